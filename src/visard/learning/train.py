"""Local training: the optimisers, and the one loop of gradient steps that all methods share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from visard.core import Weights, Work
from visard.core.method import AtLeastOne, NotNegative, Positive
from visard.data.augment import Augment
from visard.data.faces import FaceView
from visard.errors import PublicError
from visard.learning.features import Batches, input_batch
from visard.learning.heads import Head
from visard.numerics import Numerics, moved, on_device


class Sgd:
    """Stochastic gradient descent without the bookkeeping of `torch.optim`, which a small network notices.

        g <- g min(1, c / (|g| + 1e-6))     clipping, |g| over all parameters together
        v <- momentum v + g + decay p       v = g + decay p in the first step
        p <- p - lr v

    Parameters are updated in place; those without a gradient are left alone. The update is one pass over memory, that
    of `torch.optim.SGD(fused=True)`; clipping that of `clip_grad_norm_(foreach=True)`: the same bits, as a test checks.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.factors = [1.0] * len(self.parameters)  # of the learning rate, for each parameter
        self._velocity: dict[int, Tensor] = {}  # by position

    @property
    def param_groups(self) -> list[dict[str, list[Tensor]]]:
        """For `torch.amp.GradScaler`, which looks for parameters here."""
        return [{"params": self.parameters}]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def clip(self, norm: float) -> None:
        """Shorten the gradient to `norm` if it is longer."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
        if length.device.type != "cpu":  # without looking at numbers, which would wait for the device
            torch._foreach_mul_(grads, (norm / (length + 1e-6)).clamp(max=1.0))
            return
        if float(length) < 0.999 * norm:  # most steps: the factor below would be above 1
            return
        factor = norm / (length + 1e-6)
        if not float(factor) >= 1.0:  # a factor of 1 changes nothing, and not a number must pass on
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there, which are gone then: they become the first velocities."""
        groups: dict[
            tuple[bool, float, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor], list[Tensor]]
        ] = {}
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            g, p.grad = _laid_out(p.grad, p), None
            first = i not in self._velocity
            params, grads, velocity = groups.setdefault((first, self.factors[i], p.dtype, p.device), ([], [], []))
            params.append(p)
            grads.append(g)
            if self.momentum:
                self._velocity[i] = g if first else _laid_out(self._velocity[i], p)
                velocity.append(self._velocity[i])
        for (first, factor, *_), (params, grads, velocity) in groups.items():
            torch._fused_sgd_(
                params, grads, velocity, weight_decay=self.weight_decay, momentum=self.momentum, lr=self.lr * factor,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=first,
            )  # fmt: skip


def _laid_out(x: Tensor, p: Tensor) -> Tensor:
    """x in the memory order of p: the fused update walks through memory, not through indices."""
    return x if x.stride() == p.stride() else torch.empty_like(p).copy_(x)


Optimiser = Literal["sgd", "adam"]
B1, B2, EPS = 0.9, 0.999, 1e-8
STEPS = -1  # where the number of steps is kept among the moments


class Adam(Sgd):
    """Adam (Kingma and Ba 2015), with g the gradient plus weight decay times p, as in `torch.optim.Adam`.

        m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
        p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    [m, v] of each parameter are kept by its position, where `Sgd` keeps its velocity.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, lr, 0.0, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients that are there."""
        t = self._velocity.setdefault(STEPS, torch.zeros((), dtype=torch.int64))
        t += 1
        small, large = 1 - B1 ** int(t), 1 - B2 ** int(t)
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            g = p.grad + self.weight_decay * p if self.weight_decay else p.grad
            m, v = self._velocity.setdefault(i, torch.zeros(2, *p.shape, dtype=p.dtype, device=p.device))
            m.lerp_(g, 1 - B1)
            v.mul_(B2).addcmul_(g, g, value=1 - B2)
            p.addcdiv_(m, (v / large).sqrt_().add_(EPS), value=-self.lr * self.factors[i] / small)


def new_optimiser(
    kind: Optimiser, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
) -> Sgd:
    """The optimiser of that name; Adam has no use for `momentum`."""
    return Adam(parameters, lr, weight_decay) if kind == "adam" else Sgd(parameters, lr, momentum, weight_decay)


Schedule = Literal["constant", "cosine"]  # of a learning rate over the rounds of a stage


def scheduled(lr: float, schedule: Schedule, round: int, rounds: int) -> float:
    """The learning rate of a round (from 0); `cosine` falls from lr to lr / 100."""
    if schedule == "constant" or rounds <= 1:
        return lr
    return lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * round / rounds)))


@dataclass(frozen=True)
class Training:
    """How a client trains in one round. The optimiser is new every round: no momentum crosses rounds."""

    lr: Positive = 0.1
    momentum: NotNegative = 0.9  # of sgd
    weight_decay: NotNegative = 5e-4
    batch_size: AtLeastOne = 64
    unit: Literal["epochs", "iterations"] = "epochs"
    amount: AtLeastOne = 1  # epochs or iterations in a round
    partial: bool = True  # False: a last batch of a pass that is not full is left out, unless it is the only one
    schedule: Schedule = "cosine"
    clip: NotNegative = 5.0  # largest norm of a gradient; 0 = no clipping
    augment: Augment = Augment()
    optimiser: Optimiser = "sgd"  # adam suits networks whose layers differ in scale, as where batch norm was folded

    def lr_at(self, round: int, rounds: int) -> float:
        """The learning rate of a round (from 0)."""
        return scheduled(self.lr, self.schedule, round, rounds)

    def work(self, lr: float, n: int) -> Work:
        """The training of a client with n pictures in a round with this learning rate."""
        whole, rest = divmod(n, self.batch_size)
        least = min(n, self.batch_size, 2 if self.partial else self.batch_size)
        steps = self.amount * (whole + (rest >= least > 0)) if self.unit == "epochs" else self.amount
        return Work(lr, steps if n else 0, min(n, self.batch_size))


@dataclass(frozen=True)
class Trained:
    """The result of `train`."""

    loss: float  # mean over the pictures seen, without penalty
    steps: int
    pictures: int


def batches(n: int, training: Training, rng: torch.Generator) -> Iterator[np.ndarray]:
    """Rows of the batches of one round: shuffled passes, cut after `amount` epochs or iterations.

    A last batch of one picture is dropped unless it is the only one: batch norm has no variance there. Of two
    or three it has a poor one, which `partial` = False keeps out.
    """
    done = 0
    least = 2 if training.partial else training.batch_size
    passes = range(training.amount) if training.unit == "epochs" else itertools.count()
    for _ in passes:
        order = torch.randperm(n, generator=rng).numpy()
        for start in range(0, n, training.batch_size):
            rows = order[start : start + training.batch_size]
            if len(rows) < min(n, training.batch_size, least):
                continue
            yield rows
            done += 1
            if training.unit == "iterations" and done == training.amount:
                return


def train(
    model: nn.Module,
    head: Head,
    view: FaceView,
    training: Training,
    rng: torch.Generator,
    numerics: Numerics,
    *,
    lr: float | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    anchor: Weights | None = None,
    mu: float = 0.0,
    frozen_norm: bool = False,
    penalty: Callable[[Tensor, Tensor], Tensor] | None = None,
    beside: Callable[[int], Tensor] | None = None,
    correct: Callable[[dict[str, Tensor]], None] | None = None,
    frozen: Collection[nn.Module] = (),
    head_rate: float = 1.0,
) -> Trained:
    r"""SGD on `model` and `head` in place.

    `labels` (n,) replaces the view's own, for example by rows of a global head, and `mask` (classes,) says which
    classes are present. With `mu` > 0 the gradient gets FedProx's $\mu(\theta - \theta_r)$ with $\theta_r$ = `anchor`.
    `frozen_norm`: batch norm uses its running statistics and leaves them alone (its scale and shift still train).
    `penalty` of the pictures as they went in and of their features is added to the loss. `beside` gives as many
    pictures without labels, which go through the network behind those of a batch: only the penalty sees them.
    `correct` may change the gradients of the network, by name and in place, before they are clipped and a step is
    taken. `frozen` says which of network and head stay as they are. The head learns at `head_rate` times `lr`.
    """
    labels = torch.from_numpy(view.labels) if labels is None else labels
    mask = None if mask is None else moved(mask)
    on_device(model)
    held = anchor if anchor and mu else {}  # of batch norm that stays at the client there is nothing to hold on to
    anchored = [(p, moved(held[name])) for name, p in model.named_parameters() if name in held and p.requires_grad]

    @torch.no_grad()
    def corrected() -> None:
        for p, start in anchored:
            if p.grad is not None:
                p.grad.add_(p - start, alpha=mu)
        if correct is not None:
            correct({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def objective(x: Tensor, features: Tensor, rows: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        y = moved(labels.index_select(0, torch.from_numpy(rows)))
        loss = head.loss(features[: len(rows)].float(), y, mask)
        return loss if penalty is None else loss + penalty(x, features), {"loss": loss}

    done = descend(
        model, [head], view, training, rng, numerics, objective, lr=training.lr if lr is None else lr,
        frozen_norm=frozen_norm, beside=beside, corrected=corrected, frozen=frozen, heads_rate=head_rate,
    )  # fmt: skip
    return Trained(done.means["loss"], done.steps, done.pictures)


@dataclass(frozen=True)
class Descent:
    """The result of `descend`."""

    means: dict[str, float]  # of the metrics of the objective, over the pictures seen
    steps: int
    pictures: int


def descend(
    model: nn.Module,
    heads: Sequence[nn.Module],
    pictures: Batches,
    training: Training,
    rng: torch.Generator,
    numerics: Numerics,
    objective: Callable[[Tensor, Tensor, np.ndarray], tuple[Tensor, dict[str, Tensor]]],
    *,
    lr: float,
    frozen_norm: bool = False,
    beside: Callable[[int], Tensor] | None = None,
    corrected: Callable[[], None] | None = None,
    frozen: Collection[nn.Module] = (),
    heads_rate: float = 1.0,
) -> Descent:
    """SGD on `model` and `heads` in place: the one loop of gradient steps.

    `objective` of the augmented pictures, their features and their rows gives what is minimised, and metrics to report
    the means of. `beside` gives pictures that go through the network behind those of a batch, and `corrected` changes
    gradients before they are clipped. The optimiser is new: no momentum comes from an earlier call. What is `frozen`
    of model and heads stays as it is, in evaluation mode. Heads learn at `heads_rate` times `lr`.
    """
    if not len(pictures):
        raise PublicError("has no training pictures")
    for part in (model, *heads):
        on_device(part).train(part not in frozen)
    if frozen_norm:
        freeze_norm(model)
    seen: dict[str, list[tuple[Tensor, int]]] = {}  # read at the end, so that a device need not wait
    steps = count = 0
    scaler = numerics.scaler()
    with _without_gradients(frozen):
        parameters = [p for part in (model, *heads) for p in part.parameters() if p.requires_grad]
        optimiser = new_optimiser(training.optimiser, parameters, lr, training.momentum, training.weight_decay)
        if heads_rate != 1:
            own = {id(p) for head in heads for p in head.parameters()}
            optimiser.factors = [heads_rate if id(p) in own else 1.0 for p in parameters]
        for rows in batches(len(pictures), training, rng):
            x = input_batch(pictures, rows, numerics, rng, training.augment)
            x = x if beside is None else torch.cat([x, beside(len(x))])
            with numerics.autocast():
                features = model(x := numerics.place(x))
            minimised, metrics = objective(x, features, rows)
            optimiser.zero_grad()
            scaler.scale(minimised).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimiser)  # type: ignore[arg-type]
            if corrected is not None:
                corrected()
            if training.clip:
                optimiser.clip(training.clip)
            scaler.step(optimiser)  # type: ignore[arg-type]
            scaler.update()
            for name, value in metrics.items():
                seen.setdefault(name, []).append((value.detach(), len(rows)))
            steps, count = steps + 1, count + len(rows)
    means = {name: sum(value.item() * n for value, n in values) / count for name, values in seen.items()}
    if wrong := [name for name, mean in means.items() if not math.isfinite(mean)]:
        raise PublicError(f"the {wrong[0]} became {means[wrong[0]]} in training: lower method.training.lr")
    return Descent(means, steps, count)


@contextmanager
def _without_gradients(parts: Collection[nn.Module]) -> Iterator[None]:
    held = [p for part in parts for p in part.parameters() if p.requires_grad]
    for p in held:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in held:
            p.requires_grad_(True)


def freeze_norm(model: nn.Module) -> None:
    """Put the batch-norm layers of a network in training into evaluation mode."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def keep_statistics(network: nn.Module) -> None:
    """Make batch norm of this network and its copies use its running statistics for good (`model.frozen_norm`).

    `train()` no longer has an effect on it, so methods need not know. Its scale and shift still train.
    """
    for module in network.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            kind: Any = type(module)
            module.__class__ = _still(kind)
            module.eval()


@cache
def _still(kind: type[Any]) -> type[Any]:
    """The kind of layer, always in evaluation mode."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        return nn.Module.train(self, False)

    return type(kind.__name__, (kind,), {"train": train, "__module__": kind.__module__})
