"""Figures per client put together: mean, spread, worst and best client, fairness."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from visard.errors import VisardError
from visard.evaluation.results import Result

LOWER_IS_BETTER = ("eer", "loss", "frr", "fnir", "error")


@dataclass(frozen=True)
class ClientSummary(Result):
    """One metric over clients. `std` has the stated `ddof`; gap = |best - worst|.

    Jain index = (Σx)² / (n Σx²): 1 when all clients fare alike, 1/n when one has everything; None for figures
    below zero. `missing`: clients without this figure.
    """

    metric: str
    clients: int
    mean: float
    std: float
    ddof: int
    worst: float
    worst_client: str
    best: float
    best_client: str
    gap: float
    jain: float | None
    lower_is_better: bool
    missing: tuple[str, ...]


def jain_index(values: Collection[float]) -> float | None:
    """(Σx)² / (n Σx²); all zeros are perfectly equal."""
    x = np.asarray(list(values), np.float64)
    if (x < 0).any():
        return None
    largest = x.max()
    if largest == 0:
        return 1.0
    x = x / largest  # squares of tiny figures would vanish
    return float(x.sum() ** 2 / (len(x) * np.square(x).sum()))


def summarise(
    figures: Mapping[str, Mapping[str, float | None]],
    *,
    lower_is_better: Collection[str] = LOWER_IS_BETTER,
    ddof: int = 0,
) -> dict[str, ClientSummary]:
    """Summary of each metric of {client: {metric: value}}; None and NaN count as missing.

    A metric is lower-is-better if its last part ("lfw/eer" -> "eer") is listed. Of equal clients the first
    by name is named. The deviation of fewer than ddof + 1 clients is NaN; a metric nobody has is left out.
    """
    if not figures:
        raise VisardError("summary: there are no clients")
    metrics = dict.fromkeys(metric for values in figures.values() for metric in values)
    found: dict[str, ClientSummary] = {}
    for metric in metrics:
        have = {
            client: float(value)
            for client, values in sorted(figures.items())
            if (value := values.get(metric)) is not None and math.isfinite(value)
        }
        if not have:
            continue
        lower = metric.rsplit("/", 1)[-1] in lower_is_better
        low, high = min(have, key=have.__getitem__), max(have, key=have.__getitem__)
        worst, best = (high, low) if lower else (low, high)
        x = np.array(list(have.values()))
        found[metric] = ClientSummary(
            metric=metric,
            clients=len(have),
            mean=float(x.mean()),
            std=float(x.std(ddof=ddof)) if len(x) > ddof else math.nan,
            ddof=ddof,
            worst=have[worst],
            worst_client=worst,
            best=have[best],
            best_client=best,
            gap=abs(have[best] - have[worst]),
            jain=jain_index(have.values()),
            lower_is_better=lower,
            missing=tuple(client for client in sorted(figures) if client not in have),
        )
    return found
