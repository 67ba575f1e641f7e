"""The numbers that trackers show."""

from __future__ import annotations

from typing import Any

from visard.files import mapping, number


def of_evaluation(figures: dict[str, Any]) -> dict[str, float]:
    """The metrics of each test of the generic model, and the mean and the worst over the clients' own models."""
    found: dict[str, float] = {}
    for test, metrics in mapping(figures.get("generic")).items():
        for name, value in mapping(metrics).items():
            if (known := number(value)) is not None:
                found[f"{test}/{name}"] = known
    for name, summary in mapping(figures.get("clients")).items():
        for kind in ("mean", "worst"):
            if (known := number(mapping(summary).get(kind))) is not None:
                found[f"clients/{name}/{kind}"] = known
    return found
