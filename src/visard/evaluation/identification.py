"""1:N identification: closed-set rank-k and open-set TPIR at FPIR, as NIST and the IJB protocols define them.

A mated probe is one whose identity is in the gallery. The score of an identity is that of its template.
Rank of a probe = 1 + the other identities whose score is >= that of its mate: ties count against the method.
FPIR(τ) = share of non-mated probes whose largest score is >= τ.
TPIR(τ) = share of mated probes whose mate is rank 1 (so strictly above all others) and scores >= τ.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Bools, Floats, Ints, Result, labels, matrix, shares, unit_rows
from visard.evaluation.grid import PAD, one_thread_each, padded_rows
from visard.evaluation.metrics import FPIR, RANKS
from visard.evaluation.roc import Steps, conservative
from visard.numerics import moved

TEMPLATES = ("mean", "max")
CELLS = 1 << 22  # scores held at a time


@dataclass(frozen=True)
class FpirPoint(Result):
    """TPIR at the asked `fpir`, and the rate reached. `unreliable`: fpir stands for fewer than ten probes."""

    fpir: float
    tpir: float | None
    fpir_reached: float | None
    threshold: float | None
    unreliable: bool
    reason: str | None = None  # why there is no TPIR


@dataclass(frozen=True)
class Identification(Result):
    """Metrics of a search test; `rank[k]`: share of mated probes whose mate is among the first k."""

    gallery: int  # identities
    mated: int
    unmated: int
    template: str
    rank: dict[int, float]
    tpir: tuple[FpirPoint, ...]


def identify(
    gallery_features: Any,
    gallery_identity: Any,
    probe_features: Any,
    probe_identity: Any,
    *,
    ranks: tuple[int, ...] = RANKS,
    fpir: tuple[float, ...] = FPIR,
    template: str = "mean",
) -> Identification:
    """Search every probe in the gallery.

    `template`: "mean" = normalised mean of an identity's unit features, "max" = best score over its pictures.
    A rank beyond the number of identities counts every mated probe.
    """
    if any(k < 1 for k in ranks):
        raise UsageError(f"ranks: {min(ranks)} is not positive")
    targets = shares(fpir, "fpir")
    searched = search(gallery_features, gallery_identity, probe_features, probe_identity, template)
    rank, unmated = searched.rank, searched.top[~searched.mated]
    found = np.where(rank == 1, searched.mate, -np.inf)[searched.mated]
    return Identification(
        gallery=searched.gallery,
        mated=len(found),
        unmated=len(unmated),
        template=template,
        rank={k: float((rank[searched.mated] <= k).mean()) for k in ranks},
        tpir=tuple(_open_set(found, unmated, target) for target in targets),
    )


@dataclass(frozen=True, eq=False)
class Searched:
    """Every probe in the gallery; `mate` and `rank` say something of mated probes alone."""

    gallery: int  # identities
    identity: Ints  # of each probe
    mated: Bools
    mate: Floats  # score of its mate
    rank: Ints
    top: Floats  # largest score


def search(
    gallery_features: Any, gallery_identity: Any, probe_features: Any, probe_identity: Any, template: str = "mean"
) -> Searched:
    """Search every probe in the gallery; see `identify`."""
    if template not in TEMPLATES:
        raise UsageError(f"template: {template!r} is not one of {', '.join(TEMPLATES)}")
    names, columns, starts = _gallery(gallery_features, gallery_identity, template)
    count = len(matrix(probe_features, "probe features"))
    wanted = labels(probe_identity, count, "probe identity")
    if np.shape(probe_features)[1] != columns.shape[1]:
        raise VisardError(f"probe features: {np.shape(probe_features)[1]} dimensions, gallery {columns.shape[1]}")
    place = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    mated = names[place] == wanted
    if not mated.any():
        raise VisardError("probe identity: no probe shows an identity of the gallery")
    mate, rank, top = _search(columns, starts, probe_features, place)
    return Searched(len(names), wanted, mated, mate, rank, top)


def _gallery(features: Any, identity: Any, template: str) -> tuple[Ints, Floats, Ints]:
    """Identities (sorted), their template rows, and the first row of each identity."""
    count = len(matrix(features, "gallery features"))
    ids = labels(identity, count, "gallery identity")
    order = np.argsort(ids, kind="stable")
    names, starts = np.unique(ids[order], return_index=True)
    rows = unit_rows(features, "gallery features", order)
    if template == "max":
        return names, rows, starts
    sums = np.add.reduceat(rows, starts, axis=0, dtype=np.float64)
    empty = ~np.any(sums, axis=1)
    if empty.any():
        raise VisardError(f"gallery features: those of identity {names[np.argmax(empty)]} cancel to zero")
    return names, unit_rows(sums, "gallery templates"), np.arange(len(names))


def _search(columns: Floats, starts: Ints, features: Any, place: Ints) -> tuple[Floats, Ints, Floats]:
    """Score of the identity at `place`, its rank, and the largest score, for each probe."""
    given, total = np.asarray(features), len(place)
    mate, top = np.empty(total, np.float32), np.empty(total, np.float32)
    rank = np.empty(total, np.int64)
    right = moved(torch.from_numpy(padded_rows(columns))).T
    several = len(starts) < len(columns)
    # padded, and one thread to a product, as in grid.py: probes do not change each other's scores
    block = max(PAD, CELLS // right.shape[1] // PAD * PAD)

    def work(start: int) -> None:
        part = slice(start, min(start + block, total))
        size = part.stop - start
        rows = unit_rows(given, "probe features", np.arange(start, part.stop), PAD)
        scores = (moved(torch.from_numpy(rows)) @ right).cpu().numpy()[:size, : len(columns)]
        identities = np.maximum.reduceat(scores, starts, axis=1) if several else scores
        mate[part] = identities[np.arange(size), place[part]]
        rank[part] = (identities >= mate[part, None]).sum(axis=1)  # the mate itself is the 1 of the rank
        top[part] = identities.max(axis=1)

    with one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(work, start) for start in range(0, total, block)]:
            job.result()
    return mate, rank, top


def _open_set(found: Floats, top: Floats, target: float) -> FpirPoint:
    """TPIR at the smallest threshold with FPIR <= target; `found`: scores of mates at rank 1, -inf if not."""
    if not len(top):
        return FpirPoint(target, None, None, None, True, "no probe shows a person outside the gallery")
    steps = Steps.of(found[np.isfinite(found)], top)
    i, _ = conservative(steps, target)
    threshold = steps.threshold[i] if i else np.nextafter(np.float32(steps.threshold[1]), np.float32(np.inf))
    return FpirPoint(
        target,
        int(steps.true[i]) / len(found),
        int(steps.false[i]) / len(top),
        float(threshold),
        target * len(top) < 10,
    )


@dataclass(frozen=True)
class GallerySplit(Result):
    """Row numbers of gallery and probes; `unmated`: identities left out of the gallery."""

    gallery: Ints
    probe: Ints
    unmated: Ints


def split_gallery(identity: Any, seed: int = 0, gallery_images: int = 1, unmated: float = 0.2) -> GallerySplit:
    """Gallery and probes from a plain set: `gallery_images` random pictures of each identity, the rest probes.

    A share `unmated` of the identities stays out of the gallery, and all their pictures are non-mated probes. An
    identity with no picture to spare is enrolled and never searched for.
    """
    given = np.asarray(identity)
    ids = labels(given, given.size)
    if gallery_images < 1:
        raise UsageError(f"gallery_images: {gallery_images} is not positive")
    if not 0.0 <= unmated < 1.0:
        raise UsageError(f"unmated: {unmated} is not in [0, 1)")
    rng = np.random.default_rng(seed)
    names = np.unique(ids)
    strangers = np.sort(rng.permutation(names)[: round(unmated * len(names))])
    shuffled = rng.permutation(len(ids))
    ordered = shuffled[np.argsort(ids[shuffled], kind="stable")]
    _, starts, sizes = np.unique(ids[ordered], return_index=True, return_counts=True)
    turn = np.arange(len(ids)) - np.repeat(starts, sizes)  # 0, 1, ... within each identity
    outside = np.isin(ids[ordered], strangers)
    enrolled = (turn < gallery_images) & ~outside
    if not (~enrolled & ~outside).any():
        raise VisardError(
            f"identity: no enrolled identity has more than {gallery_images} picture(s): nothing to search for"
        )
    return GallerySplit(np.sort(ordered[enrolled]), np.sort(ordered[~enrolled]), strangers)
