r"""Encrypted alignment beside another loss: a source and its targets pull their embeddings together every round.

    lambda    `align.weight`, of MMD in a client's loss          L, n    `align.length`, samples of a batch

Before local training every client looks at fresh batches with the round's common weights, and the packed protocol of
encrypted MMD (Kang et al. 2022) gives it $\nabla_v L_{p3}$ for them; the i-th batch joins the i-th local iteration as
$\lambda (L_{p1} + \langle \nabla_v L_{p3}, v \rangle)$. The source meets the mean over its targets, each target the
source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from visard.core import (
    BoundStep,
    Client,
    ClientId,
    Disclosure,
    M,
    Method,
    Network,
    R,
    Replies,
    Setup,
    Weights,
    client_step,
)
from visard.core.method import S
from visard.crypto import exchange, session
from visard.crypto.exchange import Plan
from visard.crypto.moments import check_apart, epsilon
from visard.crypto.packed import block_of
from visard.crypto.paillier import BITS, check_bits, counted
from visard.crypto.session import Letters, Scheme, Session
from visard.errors import PublicError, UsageError
from visard.learning.mmd import Compare, Polynomial, within
from visard.learning.train import Training
from visard.methods.domain_adaptation import SOURCE, targets
from visard.methods.encrypted_mmd_party import (
    Card,
    Cards,
    Draw,
    Drawn,
    Look,
    Mail,
    Post,
    log,
    one_question,
    operations,
    posts,
)
from visard.methods.mmd_learner import Learner

# ----------
# Settings of encrypted alignment beside another loss (`methods/aligning.py`).


@dataclass(frozen=True)
class Align:
    """How embeddings of a source and its targets are pulled together; off unless `weight` is positive."""

    weight: float = 0.0  # lambda of MMD in every client's loss
    length: int = 16  # L: of a fixed random projection in which embeddings are compared; 0 = as they are
    batch_size: int = 64  # n
    batches: int = 1  # of a round: each joins one local iteration, from the first on; more than there are go unused
    noise: float = 0.0  # multiplier of the Gaussian noise on a client's moments
    min_batch: int = 32  # smaller batches are refused
    scheme: Scheme = "paillier"  # or ckks
    key_bits: int = BITS
    insecure_keys: bool = False  # allow short keys, for tests
    keys: str = ""  # folder of key files at each client; "" = a new key in the client's state
    pins: dict[str, str] = field(default_factory=dict)  # client -> fingerprint of its key, which all check

    def __post_init__(self) -> None:
        if self.weight < 0 or self.length < 0 or not 0 <= self.noise < math.inf or self.batches < 1:
            raise UsageError("method.align: weight, length and noise must not be negative, batches at least 1")
        if self.batch_size < max(2, self.min_batch):
            raise UsageError(f"method.align.batch_size = {self.batch_size}: below min_batch")
        check_bits(
            f"method.align.key_bits = {self.key_bits}", self.key_bits, self.insecure_keys, "method.align.insecure_keys"
        )

    @property
    def compare(self) -> Compare:
        """Where and with which kernel embeddings are compared."""
        return Compare(project=self.length)

    @property
    def block(self) -> int:
        """Slots of a column under CKKS; 0 under Paillier."""
        return block_of(self.batch_size) if self.scheme == "ckks" else 0

    def check(self, training: Training, embedding: int) -> None:
        """One clear line where this does not go with the rest of the settings."""
        if self.length > embedding:
            raise UsageError(f"method.align.length = {self.length}: embeddings have {embedding} dimensions")
        if training.unit == "iterations" and training.amount < self.batches:
            raise UsageError(f"method.align.batches = {self.batches}: a round has {training.amount} iterations")

    def plan(self, embedding: int, source: ClientId, targets: Sequence[ClientId]) -> Plan:
        """What all clients agree on, but for the kernel. The source stands where encrypted MMD has its one target."""
        return Plan(
            "packed", Polynomial((1.0, -1.0, 1.0)), self.compare.length(embedding), self.batch_size, self.batches,
            self.key_bits, tuple(targets), source, noise=self.noise, scheme=self.scheme,
        )  # fmt: skip

    def agreed(self, plan: Plan, embedding: int, source: ClientId) -> Plan:
        """The server's plan, if it is this run's: a client does not compute what its settings do not say."""
        mine = self.plan(embedding, source, plan.sources)
        twice = len({*plan.sources, source}) <= len(plan.sources)  # somebody masks an answer for itself
        if not self.weight or plan != mine.with_kernel(plan.kernel) or plan.kernel.degree != 2 or twice:
            raise PublicError("the server's plan of alignment differs from this client's settings")
        return plan


# ----------
# Encrypted alignment at a client: the steps that a method with `methods/aligning.py` adds to its own.

Penalty = Callable[[Tensor, Tensor], Tensor]  # of the pictures and embeddings of a local iteration
SEALED = frozenset(
    {Disclosure.ciphertext, Disclosure.public_key, Disclosure.statistic}
)  # what alignment adds to what leaves


@dataclass(frozen=True)
class AlignedSteps(Method[S]):
    """What a client does; the server hands on what it cannot read."""

    align: Align = Align()
    training: Training = Training()  # local: alignment changes pictures at random as it does

    @client_step
    def hello(self, client: Client, msg: Look) -> Card:
        self._agreed(client, msg.plan)
        how = self.align
        card, keys = session.hello(client.id, how.keys, how.key_bits, how.insecure_keys, how.block)
        client.state["align"] = {"keys": keys}
        return Card(card)

    @client_step
    def introduce(self, client: Client, msg: Cards) -> Mail:
        peers, kept, how = self._agreed(client, msg.plan).partners(client.id), client.state["align"], self.align
        letters, kept["keys"] = session.introduce(
            client.id, kept["keys"], msg.hellos, how.key_bits, peers, how.pins, how.block
        )
        return Mail(letters, {}, {})

    @client_step
    def offer(self, client: Client, msg: Draw) -> Drawn:
        """Look at the next batches with the common weights and send what the peers need of them."""
        plan, kept = self._agreed(client, msg.plan), client.state["align"]
        if msg.secrets:
            met = session.settle(client.id, kept.pop("keys"), msg.secrets, self.align.key_bits)
        else:
            met = Session.from_state(kept["session"])
        if msg.exchange < met.exchange:
            raise PublicError(f"exchange {msg.exchange} is over: this client is at {met.exchange}")
        learner = self._learner(client, msg.theta)
        kept["batches"] = learner.draw(plan.batches)
        kept["features"] = features = learner.look(kept["batches"], apart=bool(plan.noise))
        met = replace(met, exchange=msg.exchange)
        with counted() as costs:
            letters, tags = exchange.offer(met, plan, features)
        kept["session"] = met.to_state()
        kernel = self.align.compare.polynomial(features.flatten(0, 1)).c if client.id == SOURCE else None
        coefficients = torch.tensor(kernel, dtype=torch.float64) if kernel else None
        return Drawn(letters, tags, coefficients, operations(costs))

    @client_step
    def answer(self, client: Client, msg: Post) -> Mail:
        plan, kept = self._agreed(client, msg.plan), client.state["align"]
        met, none = Session.from_state(kept["session"]), torch.zeros(plan.batches, dtype=torch.float64)
        one_question(kept, met, plan, kept["features"], msg.received)
        with counted() as costs:
            letters, tags = exchange.answer_packed(met, plan, kept["features"], msg.received, none)
        return Mail(letters, tags, operations(costs))

    def pull(self, client: Client, theta: Weights, received: Post) -> Penalty:
        """The penalty of this round's local training, from what the peers answered."""
        plan, kept, learner = self._agreed(client, received.plan), client.state["align"], self._learner(client, theta)
        met, features = Session.from_state(kept["session"]), kept.pop("features")
        pulls, _ = exchange.take_packed(met, plan, features, received.received)
        kept["session"] = met.next().to_state()
        left = iter(list(zip(kept.pop("batches"), pulls, strict=True)))

        def penalty(_: Tensor, embeddings: Tensor) -> Tensor:
            batch, slope = next(left, (None, None))
            if batch is None or slope is None:
                return embeddings.new_zeros(())
            v = self.align.compare.inside(learner.forward(batch)).double()
            total: Tensor = plan.share(client.id) * within(v, plan.kernel) + (slope * v).sum()
            return self.align.weight * total

        return penalty

    def _learner(self, client: Client, theta: Weights) -> Learner:
        """Draws and looks at batches of all pictures, labelled or not; with the client's network at these weights."""
        how = replace(self.training, batch_size=self.align.batch_size)
        return Learner(replace(client, state={"theta": theta}), how, self.align.compare, None, False, 0.0)

    def _agreed(self, client: Client, plan: Plan) -> Plan:
        return self.align.agreed(plan, client.embedding, SOURCE)


@dataclass(frozen=True)
class Met:
    """What the server keeps of the clients' acquaintance."""

    embedding: int = 0
    hellos: Letters = field(default_factory=dict)  # public keys and nonces
    secrets: dict[ClientId, Letters] = field(default_factory=dict)  # sealed; delivered with the next exchange
    exchanges: int = 0


@dataclass(frozen=True)
class Aligning(AlignedSteps[S]):
    """For methods whose clients, one of them the source, start a round from common weights."""

    def before(self, setup: Setup, training: Training) -> Met:
        """What the server starts with."""
        if self.align.weight:
            self.align.check(training, setup.embedding)
            if self.align.noise:
                check_apart(setup.new_weights())
        return Met(setup.embedding)

    def exchanged(
        self, met: Met, net: Network, theta: Weights, chosen: Sequence[ClientId]
    ) -> tuple[Met, dict[ClientId, Post]]:
        """One exchange of the source with the chosen targets: what each gets for its local training."""
        if not self.align.weight:
            return met, {}
        met = met if met.hellos else self._meet(met, net)
        plan, clients = self.align.plan(met.embedding, SOURCE, chosen), (SOURCE, *chosen)
        drawn = _all(net, self.offer, {c: Draw(plan, theta, met.secrets.get(c, {}), met.exchanges) for c in clients})
        kernel = drawn[SOURCE].kernel
        plan = plan.with_kernel(Polynomial(tuple(kernel.tolist()) if kernel is not None else ()))
        offers = session.deliver(posts(drawn))
        mail = _all(net, self.answer, {c: Post(plan, offers[c]) for c in clients})
        post = session.deliver(posts(mail))
        secrets = {c: letters for c, letters in met.secrets.items() if c not in clients}
        met = replace(met, secrets=secrets, exchanges=met.exchanges + 1)
        noise = {"epsilon_of_a_batch": epsilon(plan.noise)} if plan.noise else {}
        log(net, [drawn, mail], **noise)
        return met, {c: Post(plan, post[c]) for c in clients}

    def _meet(self, met: Met, net: Network) -> Met:
        """Keys, and a secret between any two clients."""
        plan = self.align.plan(met.embedding, SOURCE, targets(net.clients))
        cards = _all(net, self.hello, dict.fromkeys(net.clients, Look(plan)))
        hellos = {c: card.hello for c, card in cards.items()}
        mail = _all(net, self.introduce, dict.fromkeys(net.clients, Cards(plan, hellos)))
        secrets = {c: {other: m.letters[c] for other, m in mail.items() if c in m.letters} for c in net.clients}
        return replace(met, hellos=hellos, secrets=secrets)


def _all(net: Network, step: BoundStep[M, R], messages: Mapping[ClientId, M]) -> Replies[R]:
    """Ask; the protocol needs every answer."""
    return net.ask(step, messages, min_replies=len(messages))
