"""What the command line prints is what it was told: nobody's words are taken for formatting."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import visard
from visard.cli import api
from visard.cli.console import RunWatcher, console, mark, table
from visard.cli.groups import show_groups
from visard.cli.run import methods, presets
from visard.config import load, parse
from visard.errors import UsageError
from visard.runs import run as runs

WORDS = "house-1: no reply: [/data/faces] is gone [bold red]all good[/bold red]"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)


def test_words_of_a_party_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    RunWatcher().problem(WORDS)
    mark("skipped", "pictures/[1].png: no face")
    assert capsys.readouterr().out == f"warning {WORDS}\nskipped pictures/[1].png: no face\n"


def test_names_in_tables_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table("[x]", ("name [/a]", "value"), [("[/b]", "[red]1[/red]")])
    out = capsys.readouterr().out
    assert all(part in out for part in ("[x]", "name [/a]", "[/b]", "[red]1[/red]"))


def test_a_title_is_not_broken_to_the_width_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    title = "/photos/site-a/person-04/03.jpg in the gallery of the staff"
    table(title, ("a",), [("1",)])
    assert capsys.readouterr().out.startswith(f"{title}\n")


def test_errors_by_group_fit_a_terminal_and_their_marks_are_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 80)

    def rate(value: float, apart: str) -> dict[str, Any]:
        spread = {"low": 0.97 * value, "high": 1.03 * value, "level": 0.95}
        other = {"low": 0.01, "high": 0.02} if apart else {"low": -0.01, "high": 0.01}
        return {"rate": value, "errors": 3, "trials": 1000, "interval": spread, "difference": other}

    def group(name: str, apart: str = "") -> dict[str, Any]:
        lost = {"failure": {"errors": 0, "trials": 3600}}
        rates = {"fnmr": rate(0.58482, apart), "fmr": rate(0.000963521, apart)}
        return {"name": name, "people": 180, "pictures": 3600, "enrolment": lost, **rates}

    record = {"by": "domain", "threshold": 0.6488, "fmr_target": 0.001, "everyone": group("everyone"), "between": []}
    show_groups(record | {"groups": [group("north", "above"), group("south", "above")]})
    *shown, said = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in shown[-3:]] == ["everyone", "north", "south"]  # each in one line
    assert ("▲" in "".join(shown)) == ("▲" in said)
    assert "FNMR: genuine pairs that are refused" in said


def test_a_listing_has_no_empty_column(capsys: pytest.CaptureFixture[str]) -> None:
    methods()
    assert "comes from" not in capsys.readouterr().out


def test_all_settings_of_a_preset_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    presets("fedavg")
    assert parse(tomllib.loads(capsys.readouterr().out)) == load("fedavg")
    with pytest.raises(UsageError, match="no preset 'fedvag' \\(did you mean 'fedavg'"):
        presets("fedvag")


def test_the_first_round_is_said_at_once_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = RunWatcher()
    watcher.round("federate", 1, 50, {"loss": 2.0})
    assert "rounds: 1/50" in capsys.readouterr().out
    watcher.round("federate", 2, 50, {"loss": 1.0})
    assert capsys.readouterr().out == ""


def test_what_a_run_starts_from_is_said_before_its_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = RunWatcher()
    watcher.evaluation({"generic": {"test": {"accuracy": 0.9}}})
    assert "given weights, before the first round: test accuracy 0.900" in capsys.readouterr().out
    watcher.round("federate", 1, 50, {})
    capsys.readouterr()
    watcher.evaluation({"generic": {"test": {"accuracy": 0.9}}})
    assert capsys.readouterr().out == ""


def test_a_test_of_a_resumed_run_is_not_of_what_it_started_from(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = RunWatcher()
    watcher.resumed(10)
    watcher.evaluation({"generic": {"test": {"accuracy": 0.9}}})
    assert capsys.readouterr().out == ""


def test_a_test_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds without a test between them do not repeat the last one as if it were theirs."""
    watcher = RunWatcher()
    watcher.evaluation({"generic": {"test": {"accuracy": 0.9}}})
    watcher.round("federate", 1, 3, {"loss": 2.0})
    assert "rounds: 1/3 federate  loss 2.000\n" in capsys.readouterr().out
    watcher.evaluation({"generic": {"test": {"accuracy": 0.8}}})
    watcher.round("federate", 2, 3, {"loss": 1.0})
    watcher.round("federate", 3, 3, {"loss": 1.0})
    assert "rounds: 3/3 federate  loss 1.000  test accuracy 0.800" in capsys.readouterr().out


def test_the_functions_show_progress_where_somebody_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def work(out: str, watcher: object = None) -> str:
        seen.append(watcher)
        return out

    call, mine = api.shown(work), object()
    assert call("a") == "a"
    monkeypatch.setattr(api.console, "is_jupyter", True)
    assert call("notebook") == "notebook"
    monkeypatch.setattr(api.console, "is_jupyter", False)
    monkeypatch.setattr(type(api.console), "is_terminal", True)
    assert call("b") == "b"
    call("c", mine)
    call("d", watcher=mine)
    assert seen[0] is None
    assert isinstance(seen[1], RunWatcher)
    assert isinstance(seen[2], RunWatcher)
    assert seen[3:] == [mine, mine]


def test_missing_packages_are_asked_for_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = runs.find_spec
    monkeypatch.setattr(runs, "find_spec", lambda name: None if name in ("gmpy2", "sklearn") else known(name))
    with pytest.raises(UsageError, match="encrypted-mmd needs the package gmpy2 .* pip install 'visard.crypto.'"):
        visard.run("encrypted-mmd", out=tmp_path / "run")
    with pytest.raises(UsageError, match="fedfr-da needs the package sklearn"):
        visard.run("fedfr-da", out=tmp_path / "da", overrides=["method.clustering.method=dbscan"])
