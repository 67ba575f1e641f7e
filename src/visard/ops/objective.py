"""Local training on a weighted sum of losses, over the pictures of several views."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from visard.core import Weights
from visard.data.faces import FaceView
from visard.numerics import Numerics
from visard.ops.training import Training, descend, load_weights

Term = Callable[[Tensor, Tensor, Tensor], Tensor]  # (pictures x, features f, labels y) -> a scalar
Terms = dict[str, tuple[float, Term]]  # name -> (weight, term)


@dataclass(frozen=True)
class Pictures:
    """Several views as one list of pictures, those of the first view first."""

    views: Sequence[FaceView]

    def __len__(self) -> int:
        return sum(len(view) for view in self.views)

    def batch(self, rows: np.ndarray) -> np.ndarray:
        """The pictures (len(rows), size, size, 3) uint8 at these places, in this order."""
        parts, order, first = [], [], 0
        for view in self.views:
            here = np.flatnonzero((rows >= first) & (rows < first + len(view)))
            if len(here):
                parts.append(view.batch(rows[here] - first))
                order.append(here)
            first += len(view)
        return np.concatenate(parts)[np.argsort(np.concatenate(order))]


@dataclass(frozen=True)
class Minimised:
    """What one call of `minimise` did."""

    terms: dict[str, float]  # mean of each term over the pictures, without its weight
    loss: float  # of the weighted sum
    steps: int
    pictures: int


def minimise(
    model: nn.Module,
    heads: Sequence[nn.Module],
    terms: Terms,
    pictures: Pictures,
    labels: Tensor,
    training: Training,
    rng: torch.Generator,
    numerics: Numerics,
    *,
    lr: float,
    frozen_norm: bool = False,
) -> Minimised:
    r"""SGD on `model` and `heads` in place, on $\sum_k \alpha_k L_k$ with `terms` = name -> ($\alpha_k$, $L_k$).

    A term sees the augmented pictures, their features and their labels.
    """

    def objective(x: Tensor, features: Tensor, rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        found = {name: term(x, features.float(), labels[rows]) for name, (_, term) in terms.items()}
        return torch.stack([terms[name][0] * value for name, value in found.items()]).sum(), found

    done = descend(model, heads, pictures, training, rng, numerics, objective, lr=lr, frozen_norm=frozen_norm)
    loss = sum(terms[name][0] * value for name, value in done.means.items())
    return Minimised(done.means, loss, done.steps, done.pictures)


def teacher(model: nn.Module, weights: Weights) -> Callable[[Tensor], Tensor]:
    """A frozen copy of the network with these weights, in evaluation mode: x -> features, without gradients."""
    frozen = copy.deepcopy(model).eval()
    load_weights(frozen, weights)
    return _without_gradients(frozen)


def untrained(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same with fresh weights, from torch's default generator."""
    fresh = copy.deepcopy(model).eval()
    for module in fresh.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return _without_gradients(fresh)


def _without_gradients(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def features(x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.forward(x).float()
        return found

    return features
