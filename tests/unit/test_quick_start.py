"""The command line starts quickly: what needs no network does not load one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import visard
from visard import cli
from visard.cli.run import summary
from visard.methods import METHODS

HEAVY = ("torch", "sklearn")
PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))
from visard.cli import main
main()
"""
LIGHT = [
    *([name, "--help"] for name in cli.COMMANDS),
    *(["data", name, "--help"] for name in ("make", "import", "export", "list", "show")),
    *(["keys", name, "--help"] for name in ("make", "add", "bind")),
    ["--help"],
    ["--version"],
    ["methods"],
    ["presets"],
    ["plugins"],
    ["bench"],
    ["data", "list"],
    ["keys", "make", "--out", "keys", "--nodes", "1", "--host", "localhost"],
]


def call(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VISARD_DATA": str(folder), "VISARD_CACHE": str(folder)}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=100)


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_no_network_is_loaded_where_none_is_needed(words: list[str], tmp_path: Path) -> None:
    done = call(*words, folder=tmp_path)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    if words[0] != "keys":  # keys need packages that may be absent
        assert done.returncode == 0, done.stderr


def test_a_face_set_is_made_and_shown_without_a_network(tmp_path: Path) -> None:
    for words in (
        ("data", "make", "--identities", "2", "--images", "2", "--size", "32", "--out", "faces"),
        ("data", "show", "faces", "--sheet", "faces.png"),
        ("data", "export", "faces", "faces.rec"),
        ("data", "import", "recordio", "faces.rec", "--out", "again"),
        ("data", "list", "."),
    ):
        done = call(*words, folder=tmp_path)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


def test_version(tmp_path: Path) -> None:
    assert call("--version", folder=tmp_path).stdout == f"visard {visard.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_says_itself(name: str) -> None:
    command: Any = cli.load_command(name)
    assert command.name == name
    assert (command.help or "").split("\n\n")[0].replace("\n", " ") == cli.COMMANDS[name][1]


def every_command(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
    """(words, command) of a command and of those in it."""
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, *words, name)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_an_example_and_breaks_lines_at_the_width_of_the_terminal(name: str) -> None:
    for words, command in every_command(cli.load_command(name), name):
        first, *rest = command.help.split("\n\n")
        assert not any("\n" in part.strip() for part in (first, *rest)), words
        assert "[]" not in command.get_usage(click.Context(command, info_name=words)), words
        if not getattr(command, "commands", {}) or words == "client":
            assert f"visard {words}" in command.help, f"{words} has no example"


def test_it_is_a_module_too(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "visard", "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(heading in done.stdout for heading in cli.GROUPS.values())


def test_the_listing_of_methods_is_up_to_date() -> None:
    listed = json.loads((Path(cli.__file__).parents[1] / "methods" / "listing.json").read_text())
    made = {name: summary(METHODS[name]) for name in METHODS.built_in}
    assert listed == made, "run: make pages"
    assert list(listed) == list(made)


def test_dir_lists_the_interface() -> None:
    assert set(visard.__all__) <= set(dir(visard))
    for name in visard.__all__:
        assert getattr(visard, name) is not None
