r"""Encrypted alignment beside another loss: a source and its targets pull their embeddings together every round.

    lambda    `align.weight`, of MMD in a client's loss          L, n    `align.length`, samples of a batch

Before local training every client looks at fresh batches with the round's common weights, and the packed protocol of
encrypted MMD (Kang et al. 2022) gives it $\nabla_v L_{p3}$ for them; the i-th batch joins the i-th local iteration as
$\lambda (L_{p1} + \langle \nabla_v L_{p3}, v \rangle)$. The source meets the mean over its targets, each target the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from visard.core import Client, ClientId, Disclosure, Method, Names, Network, Setup, Weights, client_step, nothing
from visard.core.method import AtLeastOne, NotNegative, Number, S
from visard.crypto.exchange import Plan
from visard.crypto.moments import check_apart, epsilon
from visard.crypto.paillier import OPERATIONS, counted
from visard.crypto.session import Letters
from visard.errors import PublicError, UsageError
from visard.learning.mmd import Compare, Polynomial, within
from visard.learning.train import Training
from visard.methods.domain_adaptation import SOURCE, targets
from visard.methods.encrypted_mmd import Card, Mail, Relayed, ask_all, log, meet, relayed
from visard.methods.encrypted_mmd_party import Encryption, Learner, Party
from visard.numerics import moved

Penalty = Callable[[Tensor, Tensor], Tensor]  # of the pictures and embeddings of a local iteration


@dataclass(frozen=True)
class Align(Encryption):
    """How embeddings of a source and its targets are pulled together; off unless `weight` is positive."""

    weight: NotNegative = 0.0  # lambda of MMD in every client's loss
    length: Number = 16  # L: of a fixed random projection in which embeddings are compared; 0 = as they are
    batch_size: int = 64  # n
    batches: AtLeastOne = 1  # of a round: each joins one local iteration, from the first on; others go unused

    def __post_init__(self) -> None:
        self.check_encryption("method.align", self.batch_size)

    @property
    def compare(self) -> Compare:
        """Where and with which kernel embeddings are compared."""
        return Compare(project=self.length)

    def plan(self, embedding: int, targets: Sequence[ClientId]) -> Plan:
        """What all clients agree on, except the kernel. The source has the role of the one target of encrypted MMD."""
        return Plan(
            "packed", Polynomial((1.0, -1.0, 1.0)), self.compare.length(embedding), self.batch_size, self.batches,
            self.key_bits, tuple(targets), SOURCE, noise=self.noise, scheme=self.scheme,
        )  # fmt: skip

    def check_plan(self, plan: Plan, embedding: int) -> None:
        """Refuse another plan than this run's: a client computes only what its settings say."""
        mine = self.plan(embedding, plan.sources)
        twice = len({*plan.sources, SOURCE}) <= len(plan.sources)  # a client would mask an answer for itself
        if not self.weight or plan != mine.with_kernel(plan.kernel) or plan.kernel.degree != 2 or twice:
            raise PublicError("the server's plan of alignment differs from this client's settings")


@dataclass(frozen=True)
class Draw:
    plan: Plan
    theta: Weights  # of all clients in this round
    secrets: Letters  # in the first exchange
    exchange: int


@dataclass(frozen=True)
class Drawn:
    letters: Annotated[Letters, Disclosure.ciphertext]
    tags: Annotated[Letters, Disclosure.ciphertext]
    kernel: Annotated[Tensor | None, Disclosure.statistic]  # the source's: coefficients, from its own distances
    figures: Annotated[dict[str, float], Disclosure.metric, Names(*OPERATIONS)]


@dataclass(frozen=True)
class Met:
    """What the server keeps of the clients' introduction."""

    embedding: int = 0
    hellos: Letters = field(default_factory=dict)  # public keys and nonces
    secrets: dict[ClientId, Letters] = field(default_factory=dict)  # sealed; delivered with the next exchange
    exchanges: int = 0


@dataclass(frozen=True)
class Aligning(Method[S]):
    """For methods whose clients, one of them the source, start a round from common weights."""

    align: Align = Align()
    training: Training = Training()  # local: alignment changes pictures at random as it does

    def packages(self) -> dict[str, str]:
        return self.align.packages() if self.align.weight else {}

    def before(self, setup: Setup, training: Training) -> Met:
        """The server's initial state; one clear line if alignment does not fit the other settings."""
        how = self.align
        if how.weight and how.length > setup.embedding:
            raise UsageError(f"method.align.length = {how.length}: embeddings have {setup.embedding} dimensions")
        if how.weight and training.unit == "iterations" and training.amount < how.batches:
            raise UsageError(f"method.align.batches = {how.batches}: a round has {training.amount} iterations")
        if how.weight and how.noise:
            check_apart(setup.new_weights())
        return Met(setup.embedding)

    def exchanged(
        self, met: Met, net: Network, theta: Weights, chosen: Sequence[ClientId]
    ) -> tuple[Met, dict[ClientId, Relayed]]:
        """One exchange of the source with the chosen targets: the input of each for its local training."""
        if not self.align.weight:
            return met, {}
        if not met.hellos:
            everyone = self.align.plan(met.embedding, targets(net.clients))
            begin = dict.fromkeys(net.clients, Relayed(everyone))
            hellos, secrets = meet(net, self.hello, self.introduce, begin, everyone)
            met = replace(met, hellos=hellos, secrets=secrets)
        plan, clients = self.align.plan(met.embedding, chosen), (SOURCE, *chosen)
        drawn = ask_all(net, self.offer, {c: Draw(plan, theta, met.secrets.get(c, {}), met.exchanges) for c in clients})
        kernel = drawn[SOURCE].kernel
        plan = plan.with_kernel(Polynomial(tuple(kernel.tolist()) if kernel is not None else ()))
        mail = ask_all(net, self.answer, relayed(plan, drawn))
        secrets = {c: letters for c, letters in met.secrets.items() if c not in clients}
        log(net, [drawn, mail], **{"epsilon_of_a_batch": epsilon(plan.noise)} if plan.noise else {})
        return replace(met, secrets=secrets, exchanges=met.exchanges + 1), relayed(plan, mail)

    @client_step(trains=nothing)
    def hello(self, client: Client, msg: Relayed) -> Card:
        self.align.check_plan(msg.plan, client.embedding)
        client.state["align"] = {}
        return Card(self.align.say_hello(client.id, client.state["align"], self.align.batch_size))

    @client_step(trains=nothing)
    def introduce(self, client: Client, msg: Relayed) -> Mail:
        self.align.check_plan(msg.plan, client.embedding)
        return Mail(self.align.send_secrets(client.id, client.state["align"], msg.plan, msg.received), {}, {})

    @client_step(trains=nothing)
    def offer(self, client: Client, msg: Draw) -> Drawn:
        """Embed the next batches with the common weights and send what the peers need."""
        party = self._party(client, msg.plan, msg.secrets)
        if msg.exchange < party.session.exchange:
            raise PublicError(f"exchange {msg.exchange} is over: this client is at {party.session.exchange}")
        party.session = replace(party.session, exchange=msg.exchange)
        with counted() as counts:
            letters, tags = party.offer(self._learner(client, msg.theta))
        kernel = None
        if client.id == SOURCE:
            seen = client.state["align"]["features"].flatten(0, 1)
            kernel = torch.tensor(self.align.compare.polynomial(seen).c, dtype=torch.float64)
        return Drawn(letters, tags, kernel, counts)

    @client_step(trains=nothing)
    def answer(self, client: Client, msg: Relayed) -> Mail:
        with counted() as counts:
            letters, tags = self._party(client, msg.plan).answer(msg.received)
        return Mail(letters, tags, counts)

    def pull(self, client: Client, theta: Weights, answers: Relayed) -> Penalty:
        """The penalty of this round's local training, from the peers' answers."""
        plan, learner = answers.plan, self._learner(client, theta)
        taken, _ = self._party(client, plan).take(answers.received)
        left = iter(taken)

        def penalty(_: Tensor, embeddings: Tensor) -> Tensor:
            batch, slope = next(left, (None, None))
            if batch is None or slope is None:
                return embeddings.new_zeros(())
            v = self.align.compare.inside(learner.forward(batch)).double()
            total: Tensor = plan.share(client.id) * within(v, plan.kernel) + (slope * v).sum()
            return moved(self.align.weight * total)

        return penalty

    def _party(self, client: Client, plan: Plan, secrets: Mapping[str, bytes] = {}) -> Party:
        self.align.check_plan(plan, client.embedding)
        kept = client.state["align"]
        return Party(kept, plan, self.align.open_session(client.id, kept, secrets))

    def _learner(self, client: Client, theta: Weights) -> Learner:
        """Draws and looks at batches of all pictures, labelled or not; with the client's network at these weights."""
        how = replace(self.training, batch_size=self.align.batch_size)
        return Learner(replace(client, state={"theta": theta}), how, self.align.compare, None, False, 0.0)
