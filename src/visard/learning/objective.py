"""Local training on a weighted sum of losses, over the pictures of several views."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, log_softmax, softplus
from torch.nn.modules.batchnorm import _NormBase

from visard.core import Weights
from visard.core.method import NotNegative, Positive
from visard.data.faces import FaceSet, FaceView
from visard.learning.heads import direction
from visard.learning.train import Training, descend
from visard.learning.weights import load_weights
from visard.numerics import Numerics, moved

Term = Callable[[Tensor, Tensor, Tensor], Tensor]  # (pictures x, features f, labels y) -> a scalar
Terms = dict[str, tuple[float, Term]]  # name -> (weight, term)


@dataclass(frozen=True)
class Pictures:
    """Several views as one list of pictures, those of the first view first."""

    views: Sequence[FaceView]

    def __len__(self) -> int:
        return sum(len(view) for view in self.views)

    @property
    def faces(self) -> FaceSet:
        """The set that all of them are of."""
        return self.views[0].faces

    def batch(self, rows: np.ndarray, mirrored: np.ndarray | None = None) -> np.ndarray:
        """The pictures (len(rows), size, size, 3) uint8 at these places, in this order; see `FaceView.batch`."""
        parts, order, first = [], [], 0
        for view in self.views:
            here = np.flatnonzero((rows >= first) & (rows < first + len(view)))
            if len(here):
                parts.append(view.batch(rows[here] - first, None if mirrored is None else mirrored[here]))
                order.append(here)
            first += len(view)
        return np.concatenate(parts)[np.argsort(np.concatenate(order))]


@dataclass(frozen=True)
class Minimised:
    """The result of `minimise`."""

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
        y = moved(labels[rows])
        found = {name: term(x, features.float(), y) for name, (_, term) in terms.items()}
        return torch.stack([terms[name][0] * value for name, value in found.items()]).sum(), found

    done = descend(model, heads, pictures, training, rng, numerics, objective, lr=lr, frozen_norm=frozen_norm)
    loss = sum(terms[name][0] * value for name, value in done.means.items())
    return Minimised(done.means, loss, done.steps, done.pictures)


def teacher(model: nn.Module, weights: Weights, follow: bool = False) -> Callable[[Tensor], Tensor]:
    """A frozen copy of the network with these weights, in evaluation mode: x -> features, without gradients.

    With `follow` its batch norm sees a batch as that of `model` does: equal weights then have equal features.
    """
    frozen = copy.deepcopy(model).eval()
    load_weights(frozen, weights)
    return _without_gradients(frozen, model if follow else None)


def untrained(model: nn.Module, follow: bool = False) -> Callable[[Tensor], Tensor]:
    """The same with fresh weights, from torch's default generator."""
    fresh = copy.deepcopy(model).eval()
    for module in fresh.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return _without_gradients(fresh, model if follow else None)


def _without_gradients(model: nn.Module, student: nn.Module | None) -> Callable[[Tensor], Tensor]:
    def features(x: Tensor) -> Tensor:
        if student is not None:
            for own, theirs in zip(model.modules(), student.modules(), strict=True):
                if isinstance(own, _NormBase):
                    own.training = theirs.training
        with torch.no_grad(), still_statistics(model):
            found: Tensor = model.forward(x).float()
        return found

    return features


def model_contrastive(f: Tensor, f_glob: Tensor, f_prev: Tensor, tau: float) -> Tensor:
    r"""Mean over the batch of $-\log\frac{e^{c_g/\tau}}{e^{c_g/\tau} + e^{c_p/\tau}}$, $c = \cos(f, \cdot)$.

    Features are (B, E). Written as softplus((c_p - c_g) / tau), which neither overflows nor cancels.
    """
    unit = direction(f)
    c_g, c_p = ((unit * direction(other)).sum(1) for other in (f_glob, f_prev))
    return softplus((c_p - c_g) / tau).mean()


@dataclass(frozen=True)
class ContrastSettings:
    """When and how strongly the term counts."""

    weight: NotNegative = 5.0  # alpha_2; 0 = none
    tau: Positive = 0.5
    first: Literal["skip", "random"] = "skip"  # a client's first round has no f_prev: no term, or an untrained network
    norm: Literal["running", "batch"] = "running"  # of both teachers: batch norm by its records, or as the student's

    def terms(self, model: nn.Module, theta: Weights, previous: Weights | None) -> Terms:
        """Eq. 5 with frozen teachers; nothing where there is nothing to leave behind."""
        if not self.weight or (previous is None and self.first == "skip"):
            return {}
        follow = self.norm == "batch"
        glob = teacher(model, theta, follow)
        prev = untrained(model, follow) if previous is None else teacher(model, previous, follow)
        return {"con": (self.weight, lambda x, f, y: model_contrastive(f, glob(x), prev(x), self.tau))}


def distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r"""$T^2 \, \mathrm{KL}(\mathrm{softmax}(z_t/T) \,\|\, \mathrm{softmax}(z_s/T))$, mean over the batch.

    Logits are (B, K). The factor T^2 keeps the size of the gradient when the temperature changes.
    """
    taught, student_log = log_softmax(teacher / temperature, 1), log_softmax(student / temperature, 1)
    return kl_div(student_log, taught, reduction="batchmean", log_target=True) * temperature**2


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norm uses the statistics of the batch, as in training mode, but does not update its running statistics."""
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def cosine_drift(features: Tensor, reference: Tensor) -> Tensor:
    """Mean over the batch of 1 - cos(features, reference), both (B, E)."""
    return 1 - (direction(features.float()) * direction(reference.float())).sum(dim=1).mean()


class Drift:
    r"""The penalty $C (1 - \cos(f_{global}(x), f_{local}(x)))$ of Gansekoele et al., Eq. 4.

    `model` is copied as it is now and frozen. The copy sees batches as the training network does, batch norm
    included, so that the penalty is 0 at the start of the round and only what changed since then counts.
    """

    def __init__(self, model: nn.Module, C: float) -> None:
        self.C = C
        self.model = copy.deepcopy(model).requires_grad_(False).train()

    def reference(self, x: Tensor) -> Tensor:
        """The features that the round's first model gives (B, E)."""
        with torch.no_grad(), still_statistics(self.model):
            # `forward` itself: a compiled network would be compiled again for its copy
            features: Tensor = self.model.forward(x)
        return features

    def penalty(self, features: Tensor, reference: Tensor) -> Tensor:
        """C times the drift from the reference."""
        return self.C * cosine_drift(features, reference)

    def __call__(self, x: Tensor, features: Tensor) -> Tensor:
        return self.penalty(features, self.reference(x))


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def reverse(x: Tensor, strength: float) -> Tensor:
    """x itself; its gradient comes back times -strength (their Eq. 17-18)."""
    out: Tensor = _Reverse.apply(x, strength)  # type: ignore[no-untyped-call]
    return out


def strength_at(progress: float, gamma: float = 10.0) -> float:
    r"""$\lambda_p = 2 / (1 + e^{-\gamma p}) - 1$: no reversal while the critic knows nothing, full at the end."""
    return 2 / (1 + math.exp(-gamma * progress)) - 1


class Critic(nn.Module):
    """Features (B, embedding) -> (B,): one hidden layer is enough to tell two domains apart."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(embedding, hidden), nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.out(torch.relu(self.hidden(features)))[:, 0]
        return found


def domain_loss(critic: nn.Module, source: Tensor, target: Tensor, strength: float) -> Tensor:
    """Binary cross-entropy of the critic on reversed features, both domains with the same weight."""
    logits = critic(reverse(torch.cat([source, target]), strength))
    labels = torch.cat([torch.zeros(len(source)), torch.ones(len(target))]).to(logits)
    return binary_cross_entropy_with_logits(logits, labels)
