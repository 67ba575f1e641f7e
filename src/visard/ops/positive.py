r"""Learning from one's own pictures alone, without negatives (FedFace Eqs. 6 and 7), one client or a cohort at a time.

f   features, used at length 1       w   class vectors of a client's people, length 1       m   margin (cosine)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Weights
from visard.data.augment import augment, to_float
from visard.data.faces import FaceView
from visard.errors import Told, VisardError
from visard.heads import Head, cosine, direction
from visard.numerics import Numerics
from visard.ops.training import Training, batches, freeze_norm


@dataclass(frozen=True)
class OneStep(Training):
    """Training of Algorithm 1: one plain gradient step a round on all pictures of a client (up to `batch_size`)."""

    lr: float = 0.001
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 256
    unit: Literal["epochs", "iterations"] = "iterations"
    schedule: Literal["constant", "cosine"] = "constant"
    clip: float = 0.0

    @property
    def is_one_step(self) -> bool:
        """Whether a round is one step of plain SGD, so that the clients' average is one step on the average loss."""
        return self.unit == "iterations" and self.amount == 1 and not self.clip


def squared_hinge(features: Tensor, w: Tensor, margin: float) -> Tensor:
    r"""$l_{pos} = \max(0, m - w^\top f)^2$ of each picture (Eq. 7); features and w (B, E), both used at length 1."""
    cos = (direction(features) * direction(w)).sum(1)
    return (margin - cos).clamp_min(0) ** 2


class Positive(Head):
    """The class vectors of one client as a head; its loss is the mean of `squared_hinge`, and nothing repels."""

    def __init__(self, w: Tensor, margin: float, trained: bool = True) -> None:
        super().__init__(*w.shape)
        self.margin = margin
        self.weight.data.copy_(w)
        self.weight.requires_grad_(trained)

    def _scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
        return cosine(f, w)

    def loss(self, features: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check(features, labels, mask)
        return squared_hinge(features, self.weight[labels], self.margin).mean()


def variance(features: Tensor) -> float:
    r"""$1 - \lVert \frac1B \sum_j f_j \rVert^2$ of unit features: 0 where all lie in one point, near 1 where spread."""
    mean = direction(features).mean(0)
    return 1 - float(mean @ mean)


def same_weights(thetas: Sequence[Weights]) -> Weights:
    """The network that all clients of a cohort start from; it must be the very same one."""
    first = [*map(id, thetas[0].values())]
    if any([*map(id, theta.values())] != first for theta in thetas):
        raise VisardError("the clients of a cohort start from different networks")
    return thetas[0]


@dataclass(frozen=True)
class Member:
    """A client in a cohort: its pictures, its class vectors (classes, E), its random numbers."""

    view: FaceView
    w: Tensor
    rng: torch.Generator


def one_step_together(
    model: nn.Module,
    members: Sequence[Member],
    margin: float,
    training: Training,
    numerics: Numerics,
    *,
    lr: float,
    frozen_norm: bool,
    trained: bool = True,
) -> tuple[list[Tensor], list[float]]:
    r"""One SGD step of every client in one pass; returns the clients' class vectors and losses.

    From one $\theta$, $\sum_i \frac{n_i}{n}(\theta - \eta\nabla L_i) = \theta - \eta\nabla\sum_i\frac{n_i}{n}L_i$:
    the network steps on the weighted sum and then holds the clients' weighted average. A class vector occurs in
    the loss of its own client alone, so its gradient is $\frac{n_i}{n}\nabla L_i$ and is scaled back. The first step
    of a new optimiser knows no momentum. Exact while pictures do not see each other (no batch statistics) and
    nothing is clipped.
    """
    if not all(len(m.view) for m in members):
        raise Told("has no training pictures")
    pictures, labels, owner, first = [], [], [], 0
    for i, m in enumerate(members):
        rows = next(batches(len(m.view), training, m.rng))
        pictures.append(augment(to_float(m.view.batch(rows), numerics.channels_last), m.rng, training.augment))
        labels.append(torch.from_numpy(m.view.labels[rows]) + first)
        owner.append(torch.full((len(rows),), i))
        first += len(m.w)
    model.train()
    if frozen_norm:
        freeze_norm(model)
    W = torch.cat([m.w for m in members]).requires_grad_(trained)
    of = torch.cat(owner)
    with numerics.autocast():
        features = model(numerics.place(torch.cat(pictures)))
    hinge = squared_hinge(features.float(), W[torch.cat(labels)], margin)
    batch = torch.bincount(of, minlength=len(members))
    L = torch.zeros(len(members)).index_add(0, of, hinge) / batch  # Eq. 2 of each client
    n = torch.tensor([len(m.view) for m in members], dtype=torch.float32)
    share = n / n.sum()
    model.zero_grad(set_to_none=True)
    (share * L).sum().backward()  # type: ignore[no-untyped-call]
    _step([p for p in model.parameters() if p.requires_grad], lr, training.weight_decay)
    if trained:
        assert W.grad is not None
        scale = torch.cat([s.expand(len(m.w)) for s, m in zip(share, members, strict=True)])
        W.grad.div_(scale[:, None])
        _step([W], lr, training.weight_decay)
    return list(torch.split(direction(W.detach()), [len(m.w) for m in members])), L.detach().double().tolist()


@torch.no_grad()
def _step(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> None:
    """Plain SGD in place."""
    for p in parameters:
        if p.grad is not None:
            p.sub_(p.grad.add(p, alpha=weight_decay), alpha=lr)
            p.grad = None
