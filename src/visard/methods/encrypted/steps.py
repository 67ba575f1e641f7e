"""Encrypted MMD at a party: the settings, and the steps that the server can ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from visard.core import Client, ClientId, Leaves, Method, Weights, client_step
from visard.core.method import S
from visard.crypto import session
from visard.crypto.costs import counted
from visard.crypto.exchange import Plan, Variant
from visard.crypto.packed_ckks import block_of
from visard.crypto.paillier import BITS, check_bits
from visard.crypto.session import Scheme, Session
from visard.errors import Told, UsageError
from visard.methods.encrypted.messages import (
    Begin,
    Card,
    Cards,
    Go,
    Heads,
    Look,
    Mail,
    Measured,
    Moved,
    Post,
    Predicted,
    Pretrained,
    begun,
)
from visard.methods.encrypted.party import Party, operations
from visard.ops.adam import Optimiser
from visard.ops.alignment import Learner
from visard.ops.compare import Compare
from visard.ops.predictor import new_head, quality
from visard.ops.training import HeadSettings, Training


@dataclass(frozen=True)
class EncryptedSteps(Method[S]):
    """What a party does; nothing that it says can be read by the server but weights, kernels and losses."""

    leaves = frozenset(
        {Leaves.weights, Leaves.class_vectors, Leaves.ciphertext, Leaves.public_key, Leaves.statistic, Leaves.metric}
        | {Leaves.count}
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
        check_bits("method.key_bits", self.key_bits, self.insecure_keys)

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
            raise Told("the server's plan gives the parties other roles than before")
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
            raise Told("the server's plan is not for the parties of this session")
        if self.target not in ("", plan.target):
            raise Told(f"the server's plan has another target than {self.target}")
        n = self.training.batch_size
        mine = (self.protocol, self.scheme, n, self.batches, self.key_bits, self.pooled, self.monitor, self.sums)
        said = (plan.variant, plan.scheme, plan.n, plan.batches, plan.bits, plan.pooled, plan.loss, plan.sums)
        if (*said, plan.noise) != (*mine, self.noise):
            raise Told("the server's plan differs from this party's settings")
        return plan
