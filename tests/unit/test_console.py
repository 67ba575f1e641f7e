"""What the command line prints is what it was told: nobody's words are taken for formatting."""

from __future__ import annotations

import pytest

from visard.cli.console import RunWatcher, console, mark, table

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
