"""1:N search of templates in the galleries of IJB, by the standard definition and by that of old evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visard.errors import UsageError, VisardError
from visard.evaluation.identification import Identification, identify
from visard.evaluation.ijb import Pooled
from visard.evaluation.inputs import Bools, Floats, Ints, labels, shares
from visard.evaluation.results import Result

FPIR = (1e-2, 1e-1)
RANKS = (1, 5, 10)
CELLS = 1 << 22  # scores of a search held at a time
LEGACY = "legacy_insightface"


@dataclass(frozen=True)
class LegacyPoint(Result):
    """`tpir` at the pair-level rate that old evaluations called FPIR."""

    fpir: float
    tpir: float | None
    threshold: float | None


@dataclass(frozen=True)
class Legacy(Result):
    """1:N by the rule of old InsightFace evaluations, for comparison with tables that used it."""

    rule: str
    gallery: int
    probes: int
    mated: int
    rank: dict[int, float]
    tpir: tuple[LegacyPoint, ...]


@dataclass(frozen=True)
class Search(Result):
    """1:N in each gallery by the standard definition (identification.py), and the means over galleries."""

    galleries: dict[str, Identification]
    rank: dict[int, float]
    tpir: dict[float, float | None]
    legacy: Legacy | None = None


def search_galleries(
    pooled: Pooled,
    galleries: Mapping[str, tuple[Any, Any]],
    probes: tuple[Any, Any],
    *,
    ranks: tuple[int, ...] = RANKS,
    fpir: tuple[float, ...] = FPIR,
    legacy: bool = True,
) -> Search:
    """Search all probes in each gallery on its own; galleries and probes are (template numbers, subjects).

    The `legacy` rule is added where every subject has one template in all galleries together, as it demands.
    """
    if not galleries:
        raise UsageError("galleries: none given")
    wanted, subject = pooled.rows[pooled.place(probes[0], "probes")], _subjects(probes, "probes")
    found = {}
    for name, gallery in galleries.items():
        rows = pooled.rows[pooled.place(gallery[0], f"gallery {name}")]
        found[name] = identify(rows, _subjects(gallery, f"gallery {name}"), wanted, subject, ranks=ranks, fpir=fpir)
    tpir: dict[float, float | None] = {}
    for k, rate in enumerate(fpir):
        each = [result.tpir[k].tpir for result in found.values()]
        known = [value for value in each if value is not None]
        tpir[rate] = sum(known) / len(known) if len(known) == len(each) else None
    rank = {k: sum(result.rank[k] for result in found.values()) / len(found) for k in ranks}
    people = np.concatenate([_subjects(gallery, "gallery") for gallery in galleries.values()])
    once = len(np.unique(people)) == len(people)
    old = search_legacy(pooled, galleries, probes, ranks=ranks, fpir=fpir) if legacy and once else None
    return Search(found, rank, tpir, old)


def _subjects(gallery: tuple[Any, Any], what: str) -> Ints:
    return labels(gallery[1], np.size(gallery[0]), f"{what} subject")


def search_legacy(
    pooled: Pooled,
    galleries: Mapping[str, tuple[Any, Any]],
    probes: tuple[Any, Any],
    *,
    ranks: tuple[int, ...] = RANKS,
    fpir: tuple[float, ...] = FPIR,
) -> Legacy:
    """`legacy_insightface`: galleries merged, false alarms counted over pairs, no rank-1 condition.

    Threshold = the ceil(probes · FPIR)-th largest of all impostor scores (probe x gallery); TPIR = share of mated
    probes whose mate scores strictly above. The rate is per probe but counted over pairs, so that it is far stricter
    than the standard FPIR in one way and, without the rank, laxer in another.
    """
    template = np.concatenate([np.asarray(g[0]) for g in galleries.values()])
    people = np.concatenate([_subjects(g, f"gallery {name}") for name, g in galleries.items()])
    names, index, count = np.unique(people, return_index=True, return_counts=True)
    if (count > 1).any():
        raise VisardError(f"galleries: subject {names[count > 1][0]} has several templates, {LEGACY} allows one")
    gallery = pooled.rows[pooled.place(template[index], "galleries")]
    place = pooled.place(probes[0], "probes")
    return legacy_rule(gallery, names, pooled.rows, _subjects(probes, "probes"), place=place, ranks=ranks, fpir=fpir)


def legacy_rule(
    gallery: Floats,
    names: Ints,
    probes: Floats,
    wanted: Ints,
    *,
    place: Ints | None = None,
    ranks: tuple[int, ...] = RANKS,
    fpir: tuple[float, ...] = FPIR,
) -> Legacy:
    """The rule of `search_legacy` for gallery rows (K, E) of the people `names` (rising), and probe rows of `wanted`.

    Scores are inner products of the rows as they are; `place` picks probe rows (default all, in order).
    """
    place = np.arange(len(wanted)) if place is None else place
    right = torch.from_numpy(np.ascontiguousarray(gallery.T))
    column = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    mated = names[column] == wanted
    if not mated.any():
        raise VisardError("probes: none shows a person of the galleries")
    sizes = [math.ceil(len(wanted) * rate) for rate in shares(fpir, "fpir")]
    mate, rank = np.full(len(wanted), -np.inf, np.float32), np.zeros(len(wanted), np.int64)
    largest = np.empty(0, np.float32)
    block = max(1, CELLS // len(names))
    for start in range(0, len(wanted), block):
        part = slice(start, start + block)
        scores = (torch.from_numpy(probes[place[part]]) @ right).numpy()
        mine = np.flatnonzero(mated[part])
        mate[part][mine] = scores[mine, column[part][mine]]
        rank[part] = (scores >= mate[part, None]).sum(axis=1)
        largest = _largest(np.concatenate([largest, _impostors(scores, mine, column[part][mine])]), max(sizes))
    largest = np.sort(largest)[::-1]
    points = [
        LegacyPoint(rate, float((mate[mated] > largest[k - 1]).mean()), float(largest[k - 1]))
        if k <= len(largest)
        else LegacyPoint(rate, None, None)
        for rate, k in zip(fpir, sizes, strict=True)
    ]
    found = {k: float((rank[mated] <= k).mean()) for k in ranks}
    return Legacy(LEGACY, len(names), len(wanted), int(mated.sum()), found, tuple(points))


def _impostors(scores: Floats, rows: Ints, columns: Ints) -> Floats:
    keep: Bools = np.ones(scores.shape, np.bool_)
    keep[rows, columns] = False
    return scores[keep]


def _largest(scores: Floats, count: int) -> Floats:
    if len(scores) <= count:
        return scores
    return np.partition(scores, len(scores) - count)[len(scores) - count :]
