"""Balanced lists of genuine and impostor pairs, in folds that share no person where that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import UsageError, VisardError
from visard.evaluation.inputs import Bools, Ints, labels
from visard.evaluation.results import Result


@dataclass(frozen=True)
class PairList(Result):
    """Pairs (P, 2) of rows and whether they show the same person, fold after fold, genuine first in each."""

    pairs: Ints
    same: Bools
    fold: Ints
    disjoint: bool  # no person appears in two folds


def make_pairs(identity: Any, count: int, seed: int = 0, same_fraction: float = 0.5, folds: int = 10) -> PairList:
    """Draw `count` different pairs, uniformly among genuine and among impostor pairs; the seed decides all.

    Persons are dealt to the folds first. If one fold cannot give its share, all folds draw from everyone
    (`disjoint` is then False).
    """
    given = np.asarray(identity)
    ids = labels(given, given.size)
    if count < folds or folds < 1:
        raise UsageError(f"count: {count} pairs cannot fill {folds} folds")
    if not 0.0 <= same_fraction <= 1.0:
        raise UsageError(f"same_fraction: {same_fraction} is not between 0 and 1")
    sizes = np.unique(ids, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    impostors = len(ids) * (len(ids) - 1) // 2 - genuine
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
    deal = _deal(ids, folds, rng)
    disjoint = all(map(_has, [ids[rows] for rows in deal], same_sizes, other_sizes))
    if disjoint:
        genuine_parts = [_genuine(ids, rows, size, rng) for rows, size in zip(deal, same_sizes, strict=True)]
        other_parts = [_impostor(ids, rows, size, rng) for rows, size in zip(deal, other_sizes, strict=True)]
    else:
        everyone = np.arange(len(ids))
        genuine_parts = np.split(_genuine(ids, everyone, same_count, rng), same_ends[:-1])
        other_parts = np.split(_impostor(ids, everyone, count - same_count, rng), (ends - same_ends)[:-1])
    parts = [part for both in zip(genuine_parts, other_parts, strict=True) for part in both]
    sizes = np.array([len(part) for part in parts])
    same = np.repeat(np.arange(2 * folds) % 2 == 0, sizes)
    return PairList(np.concatenate(parts), same, np.repeat(np.arange(2 * folds) // 2, sizes), disjoint)


def _deal(ids: Ints, folds: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of each fold: persons shuffled, then dealt largest first so that every fold gets genuine pairs."""
    names, inverse, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = rng.permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    fold_of = np.empty(len(names), np.int64)
    turn = np.arange(len(names))
    snake = np.where(turn // folds % 2 == 0, turn % folds, folds - 1 - turn % folds)
    fold_of[order] = snake
    return [np.flatnonzero(fold_of[inverse] == k) for k in range(folds)]


def _has(ids: Ints, same: int, other: int) -> bool:
    """Whether these pictures give so many genuine and impostor pairs."""
    sizes = np.unique(ids, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    return same <= genuine and other <= len(ids) * (len(ids) - 1) // 2 - genuine


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
