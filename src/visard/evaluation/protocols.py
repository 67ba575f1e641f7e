"""The tests of a run: the generic model on identities that it was not trained on, and a client's own model.

Generic: 1:1 over all pairs and in ten folds of balanced pairs, 1:N in a gallery of most of the identities.
Personal: how well a client's own model knows the client's identities among those of all clients (Liu et al. 2022).
1:1  genuine = all pairs of pictures of one local identity; impostors = all other pairs with a local picture.
1:N  gallery = the local identities, each from its registered (training) pictures; probes = the test pictures of all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Bools, Floats, Ints, Result, labels, matrix, pair_counts, unit_rows
from visard.evaluation.identification import Identification, identify, split_gallery
from visard.evaluation.ijb import Legacy, legacy_rule
from visard.evaluation.metrics import PERSONAL_FAR, PERSONAL_FPIR, names_of, values
from visard.evaluation.scores import Limits, Roc, stream_roc
from visard.evaluation.verification import Verification, verify_all, verify_pairs

OF_FOLDS = ("accuracy", "accuracy_std", "fold_accuracy", "fold_distance", "best_accuracy", "best_threshold")
STREAM = Limits(exact_auc_pairs=0)  # TAR at FAR is exact; the area of a personal test comes from the bins


class Settings(Protocol):
    """What `[evaluation]` says; see `visard.config.EvaluationSettings`."""

    @property
    def pairs(self) -> int: ...
    @property
    def far(self) -> tuple[float, ...]: ...
    @property
    def bootstrap(self) -> int: ...


@dataclass(frozen=True)
class SetVerification(Verification):
    """Verification over all pairs of a set, and accuracies over `fold_pairs` balanced pairs of it in ten folds."""

    fold_pairs: int = 0
    folds_disjoint: bool = False  # no identity appears in two folds


def verify_set(features: Floats, identity: Ints, settings: Settings, seed: int = 0) -> SetVerification:
    """TAR at FAR, EER and AUC over all pairs, and the ten-fold accuracy over balanced pairs."""
    every = verify_all(features, identity, far=settings.far, bootstrap=settings.bootstrap, seed=seed)
    genuine, impostors = pair_counts(identity)
    possible = 2 * min(genuine, impostors)
    if possible < 20:
        raise VisardError(f"the test set has {genuine} genuine and {impostors} impostor pairs: too few for ten folds")
    chosen = make_pairs(identity, min(settings.pairs, possible), seed)
    folds = verify_pairs(
        features, chosen.pairs, chosen.same, identity=identity, bootstrap=settings.bootstrap, seed=seed
    )  # fmt: skip
    of_folds = {k: v for k, v in (folds.intervals or {}).items() if k in ("accuracy", "best")}
    given = {field.name: getattr(every, field.name) for field in fields(every)}
    given |= {name: getattr(folds, name) for name in OF_FOLDS} | {"intervals": {**(every.intervals or {}), **of_folds}}
    return SetVerification(**given, fold_pairs=len(chosen.pairs), folds_disjoint=chosen.disjoint)


def verification(features: Floats, identity: Ints, settings: Settings, seed: int = 0) -> dict[str, Any]:
    """`verify_set` as plain values."""
    return verify_set(features, identity, settings, seed).to_dict()


def search_set(features: Floats, identity: Ints, seed: int = 0) -> Identification:
    """Rank-k and TPIR at FPIR: one picture of most identities as gallery, the rest as probes."""
    parts = split_gallery(identity, seed)
    return identify(features[parts.gallery], identity[parts.gallery], features[parts.probe], identity[parts.probe])


def identification(features: Floats, identity: Ints, seed: int = 0) -> dict[str, Any]:
    """`search_set` as plain values."""
    return search_set(features, identity, seed).to_dict()


@dataclass(frozen=True)
class PairList(Result):
    """Pairs (P, 2) of rows and whether they show the same identity, fold after fold, genuine first in each."""

    pairs: Ints
    same: Bools
    fold: Ints
    disjoint: bool  # no identity appears in two folds


def make_pairs(identity: Any, count: int, seed: int = 0, same_fraction: float = 0.5, folds: int = 10) -> PairList:
    """Draw `count` different pairs, uniformly among genuine and among impostor pairs; the seed decides all.

    Identities are distributed to the folds first. If one fold cannot give its share, all folds draw from all
    (`disjoint` is then False).
    """
    given = np.asarray(identity)
    ids = labels(given, given.size)
    if count < folds or folds < 1:
        raise UsageError(f"count: {count} pairs cannot fill {folds} folds")
    if not 0.0 <= same_fraction <= 1.0:
        raise UsageError(f"same_fraction: {same_fraction} is not between 0 and 1")
    genuine, impostors = pair_counts(ids)
    same_count = round(count * same_fraction)
    if same_count and not genuine:
        raise VisardError("pairs: every identity has only one picture, so there are no genuine pairs")
    for asked, there, kind in ((same_count, genuine, "genuine"), (count - same_count, impostors, "impostor")):
        if asked > there:
            raise VisardError(f"pairs: {asked} {kind} pairs were asked for, the set has {there}")
    rng = np.random.default_rng(seed)
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(count), folds)])
    same_ends = ends * same_count // count
    same_sizes, other_sizes = np.diff(same_ends, prepend=0), np.diff(ends - same_ends, prepend=0)
    parts_of = _distributed(ids, folds, rng)
    possible = [pair_counts(ids[rows]) for rows in parts_of]
    disjoint = all(s <= g and o <= i for (g, i), s, o in zip(possible, same_sizes, other_sizes, strict=True))
    if disjoint:
        genuine_parts = [_genuine(ids, rows, size, rng) for rows, size in zip(parts_of, same_sizes, strict=True)]
        other_parts = [_impostor(ids, rows, size, rng) for rows, size in zip(parts_of, other_sizes, strict=True)]
    else:
        every_row = np.arange(len(ids))
        genuine_parts = np.split(_genuine(ids, every_row, same_count, rng), same_ends[:-1])
        other_parts = np.split(_impostor(ids, every_row, count - same_count, rng), (ends - same_ends)[:-1])
    parts = [part for both in zip(genuine_parts, other_parts, strict=True) for part in both]
    sizes = np.array([len(part) for part in parts])
    same = np.repeat(np.arange(2 * folds) % 2 == 0, sizes)
    return PairList(np.concatenate(parts), same, np.repeat(np.arange(2 * folds) // 2, sizes), disjoint)


def _distributed(ids: Ints, folds: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of each fold: identities shuffled, then given out largest first so that every fold gets genuine pairs."""
    names, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = rng.permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    fold_of = np.empty(len(names), np.int64)
    turn = np.arange(len(names))
    snake = np.where(turn // folds % 2 == 0, turn % folds, folds - 1 - turn % folds)
    fold_of[order] = snake
    return [np.flatnonzero(fold_of[inverse] == k) for k in range(folds)]


def _ranks(total: int, count: int, rng: np.random.Generator) -> Ints:
    """`count` different numbers below `total`, in random order."""
    if count * 3 > total:
        return rng.permutation(total)[:count]
    found = np.empty(0, np.int64)
    while len(found) < count:
        more = np.concatenate([found, rng.integers(total, size=count + count // 8 + 8)])
        _, first = np.unique(more, return_index=True)
        found = more[np.sort(first)]
    return found[:count]


def _unrank(rank: Ints) -> tuple[Ints, Ints]:
    """The pair i < j with number j(j-1)/2 + i; the square root is corrected by one where it rounds."""
    j = ((1 + np.sqrt(1 + 8 * rank.astype(np.float64))) / 2).astype(np.int64)
    j -= j * (j - 1) // 2 > rank
    j += (j + 1) * j // 2 <= rank
    return rank - j * (j - 1) // 2, j


def _genuine(ids: Ints, rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Different genuine pairs among the rows, uniformly."""
    if not count:
        return np.empty((0, 2), np.int64)
    ordered = rows[np.argsort(ids[rows], kind="stable")]
    _, starts, sizes = np.unique(ids[ordered], return_index=True, return_counts=True)
    ends = np.cumsum(sizes * (sizes - 1) // 2)
    rank = _ranks(int(ends[-1]), count, rng)
    owner = np.searchsorted(ends, rank, side="right")
    i, j = _unrank(rank - (ends[owner] - sizes[owner] * (sizes[owner] - 1) // 2))
    return np.stack([ordered[starts[owner] + i], ordered[starts[owner] + j]], axis=1)


def _impostor(ids: Ints, rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Different impostor pairs among the rows, uniformly: drawn among all pairs, genuine ones passed over."""
    total = len(rows) * (len(rows) - 1) // 2
    asked = count
    while True:
        asked = min(total, 2 * asked + 16)
        i, j = _unrank(_ranks(total, asked, rng)) if count else (rows[:0], rows[:0])
        different = ids[rows[i]] != ids[rows[j]]
        if different.sum() >= count or asked == total:
            return np.stack([rows[i[different]], rows[j[different]]], axis=1)[:count]


def personal_roc(
    features: Any,
    identity: Any,
    local: Any,
    *,
    far: tuple[float, ...] = PERSONAL_FAR,
    limits: Limits = STREAM,
) -> Roc:
    """1:1 over the test pictures (N, E) of all clients with their `identity` (N,); `local`: the client's identities.

    L local pictures of N give L(N - L) + L(L - 1)/2 pairs, each counted once, in bounded memory.
    """
    ids = labels(identity, len(matrix(features, "features")))
    names, inverse = np.unique(ids, return_inverse=True)
    mine = np.isin(names, np.asarray(local))
    if not mine.any():
        raise VisardError("no test picture shows an identity of the client")
    number = np.empty(len(names), np.int64)
    number[np.argsort(~mine, kind="stable")] = np.arange(len(names))  # local identities get the smallest numbers
    return stream_roc(features, number[inverse], below=int(mine.sum()), far=far, limits=limits)


def personal_search_legacy(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, *, fpir: tuple[float, ...] = PERSONAL_FPIR
) -> Legacy:
    """1:N as the paper's released code counts (`ijb.search_legacy`).

    Its gallery row is the mean of unit features and is not scaled to length one again.
    """
    rows, ids = unit_rows(gallery, "gallery features"), labels(gallery_identity, len(np.asarray(gallery)))
    names, inverse, count = np.unique(ids, return_inverse=True, return_counts=True)
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, inverse, rows)
    means: Floats = (sums / count[:, None]).astype(np.float32)
    wanted = labels(probe_identity, len(np.asarray(probes)), "probe identity")
    return legacy_rule(means, names, unit_rows(probes, "probe features"), wanted, ranks=(1,), fpir=fpir)


def personal_metrics(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, local: Any
) -> dict[str, float]:
    """The metrics of both protocols by name; one that stands for less than one impostor is left out."""
    wanted = np.asarray(probe_identity)
    mine = np.isin(wanted, np.asarray(local))
    found: dict[str, float] = {}
    if np.unique(wanted[mine], return_counts=True)[1].max(initial=0) > 1 and len(np.unique(wanted)) > 1:
        roc = personal_roc(probes, wanted, local)
        found |= _named({"verification": roc.to_dict()}, roc.impostors)
    if not np.isin(wanted, np.asarray(gallery_identity)).any():
        return found
    search = identify(gallery, gallery_identity, probes, wanted, ranks=(1,), fpir=PERSONAL_FPIR)
    found |= _named({"identification": search.to_dict()}, search.unmated)
    if len(np.unique(gallery_identity)) > 1 or not mine.all():
        old = personal_search_legacy(gallery, gallery_identity, probes, wanted)
        for before in old.tpir:
            if before.tpir is not None and before.fpir * len(wanted) >= 1:
                found[f"personal/legacy_tpir@fpir={before.fpir:g}"] = before.tpir
    return found


def personal_names() -> list[str]:
    """All names that `personal_metrics` can give."""
    found = names_of("verification", PERSONAL_FAR) + names_of("identification", (1, *PERSONAL_FPIR))
    return [f"personal/{name}" for name in (*found, *(f"legacy_tpir@fpir={rate:g}" for rate in PERSONAL_FPIR))]


def _named(test: dict[str, Any], trials: int) -> dict[str, float]:
    """The registered metrics of a test, without rates that stand for less than one of its impostors or strangers."""
    return {
        f"personal/{v.name}": v.value
        for v in values(test)
        if v.value is not None and (v.at is None or v.at * trials >= 1)
    }
