"""Health and logs of servers and parties, and the files for containers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from visard.cli import commands, main
from visard.cli.deploy import Log, reporter, reporting
from visard.deployment.health import Health
from visard.errors import UsageError, VisardError

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "containers"


@pytest.fixture
def well() -> Iterator[tuple[Health, dict[str, Any]]]:
    state: dict[str, Any] = {"well": True}
    health = Health("0", lambda: (state["well"], {"connected": 2}))
    yield health, state
    health.close()


def ask(monkeypatch: pytest.MonkeyPatch, port: int) -> int:
    monkeypatch.setattr(sys, "argv", ["visard", "health", "--port", str(port)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_health_is_said_and_asked_for(
    well: tuple[Health, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health, state = well
    assert ask(monkeypatch, health.port) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["connected"]) == ("ok", 2)
    state["well"] = False
    assert ask(monkeypatch, health.port) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "unwell"
    with pytest.raises(UsageError, match="--health x: must look like PORT or HOST:PORT"):
        Health("x", lambda: (True, {}))
    with pytest.raises(UsageError, match="Address already in use"):
        Health(str(health.port), lambda: (True, {}))


def test_nothing_there_is_not_well(
    well: tuple[Health, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Health("0", lambda: (True, {}))
    other.close()
    assert ask(monkeypatch, other.port) == 1
    assert "nothing answers at 127.0.0.1" in capsys.readouterr().err


def test_a_log_of_json_has_an_object_in_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporter(Log.json)("a party said \x1b[31m\n and more")
    with pytest.raises(BaseException) as ended, reporting(Log.json):
        raise VisardError("the disk is full")
    assert getattr(ended.value, "exit_code", None) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["level"] == "info"
    assert "\x1b" not in first["text"]
    assert (second["level"], second["text"]) == ("error", "the disk is full")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", second["time"])


def words(text: str) -> list[list[str]]:
    """Commands of visard in the files for containers: [server, ...] or [client, ...]."""
    found = [re.split(r",\s*", line) for line in re.findall(r"command: \[(.*)\]", text)]
    found += [re.findall(r"- (\S+)", block) for block in re.findall(r"command:\n((?: +- .*\n)+)", text)]
    found += [line.split() for line in re.findall(r"^ExecStart=/opt/visard/bin/visard (.*)$", text, re.MULTILINE)]
    return [[word.strip('"') for part in each for word in part.split("=", 1)] for each in found]


@pytest.mark.parametrize(
    ("file", "count"), [("compose.yaml", 4), ("visard-server.service", 1), ("visard-client.service", 1)]
)
def test_commands_in_the_files_for_containers_have_options_that_exist(file: str, count: int) -> None:
    found = words((FILES / file).read_text())
    assert len(found) == count
    for command, *rest in found:
        assert command in ("server", "client")
        context = commands().commands[command].make_context(command, list(rest), resilient_parsing=True)
        given = {word[2:].replace("-", "_") for word in rest if word.startswith("--")}
        assert given <= context.params.keys(), (file, given - context.params.keys())
        assert (context.params["health"], context.params["log"]) == ("9080", Log.json)


def test_the_image_has_no_root_and_no_package_without_a_digest() -> None:
    text = (FILES / "Dockerfile").read_text()
    stages = text.split("\nFROM ")[1:]
    assert len(stages) == 2
    assert "USER 10001:10001" in stages[1]
    installs = re.findall(r"pip install (.*)", text.replace("\\\n", " "))
    assert len(installs) == 3
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    compose = (FILES / "compose.yaml").read_text()
    for line in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true"):
        assert line in compose


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", ["visard-server.service", "visard-client.service"])
def test_units_are_hardened(unit: str, tmp_path: Path) -> None:
    text = (FILES / unit).read_text().replace("/opt/visard/bin/visard", shutil.which("true") or "/bin/true")
    (tmp_path / unit).write_text(text)
    checked = subprocess.run(["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True)
    assert unit not in checked.stderr, checked.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", tmp_path / unit], capture_output=True, text=True
    )
    level = re.search(r"exposure level for \S+: ([\d.]+)", rated.stdout)
    assert level is not None, rated.stderr
    assert float(level.group(1)) < 2.5


def test_the_script_of_the_image_wants_a_digest() -> None:
    script = FILES / "build.sh"
    done = subprocess.run(["sh", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "TORCH_SHA256=...: the digest of the wheel of torch (docs/containers.md)\n"
