r"""Robust rules: a minority of hostile clients cannot move their result far, whatever they send.

    rule               each client     what it gives                                              paper
    median             alike           the median of each coordinate                              Yin et al. 2018
    trimmed-mean       alike           the mean of each coordinate without its ends               Yin et al. 2018
    geometric-median   by its weight   the point with the least sum of distances to all replies   Pillutla et al. 2022
    krum               alike           the reply that is nearest to most others                   Blanchard et al. 2017
    multi-krum         alike           the mean of several such replies                           Blanchard et al. 2017
    bulyan             alike           a trimmed mean of several such replies                     El Mhamdi et al. 2018

They are for rounds in which all clients are sent the same. Krum and the geometric median measure distances: each field
by itself, and its trained entries and batch norm's running statistics apart, as `limits` does, so that what is large in
one part hides nothing in another. Integer entries (counters) become their median, of an even number the lower of the
middle two. Replies are taken in the order of the clients' names, so that the order of arrival does not change the bits.
Memory does not grow with the size of a reply: each rule reads all replies piece by piece.

A bound on the norm of updates is not a rule: `bound` (see `limits`) applies before every rule, including the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from visard.aggregation.limits import part_of
from visard.aggregation.rules import Held, RuleOfAll
from visard.core import Weights

TOLERANCE = 1e-7  # Weiszfeld ends when the point moves by no more than this share of the typical distance, ...
ITERATIONS = 1000  # ... or after so many steps
SMOOTHING = 1e-6  # a reply nearer than this share of the typical distance counts as if it were so far away


def by_coordinate(replies: Held, combine: Callable[[Tensor], Tensor]) -> Weights:
    """Each coordinate by itself: `combine` makes (places,) of (replies, places), which are sorted over the replies."""
    return {key: _entry(replies, key, combine if like.is_floating_point() else _low) for key, like in _entries(replies)}


def _entries(replies: Held) -> list[tuple[str, Tensor]]:
    return list(replies.like.items())


def _entry(replies: Held, key: str, combine: Callable[[Tensor], Tensor], rows: Sequence[int] | None = None) -> Tensor:
    """One entry; with `rows` of these replies alone."""
    like = replies.like[key]
    result = torch.empty(like.numel(), dtype=like.dtype)
    for places, values in replies.pieces(key):
        result[places] = combine((values if rows is None else values[rows]).sort(0).values).to(like.dtype)
    return result.view(like.shape)


def _low(ordered: Tensor) -> Tensor:
    """The median, of an even number the lower of the middle two."""
    return ordered[(len(ordered) - 1) // 2]


def _median(ordered: Tensor) -> Tensor:
    """The median, of an even number the mean of the middle two."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1].double() + ordered[half].double()) / 2


@dataclass(frozen=True)
class Median(RuleOfAll):
    """The median of each coordinate (Yin et al. 2018, Definition 1)."""

    name = "median"
    title = "the median of each coordinate, all clients alike"

    def combine(self, replies: Held) -> Weights:
        return by_coordinate(replies, _median)


@dataclass(frozen=True, kw_only=True)
class _Withstanding(RuleOfAll):
    """A rule for a stated share of hostile replies."""

    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # largest share of the replies that may be hostile

    def most(self, replies: int) -> int:
        """How many of so many replies may be hostile: at most the share of them, and one at least, unless it is 0."""
        return max(math.floor(Fraction(repr(self.hostile)) * replies), int(self.hostile > 0))

    def _needs(self, replies: int, fewest: int) -> str | None:
        if replies >= fewest:
            return None
        return (
            f"{self.name} with aggregation.hostile = {self.hostile:g} needs {fewest} replies to withstand "
            f"{self.most(replies)}, and there are {replies}"
        )


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(_Withstanding):
    """The mean of each coordinate without its k largest and its k smallest values (Yin et al. 2018, Definition 2)."""

    name = "trimmed-mean"
    title = "the mean of each coordinate without its largest and smallest values, all clients alike"

    def too_few(self, replies: int) -> str | None:
        return self._needs(replies, 2 * self.most(replies) + 1)

    def combine(self, replies: Held) -> Weights:
        n = len(replies.weights)
        k = self.most(n)
        return by_coordinate(replies, lambda ordered: ordered[k : n - k].double().mean(0))


def parts(replies: Held) -> list[list[str]]:
    """The entries with numbers, the trained ones and the running statistics apart."""
    found: dict[str, list[str]] = {}
    for key, like in _entries(replies):
        if like.is_floating_point():
            found.setdefault(part_of(key), []).append(key)
    return list(found.values())


def distances(replies: Held, keys: Sequence[str]) -> Tensor:
    """The squared distances (n, n) between all pairs of replies over some entries, from sums of products.

    Uses differences from what was sent, if something was, so that weights that hardly change lose no precision.
    """
    n = len(replies.weights)
    products = torch.zeros(n, n, dtype=torch.float64)
    for key in keys:
        sent = None if replies.sent is None else replies.sent[key].reshape(-1)
        for places, values in replies.pieces(key):
            update = values.double()
            if sent is not None:
                update -= sent[places].double()
            products += update @ update.T
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp_(min=0)
    return found.fill_diagonal_(0)


def _mixed(replies: Held, shares: Sequence[tuple[Sequence[str], Tensor]]) -> Weights:
    """The mean of the replies by shares (n,) that sum to one, given for groups of entries; counters by their median."""
    found = {key: _entry(replies, key, _low) for key, like in _entries(replies) if not like.is_floating_point()}
    for keys, share in shares:
        chosen = share.nonzero().flatten()
        for key in keys:
            like = replies.like[key]
            found[key] = torch.empty(like.shape, dtype=like.dtype)
            for places, values in replies.pieces(key):
                found[key].view(-1)[places] = _sum(values[chosen], share[chosen]).to(like.dtype)
    return {key: found[key] for key in replies.like}


def _sum(values: Tensor, share: Tensor) -> Tensor:
    """(replies, places) by shares (replies,); one reply alone is itself to the last bit."""
    return values[0] if len(values) == 1 else share @ values.double()


@dataclass(frozen=True)
class GeometricMedian(RuleOfAll):
    r"""The geometric median $\arg\min_z \sum_i w_i \lVert \theta_i - z \rVert$ (Pillutla et al. 2022, Eq. 4).

    Weiszfeld's algorithm with their smoothing: $z \leftarrow \sum_i \beta_i \theta_i / \sum_i \beta_i$ with
    $\beta_i = w_i / \max(\nu, \lVert \theta_i - z \rVert)$. Every such $z$ is a mean of the replies, so its distances
    to them follow from those between replies: the replies are read once for these and once for the result, however many
    steps it takes. It starts at the mean, and ends when $z$ moves by at most `TOLERANCE` of the typical distance, after
    `ITERATIONS` steps at the latest.
    """

    name = "geometric-median"
    title = "the point with the least sum of distances to all replies, each client by its weight"

    def combine(self, replies: Held) -> Weights:
        weights = torch.tensor(replies.weights, dtype=torch.float64)
        return _mixed(replies, [(keys, shares_of(distances(replies, keys), weights)) for keys in parts(replies)])


def shares_of(squared: Tensor, weights: Tensor) -> Tensor:
    """The shares (n,) of the replies in their geometric median, from the squared distances between them."""
    share, typical = weights / weights.sum(), _typical(squared.sqrt())
    for _ in range(ITERATIONS if typical else 0):
        far = (squared @ share - 0.5 * share @ squared @ share).clamp(min=0).sqrt()
        pull = weights / far.clamp(min=SMOOTHING * typical)
        before, share = share, pull / pull.sum()
        step = share - before
        if -0.5 * float(step @ squared @ step) <= (TOLERANCE * typical) ** 2:
            break
    return share


def _typical(between: Tensor) -> float:
    """The least distance within which a reply has more than half of all replies: no minority can choose it."""
    found = float(between.kthvalue(len(between) // 2 + 1).values.min())
    return found or min(between[between > 0].tolist(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Krum(_Withstanding):
    r"""The reply with the lowest score: the sum of its squared distances to the $n - f - 2$ nearest others (Blanchard
    et al. 2017, Section 4). Needs $n \ge 2 f + 3$ replies. Of equal scores the first by the client's name counts.
    """

    name = "krum"
    title = "the one reply that is nearest to most others, all clients alike"

    def too_few(self, replies: int) -> str | None:
        return self._needs(replies, 2 * self.most(replies) + 3)

    def number(self, replies: int) -> int:
        """How many of the replies with the lowest scores are averaged."""
        return 1

    def combine(self, replies: Held) -> Weights:
        n = len(replies.weights)
        best = [(keys, scores(distances(replies, keys), self.most(n)).argsort(stable=True)) for keys in parts(replies)]
        share = torch.zeros(n, dtype=torch.float64)
        m = self.number(n)
        return _mixed(replies, [(keys, share.index_fill(0, order[:m], 1 / m)) for keys, order in best])


def scores(squared: Tensor, f: int) -> Tensor:
    """Krum's score (n,) of each reply."""
    n = len(squared)
    return squared.sort(1).values[:, 1 : n - f - 1].sum(1)  # the first is the distance to itself


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the `chosen` replies with the lowest scores of Krum; 0: n - f - 2 (Damaskinos et al. 2019)."""

    name = "multi-krum"
    title = "the mean of the replies that are nearest to most others, all clients alike"

    chosen: Annotated[int, Field(ge=0)] = 0

    def too_few(self, replies: int) -> str | None:
        few = super().too_few(replies)
        if few is None and self.chosen > replies:
            return f"{self.name} with aggregation.chosen = {self.chosen} is to average more than the {replies} replies"
        return few

    def number(self, replies: int) -> int:
        return self.chosen or replies - self.most(replies) - 2


@dataclass(frozen=True, kw_only=True)
class Bulyan(_Withstanding):
    r"""In each coordinate the mean of the $\theta - 2 f$ values that are nearest to the median, of $\theta = n - 2 f$
    replies that Krum chooses one after the other (El Mhamdi et al. 2018, Section 4). Needs $n \ge 4 f + 3$ replies.

    Among the m replies that are left Krum looks at the m - f - 2 nearest others, at one at the least. The median of an
    even number is the lower of the middle two, and of two values that are as near to it the lower one counts.
    """

    name = "bulyan"
    title = "the mean of the middle values of the replies that are nearest to most others, all clients alike"

    def too_few(self, replies: int) -> str | None:
        return self._needs(replies, 4 * self.most(replies) + 3)

    def combine(self, replies: Held) -> Weights:
        n = len(replies.weights)
        f = self.most(n)
        found = {key: _entry(replies, key, _low) for key, like in _entries(replies) if not like.is_floating_point()}
        for keys in parts(replies):
            rows = one_by_one(distances(replies, keys), f, n - 2 * f)
            found |= {key: _entry(replies, key, lambda v: _near_median(v, n - 4 * f), rows) for key in keys}
        return {key: found[key] for key in replies.like}


def one_by_one(squared: Tensor, f: int, count: int) -> list[int]:
    """The replies that Krum chooses one after the other, each among those that are left."""
    left, chosen = list(range(len(squared))), list[int]()
    while len(chosen) < count:
        score = scores(squared[left][:, left], min(f, len(left) - 3))
        chosen.append(left.pop(int(score.argmin())))
    return sorted(chosen)


def _near_median(ordered: Tensor, count: int) -> Tensor:
    """The mean of the values that are nearest to the median."""
    away = (ordered.double() - _low(ordered).double()).abs()
    return ordered.gather(0, away.sort(dim=0, stable=True).indices[:count]).double().mean(0)
