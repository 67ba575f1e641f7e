"""`visard ledger`: check the records of what left, and compare those of server and parties."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visard.cli.console import console
from visard.errors import UsageError, VisardError
from visard.text import count, listing, plural

SHOWN = 20  # lines of one sort; the rest is counted
app = typer.Typer(
    help="Check the records of what left each client, and compare the two sides of a deployment.\n\n"
    "The server keeps RUN/checkpoint/received-000001.jsonl, each party ledger-000001.jsonl in its state folder.",
    no_args_is_help=True,
)


@app.callback()
def _ledger() -> None:
    """Check the records of what left each client, and compare the two sides of a deployment."""


@app.command("verify")
def verify(
    record: Annotated[Path, typer.Argument(help="a run folder, a party's state folder, or a file of either record")],
) -> None:
    """Follow the chain of a record. The first line that was changed, removed or added is named; exit code 1.

    Lines missing at the end are not noticed: note down the printed digest, or compare both sides.

    Examples: visard ledger verify runs/ours, visard ledger verify mine
    """
    from visard.deployment.ledger_check import verify as follow

    if not record.exists():
        raise UsageError(f"{record} does not exist")
    checked = follow(record)
    _say(checked.text)
    if checked.replies:
        _say("replies: " + ", ".join(f"{count(n)} {outcome}" for outcome, n in sorted(checked.replies.items())))


@app.command("compare")
def compare(
    run: Annotated[Path, typer.Argument(help="the run folder, at the server")],
    ledgers: Annotated[list[Path], typer.Argument(help="records of its parties: state folders, or files of them")],
) -> None:
    """Compare what parties sent with what the server received: every reply, accepted or not, byte for byte.

    Exit code 0: both sides agree. A reply that is missing in the server's record is listed but is no difference,
    if a kill or a broken connection explains it. Exit code 1: a difference is listed.

    Example: visard ledger compare runs/ours party-1 party-2
    """
    from visard.deployment.ledger_check import compare as check

    for path in (run, *ledgers):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
    found = check(run, ledgers)
    _say(f"{plural(found.same, 'reply', 'replies')} on both sides, byte for byte the same")
    _list("open", found.open)
    _list("DIFFERENT", found.differences)
    if found.unchecked:
        _say(f"not compared, for no record of its party was given: {listing(sorted(found.unchecked))}")
    if not found.agree:
        raise VisardError(f"the records differ in {plural(len(found.differences), 'place')}")


def _list(title: str, lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        _say(f"{title}: {line}")
    if len(lines) > SHOWN:
        _say(f"{title}: and {count(len(lines) - SHOWN)} more")


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
