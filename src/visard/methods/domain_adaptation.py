"""Domain adaptation between source and target clients: the shared parts, and the classic methods DAN and DANN.

DAN and DANN see the pictures of both domains in one place, which FedFR-DA avoids; a penalty on features aligns them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import torch
from torch import Tensor

from visard.clustering.cluster import METRICS as AGREEMENT
from visard.core import Client, ClientId, Disclosure, Method, Names, Network, Setup, Stage, State, Weights, client_step
from visard.core.method import ALREADY_CENTRAL, AtLeastOne, NotNegative
from visard.data.faces import FaceView
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.features import input_batch
from visard.learning.heads import Head, HeadSettings, direction
from visard.learning.mmd import mmd2, squared_distances
from visard.learning.objective import Critic, domain_loss, strength_at
from visard.learning.train import Training, train
from visard.learning.weights import load_weights, weights_of

SOURCE: ClientId = "source"  # the client with labels; every other client is a target


@dataclass(frozen=True)
class Labelled:
    """A client's report on its pseudo labels."""

    clusters: Annotated[int, Disclosure.count]
    kept: Annotated[int, Disclosure.count]  # pictures with a label
    figures: Annotated[dict[str, float], Disclosure.metric, Names("d", *AGREEMENT)]


def targets(clients: Iterable[ClientId]) -> list[ClientId]:
    """The clients without labels."""
    return [c for c in clients if c != SOURCE]


def check_start(method: str, setup: Setup, pretrain_rounds: int) -> None:
    """Pseudo labels of an untrained network would be noise: there is a file to start from, or a first stage."""
    if not pretrain_rounds and not setup.given:
        raise UsageError(f"{method} starts from a trained network: give model.weights or method.pretrain_rounds")


def losses_of_sides(losses: dict[ClientId, float]) -> dict[str, float]:
    """The mean loss of the source and of the targets, where there are some."""
    sides = {"source": [v for c, v in losses.items() if c == SOURCE], "target": [losses[c] for c in targets(losses)]}
    return {f"loss_{side}": sum(values) / len(values) for side, values in sides.items() if values}


def given_head(how: HeadSettings, setup: Setup) -> Weights:
    """The head of `model.class_vectors`: class vectors (classes, E) and, where heads of that kind have some, biases.

    Empty if no file is given. Zeros instead of biases would be another classifier than the trained one.
    """
    W, b = setup.class_vectors, setup.biases
    if W is None:
        return {}
    if how.biased != (b is not None):
        has, lacks = ("biases", "none") if b is not None else ("no biases", "some")
        raise UsageError(f"model.class_vectors holds {has}, the {how.kind} head has {lacks}")
    return {"weight": W.clone()} | ({} if b is None else {"bias": b.clone()})


def restore_head(how: HeadSettings, classes: int, embedding: int, state: State, start: Weights) -> Head:
    """A head as the state has it, or else with what `start` gives of it, or else fresh."""
    head = how.build(classes, embedding)
    if "head" in state:
        load_weights(head, state["head"])
    elif start:
        if (shape := tuple(start["weight"].shape)) != (classes, embedding):
            raise VisardError(f"class vectors {shape} do not fit {classes} people of {embedding} dimensions")
        load_weights(head, weights_of(head) | start)
    return head


Penalty = Callable[[Tensor, Tensor], Tensor]  # of source and target features (B, E) each


@dataclass(frozen=True)
class Server:
    theta: Weights
    head: Weights  # of the source's identities, where a file gave one


@dataclass(frozen=True)
class Down:
    theta: Weights
    head: Weights
    lr: float
    progress: float  # of the run at the start of the round, 0 to 1
    share: float  # of the run that the round is


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    loss: Annotated[float, Disclosure.metric]
    gap: Annotated[float, Disclosure.metric]  # mean penalty


@dataclass(frozen=True)
class Adapting(Method[Server]):
    """Every batch is half source, half target; the head learns from the source, the penalty sees both."""

    discloses = frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count, Disclosure.metric})
    centralises = frozenset({Disclosure.pictures, Disclosure.labels})

    rounds: AtLeastOne = 20
    training: Training = Training()  # an epoch is one of the source
    head: HeadSettings = HeadSettings("arcface", 30.0, 0.5)
    weight: NotNegative = 1.0  # of the penalty

    @abstractmethod
    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        """The penalty of one round; its parameters belong to the head, so that they are kept and trained with it."""

    def extend(self, head: Head) -> None:
        """Add the parameters of the penalty to a new head; none by default."""

    def centralises_from(self, client: ClientId) -> frozenset[Disclosure]:
        return self.centralises if client == SOURCE else frozenset({Disclosure.pictures})

    def without_labels(self, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        return tuple(targets(clients))

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

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def adapt(self, client: Client, msg: Down) -> Up:
        model, parts = client.network(), client.data.parts
        if SOURCE not in parts or len(parts) < 2:
            raise PublicError("has no source and target pictures: partition.kind = domains is needed")
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
            return input_batch(target, chosen, client.numerics, client.rng, self.training.augment)

        done = train(
            model, head, source, self.training, client.rng, client.numerics,
            lr=msg.lr, penalty=weighted, beside=beside,
        )  # fmt: skip
        client.state["head"] = weights_of(head)
        return Up(weights_of(model), done.loss, float(torch.stack(gaps).mean()))


def _pictures(view: FaceView, rng: torch.Generator) -> Iterator[int]:
    """Rows of a view for ever, in shuffled passes."""
    while True:
        yield from torch.randperm(len(view), generator=rng).tolist()


def _steps(n: int, training: Training) -> int:
    """Batches of a round, give or take a last one of a single picture."""
    return training.amount if training.unit == "iterations" else training.amount * -(-n // training.batch_size)


@dataclass(frozen=True)
class DAN(Adapting):
    """Long et al., Learning Transferable Features with Deep Adaptation Networks, ICML 2015.

    The head learns from the source while MMD with several Gaussian kernels pulls the domains' features together.
    """

    name = "dan"
    title = "domain adaptation by MMD on pooled pictures"
    paper = "Long et al. 2015"
    hostile = ALREADY_CENTRAL

    kernels: AtLeastOne = 5  # Gaussians, each twice as wide (in squared distance) as the one before

    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        def gap(source: Tensor, target: Tensor) -> Tensor:
            x, y = direction(source), direction(target)
            return mmd2(x, y, bandwidths(torch.cat([x, y]), self.kernels))

        return gap


def bandwidths(features: Tensor, kernels: int) -> list[float]:
    r"""$\sigma_k$ with $2\sigma_k^2 = 2^k \bar d$, k centred on 0: around the mean squared distance of the batch."""
    with torch.no_grad():
        n = len(features)
        mean = float(squared_distances(features, features).sum()) / (n * (n - 1))
    middle = kernels // 2
    return [max(mean, 1e-12) ** 0.5 * (2.0 ** (k - middle) / 2) ** 0.5 for k in range(kernels)]


@dataclass(frozen=True)
class DANN(Adapting):
    """Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016.

    A critic learns to tell source from target features, and its gradient is reversed on the way to the backbone.
    """

    name = "dann"
    title = "domain adaptation by an adversarial critic on pooled pictures"
    paper = "Ganin et al. 2016"
    hostile = ALREADY_CENTRAL

    hidden: AtLeastOne = 256  # width of the critic
    gamma: float = 10.0  # how fast the reversal grows to 1

    def extend(self, head: Head) -> None:
        head.add_module("critic", Critic(head.embedding, self.hidden))

    def penalty(self, head: Head, progress: Callable[[], float]) -> Penalty:
        critic = cast(Critic, head.get_submodule("critic"))
        scale = head.embedding**0.5  # unit features have entries of size 1 / sqrt(E), too small for fresh layers

        def gap(source: Tensor, target: Tensor) -> Tensor:
            strength = strength_at(progress(), self.gamma)
            return domain_loss(critic, scale * direction(source), scale * direction(target), strength)

        return gap
