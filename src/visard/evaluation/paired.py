"""Two models on the same people: how much better one is than the other, with paired confidence intervals.

People are drawn with replacement, and the same draws are used for both models. So the difficulty of a draw cancels in
their difference, whose interval is narrower than two separate intervals suggest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import VisardError
from visard.evaluation.arrays import Doubles, Floats, Ints, labels
from visard.evaluation.grid import Grid
from visard.evaluation.identification import search, split_gallery
from visard.evaluation.metrics import FEW, describe, values
from visard.evaluation.protocols import Settings, make_pairs
from visard.evaluation.scores import Limits, stream_roc
from visard.evaluation.verification import (
    CELLS,
    consecutive,
    draws,
    genuine_hits,
    held_out,
    interval,
    pair_scores,
    pair_weights,
    weighted_metrics,
)
from visard.files import mapping, number

FOLDS = 10
BOOTSTRAP = 1000  # resamples of people
MOST_PAIRS = 1_000_000  # of a test whose EER and AUC are resampled: seconds; beyond, the time grows with their number
Samples = dict[str, list[float]]  # metric -> its value in each resample, NaN where a resample has none


@dataclass(frozen=True)
class Change:
    """TAR before and after at one FAR, each at the threshold that gives this FAR then."""

    far: float
    before: float
    after: float
    low: float | None  # 95 % interval of the difference, over people
    high: float | None
    threshold_before: float
    threshold_after: float
    false_accepts: float  # that the rate allows: FAR x pairs of strangers

    @property
    def difference(self) -> float:
        """The difference of the true accept rates."""
        return self.after - self.before

    @property
    def direction(self) -> int:
        """1: better beyond chance, -1: worse beyond chance, 0: no difference beyond chance."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    @property
    def unreliable(self) -> bool:
        """Whether the rate rests on too few pairs."""
        return self.false_accepts < FEW


def compare(
    before: Floats, after: Floats, identity: Ints, far: tuple[float, ...], bootstrap: int = BOOTSTRAP, seed: int = 0
) -> tuple[Change, ...]:
    """The change from features `before` to `after` (N, E) of pictures of `identity` (N,), for each rate.

    People are drawn with replacement, the same ones for both, so that the difficulty of a person cancels. The
    thresholds stay where all pairs put them.
    """
    if len(before) != len(after):
        raise VisardError(f"features of {len(before)} pictures before and of {len(after)} after")
    rocs = [stream_roc(features, identity, far=far) for features in (before, after)]
    was, now = (
        _shares(x, identity, [point.threshold for point in roc.tar], bootstrap, seed)
        for x, roc in zip((before, after), rocs, strict=True)
    )
    found = []
    for k, (old, new) in enumerate(zip(rocs[0].tar, rocs[1].tar, strict=True)):
        spread = interval(now[:, k] - was[:, k], "identity")
        known = spread.replicates > 0
        found.append(
            Change(
                old.far, old.tar, new.tar, spread.low if known else None, spread.high if known else None,
                old.threshold, new.threshold, old.far * rocs[0].impostors,
            )
        )  # fmt: skip
    return tuple(found)


def _shares(features: Floats, identity: Ints, thresholds: list[float], bootstrap: int, seed: int) -> Doubles:
    """(bootstrap, thresholds): the pairs of one person that reach a threshold, in each resample of people."""
    hits, totals = genuine_hits(Grid.build(features, identity, Limits().tile), np.array(thresholds))
    drawn = draws(np.random.default_rng(seed), len(totals), bootstrap)
    below = (drawn @ totals.astype(np.float64))[:, None]
    found = np.full((bootstrap, len(thresholds)), np.nan)
    np.divide(drawn @ hits.astype(np.float64), below, out=found, where=below > 0)
    return found


def resampled(features: Floats, identity: Ints, test: Mapping[str, Any], settings: Settings, seed: int = 0) -> Samples:
    """The metrics of a test in each resample of its people.

    `test` is what `protocols.verification` and `protocols.identification` found with the same features, settings and
    seed; the intervals there are those of these values. Thresholds and the gallery stay where all people put them; EER
    and AUC, which have no threshold, are computed again from all pairs, in sets of up to MOST_PAIRS.
    """
    if not settings.bootstrap:
        return {}
    record = mapping(test["verification"])
    points = list(record["tar"])
    shares = _shares(features, identity, [point["threshold"] for point in points], settings.bootstrap, seed)
    found: Samples = {f"tar@far={point['far']:g}": shares[:, k].tolist() for k, point in enumerate(points)}
    chosen = make_pairs(identity, int(record["fold_pairs"]), seed)
    distance = 2.0 - 2.0 * pair_scores(features, chosen.pairs).astype(np.float64)
    owners, fold = labels(identity, len(features))[chosen.pairs], consecutive(len(distance), FOLDS)
    blocks = pair_weights(chosen.same, owners, settings.bootstrap, seed)
    accuracies = [held_out(distance, chosen.same, weights, fold)[0].mean(axis=1) for weights in blocks]
    found["accuracy"] = np.concatenate(accuracies).tolist()
    found |= _areas(features, identity, settings.bootstrap, seed)
    return found | _searches(features, identity, mapping(test.get("identification")), settings.bootstrap, seed)


def _areas(features: Floats, identity: Ints, bootstrap: int, seed: int) -> Samples:
    """EER and AUC: a pair of strangers counts as often as both were drawn, so every resample needs all pairs again.

    Between two pairs of one person the ROC is a straight line, and so the pairs of strangers there are added up
    before the rest is computed; the same for pairs of one person between two of strangers.
    """
    rows = len(features)
    if rows * (rows - 1) // 2 > MOST_PAIRS:
        return {}
    one, two = np.triu_indices(rows, 1)
    names, person = np.unique(labels(identity, rows), return_inverse=True)
    scores, same = pair_scores(features, np.column_stack([one, two])), person[one] == person[two]
    order = np.lexsort((same, -scores))
    scores, same, one, two = scores[order], same[order], person[one[order]], person[two[order]]
    level = np.cumsum(np.append(0, np.diff(scores) != 0))  # pairs of one score
    share = np.bincount(level, same) / np.bincount(level)
    run = np.where((share[level] > 0) & (share[level] < 1), level, -1 - same.astype(np.int64))  # of one kind, or a tie
    starts = np.flatnonzero(np.append(True, (np.diff(run) != 0) | (np.diff(same.astype(np.int8)) != 0)))
    place = -np.cumsum(np.append(0, np.diff(run[starts]) != 0)).astype(np.float32)
    drawn = draws(np.random.default_rng(seed), len(names), bootstrap).astype(np.float32)
    block, parts = max(1, CELLS // len(scores)), []
    for start in range(0, bootstrap, block):
        some = drawn[start : start + block]
        weights = np.where(same, some[:, one], some[:, one] * some[:, two])
        sums = np.add.reduceat(weights, starts, axis=1, dtype=np.float64)
        parts.append(weighted_metrics(place, same[starts], sums, ()))
    return {name: np.concatenate([part[name] for part in parts]).tolist() for name in ("eer", "auc")}


def _searches(features: Floats, identity: Ints, record: Mapping[str, Any], bootstrap: int, seed: int) -> Samples:
    """Rank-k and TPIR: a probe counts as often as its person was drawn, in the gallery of all."""
    if not record:
        return {}
    parts = split_gallery(identity, seed)
    of = search(features[parts.gallery], identity[parts.gallery], features[parts.probe], identity[parts.probe])
    mate, rank = of.mate[of.mated], of.rank[of.mated]
    hits = {f"rank{k}": rank <= int(k) for k in mapping(record.get("rank"))}
    for point in record.get("tpir") or ():
        if point["threshold"] is not None:
            hits[f"tpir@fpir={point['fpir']:g}"] = (rank == 1) & (mate >= point["threshold"])
    names, place = np.unique(of.identity[of.mated], return_inverse=True)
    drawn = draws(np.random.default_rng(seed), len(names), bootstrap)
    below = drawn @ np.bincount(place).astype(np.float64)
    return {
        name: (drawn @ np.bincount(place[hit], minlength=len(names)) / below).tolist() for name, hit in hits.items()
    }


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
            found[v.name] |= interval(two - one, "identity").to_dict()
    return found


def change_of_clients(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Each metric of {client: {metric: value}} as the mean over the clients that have it before and after."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for metrics in after.values() for name in metrics):
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
