"""Mean, spread and paired differences over seeds; nothing is made up where there are too few."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Some values in two numbers."""

    n: int
    mean: float | None  # None: no value
    std: float | None  # ddof = 1; None: fewer than two values


@dataclass(frozen=True)
class Difference:
    """a - b, paired by seed."""

    n: int
    mean: float | None
    low: float | None  # of the 95 % interval; None: fewer than two pairs
    high: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and standard deviation (ddof = 1) of the values that are there."""
    known = [v for v in values if v is not None]
    if not known:
        return Spread(0, None, None)
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return Spread(1, mean, None)
    return Spread(len(known), mean, math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)))


def paired(a: Mapping[int, float | None], b: Mapping[int, float | None], level: float = 0.95) -> Difference:
    """Mean of a - b over the seeds that both have, with the t interval mean ± t(n - 1) std / sqrt(n)."""
    s = spread([x - y for seed, x in a.items() if x is not None and (y := b.get(seed)) is not None])
    if s.mean is None or s.std is None:
        return Difference(s.n, s.mean, None, None)
    from scipy.special import stdtrit  # quantiles of Student's t

    half = float(stdtrit(s.n - 1, (1 + level) / 2)) * s.std / math.sqrt(s.n)
    return Difference(s.n, s.mean, s.mean - half, s.mean + half)
