"""Learning from one's own pictures alone, without negatives (FedFace Eqs. 6 and 7), one client or a cohort at a time.

f   features, used at length 1       w   class vectors of a client's identities, length 1       m   margin (cosine)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Weights
from visard.core.method import AtLeastOne, NotNegative, Positive
from visard.data.faces import FaceView
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.features import input_batch
from visard.learning.heads import Head, cosine, direction
from visard.learning.train import Training, batches, freeze_norm
from visard.learning.weights import kept_local
from visard.numerics import Numerics, moved


@dataclass(frozen=True)
class OneStep(Training):
    """Training of Algorithm 1: one plain gradient step a round on all pictures of a client (up to `batch_size`)."""

    lr: Positive = 0.001
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    batch_size: AtLeastOne = 256
    unit: Literal["epochs", "iterations"] = "iterations"
    schedule: Literal["constant", "cosine"] = "constant"
    clip: NotNegative = 0.0

    @property
    def is_one_step(self) -> bool:
        """Whether a round is one step of plain SGD, so that the clients' average is one step on the average loss."""
        plain = self.optimiser == "sgd" and not self.clip
        return plain and self.unit == "iterations" and self.amount == 1


def squared_hinge(features: Tensor, w: Tensor, margin: float) -> Tensor:
    r"""$l_{pos} = \max(0, m - w^\top f)^2$ of each picture (Eq. 7); features and w (B, E), both used at length 1."""
    cos = (direction(features) * direction(w)).sum(1)
    return (margin - cos).clamp_min(0) ** 2


class PositiveHead(Head):
    """The class vectors of one client as a head; its loss is the mean of `squared_hinge`, and nothing repels."""

    def __init__(self, w: Tensor, margin: float, trained: bool = True) -> None:
        super().__init__(*w.shape)
        self.margin = margin
        self.weight.data.copy_(w)
        self.weight.requires_grad_(trained)

    def scores(self, f: Tensor, w: Tensor, labels: Tensor | None) -> Tensor:
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
    trained: bool = True,
    vectors_rate: float = 1.0,
) -> tuple[list[Tensor], list[float]]:
    r"""One SGD step of every client in one pass; returns the clients' class vectors and losses.

    Class vectors learn at `vectors_rate` times `lr`.

    From one $\theta$, $\sum_i \frac{n_i}{n}(\theta - \eta\nabla L_i) = \theta - \eta\nabla\sum_i\frac{n_i}{n}L_i$:
    the network steps on the weighted sum and then holds the clients' weighted average. A class vector occurs in
    the loss of its own client alone, so its gradient is $\frac{n_i}{n}\nabla L_i$ and is scaled back. The first step
    of a new optimiser knows no momentum. Pictures do not see each other, because batch norm is frozen, and nothing
    is clipped: so it is exact.
    """
    if not all(len(m.view) for m in members):
        raise PublicError("has no training pictures")
    pictures, labels, owner, first = [], [], [], 0
    for i, m in enumerate(members):
        rows = next(batches(len(m.view), training, m.rng))
        pictures.append(input_batch(m.view, rows, numerics, m.rng, training.augment))
        labels.append(torch.from_numpy(m.view.labels[rows]) + first)
        owner.append(torch.full((len(rows),), i))
        first += len(m.w)
    model.train()
    freeze_norm(model)
    W = moved(torch.cat([m.w for m in members])).requires_grad_(trained)
    of = moved(torch.cat(owner))
    with numerics.autocast():
        features = model(numerics.place(torch.cat(pictures)))
    hinge = squared_hinge(features.float(), W[moved(torch.cat(labels))], margin)
    batch = torch.bincount(of, minlength=len(members))
    L = hinge.new_zeros(len(members)).index_add(0, of, hinge) / batch  # Eq. 2 of each client
    n = moved(torch.tensor([len(m.view) for m in members], dtype=torch.float32))
    share = n / n.sum()
    model.zero_grad(set_to_none=True)
    ((share * L).sum() * numerics.loss_scale).backward()  # type: ignore[no-untyped-call]
    _step([p for p in model.parameters() if p.requires_grad], lr, training.weight_decay, numerics.loss_scale)
    if trained:
        assert W.grad is not None
        scale = torch.cat([s.expand(len(m.w)) for s, m in zip(share, members, strict=True)])
        W.grad.div_(scale[:, None])
        _step([W], lr * vectors_rate, training.weight_decay, numerics.loss_scale)
    return list(torch.split(direction(W.detach()), [len(m.w) for m in members])), L.detach().tolist()


@torch.no_grad()
def _step(parameters: Sequence[Tensor], lr: float, weight_decay: float, scale: float = 1.0) -> None:
    """Plain SGD in place, with gradients of a loss that was scaled."""
    for p in parameters:
        if p.grad is not None:
            grad = p.grad if scale == 1.0 else p.grad / scale
            p.sub_(grad.add(p, alpha=weight_decay), alpha=lr)
            p.grad = None


INSTEAD = "take a backbone without batch norm (model.name = tiny_nobn, spherenet20 or spherenet64)"


def has_statistics(theta: Weights) -> bool:
    """Whether a network keeps statistics of its batches."""
    return bool(kept_local(theta, "parameters"))


def check_frozen(theta: Weights, trained: bool) -> None:
    """Frozen statistics must have been learnt: those of a new network fit no picture."""
    if has_statistics(theta) and not trained:
        raise UsageError(
            "the backbone has batch norm, whose statistics stay as they are, and it is untrained: "
            f"give model.weights or method.pretrain_rounds, or {INSTEAD}"
        )


def check_not_alone(theta: Weights, identities: int) -> None:
    """Statistics of one identity normalise away what tells it from others."""
    if has_statistics(theta) and identities < 2:
        raise PublicError(
            f"one identity alone spoils batch norm's statistics: set method.batch_norm = frozen, or {INSTEAD}"
        )


Distance = Literal["cosine", "half", "euclidean", "squared"]
Reduction = Literal["mean", "sum", "per_class"]
BLOCK = 512  # rows of the cosine matrix at a time: memory is BLOCK x C, not C x C
NEAR = 1e-6  # below this Euclidean distance its slope is cut, which would be infinite


@dataclass(frozen=True)
class SpreadOut:
    """`[method.spread]`: how the server separates class vectors."""

    weight: NotNegative = 1.0  # lambda; 0 = no spread-out
    pairs: Literal["all", "nearest"] = "all"  # all within the margin (Eq. 9), or the k nearest of each (FedAwS)
    margin: NotNegative = 1.0  # v, in units of `distance`
    k: AtLeastOne = 10  # of `nearest`
    distance: Distance = "cosine"  # 1 - cos; half: (1 - cos) / 2; euclidean; squared: 2 - 2 cos
    reduction: Reduction = "per_class"  # mean over a class's pairs, summed over classes; or mean or sum over all pairs
    steps: AtLeastOne = 1  # gradient steps a round, each followed by re-normalisation


def distance(cos: Tensor, kind: Distance) -> Tensor:
    """d of two unit vectors with this cosine."""
    gap = (1 - cos).clamp_min(0)
    return {"cosine": gap, "half": gap / 2, "squared": 2 * gap, "euclidean": (2 * gap).sqrt()}[kind]


def slope(cos: Tensor, kind: Distance) -> Tensor:
    """d' = dd / dcos."""
    if kind == "euclidean":
        return -1 / distance(cos, kind).clamp_min(NEAR)
    return torch.full_like(cos, {"cosine": -1.0, "half": -0.5, "squared": -2.0}[kind])


def gradient(W: Tensor, how: SpreadOut) -> Tensor:
    r"""$\nabla_W \sum_c \sum_{\hat c \ne c} \max(0, v - d)^2$ (Eq. 9), or with $-d^2$ over the k nearest of each.

    Computed block by block without autograd; rows of W have length 1.

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


def collapse_metrics(before: Tensor, after: Tensor) -> dict[str, float]:
    """Metrics of class vectors before and after spread-out: cosines of 1 everywhere mean a collapse."""
    metrics = {}
    for when, W in (("before", before), ("after", after)):
        mean, largest = off_diagonal(W)
        metrics[f"Mean class cosine {when} spread-out"] = mean
        metrics[f"Largest class cosine {when} spread-out"] = largest
    return metrics


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
    """The weight of one pair: 1, one over the pairs of a class, or one over all pairs."""
    others = classes - 1 if how.pairs == "all" else min(how.k, classes - 1)
    return {"sum": 1.0, "per_class": 1 / max(1, others), "mean": 1 / max(1, classes * others)}[how.reduction]
