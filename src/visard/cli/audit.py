"""`visard audit`."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Annotated, Any

import typer

from visard.cli.console import console, table

SOME = 10.0  # epsilon above which nobody speaks of protection


class Audit(StrEnum):
    """What can be audited."""

    encrypted_mmd = "encrypted-mmd"


def audit(
    method: Annotated[Audit, typer.Argument(help="the method to attack")],
    samples: Annotated[int, typer.Option(help="n, of a batch")] = 64,
    length: Annotated[int, typer.Option(help="L, of a feature")] = 16,
    peers: Annotated[int, typer.Option(help="parties whose answers are added up")] = 1,
    noise: Annotated[float, typer.Option(help="method.noise")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the random features")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Attack a method on random features and say what came out: encryption does not hide what a result determines.

    Examples:

      visard audit encrypted-mmd

      visard audit encrypted-mmd --samples 64 --length 128

      visard audit encrypted-mmd --peers 3 --noise 5
    """
    from visard.privacy.moments_attack import audit as attack

    report = attack(samples, length, peers, noise, seed)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    title = f"From what it decrypts for one batch (n = {samples}, L = {length}), a party computes of {peers} other(s)"
    table(title, ("what", "dimensions determined", "relative error of the guess"), lines(report))
    console.print(verdict(report), highlight=False, soft_wrap=True)


def lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the table."""
    rows = {
        "mean feature of the nearest single party": ("the_mean", "a_peer_s_mean"),
        "mean feature, average over the parties": ("the_mean", "the_average_mean"),
        "second moments, average over the parties": ("the_second_moments", "the_second_moments"),
    }
    return [
        (words, _percent(report[f"determined_of_{share}"]), f"{report[f'error_of_{error}']:.2g}")
        for words, (share, error) in rows.items()
    ]


def verdict(report: dict[str, Any]) -> str:
    """One sentence that a reader can act on."""
    eps, mean, second = (
        report[k] for k in ("epsilon_of_one_batch", "determined_of_the_mean", "determined_of_the_second_moments")
    )
    if eps is not None:
        words = "" if eps <= SOME else ", which is hardly any protection"
        return f"The noise makes one batch, for a given network, ({eps:.2g}, 1e-5)-differentially private{words}."
    if second < 1:
        of = " of the average over the parties" if report["peers"] > 1 else ""
        return f"{_percent(mean)} of the mean and {_percent(second)} of the second moments{of} are revealed."
    if report["peers"] > 1:
        return "The average over the parties is revealed exactly; the parts of single parties are not."
    return "The moments are revealed exactly: use more peers with method.sums, method.noise, or n well below L."


def _percent(share: float) -> str:
    """Rounded down: 100 % is said of everything alone."""
    return f"{math.floor(100 * share)} %"
