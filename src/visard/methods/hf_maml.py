r"""HF-MAML: Gansekoele, Hess and Bhulai, Meta-Learning for Federated Face Recognition in Imbalanced Data Regimes, 2024.

Algorithm 1 is federated averaging of w (and, with a global head, of a) in which a client takes the meta steps of
Eqs. 1 to 3 below: along the gradient of the loss *after* one step of adaptation, without ever forming a Hessian.
The embedding regularisation, Eq. 4, is `visard.learning.objective.Drift`.

    p       joint parameters of backbone w and head a      D, D', D''   three different batches
    alpha   step of the adaptation                          g            gradient at the adapted point, on D'
    beta    step of the update                              h            Hessian at p times g, on D''
    delta   half the distance of the two probes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from visard.core import Client, Work
from visard.core.method import AtLeastOne, NotNegative, Positive
from visard.data.augment import Augment
from visard.data.faces import FaceView
from visard.errors import PublicError
from visard.learning.features import input_batch
from visard.learning.heads import Head, HeadSettings
from visard.learning.objective import Drift, still_statistics
from visard.learning.train import Schedule, scheduled
from visard.methods.fedavg import Averaging, Down, Learnt, Task
from visard.numerics import Numerics, moved, on_device

B = TypeVar("B")
# how h is had: by two probes (Eq. 3), by differentiating the gradient, or not at all (first-order MAML)
Order = Literal["hessian-free", "exact", "first"]


@dataclass(frozen=True)
class MetaTraining:
    """How a client trains in one round. The adaptation is plain gradient descent; the update may have momentum."""

    alpha: NotNegative = 0.01  # step of the adaptation, Eq. 2
    beta: Positive = 0.1  # step of the update, Eq. 1
    delta: Positive = 0.1  # half the distance of the probes, Eq. 3; the paper's 0.001 mostly measures kinks of ReLU
    steps: AtLeastOne = 50  # in a round; each takes three batches
    batch_size: AtLeastOne = 64
    order: Order = "hessian-free"
    scale_delta: bool = False  # probe at distance delta, not delta * |g|
    clip: NotNegative = 0.0  # largest norm of g; 0 = no clipping
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the update; the paper's "All" in Table IV has 0.9
    schedule: Schedule = "constant"  # of beta
    augment: Augment = Augment()

    @property
    def curved(self) -> bool:
        """Whether a step has an h, and so a D''."""
        return self.order != "first" and self.alpha > 0

    @property
    def gradients(self) -> int:
        """Gradient evaluations of one step; differentiating a gradient counts as one."""
        return 4 if self.curved else 2

    def beta_at(self, round: int, rounds: int) -> float:
        """beta of a round (from 0)."""
        return scheduled(self.beta, self.schedule, round, rounds)


@dataclass(frozen=True)
class HFMaml(Averaging):
    """The clients train a model that a few batches of a client make its own; the server averages."""

    name = "hf-maml"
    title = "Hessian-free meta-learning: a model that any client makes its own in a few batches"
    paper = "Gansekoele, Hess and Bhulai 2024"

    rounds: AtLeastOne = 30
    head: HeadSettings = HeadSettings("arcface", 8.0, 0.5)
    training: MetaTraining = MetaTraining()

    def rate(self, round: int) -> float:
        return self.training.beta_at(round, self.rounds)

    def work(self, client: Client, msg: Down) -> Work:
        n = len(client.data.train)
        return Work(msg.lr, self.training.steps if n else 0, batch_of(n, self.training.batch_size))

    def learn(self, client: Client, task: Task, msg: Down) -> Learnt:
        done = meta_train(
            task.model, task.head, client.data.train, self.training, client.rng, client.numerics,
            beta=msg.lr, labels=task.labels, mask=task.mask, drift=task.drift,
        )  # fmt: skip
        return Learnt(done.loss, done.gradients, done.samples)


@dataclass(frozen=True)
class MetaTrained:
    """The result of `meta_train`."""

    loss: float  # mean over the steps, on D before the adaptation, without the drift
    gradients: int  # gradient evaluations
    samples: int  # pictures drawn; those of D'' count once although they are used twice


def meta_step(
    p: Sequence[Tensor],
    loss: Callable[[B], Tensor],
    batches: tuple[B, B, B],
    *,
    alpha: float,
    beta: float,
    delta: float,
    order: Order = "hessian-free",
    scale_delta: bool = False,
    clip: float = 0.0,
    momentum: float = 0.0,
    velocity: Sequence[Tensor] = (),
    quietly: Callable[[], AbstractContextManager[None]] = nullcontext,
    scale: float = 1.0,
) -> Tensor:
    r"""One step on the parameters `p` in place; returns the loss on D at the old p.

    $\tilde p = p - \alpha \nabla F(p; D)$, $g = \nabla F(\tilde p; D')$ (Eq. 2),
    $h = [\nabla F(p + \delta g; D'') - \nabla F(p - \delta g; D'')] / 2\delta$ (Eq. 3),
    $p \leftarrow p - \beta (g - \alpha h)$ (Eq. 1). `exact`: $h = \nabla (\nabla F(p; D'')^T g)$ with g held fixed.
    With momentum $\mu$ the step is along $v \leftarrow \mu v + g - \alpha h$, which `velocity` holds.
    h is a derivative at the *old* p and has g inside. `loss` reads p where it is; p is put back from a
    copy between the passes, so no rounding stays behind. All passes but the first run in `quietly()`. Losses are
    multiplied by `scale` before they are differentiated, and gradients divided by it.
    """
    D, D1, D2 = batches
    start = [x.detach().clone() for x in p]

    def gradient(batch: B, twice: bool = False) -> tuple[Tensor, list[Tensor]]:
        value = loss(batch)
        found = list(torch.autograd.grad(value * scale, p, create_graph=twice))
        return value.detach(), found if scale == 1.0 else [g / scale for g in found]

    def move(direction: Sequence[Tensor], by: float) -> None:
        """p = start + by * direction."""
        with torch.no_grad():
            torch._foreach_copy_(list(p), start)
            torch._foreach_add_(list(p), list(direction), alpha=by)

    before, inner = gradient(D)
    move(inner, -alpha)
    with quietly():
        _, g = gradient(D1)
        length = float(torch.nn.utils.get_total_norm(g, foreach=True)) if clip or scale_delta else 0.0
        if clip and length > clip:
            torch._foreach_mul_(g, clip / length)
            length = clip
        if order == "exact" and alpha:
            move(g, 0.0)
            _, slope = gradient(D2, twice=True)
            h = torch.autograd.grad(slope, p, grad_outputs=g, materialize_grads=True)
            torch._foreach_add_(g, list(h), alpha=-alpha)
        elif order == "hessian-free" and alpha:
            d = delta / max(length, 1e-12) if scale_delta else delta
            move(g, d)
            _, above = gradient(D2)
            move(g, -d)
            _, below = gradient(D2)
            torch._foreach_sub_(above, below)
            torch._foreach_add_(g, above, alpha=-alpha / (2 * d))  # g - alpha h
    if momentum:
        torch._foreach_mul_(list(velocity), momentum)
        torch._foreach_add_(list(velocity), g)
        g = list(velocity)
    move(g, -beta)
    return before


@dataclass(frozen=True)
class Batch:
    """Pictures x (B, 3, size, size), labels y (B,), and the features that the drift is measured from."""

    x: Tensor
    y: Tensor
    reference: Tensor | None
    probe: bool = False  # D''


def batch_of(n: int, size: int) -> int:
    """Pictures of each of the three batches of a client with n pictures."""
    return min(size, max(n // 3, min(n, 2)))


def three_batches(n: int, size: int, rng: torch.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of D, D' and D'': drawn without replacement, so that no picture is in two of them.

    A client with fewer than 3 * size pictures takes thirds of them; with fewer than 6 the batches are pairs (for
    batch norm's sake) that may overlap.
    """
    order = torch.randperm(n, generator=rng).numpy()
    size = batch_of(n, size)
    D, D1, D2 = (np.take(order, range(k * size, (k + 1) * size), mode="wrap") for k in range(3))
    return D, D1, D2


def meta_train(
    model: nn.Module,
    head: Head,
    view: FaceView,
    training: MetaTraining,
    rng: torch.Generator,
    numerics: Numerics,
    *,
    beta: float,
    labels: Tensor,
    mask: Tensor | None = None,
    drift: Drift | None = None,
) -> MetaTrained:
    """One round of meta steps on `model` and `head` in place; batch-norm statistics are updated by the pass on D alone.

    `labels` (n,) are rows of the head and `mask` (classes,) says which of them this client has. `drift` is Eq. 4.
    """
    if not len(view):
        raise PublicError("has no training pictures")
    on_device(model).train()
    on_device(head).train()
    mask = None if mask is None else moved(mask)
    parameters = [p for p in (*model.parameters(), *head.parameters()) if p.requires_grad]
    losses: list[Tensor] = []  # of a step's passes, without the drift

    def prepare(rows: np.ndarray, probe: bool = False) -> Batch:
        x = input_batch(view, rows, numerics, rng, training.augment)
        return Batch(x, moved(labels[rows]), None if drift is None else drift.reference(x), probe)

    def loss(batch: Batch) -> Tensor:
        # bfloat16 rounds away the difference of two probes, and `forward`: a compiled network has no second derivative
        with nullcontext() if batch.probe else numerics.autocast():
            features = model.forward(batch.x) if batch.probe and training.order == "exact" else model(batch.x)
        value = head.loss(features.float(), batch.y, mask)
        losses.append(value.detach())
        return value if drift is None or batch.reference is None else value + drift.penalty(features, batch.reference)

    velocity = [torch.zeros_like(p) for p in parameters] if training.momentum else []
    before: list[Tensor] = []  # of each step, read at the end: a device goes on meanwhile
    samples = 0
    for _ in range(training.steps):
        D, D1, D2 = three_batches(len(view), training.batch_size, rng)
        adapt, test = prepare(D), prepare(D1)
        probe = prepare(D2, probe=True) if training.curved else test
        meta_step(
            parameters, loss, (adapt, test, probe), alpha=training.alpha, beta=beta, delta=training.delta,
            order=training.order, scale_delta=training.scale_delta, clip=training.clip,
            momentum=training.momentum, velocity=velocity, quietly=lambda: still_statistics(model),
            scale=numerics.loss_scale,
        )  # fmt: skip
        before.append(losses[0])
        losses.clear()
        samples += (3 if training.curved else 2) * len(D)
    mean = sum(loss.item() for loss in before) / training.steps
    if not math.isfinite(mean):
        raise PublicError(
            f"the loss became {mean} in training: lower method.training.beta, or set method.training.clip"
        )
    return MetaTrained(mean, training.steps * training.gradients, samples)
