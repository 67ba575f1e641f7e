"""Local training on a weighted sum of losses, over the pictures of several views."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from visard.core import Weights
from visard.data.augment import augment, to_float
from visard.data.faces import FaceView
from visard.errors import VisardError
from visard.numerics import Numerics
from visard.ops.training import Training, batches, freeze_norm, load_weights

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

    The optimiser is new: no momentum comes from an earlier round. A term sees the augmented pictures, their
    features and their labels.
    """
    if not len(pictures):
        raise VisardError("has no training pictures")
    parameters = [p for part in (model, *heads) for p in part.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(
        parameters, lr=lr, momentum=training.momentum, weight_decay=training.weight_decay, foreach=True
    )
    model.train()
    if frozen_norm:
        freeze_norm(model)
    sums, steps, seen = dict.fromkeys(terms, 0.0), 0, 0
    for rows in batches(len(pictures), training, rng):
        x = numerics.place(augment(to_float(pictures.batch(rows), numerics.channels_last), rng, training.augment))
        with numerics.autocast():
            f = model(x)
        f, y = f.float(), labels[rows]
        found = {name: term(x, f, y) for name, (_, term) in terms.items()}
        total = torch.stack([terms[name][0] * value for name, value in found.items()]).sum()
        optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        if training.clip:
            torch.nn.utils.clip_grad_norm_(parameters, training.clip, foreach=True)
        optimiser.step()
        for name, value in found.items():
            sums[name] += float(value.detach()) * len(rows)
        steps, seen = steps + 1, seen + len(rows)
    means = {name: value / seen for name, value in sums.items()}
    loss = sum(terms[name][0] * value for name, value in means.items())
    if not math.isfinite(loss):
        raise VisardError(f"the loss became {loss} in training: lower method.training.lr")
    return Minimised(means, loss, steps, seen)


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
