"""Errors by group of people: false matches and false non-matches of each group at one threshold for all.

As ISO/IEC 19795-10 asks: a deployed system has one threshold, so it is set on everyone together at a stated false match
rate, and then each group has its rates there, and each two groups their false matches with each other. Failures to
enrol count beside them: pictures in which no face was found make no errors, and would not be seen.

FMR of a group   share of its impostor pairs (two people of the group) whose score reaches the threshold
FNMR of a group  share of its genuine pairs (one person, both pictures of the group) whose score does not
failure to enrol share of its pictures in which no face of sufficient quality was found

Intervals: people are drawn with replacement, a genuine pair counts as often as its person was drawn, an impostor pair
as often as both were; the threshold stays. `difference` is that of a group's rate to the rate of all in the same draws:
where it does not contain 0, the group fares differently. Where no error was seen, draws see none either, and the upper
end is 3 / n instead (the rule of three), with n people for genuine and n / 2 disjoint pairs of people for impostors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visard.data.faces import LOW_QUALITY, NO_FACE, UNREADABLE, FaceSet, FaceView
from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import Doubles, Floats, Ints, Result, labels, matrix, shares
from visard.evaluation.grid import Grid, Tile, one_thread_each
from visard.evaluation.metrics import FEW
from visard.evaluation.scores import stream_roc
from visard.evaluation.verification import Interval, draws, interval
from visard.files import mapping, number
from visard.text import listing, plural

DOMAIN = "domain"
FEW_PEOPLE = 20  # with fewer, one person more or less changes the metrics of a group
MOST_GROUPS = 100


@dataclass(frozen=True)
class Rate(Result):
    """An error rate: `errors` of `trials`; None where there are none to try."""

    errors: int
    trials: int
    rate: float | None = None
    interval: Interval | None = None
    difference: Interval | None = None  # of the rate to that of all groups together


def apart(rate: Mapping[str, Any]) -> str:
    """Whether a rate (as `Rate.to_dict()`) is above or below that of all, beyond chance; empty if it is not."""
    difference = mapping(rate.get("difference"))
    low, high = number(difference.get("low")), number(difference.get("high"))
    return "" if low is None or high is None else "above" if low > 0 else "below" if high < 0 else ""


@dataclass(frozen=True)
class Enrolment(Result):
    """Pictures that came, and those in which no face of sufficient quality was found (`failure`).

    `unreadable` pictures are no attempts. `people`: those of whom not one picture could be enrolled.
    """

    failure: Rate
    unreadable: int
    people: int


@dataclass(frozen=True)
class Group(Result):
    """One group at the common threshold; `doubt` says in a sentence why its metrics are unreliable."""

    name: str
    people: int
    pictures: int
    fmr: Rate
    fnmr: Rate
    enrolment: Enrolment | None = None  # None: not known
    doubt: str = ""


@dataclass(frozen=True)
class Between(Result):
    """Two groups: impostor pairs across them, and genuine pairs of people who have pictures in both."""

    first: str
    second: str
    fmr: Rate
    fnmr: Rate


@dataclass(frozen=True)
class GroupErrors(Result):
    """Errors by group at the one threshold (cosine) that gives all people together the rate `fmr_target`.

    Ratios are largest / smallest rate over groups, None where the smallest is 0 or a group has none.
    """

    by: str
    fmr_target: float
    threshold: float
    everyone: Group
    groups: tuple[Group, ...]
    between: tuple[Between, ...]
    fmr_ratio: float | None
    fnmr_ratio: float | None
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [
            f"Errors by {self.by} at threshold {self.threshold:.4f} (FMR of everyone {self.everyone.fmr.rate:.2g})"
        ]
        for g in (self.everyone, *self.groups):
            fmr, fnmr = ("none" if r.rate is None else f"{r.rate:.4g}" for r in (g.fmr, g.fnmr))
            lines.append(f"  {g.name}: {g.people} people, {g.pictures} pictures, FMR {fmr}, FNMR {fnmr}")
        return "\n".join([*lines, *self.warnings])


def errors_by_group(
    features: Any,
    identity: Any,
    group: Any,
    names: Sequence[str],
    *,
    by: str = "group",
    fmr: float = 1e-3,
    bootstrap: int = 200,
    seed: int = 0,
) -> GroupErrors:
    """Errors of all pairs of pictures (N, E), whose `group` (N,) is a row of `names`; nothing on failures to enrol.

    A person may have pictures in several groups (with and without glasses).
    """
    ids = labels(identity, len(matrix(features, "features")))
    place = labels(group, len(ids), "group")
    (target,) = shares((fmr,), "fmr")
    used = np.unique(place)
    if used[0] < 0 or used[-1] >= len(names):
        raise VisardError(f"group: a number has no name among the {len(names)} groups")
    if not 2 <= len(used) <= MOST_GROUPS:
        raise UsageError(f"by {by}: {plural(len(used), 'group')} to compare, needs 2 to {MOST_GROUPS}")
    _, person = np.unique(ids, return_inverse=True)
    (point,) = stream_roc(features, ids, far=(target,)).tar
    order = np.argsort(person, kind="stable")  # that of the grid
    grid = Grid.build(features, person)
    sizes = np.zeros((int(person.max()) + 1, len(used)))  # pictures of each person in each group
    place = np.searchsorted(used, place)
    np.add.at(sizes, (person, place), 1)
    rng = np.random.default_rng(seed)
    weights = np.vstack([np.ones((1, len(sizes))), draws(rng, len(sizes), bootstrap)])  # row 0: everyone once
    false, missed = _accepted(grid, place[order], point.threshold, weights, len(used))
    genuine, impostors = _trials(sizes, weights)
    missed = genuine - missed
    people = (sizes > 0).sum(axis=0).astype(int)
    everyone = Group(
        "everyone",
        len(sizes),
        len(ids),
        _rate(false.sum(1), impostors.sum(1), len(sizes) // 2),
        _rate(missed.sum(1), genuine.sum(1), len(sizes)),
    )
    all_rates = [np.divide(e.sum(1), t.sum(1), out=np.full(len(e), np.nan), where=t.sum(1) > 0)
                 for e, t in ((false, impostors), (missed, genuine))]  # fmt: skip
    G, found, between = len(used), [], []
    for g in range(G):
        for h in range(g, G):
            cell = g * G + h
            both = int(((sizes[:, g] > 0) & (sizes[:, h] > 0)).sum())
            crowd = people[g] // 2 if g == h else min(people[g], people[h])
            rates = (
                _rate(false[:, cell], impostors[:, cell], crowd, all_rates[0]),
                _rate(missed[:, cell], genuine[:, cell], both, all_rates[1]),
            )
            if g == h:
                found.append(Group(names[used[g]], int(people[g]), int(sizes[:, g].sum()), *rates))
            else:
                between.append(Between(names[used[g]], names[used[h]], *rates))
    found = [replace(one, doubt=_doubt(one)) for one in found]
    doubts = dict.fromkeys(one.doubt for one in found if one.doubt)
    warnings = [f"{listing([one.name for one in found if one.doubt == doubt])}: {doubt}." for doubt in doubts]
    if point.unreliable:
        warnings.insert(0, f"FMR {target:g} stands for fewer than {FEW} of all impostor pairs: the threshold depends on"
                           " single pairs.")  # fmt: skip
    return GroupErrors(
        by, target, point.threshold, everyone, tuple(found), tuple(between),
        _ratio([g.fmr for g in found]), _ratio([g.fnmr for g in found]), tuple(warnings),
    )  # fmt: skip


def _accepted(grid: Grid, place: Ints, threshold: float, weights: Doubles, groups: int) -> tuple[Doubles, Doubles]:
    """Weighted impostor and genuine pairs that reach the threshold, (draws, groups²), at g * groups + h with g <= h.

    Whole numbers throughout, which float64 adds without rounding: the order of threads leaves no trace.
    """
    key = grid.identity * groups + place

    def work(corner: Tile) -> tuple[Doubles, Doubles] | None:
        block = grid.block(corner, torch.empty(grid.tile * grid.tile))
        reached = block >= threshold
        hits = np.flatnonzero(np.triu(reached, 1) if corner[0] == corner[1] else reached)
        if not len(hits):
            return None
        i, j = (key[start : start + n] for start, n in zip(corner, block.shape, strict=True))
        (rows, row), (columns, column) = (np.unique(part, return_inverse=True) for part in (i, j))
        a, b = np.divmod(hits, block.shape[1])
        count = np.bincount(row[a] * len(columns) + column[b], minlength=len(rows) * len(columns))
        return _weighted(count.reshape(len(rows), -1).astype(np.float64), rows, columns, weights, groups)

    false, true = np.zeros((2, len(weights), groups * groups))
    with one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        for found in pool.map(work, grid.tiles()):
            if found is not None:
                false += found[0]
                true += found[1]
    return _folded(false, groups), _folded(true, groups)


def _weighted(count: Doubles, rows: Ints, columns: Ints, weights: Doubles, groups: int) -> tuple[Doubles, Doubles]:
    """Of the pairs `count` between (person, group) keys: weighted sums of impostors and of genuine in each cell."""
    (p, g), (q, h) = np.divmod(rows, groups), np.divmod(columns, groups)
    false, true = np.zeros((2, len(weights), groups * groups))
    same = p[:, None] == q[None, :]
    first, second = np.nonzero(same & (count > 0))
    cells = g[first] * groups + h[second]
    for cell in np.unique(cells):
        here = cells == cell
        true[:, cell] = weights[:, p[first[here]]] @ count[first[here], second[here]]
    apart = np.where(same, 0.0, count)
    one_hot = np.eye(groups)[h]  # (columns, groups)
    for k in np.unique(g):
        sums = (weights[:, p[g == k]] @ apart[g == k]) * weights[:, q]  # Σ over rows of w_a n_ab, times w_b
        false[:, k * groups : (k + 1) * groups] = sums @ one_hot
    return false, true


def _folded(cells: Doubles, groups: int) -> Doubles:
    """Cells (g, h) and (h, g) are the same two groups: all in g <= h."""
    square = cells.reshape(-1, groups, groups)
    return np.triu(square + np.tril(square, -1).transpose(0, 2, 1)).reshape(cells.shape)


def _trials(sizes: Doubles, weights: Doubles) -> tuple[Doubles, Doubles]:
    """Weighted numbers of genuine and of impostor pairs in each cell, from the numbers of pictures (people, groups)."""
    G = sizes.shape[1]
    genuine, impostors = np.zeros((2, len(weights), G, G))
    total = weights @ sizes  # (draws, groups)
    for g in range(G):
        both = sizes[:, g : g + 1] * sizes
        own = weights**2 @ both  # pairs of one person, which are no impostors
        genuine[:, g] = weights @ both
        impostors[:, g] = total[:, g : g + 1] * total - own
        genuine[:, g, g] = weights @ (sizes[:, g] * (sizes[:, g] - 1) / 2)
        impostors[:, g, g] /= 2
    upper = np.triu(np.ones((G, G)))
    return (genuine * upper).reshape(len(weights), -1), (impostors * upper).reshape(len(weights), -1)


def _rate(errors: Doubles, trials: Doubles, crowd: int, everyone: Doubles | None = None) -> Rate:
    """A rate from its value (first) and its draws; `crowd`: independent trials for the rule of three."""
    count, total = round(float(errors[0])), round(float(trials[0]))
    if not total:
        return Rate(count, total)
    drawn = np.divide(errors, trials, out=np.full(len(errors), np.nan), where=trials > 0)
    if len(drawn) == 1:
        return Rate(count, total, count / total)
    spread = interval(drawn[1:], "identity")
    bound = min(1.0, 3.0 / max(1, crowd))
    if count == 0:
        spread = replace(spread, high=max(bound, spread.high))
    if count == total:
        spread = replace(spread, low=min(1.0 - bound, spread.low))
    apart = None if everyone is None else interval(drawn[1:] - everyone[1:], "identity")
    if apart is not None and count in (0, total):  # draws cannot differ from what was seen
        base = everyone[0] if everyone is not None else 0.0
        low, high = min(apart.low, spread.low - base), max(apart.high, spread.high - base)
        apart = replace(apart, low=float(low), high=float(high))
    return Rate(count, total, count / total, spread, apart)


def _ratio(rates: Sequence[Rate]) -> float | None:
    known = [r.rate for r in rates if r.rate is not None]
    return max(known) / min(known) if len(known) == len(rates) and min(known) > 0 else None


def _doubt(group: Group) -> str:
    """Why the metrics of a group are unreliable, in words; empty if they are reliable."""
    reasons = []
    if group.people < FEW_PEOPLE:
        reasons.append(f"{plural(group.people, 'person', 'people')} are too few for a figure, read the intervals")
    for name, rate, kind in (("FMR", group.fmr, "impostor"), ("FNMR", group.fnmr, "genuine")):
        if not rate.trials:
            reasons.append(f"no {kind} pairs, so no {name}")
        elif rate.errors < FEW and group.people >= FEW_PEOPLE:
            reasons.append(f"its {name} rests on {plural(rate.errors, 'error')}")
    return "; ".join(reasons)


def errors_by(
    features: Sequence[Floats],
    views: Sequence[FaceView],
    by: str,
    *,
    fmr: float = 1e-3,
    bootstrap: int = 200,
    seed: int = 0,
) -> GroupErrors:
    """Errors by domain, or by an attribute, over the people of one view or of several together, with enrolment.

    `features`: those (n, E) of each view. Views may be of different face sets, whose people are different ones.
    """
    if not views or len(features) != len(views):
        raise VisardError(f"by {by}: {len(features)} features of {len(views)} views")
    sets = list({view.faces.path: view.faces for view in views}.values())
    first = dict(zip((faces.path for faces in sets), np.cumsum([0, *map(_people, sets)]).tolist(), strict=False))
    names: dict[str, int] = {}  # in the order of the sets
    for faces in sets:
        for mark in range(len(faces.domains)) if by == DOMAIN else (1, -1, 0):
            names.setdefault(_name(faces, by, mark, len(sets)), len(names))
    known: set[tuple[Path, int]] = set()
    rows: list[Floats] = []
    identity: list[int] = []
    group: list[int] = []
    for given, view in zip(features, views, strict=True):
        if len(given) != len(view):
            raise VisardError(f"by {by}: {len(given)} features of {len(view)} pictures")
        faces, path = view.faces, view.faces.path
        fresh = [k for k, row in enumerate(view.index.tolist()) if (path, row) not in known]
        known |= {(path, row) for row in view.index.tolist()}
        rows.append(np.asarray(given)[fresh])
        identity += (view.identity[fresh] + first[path]).tolist()
        marks = view.domain if by == DOMAIN else faces.attribute(by)[view.index]
        group += [names[_name(faces, by, mark, len(sets))] for mark in marks[fresh].tolist()]
    ids, place = np.array(identity, np.int64), np.array(group, np.int64)
    found = errors_by_group(
        np.concatenate(rows), ids, place, list(names), by=by, fmr=fmr, bootstrap=bootstrap, seed=seed
    )
    parts = [_skipped(faces, [v for v in views if v.faces.path == faces.path], by, len(sets), names) for faces in sets]
    if any(part is None for part in parts):
        why = "The face set does not say whose pictures were skipped (imported by an older version): import it again."
        return replace(found, warnings=(*found.warnings, why))
    moved = [part + np.array([first[faces.path], 0, 0]) for faces, part in zip(sets, parts, strict=True)
             if part is not None]  # fmt: skip
    skipped = np.concatenate(moved)
    tried = {name: skipped[skipped[:, 1] == number] for name, number in names.items()}
    groups = tuple(
        replace(one, enrolment=_enrolment(tried[one.name], ids[place == names[one.name]], bootstrap, seed))
        for one in found.groups
    )
    everyone = replace(found.everyone, enrolment=_enrolment(skipped, ids, bootstrap, seed))
    empty = set(names) - {one.name for one in groups}
    lost = [f"{name}: not one picture could be enrolled." for name in names if name in empty and len(tried[name])]
    return replace(found, everyone=everyone, groups=groups, warnings=(*found.warnings, *lost))


def _people(faces: FaceSet) -> int:
    """How many numbers the people of a set need, including those without any picture."""
    skipped = faces.skipped()
    return max(len(faces.names), 0 if skipped is None else int(skipped.identity.max(initial=-1)) + 1)


def _name(faces: FaceSet, by: str, mark: int, sets: int) -> str:
    """The name of a group."""
    if by != DOMAIN:
        return {1: by, -1: f"not {by}"}.get(mark, "unknown")
    own = faces.path.name
    return faces.domains[mark] if sets == 1 else own if len(faces.domains) == 1 else f"{own}: {faces.domains[mark]}"


def _skipped(faces: FaceSet, views: Sequence[FaceView], by: str, sets: int, names: dict[str, int]) -> Ints | None:
    """Rows (person, group, reason) of skipped pictures of the people in the views; None where that is not known.

    People without any picture belong only to views of the whole set.
    """
    skipped = faces.skipped()
    if skipped is None:
        return None
    here = set(np.concatenate([view.identity for view in views]).tolist())
    whole = len(here) == len(faces.names)
    mine = np.array([p in here or (whole and p >= len(faces.names)) for p in skipped.identity.tolist()], bool)
    marks = skipped.domain if by == DOMAIN else skipped.attributes[:, faces.attribute_names.index(by)]
    group = [names[_name(faces, by, mark, sets)] for mark in marks[mine].tolist()]
    return np.column_stack([skipped.identity[mine], np.array(group, np.int64), skipped.reason[mine]]).astype(np.int64)


def _enrolment(skipped: Ints, enrolled: Ints, bootstrap: int, seed: int) -> Enrolment:
    """Failures of a group, with an interval over its people; `enrolled`: whom each of its pictures shows."""
    failed = skipped[np.isin(skipped[:, 2], (NO_FACE, LOW_QUALITY)), 0]
    people, place = np.unique(np.concatenate([enrolled, failed]), return_inverse=True)
    total = np.bincount(place, minlength=len(people)).astype(np.float64)
    wrong = np.bincount(place[len(enrolled) :], minlength=len(people)).astype(np.float64)
    rng = np.random.default_rng(seed)
    weights = np.vstack([np.ones((1, len(people))), draws(rng, len(people), bootstrap)])
    rate = _rate(weights @ wrong, weights @ total, len(people))
    lost = np.setdiff1d(failed, enrolled)
    return Enrolment(rate, int((skipped[:, 2] == UNREADABLE).sum()), len(lost))
