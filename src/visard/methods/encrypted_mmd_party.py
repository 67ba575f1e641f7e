"""Encrypted MMD at a party: the settings, and the steps that the server can ask for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from visard.aggregation.rules import weighted_mean
from visard.core import Client, ClientId, Disclosure, Method, Network, Setup, State, Weights, client_step
from visard.core.method import S
from visard.crypto import exchange, session
from visard.crypto.exchange import Plan, Variant
from visard.crypto.packed import block_of
from visard.crypto.paillier import BITS, Costs, check_bits, counted
from visard.crypto.session import Letters, Scheme, SealedMail, Session
from visard.errors import PublicError, UsageError
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare, within
from visard.learning.train import Optimiser, Training
from visard.methods.domain_adaptation import given_head
from visard.methods.mmd_learner import Learner, new_head, quality

# ----------
# A party of encrypted MMD during one step: its networks, its end of the session, and the plan that all agree on.

OPERATIONS = ("encryptions", "decryptions", "multiplications", "refreshes")


@dataclass
class Party:
    """Between steps, its batches, their features and its masks are in the client's state."""

    client: Client
    plan: Plan
    learner: Learner
    session: Session
    weight: float  # lambda

    @property
    def state(self) -> dict[str, Any]:
        return self.client.state

    @property
    def chained(self) -> bool:
        """B: gradients by features under encryption, the rest by back-propagation at home."""
        return self.plan.variant not in ("naive", "compressed")

    @property
    def outputs(self) -> int:
        """Numbers of one batch's encrypted gradient."""
        return self.plan.n * self.plan.length if self.chained else self.learner.size

    def offer(self) -> SealedMail:
        """Draw the next batches and send what the peers need of them."""
        batches = self.learner.draw(self.plan.batches)
        features = self.learner.look(batches, apart=bool(self.plan.noise))
        self.state.update(batches=batches, features=features)
        return exchange.offer(self.session, self.plan, features)

    def answer(self, offers: Mapping[str, bytes]) -> SealedMail:
        """Compute with what the peers sent."""
        features: Tensor = self.state["features"]
        one_question(self.state, self.session, self.plan, features, offers)
        if self.plan.variant == "packed":
            return exchange.answer_packed(self.session, self.plan, features, offers, self._extra(features))
        batches = self.state["batches"]
        by = None if self.chained else lambda i, slopes: self.learner.by_parameters(batches[i], slopes)
        post, self.state["masks"] = exchange.answer_forward(
            self.session, self.plan, features, offers, self._extra(features), by
        )
        return post

    def unveil(self, answers: Mapping[str, bytes]) -> SealedMail:
        """Decrypt the peers' masked gradients for them; keep the loss, if there is one."""
        post, losses = exchange.unveil(self.session, self.plan, answers, self.outputs)
        if losses is not None:
            self.state["losses"] = losses
        return post

    def learn(self, received: Mapping[str, bytes]) -> dict[str, float]:
        """Take the gradients and train on the batches that were offered; mean losses over the batches."""
        plan, features = self.plan, self.state.pop("features")
        if plan.variant == "packed":
            pulls, losses = exchange.take_packed(self.session, plan, features, received)
        else:
            pulls = exchange.take_forward(self.session, plan, received, self.state.pop("masks"), self.outputs)
            pulls = pulls.reshape(features.shape) if self.chained else pulls
            losses = self.state.pop("losses", None)
        sums: dict[str, float] = {}
        decay = self.learner.decay()
        for i, (batch, pull) in enumerate(zip(self.state.pop("batches"), pulls, strict=True)):
            share = plan.share(self.client.id)
            figures = self.learner.step(batch, pull, plan.kernel, share, self.weight)
            if losses is not None:
                mmd = figures["within"] + float(losses[i])  # the target's regulariser is in it
                figures |= {"mmd": mmd, "total": figures["task"] + self.weight * mmd + decay}
            sums = {k: sums.get(k, 0.0) + v / plan.batches for k, v in figures.items()}
        self.learner.save()
        self.session = self.session.next()
        return {k: v for k, v in sums.items() if k != "within"}  # which is the party's own business

    def _extra(self, features: Tensor) -> Tensor:
        """What the target adds to the loss of a batch that a source monitors (Section 4.2.3), in units of lambda."""
        if not self.plan.loss or self.client.id != self.plan.target or not self.weight:
            return torch.zeros(len(features), dtype=torch.float64)
        decay = self.learner.decay() / self.weight
        return torch.stack([within(v, self.plan.kernel) + decay for v in features])


def one_question(
    state: State, session: Session, plan: Plan, features: Tensor, offers: Mapping[str, bytes]
) -> None:  # fmt: skip
    """Refuse a second question in one exchange, unless it is the same: masks cancel in the difference of answers."""
    parts = [plan.name(), features.contiguous().numpy().tobytes(), *(offers[c] for c in sorted(offers))]
    digest = hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).digest()
    exchange, before = state.get("answered", (-1, b""))
    if exchange == session.exchange and before != digest:
        raise PublicError(f"exchange {exchange}: another question was answered before")
    state["answered"] = (session.exchange, digest)


def operations(costs: Costs) -> dict[str, float]:
    """The counters that are the same whatever the machine."""
    return {name: float(getattr(costs, name)) for name in OPERATIONS}


# ----------
# All that travels in encrypted MMD, down to a party and up to the server.


def begun(theta: Weights, head: Weights) -> State:
    """What a party's state begins with; an empty head leaves the party's own."""
    return {"theta": theta} | ({"head": head} if head else {})


@dataclass(frozen=True)
class Begin:
    theta: Weights
    head: Weights  # empty: a new one, or the own
    lr: float


@dataclass(frozen=True)
class Pretrained:
    theta: Annotated[Weights, Disclosure.weights]
    classifier: Annotated[Weights, Disclosure.class_vectors]  # empty where classes are not shared
    loss: Annotated[float, Disclosure.metric]


@dataclass(frozen=True)
class Card:
    hello: Annotated[bytes, Disclosure.public_key]  # public key and a nonce


@dataclass(frozen=True)
class Cards:
    plan: Plan
    hellos: Letters


@dataclass(frozen=True)
class Look:
    plan: Plan


@dataclass(frozen=True)
class Measured:
    kernel: Annotated[Tensor, Disclosure.statistic]  # coefficients, from distances of the party's own features


@dataclass(frozen=True)
class Go:
    plan: Plan
    received: Letters  # sender -> message; empty: nothing to learn from yet
    secrets: Letters  # in the first exchange
    theta: Weights  # of pooled sources; empty: the own
    head: Weights
    lr: float
    more: bool  # whether there is another exchange


@dataclass(frozen=True)
class Moved:
    letters: Annotated[Letters, Disclosure.ciphertext]
    tags: Annotated[Letters, Disclosure.ciphertext]
    weights: Annotated[Weights, Disclosure.weights]  # of pooled sources
    classifier: Annotated[Weights, Disclosure.class_vectors]  # of shared classes
    figures: Annotated[dict[str, float], Disclosure.metric]


@dataclass(frozen=True)
class Post:
    plan: Plan
    received: Letters


@dataclass(frozen=True)
class Mail:
    letters: Annotated[Letters, Disclosure.ciphertext]
    tags: Annotated[Letters, Disclosure.ciphertext]
    figures: Annotated[dict[str, float], Disclosure.metric]


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
    figures: Annotated[dict[str, float], Disclosure.metric]


@dataclass(frozen=True)
class Heads:
    plan: Plan
    heads: list[Weights]  # of the sources
    theta: Weights = field(default_factory=dict)  # the pre-trained extractor, before alignment; empty: the own


@dataclass(frozen=True)
class Predicted:
    figures: Annotated[dict[str, float], Disclosure.metric]


@dataclass(frozen=True)
class EncryptedSteps(Method[S]):
    """What a party does; nothing that it says can be read by the server but weights, kernels and losses."""

    discloses = frozenset(
        {
            Disclosure.weights,
            Disclosure.class_vectors,
            Disclosure.ciphertext,
            Disclosure.public_key,
            Disclosure.statistic,
            Disclosure.metric,
        }
        | {Disclosure.count}
    )

    rounds: int = 10
    exchanges: int = 10  # of batches in a round
    batches: int = 1  # in one exchange: more save time on a slow network, at gradients up to so many steps old
    weight: float = 1.0  # lambda, of MMD
    protocol: Variant = "packed"  # or the paper's: naive, compressed (A), chain_rule (B), both
    scheme: Scheme = "paillier"  # or ckks: faster for long features, more bytes, needs the extra `ckks`
    pooled: bool = False  # all sources are one domain (Eqs. 16, 17) instead of one each (Eqs. 18-20)
    target: ClientId = ""  # the party without labels; "" = the last client
    compare: Compare = Compare()
    training: Training = Training()
    optimiser: Optimiser = "sgd"  # of pre-training and alignment; adam keeps its moments from exchange to exchange
    head: HeadSettings = HeadSettings()
    task: Literal["classify", "regress"] = "classify"
    classes: Literal["own", "shared"] = "own"  # shared: all know the same classes, and the target gets the classifiers
    tested: Literal["test", "all"] = "test"  # all: the target predicts all that it has, as is usual without labels
    pretrain_rounds: int = 5  # of the sources; their extractors are averaged
    monitor: bool = False  # sources learn the loss (Section 4.2.3): one more equation about the target each batch
    sums: bool = True  # answers of several peers are masked, so that their owner can read the sum and no part
    noise: float = 0.0  # multiplier of the Gaussian noise on a party's moments; 0 = none (see the card)
    min_batch: int = 32  # smaller batches are refused: their moments are nearly the features themselves
    key_bits: int = BITS
    insecure_keys: bool = False  # allow short keys, for tests
    keys: str = ""  # folder of key files at each party; "" = a new key in the party's state
    pins: dict[str, str] = field(default_factory=dict)  # party -> fingerprint of its key, which all check

    def __post_init__(self) -> None:
        for name in ("exchanges", "batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"method.{name} = {getattr(self, name)}: must be at least 1")
        if self.rounds + self.pretrain_rounds < 1:
            raise UsageError(f"method.rounds = {self.rounds}: must be at least 1, or only pretrain_rounds")
        if min(self.rounds, self.pretrain_rounds, self.weight) < 0:
            raise UsageError("method.rounds, method.pretrain_rounds and method.weight must not be negative")
        if self.training.batch_size < max(2, self.min_batch):
            raise UsageError(f"method.training.batch_size = {self.training.batch_size}: below min_batch")
        if self.protocol == "packed" and self.compare.degree > 2:
            raise UsageError(f"method.compare.degree = {self.compare.degree}: packed computes degrees 1 and 2")
        if not 0 <= self.noise < math.inf or (self.noise and self.protocol != "packed"):
            raise UsageError(
                f"method.noise = {self.noise}: must be a number, not negative, and needs the packed protocol"
            )
        if self.scheme == "ckks" and self.protocol != "packed":
            raise UsageError(f"method.scheme = ckks: carries the packed protocol, not {self.protocol}")
        if self.noise and self.monitor:
            raise UsageError("method.monitor: a monitored loss is not covered by method.noise")
        if self.monitor and self.pooled:
            raise UsageError("method.monitor: pooled sources have no loss of their own to monitor")
        check_bits(f"method.key_bits = {self.key_bits}", self.key_bits, self.insecure_keys, "method.insecure_keys")

    @client_step
    def fit(self, client: Client, msg: Begin) -> Pretrained:
        """Eq. 1, at a source."""
        client.state.update(begun(msg.theta, msg.head))
        learner = self._learner(client, True, msg.lr)
        loss = learner.fit()
        learner.save()
        client.state.pop("momentum")
        return Pretrained(client.state["theta"], self._shared(client), loss)

    @client_step
    def hello(self, client: Client, msg: Begin) -> Card:
        client.state.update(begun(msg.theta, msg.head))
        card, client.state["keys"] = session.hello(client.id, self.keys, self.key_bits, self.insecure_keys, self._block)
        return Card(card)

    @client_step
    def introduce(self, client: Client, msg: Cards) -> Mail:
        peers = self._agreed(msg.plan, msg.hellos).partners(client.id)
        client.state["roles"] = (*msg.plan.sources, msg.plan.target)
        letters, client.state["keys"] = session.introduce(
            client.id, client.state["keys"], msg.hellos, self.key_bits, peers, self.pins, self._block
        )
        return Mail(letters, {}, {})

    @client_step
    def measure(self, client: Client, msg: Look) -> Measured:
        """The kernel that suits a source's features, once a round."""
        learner = self._learner(client, True, 0.0)
        kernel = self.compare.polynomial(learner.look(learner.draw(4)).flatten(0, 1))
        return Measured(torch.tensor(kernel.c, dtype=torch.float64))

    @client_step
    def advance(self, client: Client, msg: Go) -> Moved:
        """Learn from the answers to the last batches, then offer the next ones."""
        if msg.theta:
            client.state.update(begun(msg.theta, msg.head))
        if msg.secrets:
            end = session.settle(client.id, client.state.pop("keys"), msg.secrets, self.key_bits)
            client.state["session"] = end.to_state()
        party = self._party(client, msg.plan, msg.lr)
        with counted() as costs:
            figures = party.learn(msg.received) if msg.received else {}
            letters, tags = party.offer() if msg.more else ({}, {})
        client.state["session"] = party.session.to_state()
        source = client.id != msg.plan.target
        pooled = client.state["theta"] if self.pooled and source else {}
        return Moved(letters, tags, pooled, self._shared(client) if source else {}, figures | operations(costs))

    @client_step
    def answer(self, client: Client, msg: Post) -> Mail:
        with counted() as costs:
            letters, tags = self._party(client, msg.plan).answer(msg.received)
        return Mail(letters, tags, operations(costs))

    @client_step
    def unveil(self, client: Client, msg: Post) -> Mail:
        """Decrypt peers' masked gradients: not in the packed protocol."""
        with counted() as costs:
            letters, tags = self._party(client, msg.plan).unveil(msg.received)
        return Mail(letters, tags, operations(costs))

    @client_step
    def predict(self, client: Client, msg: Heads) -> Predicted:
        """The target's extractor with the average of the sources' classifiers, on its own test data."""
        if msg.theta:
            client.state["theta"] = msg.theta
        how = self.head if self.task == "classify" else None
        heads = [new_head(how, client.data.n_classes, client.embedding, W) for W in msg.heads]
        return Predicted(quality(client, self._learner(client, False, 0.0).model, heads, self.tested == "all"))

    def _party(self, client: Client, plan: Plan, lr: float = 0.0) -> Party:
        learner = self._learner(client, client.id != plan.target, lr)
        end = Session.from_state(client.state["session"])
        agreed = self._agreed(plan, end.keys)
        if tuple(client.state["roles"]) != (*plan.sources, plan.target):  # a target answers without masks
            raise PublicError("the server's plan gives the parties other roles than before")
        return Party(client, agreed, learner, end, self.weight)

    def _learner(self, client: Client, labelled: bool, lr: float) -> Learner:
        head = self.head if self.task == "classify" else None
        return Learner(client, self.training, self.compare, head, labelled, lr, self.optimiser)

    def _shared(self, client: Client) -> Weights:
        head: Weights = client.state["head"] if self.classes == "shared" else {}
        return head

    @property
    def _block(self) -> int:
        return block_of(self.training.batch_size) if self.scheme == "ckks" else 0

    def _agreed(self, plan: Plan, parties: Iterable[ClientId]) -> Plan:
        """The server's plan, if it is this run's: a party does not compute what its settings do not say."""
        if sorted((*plan.sources, plan.target)) != sorted(parties):  # a smaller sum would tell more of this party
            raise PublicError("the server's plan is not for the parties of this session")
        if self.target not in ("", plan.target):
            raise PublicError(f"the server's plan has another target than {self.target}")
        n = self.training.batch_size
        mine = (self.protocol, self.scheme, n, self.batches, self.key_bits, self.pooled, self.monitor, self.sums)
        said = (plan.variant, plan.scheme, plan.n, plan.batches, plan.bits, plan.pooled, plan.loss, plan.sums)
        if (*said, plan.noise) != (*mine, self.noise):
            raise PublicError("the server's plan differs from this party's settings")
        return plan


# ----------
# Small things the server of encrypted MMD does with replies.


def mean(parts: Iterable[Weights]) -> Weights:
    """The plain mean of weights; of empty ones nothing."""
    return weighted_mean((part, 1) for part in parts)


def head_of(how: HeadSettings, setup: Setup) -> Weights:
    """The common classifier of a file, where one is given; else none yet."""
    head = given_head(how, setup)
    if head and len(head["weight"]) != setup.classes:
        raise UsageError(f"model.class_vectors holds {len(head['weight'])} classes, the data have {setup.classes}")
    return head


def posts(mail: Mapping[ClientId, Mail | Moved | Drawn]) -> dict[ClientId, tuple[Letters, Letters]]:
    """What each party posted: messages and tags."""
    return {c: (m.letters, m.tags) for c, m in mail.items()}


def log(net: Network, replies: Sequence[Mapping[ClientId, Mail | Moved | Drawn]], **more: float) -> None:
    """Over all steps of a round: losses as means over the parties that know them, operations by party and as sums."""
    losses: dict[str, list[float]] = {}
    operations: dict[ClientId, dict[str, float]] = {}
    for party, m in (pair for step in replies for pair in step.items()):
        for name, value in m.figures.items():
            if name in ("task", "mmd", "total"):
                losses.setdefault(name, []).append(value)
            else:
                mine = operations.setdefault(party, {})
                mine[name] = mine.get(name, 0.0) + value
    names = dict.fromkeys(name for mine in operations.values() for name in mine)
    sums = {name: sum(mine.get(name, 0.0) for mine in operations.values()) for name in names}
    net.log(**{name: sum(values) / len(values) for name, values in losses.items()} | sums | more)
    for party, mine in operations.items():
        net.log_client(party, **mine)
