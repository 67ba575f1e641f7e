"""IJB-A, IJB-B and IJB-C from features: templates pooled over media, and 1:1 verification; 1:N is in galleries.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import UsageError, VisardError
from visard.evaluation.inputs import Doubles, Floats, Ints, labels, matrix, unit_rows
from visard.evaluation.scores import Roc, roc_of
from visard.evaluation.sweep import one_thread_each

FAR = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ROWS = 8192  # features pooled at a time
PAIRS = 2048  # pairs compared at a time: both sides stay in the cache


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
        """From "N1D1F0", in any order; what is not named stays on."""
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
        weight *= _scores(score, count)
    starts = np.searchsorted(place[order], np.arange(len(ids) + 1))
    sums = np.empty((len(ids), given.shape[1]))
    begin = 0
    while begin < len(ids):
        # as many whole templates as fit; a larger one alone
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + ROWS, side="right")) - 1)
        taken = order[starts[begin] : starts[end]]
        sums[begin:end] = _sum(given, entry[taken], weight[taken], starts[begin:end] - starts[begin], keep_norm)
        begin = end
    try:
        return Pooled(ids, unit_rows(sums, "templates"))
    except VisardError:
        empty = int(np.argmin(np.abs(sums).max(axis=1) > 0))
        raise VisardError(f"features: those of template {ids[empty]} cancel to zero") from None


def _scores(score: Any, count: int) -> Doubles:
    given = np.asarray(score, np.float64)
    if given.shape != (count,) or not np.isfinite(given).all():
        raise VisardError(f"score: expected {count} finite numbers, got shape {given.shape}")
    return given


def _sum(given: Any, rows: Ints, weight: Doubles, starts: Ints, keep_norm: bool) -> Doubles:
    """Weighted sums of the rows between `starts`."""
    taken: Doubles = given[rows].astype(np.float64)
    if not np.isfinite(taken).all():
        raise VisardError(f"features: row {rows[np.argmin(np.isfinite(taken).all(axis=1))]} is not finite")
    if not keep_norm:
        length = np.sqrt(np.einsum("nd,nd->n", taken, taken))
        if not length.all():
            raise VisardError(f"features: row {rows[np.argmin(length)]} is all zeros")
        weight = weight / length
    taken *= weight[:, None]
    sums: Doubles = np.add.reduceat(taken, starts, axis=0)
    return sums


def verify_templates(
    pooled: Pooled, first: Any, second: Any, same: Any, *, far: tuple[float, ...] = FAR, rule: str = "conservative"
) -> Roc:
    """1:1 figures of the template numbers `first` and `second` (P,), `same` (P,) telling the genuine pairs."""
    truth = np.asarray(same)
    scores = template_scores(pooled, first, second)
    if truth.shape != scores.shape or truth.dtype != np.bool_:
        raise VisardError(f"same: expected {len(scores)} booleans, got {truth.dtype} {truth.shape}")
    return roc_of(scores[truth], scores[~truth], far=far, rule=rule)


def template_scores(pooled: Pooled, first: Any, second: Any) -> Floats:
    """Cosines (P,) of pairs of templates, float32; a pair's score does not depend on the others or on threads."""
    one, two = np.asarray(first), np.asarray(second)
    if one.shape != two.shape or one.ndim != 1 or not len(one):
        raise VisardError(f"pairs: {one.shape} first and {two.shape} second templates")
    found = np.empty(len(one), np.float32)

    def work(start: int) -> None:
        for begin in range(start, min(start + 32 * PAIRS, len(one)), PAIRS):
            part = slice(begin, begin + PAIRS)
            a, b = (pooled.rows[pooled.place(ids[part], "pairs")] for ids in (one, two))
            np.einsum("nd,nd->n", a, b, out=found[part])

    with one_thread_each() as threads, ThreadPoolExecutor(threads) as workers:
        for job in [workers.submit(work, start) for start in range(0, len(one), 32 * PAIRS)]:
            job.result()
    return found
