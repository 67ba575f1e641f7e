"""IJB-A, IJB-B and IJB-C from features: templates pooled over media, 1:1 verification, and 1:N search in galleries.

The search is by the standard definition, and by that of old evaluations for comparison with their tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Doubles, Floats, Ints, Result, labels, matrix, shares, unit_rows
from visard.evaluation.grid import one_thread_each, padded_rows
from visard.evaluation.identification import Identification, identify
from visard.evaluation.metrics import FPIR, IJB_FAR, RANKS
from visard.evaluation.scores import Roc, roc_of
from visard.numerics import moved

ROWS = 1024  # features pooled at a time: they stay in the cache
CHUNK = 1 << 22  # pairs looked up and sorted at a time
PAIRS = 2048  # pairs gathered at a time: they stay in the cache
BLOCK = 256  # templates compared with all others at a time
DENSE = 1 / 30  # share of wanted pairs from which a matrix product of all pairs is faster


@dataclass(frozen=True)
class Switches:
    """How features are prepared: N keeps their norms, D weighs them by the detector's score, F adds the mirror image's.

    N and D act in `pool`, F where features are computed.
    """

    N: bool = True
    D: bool = True
    F: bool = True

    @classmethod
    def parse(cls, text: str) -> Switches:
        """From "N1D1F0", in any order; switches that are not named stay on."""
        words = [text[i : i + 2].upper() for i in range(0, len(text), 2)]
        known = {f"{name}{on}" for name in "NDF" for on in "01"}
        if not text or set(words) - known or len({w[0] for w in words}) < len(words):
            raise UsageError(f"switches {text!r}: must look like N1D1F1")
        return cls(**{word[0]: word[1] == "1" for word in words})


@dataclass(frozen=True, eq=False)
class Pooled:
    """Templates (T, E) of length one, float32, and their numbers (T,), rising."""

    ids: Ints
    rows: Floats

    def place(self, template: Any, what: str) -> Ints:
        """Row of each template number."""
        wanted = labels(template, np.size(template), what)
        found = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        absent = self.ids[found] != wanted
        if absent.any():
            raise VisardError(f"{what}: template {wanted[np.argmax(absent)]} has no pictures")
        return found


def pool(
    features: Any, template: Any, media: Any, *, row: Any = None, score: Any = None, keep_norm: bool = True
) -> Pooled:
    """Template = normalise(sum over media of the mean over the pictures of a medium).

    Entry i says that picture `row[i]` (by default i) of `features` is in template[i], medium media[i]; `score` (one
    per entry) weighs it (switch D), keep_norm=False scales it to length one before (N off). Sums are in float64, over
    blocks of whole templates, so that no copy of the features is made.
    """
    given = matrix(features, "features")
    count = np.size(template)
    entry = labels(np.arange(count) if row is None else row, count, "row")
    if count == 0 or entry.min() < 0 or entry.max() >= len(given):
        raise VisardError(f"row: the templates point outside the {len(given)} rows of features")
    ids, place = np.unique(labels(template, count, "template"), return_inverse=True)
    medium = np.unique(labels(media, count, "media"), return_inverse=True)[1]
    order = np.lexsort((medium, place))
    key = place * (int(medium.max()) + 1) + medium
    _, group, size = np.unique(key, return_inverse=True, return_counts=True)
    weight = 1.0 / size[group]
    if score is not None:
        scores = np.asarray(score, np.float64)
        if scores.shape != (count,) or not np.isfinite(scores).all():
            raise VisardError(f"score: expected {count} finite numbers, got shape {scores.shape}")
        weight *= scores
    starts = np.searchsorted(place[order], np.arange(len(ids) + 1))
    sums = np.empty((len(ids), given.shape[1]))

    def work(begin: int, end: int) -> None:
        taken = order[starts[begin] : starts[end]]
        sums[begin:end] = _sum(given, entry[taken], weight[taken], starts[begin:end] - starts[begin], keep_norm)

    with one_thread_each() as threads, ThreadPoolExecutor(threads) as workers:
        for job in [workers.submit(work, *ends) for ends in _blocks(starts)]:
            job.result()
    try:
        return Pooled(ids, unit_rows(sums, "templates"))
    except VisardError:
        empty = int(np.argmin(np.abs(sums).max(axis=1) > 0))
        raise VisardError(f"features: those of template {ids[empty]} cancel to zero") from None


def _blocks(starts: Ints) -> Iterator[tuple[int, int]]:
    """As many whole templates as have ROWS entries together; a larger one alone."""
    begin, last = 0, len(starts) - 1
    while begin < last:
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + ROWS, side="right")) - 1)
        yield begin, end
        begin = end


def _sum(given: Any, rows: Ints, weight: Doubles, starts: Ints, keep_norm: bool) -> Doubles:
    """Weighted sums of the rows between `starts`."""
    taken: Doubles = given[rows].astype(np.float64)
    if not keep_norm:
        length = np.sqrt(np.einsum("nd,nd->n", taken, taken))
        if not length.all():
            raise VisardError(f"features: row {rows[np.argmin(length)]} is all zeros")
        weight = weight / length
    taken *= weight[:, None]
    sums: Doubles = np.add.reduceat(taken, starts, axis=0)
    if not np.isfinite(sums).all():
        bad = ~np.isfinite(taken).all(axis=1)
        raise VisardError(f"features: row {rows[np.argmax(bad)]} is not finite, or too large")
    return sums


def verify_templates(pooled: Pooled, first: Any, second: Any, same: Any, *, far: tuple[float, ...] = IJB_FAR) -> Roc:
    """1:1 metrics of the template numbers `first` and `second` (P,), `same` (P,) telling the genuine pairs."""
    truth = np.asarray(same)
    scores = template_scores(pooled, first, second)
    if truth.shape != scores.shape or truth.dtype != np.bool_:
        raise VisardError(f"same: expected {len(scores)} booleans, got {truth.dtype} {truth.shape}")
    return roc_of(scores[truth], scores[~truth], far=far)


def template_scores(pooled: Pooled, first: Any, second: Any) -> Floats:
    """Cosines (P,) of pairs of templates, float32.

    Protocols compare most of one group of templates with most of another: then all of both are, block by block in one
    matrix product, and the wanted ones are picked. Where few of the possible pairs are wanted, they are gathered.
    """
    one, two = np.asarray(first), np.asarray(second)
    if one.shape != two.shape or one.ndim != 1 or not len(one):
        raise VisardError(f"pairs: {one.shape} first and {two.shape} second templates")
    found = np.empty(len(one), np.float32)
    with one_thread_each() as threads, ThreadPoolExecutor(threads) as workers:
        for start in range(0, len(one), CHUNK):
            part = slice(start, start + CHUNK)
            rows = [pooled.place(ids[part], "pairs").astype(np.int32) for ids in (one, two)]
            used = [np.flatnonzero(np.bincount(places, minlength=len(pooled.ids))) for places in rows]
            if len(rows[0]) >= DENSE * len(used[0]) * len(used[1]):
                _all_and_pick(pooled.rows, rows, used, found[part], workers)
            else:
                _gather(pooled.rows, rows, found[part], workers)
    return found


def _gather(table: Floats, rows: list[NDArray[np.int32]], found: Floats, workers: ThreadPoolExecutor) -> None:

    def work(start: int) -> None:
        for begin in range(start, min(start + 32 * PAIRS, len(found)), PAIRS):
            part = slice(begin, begin + PAIRS)
            np.einsum("nd,nd->n", table[rows[0][part]], table[rows[1][part]], out=found[part])

    for job in [workers.submit(work, start) for start in range(0, len(found), 32 * PAIRS)]:
        job.result()


def _all_and_pick(
    table: Floats, rows: list[NDArray[np.int32]], used: list[Ints], found: Floats, workers: ThreadPoolExecutor
) -> None:
    column = np.zeros(len(table), np.int32)
    column[used[1]] = np.arange(len(used[1]))
    right = moved(torch.from_numpy(padded_rows(table[used[1]]))).T
    short = rows[0].astype(np.uint16) if len(table) <= 1 << 16 else rows[0]  # numpy sorts 16 bits in linear time
    order = np.argsort(short, kind="stable")
    ends = np.searchsorted(rows[0], np.append(used[0], len(table)), sorter=order)

    def work(start: int) -> None:
        mine = used[0][start : start + BLOCK]
        scores = (moved(torch.from_numpy(padded_rows(table[mine]))) @ right).cpu().numpy()
        wanted = order[ends[start] : ends[start + len(mine)]]
        found[wanted] = scores[np.searchsorted(mine, rows[0][wanted]), column[rows[1][wanted]]]

    for job in [workers.submit(work, start) for start in range(0, len(used[0]), BLOCK)]:
        job.result()


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
    fpir: tuple[float, ...] = FPIR,
) -> Search:
    """Search all probes in each gallery on its own; galleries and probes are (template numbers, subjects).

    The rule of old evaluations is added where every subject has one template in all galleries together, as it demands.
    """
    if not galleries:
        raise UsageError("galleries: none given")
    wanted, subject = pooled.rows[pooled.place(probes[0], "probes")], _subjects(probes, "probes")
    found = {}
    for name, gallery in galleries.items():
        rows = pooled.rows[pooled.place(gallery[0], f"gallery {name}")]
        found[name] = identify(rows, _subjects(gallery, f"gallery {name}"), wanted, subject, fpir=fpir)
    tpir: dict[float, float | None] = {}
    for k, rate in enumerate(fpir):
        each = [result.tpir[k].tpir for result in found.values()]
        known = [value for value in each if value is not None]
        tpir[rate] = sum(known) / len(known) if len(known) == len(each) else None
    rank = {k: sum(result.rank[k] for result in found.values()) / len(found) for k in RANKS}
    subjects = np.concatenate([_subjects(gallery, "gallery") for gallery in galleries.values()])
    once = len(np.unique(subjects)) == len(subjects)
    old = search_legacy(pooled, galleries, probes, fpir=fpir) if once else None
    return Search(found, rank, tpir, old)


def _subjects(gallery: tuple[Any, Any], what: str) -> Ints:
    return labels(gallery[1], np.size(gallery[0]), f"{what} subject")


def search_legacy(
    pooled: Pooled,
    galleries: Mapping[str, tuple[Any, Any]],
    probes: tuple[Any, Any],
    *,
    fpir: tuple[float, ...] = FPIR,
) -> Legacy:
    """`legacy_insightface`: galleries merged, false alarms counted over pairs, no rank-1 condition.

    Threshold = the ceil(probes · FPIR)-th largest of all impostor scores (probe x gallery); TPIR = share of mated
    probes whose mate scores strictly above. The rate is per probe but counted over pairs, so that it is far stricter
    than the standard FPIR in one way and, without the rank, laxer in another.
    """
    template = np.concatenate([np.asarray(g[0]) for g in galleries.values()])
    subjects = np.concatenate([_subjects(g, f"gallery {name}") for name, g in galleries.items()])
    names, index, count = np.unique(subjects, return_index=True, return_counts=True)
    if (count > 1).any():
        raise VisardError(f"galleries: subject {names[count > 1][0]} has several templates, {LEGACY} allows one")
    gallery = pooled.rows[pooled.place(template[index], "galleries")]
    place = pooled.place(probes[0], "probes")
    return legacy_rule(gallery, names, pooled.rows, _subjects(probes, "probes"), place=place, fpir=fpir)


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
    """The rule of `search_legacy` for gallery rows (K, E) of identities `names` (rising), and probe rows of `wanted`.

    Scores are inner products of the rows as they are; `place` picks probe rows (default all, in order).
    """
    place = np.arange(len(wanted)) if place is None else place
    right = moved(torch.from_numpy(np.ascontiguousarray(gallery.T)))
    column = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    mated = names[column] == wanted
    if not mated.any():
        raise VisardError("probes: none shows an identity of the galleries")
    sizes = [math.ceil(len(wanted) * rate) for rate in shares(fpir, "fpir")]
    mate, rank = np.full(len(wanted), -np.inf, np.float32), np.zeros(len(wanted), np.int64)
    largest = np.empty(0, np.float32)
    block = max(1, CELLS // len(names))
    for start in range(0, len(wanted), block):
        part = slice(start, start + block)
        scores = (moved(torch.from_numpy(probes[place[part]])) @ right).cpu().numpy()
        mine = np.flatnonzero(mated[part])
        mate[part][mine] = scores[mine, column[part][mine]]
        rank[part] = (scores >= mate[part, None]).sum(axis=1)
        impostor = np.ones(scores.shape, np.bool_)
        impostor[mine, column[part][mine]] = False
        largest = np.concatenate([largest, scores[impostor]])
        if (extra := len(largest) - max(sizes)) > 0:
            largest = np.partition(largest, extra)[extra:]
    largest = np.sort(largest)[::-1]
    points = [
        LegacyPoint(rate, float((mate[mated] > largest[k - 1]).mean()), float(largest[k - 1]))
        if k <= len(largest)
        else LegacyPoint(rate, None, None)
        for rate, k in zip(fpir, sizes, strict=True)
    ]
    found = {k: float((rank[mated] <= k).mean()) for k in ranks}
    return Legacy(LEGACY, len(names), len(wanted), int(mated.sum()), found, tuple(points))
