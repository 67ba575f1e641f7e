r"""The spread-out regulariser: keeps class vectors apart where no client may see another's (FedFace Eq. 9, FedAwS).

W (C, E)   class vectors, rows of length 1        d   a distance, a function of the cosine
v          pairs nearer than this are pushed      k   nearest others, which FedAwS pushes without a margin
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visard.errors import UsageError
from visard.heads import direction

Distance = Literal["cosine", "half", "euclidean", "squared"]
Reduction = Literal["mean", "sum", "per_class"]
BLOCK = 512  # rows of the cosine matrix at a time: memory is BLOCK x C, not C x C
NEAR = 1e-6  # below this Euclidean distance its slope is cut, which would be infinite


@dataclass(frozen=True)
class SpreadOut:
    """`[method.spread]`: how the server separates class vectors."""

    weight: float = 1.0  # lambda; 0 = no spread-out
    pairs: Literal["all", "nearest"] = "all"  # all within the margin (Eq. 9), or the k nearest of each (FedAwS)
    margin: float = 1.0  # v, in units of `distance`
    k: int = 10  # of `nearest`
    distance: Distance = "cosine"  # 1 - cos; half: (1 - cos) / 2; euclidean; squared: 2 - 2 cos
    reduction: Reduction = "per_class"  # mean over a class's pairs, summed over classes; or mean or sum over all pairs
    steps: int = 1  # gradient steps a round, each followed by re-normalisation

    def __post_init__(self) -> None:
        for name in ("weight", "margin"):
            if getattr(self, name) < 0:
                raise UsageError(f"spread.{name} = {getattr(self, name)}: must not be negative")
        for name in ("k", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"spread.{name} = {getattr(self, name)}: must be at least 1")


def distance(cos: Tensor, kind: Distance) -> Tensor:
    """d of two unit vectors with this cosine."""
    gap = (1 - cos).clamp_min(0)
    return {"cosine": gap, "half": gap / 2, "squared": 2 * gap, "euclidean": (2 * gap).sqrt()}[kind]


def slope(cos: Tensor, kind: Distance) -> Tensor:
    """d' = dd / dcos."""
    if kind == "euclidean":
        return -1 / distance(cos, kind).clamp_min(NEAR)
    return torch.full_like(cos, {"cosine": -1.0, "half": -0.5, "squared": -2.0}[kind])


def regulariser(W: Tensor, how: SpreadOut) -> Tensor:
    r"""$\sum_c \sum_{\hat c \ne c} \max(0, v - d)^2$ (Eq. 9), or $-d^2$ over the k nearest of each; a scalar."""
    W = direction(W)
    total = torch.zeros((), dtype=W.dtype)
    for _, cos in _blocks(W):
        if how.pairs == "all":
            total += ((how.margin - distance(cos, how.distance)).clamp_min(0) ** 2).sum()
        else:
            total -= (distance(_nearest(cos, how.k)[0], how.distance) ** 2).sum()
    return total * _share(len(W), how)


def gradient(W: Tensor, how: SpreadOut) -> Tensor:
    r"""$\nabla_W$ of `regulariser`, block by block without autograd; rows of W have length 1.

    A pair within the margin enters twice, as $(c, \hat c)$ and $(\hat c, c)$; a nearest one moves both its ends.
    A cosine does not change with the length of a row, so the part of the gradient along the row is taken out.
    With that part left in (inner products for cosines) a large $\lambda$ turns vectors that lie close together
    to the opposite side, all to the same place, and separates nothing.
    """
    result = torch.zeros_like(W)
    for rows, cos in _blocks(W):
        if how.pairs == "all":
            push = -2 * (how.margin - distance(cos, how.distance)).clamp_min(0) * slope(cos, how.distance)
            result[rows] = 2 * push @ W
        else:
            near, other = _nearest(cos, how.k)
            push = (-2 * distance(near, how.distance) * slope(near, how.distance))[:, :, None]
            result[rows] += (push * W[other]).sum(1)
            result.index_add_(0, other.flatten(), (push * W[rows][:, None]).flatten(0, 1))
    return (result - (result * W).sum(1, keepdim=True) * W) * _share(len(W), how)


def spread_out(W: Tensor, how: SpreadOut) -> Tensor:
    r"""$W \leftarrow \mathrm{normalise}(W - \lambda \nabla reg_{sp}(W))$, `steps` times (Algorithm 1, line 10)."""
    W = direction(W)
    if how.weight and len(W) > 1:
        for _ in range(how.steps):
            W = direction(W - how.weight * gradient(W, how))
    return W


def off_diagonal(W: Tensor) -> tuple[float, float]:
    """Mean and largest cosine of two different rows; (0, 0) where there are no two."""
    if len(W) < 2:
        return 0.0, 0.0
    total, largest = 0.0, -1.0
    for _, cos in _blocks(direction(W)):
        largest = max(largest, float(cos.max()))
        total += float(cos.masked_fill(cos.isneginf(), 0).sum(dtype=torch.float64))
    return total / (len(W) * (len(W) - 1)), largest


def collapse_figures(before: Tensor, after: Tensor) -> dict[str, float]:
    """What a round logs of class vectors before and after spread-out: cosines of 1 everywhere are a collapse."""
    figures = {}
    for when, W in (("before", before), ("after", after)):
        mean, largest = off_diagonal(W)
        figures[f"Mean class cosine {when} spread-out"] = mean
        figures[f"Largest class cosine {when} spread-out"] = largest
    return figures


def _blocks(W: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows (B,) and their cosines (B, C) with all; a row's cosine with itself is -inf: no distance is larger."""
    for rows in torch.split(torch.arange(len(W)), BLOCK):
        cos = (W[rows] @ W.t()).clamp_(-1, 1)
        cos[torch.arange(len(rows)), rows] = -torch.inf
        yield rows, cos


def _nearest(cos: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest cosines of each row and whose they are, (B, k) each; all others if there are fewer."""
    found = cos.topk(min(k, cos.shape[1] - 1), dim=1)
    return found.values, found.indices


def _share(classes: int, how: SpreadOut) -> float:
    """What one pair counts: 1, one over the pairs of a class, or one over all pairs."""
    others = classes - 1 if how.pairs == "all" else min(how.k, classes - 1)
    return {"sum": 1.0, "per_class": 1 / max(1, others), "mean": 1 / max(1, classes * others)}[how.reduction]
