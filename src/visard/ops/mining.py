"""Hard negatives: public pictures that look like somebody whom the client knows (Liu et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from visard.errors import VisardError
from visard.heads import direction

ROWS, COLUMNS = 1024, 4096  # of a block of cosines: 16 MB, whatever the number of pictures


def closest(pictures: Tensor, others: Tensor, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    r"""$\max_j \cos(p_i, o_j)$ (n,) for features p (n, E) against o (m, E), by blocks of one matrix product each."""
    if pictures.ndim != 2 or others.ndim != 2 or pictures.shape[1] != others.shape[1]:
        raise VisardError(f"mining: features {tuple(pictures.shape)} against {tuple(others.shape)}")
    found = pictures.new_full((len(pictures),), -torch.inf)
    # transposed once and laid out for the product: a block of columns is then a plain slice
    right = direction(others).t().contiguous()
    block = pictures.new_empty(min(rows, len(pictures)) * min(columns, len(others)))
    for i in range(0, len(pictures), rows):
        left = direction(pictures[i : i + rows])
        best = found[i : i + rows]
        for j in range(0, len(others), columns):
            part = right[:, j : j + columns]
            cosines = torch.mm(left, part, out=block[: len(left) * part.shape[1]].view(len(left), -1))
            torch.maximum(best, cosines.amax(1), out=best)
    return found


def hard_negatives(pictures: Tensor, others: Tensor, threshold: float) -> Tensor:
    r"""Rows of `pictures` with $\max_j \cos(p_i, o_j) > t_{HN}$, in rising order."""
    return torch.nonzero(closest(pictures, others) > threshold).flatten()
