"""Real numbers as integers with one fixed exponent: nothing about a value shows in its encoding's form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visard.errors import VisardError


@dataclass(frozen=True)
class FixedPoint:
    """x -> round(x 2^bits), refused where |x| exceeds `limit`."""

    bits: int
    limit: float = math.inf

    def encode(self, values: Tensor) -> list[int]:
        """Integers of the values in row-major order."""
        x = values.detach().double().flatten()
        if not bool(torch.isfinite(x).all()):
            raise VisardError("a value to encrypt is not finite")
        if len(x) and float(x.abs().max()) > self.limit:
            raise VisardError(f"a value to encrypt is {float(x.abs().max()):.4g}, above the limit of {self.limit:g}")
        return [int(v) for v in torch.round(x * 2.0**self.bits).tolist()]

    def decode(self, numbers: Iterable[int], shape: Sequence[int]) -> Tensor:
        """float64 values of the integers."""
        unit = 1 << self.bits
        return torch.tensor([int(v) / unit for v in numbers], dtype=torch.float64).reshape(tuple(shape))
