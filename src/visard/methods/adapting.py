"""Classic domain adaptation in one place: source with labels and target without, aligned by a penalty on features.

It moves the pictures of both domains together, which is what FedFR-DA avoids; DAN and DANN say which penalty.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from visard.core import Client, ClientId, Leaves, Method, Network, Setup, Stage, Weights, client_step
from visard.data.augment import augment, to_float
from visard.data.faces import FaceView
from visard.errors import Told, UsageError
from visard.heads import Head
from visard.methods.domains import SOURCE, given_head, restore_head, targets
from visard.methods.fitting import check_rounds
from visard.ops.training import HeadSettings, Training, load_weights, train, weights_of

Penalty = Callable[[Tensor, Tensor], Tensor]  # of source and target features (B, E) each


@dataclass(frozen=True)
class Server:
    theta: Weights
    head: Weights  # of the source's people, where a file gave one


@dataclass(frozen=True)
class Down:
    theta: Weights
    head: Weights
    lr: float
    progress: float  # of the run at the start of the round, 0 to 1
    share: float  # of the run that the round is


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Leaves.weights]
    loss: Annotated[float, Leaves.metric]
    gap: Annotated[float, Leaves.metric]  # mean penalty


@dataclass(frozen=True)
class Adapting(Method[Server]):
    """Every batch is half source, half target; the head learns from the source, the penalty sees both."""

    leaves = frozenset({Leaves.weights, Leaves.count, Leaves.metric})
    pools = frozenset({Leaves.pictures, Leaves.labels})

    rounds: int = 20
    training: Training = Training()  # an epoch is one of the source
    head: HeadSettings = HeadSettings("arcface", 30.0, 0.5)
    weight: float = 1.0  # of the penalty

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        if self.weight < 0:
            raise UsageError(f"method.weight = {self.weight}: must not be negative")

    @abstractmethod
    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        """The penalty of one round; what it learns belongs to the head, so that it is kept and trained with it."""

    def extend(self, head: Head) -> None:
        """Add to a new head what the penalty learns; default nothing."""

    def pools_of(self, client: ClientId) -> frozenset[Leaves]:
        return self.pools if client == SOURCE else frozenset({Leaves.pictures})

    def start(self, setup: Setup) -> Server:
        return Server(setup.new_weights(), given_head(self.head, setup))

    def stages(self) -> list[Stage[Server]]:
        return [Stage("adapt", self.rounds, self.round)]

    def round(self, s: Server, net: Network) -> Server:
        lr = self.training.lr_at(net.round, self.rounds)
        (pool,) = net.clients
        message = Down(s.theta, s.head, lr, net.round / self.rounds, 1 / self.rounds)
        up = net.ask(self.adapt, {pool: message})[pool]
        net.log(loss=up.loss, gap=up.gap, lr=lr)
        return Server(up.theta, s.head)

    @client_step
    def adapt(self, client: Client, msg: Down) -> Up:
        model, parts = client.network(), client.data.parts
        if SOURCE not in parts or len(parts) < 2:
            raise Told("has no source and target pictures: partition.kind = domains is needed")
        load_weights(model, msg.theta)
        source, rows = parts[SOURCE], [parts[c].index for c in targets(parts)]
        target = FaceView.of(source.faces, np.concatenate(rows))
        head = restore_head(self.head, source.n_classes, client.embedding, {}, msg.head)
        self.extend(head)
        if "head" in client.state:
            load_weights(head, client.state["head"])
        gaps: list[Tensor] = []
        steps = _steps(len(source), self.training)
        penalty = self.penalty(head, lambda: msg.progress + msg.share * min(1.0, len(gaps) / steps))

        def weighted(_: Tensor, features: Tensor) -> Tensor:
            half = len(features) // 2
            gap = penalty(features[:half].float(), features[half:].float())
            gaps.append(gap.detach())
            return self.weight * gap

        stream = _pictures(target, client.rng)

        def beside(count: int) -> Tensor:
            chosen = [next(stream) for _ in range(count)]
            x = to_float(target.batch(chosen), client.numerics.channels_last)
            return augment(x, client.rng, self.training.augment)

        done = train(
            model, head, source, self.training, client.rng, client.numerics,
            lr=msg.lr, penalty=weighted, beside=beside,
        )  # fmt: skip
        client.state["head"] = weights_of(head)
        return Up(weights_of(model), done.loss, float(torch.stack(gaps).mean()))

    def backbone(self, s: Server) -> Weights | None:
        return s.theta


def _pictures(view: FaceView, rng: torch.Generator) -> Iterator[int]:
    """Rows of a view for ever, in shuffled passes."""
    while True:
        yield from torch.randperm(len(view), generator=rng).tolist()


def _steps(n: int, training: Training) -> int:
    """Batches of a round, give or take a last one of a single picture."""
    return training.amount if training.unit == "iterations" else training.amount * -(-n // training.batch_size)
