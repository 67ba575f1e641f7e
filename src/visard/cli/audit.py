"""`visard audit`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from visard.cli.console import console, table


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
    title = f"From its own gradient of one batch (n = {samples}, L = {length}), a party computes of {peers} other(s)"
    table(title, ("what", "relative error of the guess"), lines(report))
    console.print(verdict(report), highlight=False, soft_wrap=True)


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the table."""
    if not report["determined"]:
        return [("mean and second moments of the batch", "not determined")]
    names = {
        "error_of_a_peer_s_mean": "mean feature of the nearest single party",
        "error_of_the_average_mean": "mean feature, average over the parties",
        "error_of_the_second_moments": "second moments, average over the parties",
    }
    return [(words, f"{report[name]:.2g}") for name, words in names.items()]


def verdict(report: dict[str, Any]) -> str:
    """One sentence that a reader can act on."""
    if not report["determined"]:
        return "With so few samples for so many dimensions only projections on the own features are known."
    if report["noise"]:
        return f"The noise makes one batch (epsilon, delta) = ({report['epsilon_of_one_batch']:.2g}, 1e-5) private."
    if report["peers"] > 1:
        return "The average over the parties is revealed exactly; the parts of single parties are not."
    return "The moments are revealed exactly: use more peers with method.sums, method.noise, or n <= L."
