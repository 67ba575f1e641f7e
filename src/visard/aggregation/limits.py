r"""Limits between clients that need not trust each other: how much one reply counts, how far it can move the result,
and which replies are reported because they are far from the others.

    [aggregation]
    max_weight = 0.5   # largest share of one reply in an average; 1 = no limit
    bound = 3.0        # largest norm of an update, as a multiple of the median of the round; 0 = no limit

The update of a reply is what it changes of what its client was sent under the same name, or all of it where nothing was
sent. Its norm is taken separately over the trained entries and over batch norm's running statistics: these differ in
size, and a common limit would protect neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import median_low

import torch
from torch import Tensor

from visard.core import Weights
from visard.disclosure import is_statistic

BOUND, MAX_WEIGHT = 3.0, 0.5  # of a run between real parties that does not say otherwise
SMALL = 0.01  # an update of at most this share of the norm of what was sent is never shortened
# a norm is far from the others if its logarithm is so many standard deviations above them (as the MAD estimates them),
# it is so many times the median, and so large a share of the norm of what was sent;
MADS, RATIO, SHARE = 5.0, 5.0, 0.1
GROSS = 100.0  # or, whatever the others sent, so many times the norm of what was sent
BLOCK = 2**16  # numbers that are taken at once and stay in the cache
WHOLE, STATISTIC = "", "running statistics"  # parts of a field


def capped(weights: Sequence[float], most: float) -> list[float]:
    r"""The weights of replies, changed so that no share of their sum is above `most`.

    The largest get the share `most`, the others share the rest in their proportions (water-filling). Where `most` is
    below $1/n$ all are equal. Computed in fractions, so neither the order nor the size of a claim changes the others'
    shares. If no weight is too large, all stay as they are.
    """
    exact, limit = [Fraction(w) for w in weights], Fraction(most)
    if max(exact, default=Fraction(0)) <= limit * sum(exact):
        return list(weights)
    if limit * len(exact) <= 1:
        return [1.0] * len(exact)
    shares, room, rest = dict.fromkeys(range(len(exact)), Fraction(0)), Fraction(1), sum(exact, Fraction(0))
    for place in sorted(shares, key=lambda i: -exact[i]):
        shares[place] = min(limit, exact[place] * room / rest)
        room, rest = room - shares[place], rest - exact[place]
    return [float(shares[i]) for i in range(len(exact))]


def part_of(key: str) -> str:
    """The part of a field that an entry belongs to."""
    return STATISTIC if is_statistic(key, ()) else WHOLE


def norms(value: Weights, sent: Weights | None = None) -> dict[str, float]:
    """The L2 norm of the update in each part of a field, inf where that is too large for it; counters have none.

    The update is computed in the type that it has, its squares in float64, both in pieces that stay in the cache.
    """
    found = dict[str, list[float]]()
    for key, tensor in value.items():
        if tensor.is_floating_point():
            flat, before = tensor.reshape(-1), None if sent is None else sent[key].reshape(-1)
            for start in range(0, max(1, len(flat)), BLOCK):
                change = flat[start : start + BLOCK]
                if before is not None:
                    change = change - before[start : start + BLOCK]
                found.setdefault(part_of(key), []).append(float(torch.linalg.vector_norm(change.double())))
    return {part: math.hypot(*lengths) for part, lengths in found.items()}


def longest(found: Sequence[float], bound: float, sent: float) -> float:
    """The longest update that a round allows: `bound` times the median of its norms.

    Of an even number of replies the lower of the middle two counts: of two replies the shorter one is the measure. A
    small update (`SMALL` of the norm of what was sent) is always allowed, so that one of two clients cannot stop the
    other by sending no update. A single reply may be as long as what was sent.
    """
    if len(found) < 2:
        return sent or math.inf
    return max(bound * median_low(found), SMALL * sent)


def shortened(value: Weights, sent: Weights | None, allowed: dict[str, float], lengths: dict[str, float]) -> Weights:
    """A value whose update has the same direction and is no longer than `allowed` in any part.

    An update too long for float64 is dropped.
    """
    result = dict(value)
    for key, tensor in value.items():
        part = part_of(key)
        if not tensor.is_floating_point() or lengths[part] <= allowed[part]:
            continue
        base = torch.zeros_like(tensor) if sent is None else sent[key]
        scale = allowed[part] / lengths[part]
        if math.isfinite(lengths[part]) and scale > 0:
            result[key] = (base.double() + scale * _update(tensor, None if sent is None else base)).to(tensor.dtype)
        else:
            result[key] = base.clone()
    return result


def far(found: Sequence[float], sent: Sequence[float]) -> list[str | None]:
    """For each norm: in words how far it is from the others, or None if it is not far.

    With fewer than three replies an update is far if it is longer than what was sent.
    """
    said: list[str | None] = []
    middle, scale = (median_low(found), _scale(found)) if found else (0.0, 0.0)
    for norm, base in zip(found, sent, strict=True):
        lone = len(found) < 3
        said.append(None)
        if not norm > SHARE * base:
            continue
        if base and norm > (1.0 if lone else GROSS) * base:
            said[-1] = f"is {norm / base:.3g} times as long as what was sent"
        elif not lone and norm > RATIO * middle and _log(norm) > _log(middle) + MADS * scale:
            times = f"is {norm / middle:.3g} times as long as" if middle else f"has length {norm:.3g}, not 0 as"
            said[-1] = f"{times} the median of {len(found)} replies"
    return said


def _scale(found: Sequence[float]) -> float:
    """The standard deviation of the logarithms of norms, as their median absolute deviation estimates it."""
    logs = [_log(n) for n in found]
    middle = median_low(logs)
    return 1.4826 * median_low(abs(x - middle) for x in logs)


def _log(norm: float) -> float:
    return math.log(min(max(norm, 1e-300), 1e300))


def _update(value: Tensor, sent: Tensor | None) -> Tensor:
    return value.double() if sent is None else value.double() - sent.double()
