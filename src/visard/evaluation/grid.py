"""The comparisons of one evaluation as a grid of tiles, each one float32 matrix product.

Rows are sorted by identity, so genuine pairs lie in few tiles and the rest are impostors throughout.

The score of a pair does not depend on how the grid is cut: every product runs on one thread (parallel work is
over tiles) and has at least `PAD` rows and columns, zero rows filling the edge. So no product falls back to a
matrix-vector kernel or splits its inner sum, the two cases in which sgemm was seen to change the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visard.errors import VisardError
from visard.evaluation.inputs import Bools, Floats, Ints, labels, matrix, unit_rows

PAD = 64
Tile = tuple[int, int]


@dataclass(frozen=True)
class Side:
    """One set of faces: unit rows sorted by identity, zero rows at the end up to a multiple of `PAD`."""

    rows: Tensor  # (N padded, D)
    identity: Ints  # (N,)
    group: Ints | None  # (N,)

    @classmethod
    def build(cls, features: Any, identity: Any, group: Any, what: str) -> Side:
        """Check, sort and normalise; `group` marks pairs that are never compared (same value = excluded)."""
        count = len(matrix(features, f"{what} features"))
        ids = labels(identity, count, f"{what} identity")
        order = np.argsort(ids, kind="stable")
        groups = None if group is None else labels(group, count, f"{what} exclusion groups")[order]
        rows = unit_rows(features, f"{what} features", order, PAD)
        return cls(torch.from_numpy(rows), ids[order], groups)

    def __len__(self) -> int:
        return len(self.identity)

    def first(self, count: int) -> Side:
        """The first `count` rows; rows that fill up to a multiple of `PAD` are here those that follow."""
        group = None if self.group is None else self.group[:count]
        return Side(self.rows[: -(-count // PAD) * PAD], self.identity[:count], group)


@dataclass(frozen=True)
class Grid:
    """All pairs i < j of one set (`within`; `a` may be only its first rows), or all pairs of two sets."""

    a: Side
    b: Side
    within: bool
    tile: int = 1024

    @classmethod
    def build(
        cls,
        features: Any,
        identity: Any,
        against: tuple[Any, Any] | None = None,
        exclude: Any = None,
        tile: int = 1024,
        below: int | None = None,
    ) -> Grid:
        """One set with itself, or with (features, identity) of `against`; `exclude`: groups, or a pair.

        `below`: of the pairs of one set only those with at least one identity smaller than this.
        """
        if tile < PAD or tile % PAD:
            raise VisardError(f"tile: {tile} is not a positive multiple of {PAD}")
        if against is None:
            side = Side.build(features, identity, exclude, "set")
            some = side if below is None else side.first(int(np.searchsorted(side.identity, below)))
            return cls(some, side, True, tile)
        first, second = (None, None) if exclude is None else exclude
        a = Side.build(features, identity, first, "first")
        b = Side.build(against[0], against[1], second, "second")
        if a.rows.shape[1] != b.rows.shape[1]:
            raise VisardError(f"features: {a.rows.shape[1]} dimensions against {b.rows.shape[1]}")
        return cls(a, b, False, tile)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Numbers of genuine and of impostor pairs, from the labels alone."""
        total = len(self.a) * len(self.b)
        if self.within:
            total -= len(self.a) * (len(self.a) + 1) // 2
        genuine = self._equal(self.a.identity, self.b.identity)
        if self.a.group is None or self.b.group is None:
            return genuine, total - genuine
        a, b = self.a.group, self.b.group
        excluded = self._equal(a, b)
        both = self._equal(np.stack([self.a.identity, a], 1), np.stack([self.b.identity, b], 1))
        return genuine - both, total - genuine - (excluded - both)

    def _equal(self, a: Ints, b: Ints) -> int:
        """Number of pairs with equal labels."""
        if self.within:
            return _pairs(b) - _pairs(b[len(a) :])
        _, inverse = np.unique(np.concatenate([a, b]), axis=0, return_inverse=True)
        size = int(inverse.max()) + 1
        of_a, of_b = inverse[: len(a)], inverse[len(a) :]
        return int(np.dot(np.bincount(of_a, minlength=size), np.bincount(of_b, minlength=size)))

    def tiles(self, genuine_only: bool = False) -> list[Tile]:
        """Upper left corners of the tiles; only those that hold genuine pairs if asked."""
        corners = [
            (i, j)
            for i in range(0, len(self.a), self.tile)
            for j in range(i if self.within else 0, len(self.b), self.tile)
        ]
        return [corner for corner in corners if self._mixed(corner)] if genuine_only else corners

    def _mixed(self, corner: Tile) -> bool:
        """Whether the identities of the tile's rows and columns overlap (both are sorted)."""
        a = self.a.identity[corner[0] : corner[0] + self.tile]
        b = self.b.identity[corner[1] : corner[1] + self.tile]
        return bool(a[0] <= b[-1] and b[0] <= a[-1])

    def scores(self, corner: Tile, buffer: Tensor) -> tuple[Tensor, Floats]:
        """All scores of a tile, flat, and the genuine ones among them; `buffer` (tile²,) is scratch."""
        product = self._product(corner, buffer)
        tile = product.numpy()[: len(self.a) - corner[0], : len(self.b) - corner[1]]
        valid = self._valid(corner, *tile.shape)
        if valid is not None:
            flat = torch.from_numpy(tile[valid])
        elif tile.shape == product.shape:
            flat = product.view(-1)
        else:
            flat = torch.from_numpy(tile.ravel())
        return flat, tile[self._same(corner, valid)] if self._mixed(corner) else np.empty(0, np.float32)

    def genuine(self, corner: Tile, buffer: Tensor) -> tuple[Floats, Ints]:
        """The genuine scores of a tile, and the identity of each."""
        tile = self._product(corner, buffer).numpy()[: len(self.a) - corner[0], : len(self.b) - corner[1]]
        same = self._same(corner, self._valid(corner, *tile.shape))
        return tile[same], self.a.identity[corner[0] + np.nonzero(same)[0]]

    def _product(self, corner: Tile, buffer: Tensor) -> Tensor:
        a, b = self.a.rows[corner[0] :][: self.tile], self.b.rows[corner[1] :][: self.tile]
        product = buffer[: len(a) * len(b)].view(len(a), len(b))
        return torch.mm(a, b.T, out=product)

    def _same(self, corner: Tile, valid: Bools | None) -> Bools:
        i, j = corner
        same: Bools = self.a.identity[i : i + self.tile, None] == self.b.identity[None, j : j + self.tile]
        return same if valid is None else same & valid

    def _valid(self, corner: Tile, m: int, n: int) -> Bools | None:
        """Which of a tile's (m, n) pairs count; None = all."""
        i, j = corner
        valid = np.triu(np.ones((m, n), np.bool_), 1) if self.within and i == j else None
        if self.a.group is not None and self.b.group is not None:
            a, b = self.a.group[i : i + m], self.b.group[j : j + n]
            if np.intersect1d(a, b).size:
                other = a[:, None] != b[None, :]
                valid = other if valid is None else valid & other
        return valid

    def sample_impostors(self, count: int, seed: int = 0) -> Floats:
        """Scores of about `count` random impostor pairs, sorted; only to guess where thresholds will lie."""
        rng = np.random.default_rng(seed)
        i, j = rng.integers(len(self.a), size=count), rng.integers(len(self.b), size=count)
        keep = self.a.identity[i] != self.b.identity[j]
        if self.a.group is not None and self.b.group is not None:
            keep &= self.a.group[i] != self.b.group[j]
        i, j = i[keep], j[keep]
        found = np.empty(len(i), np.float32)
        a, b = self.a.rows.numpy(), self.b.rows.numpy()
        for start in range(0, len(i), 32768):
            part = slice(start, start + 32768)
            found[part] = np.einsum("nd,nd->n", a[i[part]], b[j[part]])
        return np.sort(found)


def _pairs(labels: Ints) -> int:
    """Number of pairs with equal labels inside one set."""
    sizes = np.unique(labels, axis=0, return_counts=True)[1]
    return int((sizes * (sizes - 1) // 2).sum())
