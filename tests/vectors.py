"""Vectors, sensor windows or any float arrays with labels, behind the interface of a view of faces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from visard.errors import VisardError


class Plain:
    """Stands where the face set of a view stands: there is no trunk in front of the network."""

    stored = False

    @staticmethod
    def through(x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, eq=False)
class VectorView:
    """x (n, ...) float32 with labels (n,): class numbers, or numbers to predict."""

    faces: ClassVar = Plain()
    x: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    n_classes: int

    def __post_init__(self) -> None:
        if len(self.x) != len(self.labels):
            raise VisardError(f"{len(self.x)} vectors with {len(self.labels)} labels")
        if not np.isfinite(self.x).all():
            raise VisardError("a vector has values that are not finite")

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The vectors at these rows."""
        return np.take(self.x, np.asarray(rows, np.int64), axis=0)

    def take(self, rows: npt.ArrayLike) -> VectorView:
        """The view of these rows (or where a mask is true)."""
        chosen = np.asarray(rows)
        return VectorView(self.x[chosen], self.labels[chosen], self.n_classes)


@dataclass(frozen=True, eq=False)
class VectorData:
    """One party's vectors; stands where `ClientData` stands."""

    train: VectorView
    val: VectorView
    test: VectorView

    @property
    def n_classes(self) -> int:
        return self.train.n_classes

    @classmethod
    def of(cls, x: npt.ArrayLike, labels: npt.ArrayLike, n_classes: int, test: float, seed: int) -> VectorData:
        """Split at random: a share `test` of the rows for tests (1.0: all of them for both, as for a target whose
        unlabelled data are the ones to predict)."""
        x, y = np.asarray(x, np.float32), np.asarray(labels)
        order = np.random.default_rng(seed).permutation(len(x))
        cut = round(len(x) * (1 - test))
        everything = VectorView(x, y, n_classes)
        none = everything.take(order[:0])
        if test >= 1:
            return cls(everything, none, everything)
        return cls(everything.take(order[:cut]), none, everything.take(order[cut:]))
