"""Two models on the same people: how much better one is than the other, with paired confidence intervals.

People are drawn with replacement, and the same draws serve both models. So what makes a draw easy or hard is in both
figures and not in their difference, whose interval is narrower than two intervals side by side suggest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from visard.evaluation.arrays import Floats, Ints, labels
from visard.evaluation.grid import Grid
from visard.evaluation.metrics import LEVEL, describe, values
from visard.evaluation.protocols import Settings, make_pairs
from visard.evaluation.scores import Limits
from visard.evaluation.verification import (
    consecutive,
    draws,
    genuine_hits,
    held_out,
    interval,
    pair_scores,
    pair_weights,
)
from visard.files import mapping, number

FOLDS = 10
Samples = dict[str, list[float]]  # metric -> its value in each resample, NaN where a resample has none


def resampled(
    features: Floats, identity: Ints, record: Mapping[str, Any], settings: Settings, seed: int = 0
) -> Samples:
    """The metrics of a test in each resample of its people: TAR at the thresholds of `record`, and accuracy.

    `record` is what `protocols.verification` found with the same features, settings and seed; its intervals are those
    of these values.
    """
    if not settings.bootstrap:
        return {}
    points = list(record["tar"])
    hits, totals = genuine_hits(
        Grid.build(features, identity, Limits().tile), np.array([point["threshold"] for point in points])
    )
    drawn = draws(np.random.default_rng(seed), len(totals), settings.bootstrap)
    below, found = drawn @ totals.astype(np.float64), Samples()
    for k, point in enumerate(points):
        share = np.full(len(below), np.nan)
        np.divide(drawn @ hits[:, k].astype(np.float64), below, out=share, where=below > 0)
        found[f"tar@far={point['far']:g}"] = share.tolist()
    chosen = make_pairs(identity, int(record["fold_pairs"]), seed)
    distance = 2.0 - 2.0 * pair_scores(features, chosen.pairs).astype(np.float64)
    owners, fold = labels(identity, len(features))[chosen.pairs], consecutive(len(distance), FOLDS)
    blocks = pair_weights(chosen.same, owners, settings.bootstrap, seed)
    accuracies = [held_out(distance, chosen.same, weights, fold)[0].mean(axis=1) for weights in blocks]
    return found | {"accuracy": np.concatenate(accuracies).tolist()}


def change(
    before: Mapping[str, Any], after: Mapping[str, Any], was: Mapping[str, Sequence[Any]], now: Samples
) -> dict[str, dict[str, Any]]:
    """Each metric of a test before and after, and its difference, with a paired interval where there are resamples."""
    earlier = {v.name: v.value for v in values(before)}
    found: dict[str, dict[str, Any]] = {}
    for v in values(after):
        first = earlier.get(v.name)
        if first is None or v.value is None:
            continue
        found[v.name] = {"before": first, "after": v.value, "difference": v.value - first}
        if v.name in was and v.name in now and len(was[v.name]) == len(now[v.name]):
            one, two = (np.array([np.nan if x is None else x for x in s[v.name]], np.float64) for s in (was, now))
            found[v.name] |= interval(two - one, LEVEL, "identity").to_dict()
    return found


def change_of_clients(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Each metric of {client: {metric: value}} as the mean over the clients that have it before and after."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for figures in after.values() for name in figures):
        both = [
            (one, two)
            for client in after
            if (one := number(mapping(before.get(client)).get(name))) is not None
            and (two := number(after[client].get(name))) is not None
        ]
        if not both:
            continue
        one, two = (float(np.mean(side)) for side in zip(*both, strict=True))
        lower = describe(name).higher_is_better is False
        better = sum((second < first) if lower else (second > first) for first, second in both)
        found[name] = {"before": one, "after": two, "difference": two - one, "clients": len(both), "better": better}
    return found
