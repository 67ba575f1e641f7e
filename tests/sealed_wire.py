"""Parties of encrypted MMD in one process, with everything that crosses between them written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.vectors import VectorData
from visard.aggregation.reduction import Reduction
from visard.aggregation.rules import Mean
from visard.core import BoundStep, Client, Replies, Setup
from visard.data.augment import Augment
from visard.engines.codec import decode, encode
from visard.engines.reply_checks import refusal
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare
from visard.learning.train import Training
from visard.methods.encrypted_mmd import EncryptedMMD, Server
from visard.numerics import Numerics

BITS = 512


def network(inputs: int, length: int, hidden: int = 0) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        layers = [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, length)] if hidden else []
        return nn.Sequential(*layers) if hidden else nn.Linear(inputs, length)

    return build


def party_data(seed: int, n: int = 24, inputs: int = 6, classes: int = 3, regress: bool = False) -> VectorData:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    x = rng.normal(size=(n, inputs)) + np.eye(classes, inputs)[labels] * 2 + 0.5 * seed
    y = (labels + 0.25).astype(np.float32) if regress else labels
    return VectorData.of(x, y, classes, 0.25, seed)


@dataclass
class Wire:
    """Enough of a network to run rounds; every message goes through the codec and is kept."""

    parties: dict[str, Client]
    round: int = 0
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    transcript: list[tuple[str, str, bytes]] = field(default_factory=list)  # step, client, reply
    before: Callable[[str, str, Any], Any] | None = None  # may look at a message, or change it
    figures: dict[str, float] = field(default_factory=dict)
    by_party: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.parties)

    def ask(self, step: BoundStep[Any, Any], messages: Mapping[str, Any], **how: Any) -> Replies[Any]:
        replies = {}
        for c, message in messages.items():
            message = decode(encode(message), step.types[0])
            message = self.before(step.name, c, message) if self.before else message
            reply = step(self.parties[c], message)
            assert (wrong := refusal(step, message, reply, 1, 0)) is None, wrong
            data = encode(reply)
            self.transcript.append((step.name, c, data))
            replies[c] = decode(data, step.types[1])
            self.parties[c].state = decode(encode(self.parties[c].state), dict)
        return Replies(replies)

    def reduce(
        self, step: BoundStep[Any, Any], messages: Mapping[str, Any], *, mean: tuple[str, ...], by: Any, **how: Any
    ) -> tuple[dict[str, Any], Replies[Any]]:
        reduction = Reduction(Mean(), mean, by, None)
        rest = {c: reduction.take(c, messages[c], reply) for c, reply in self.ask(step, messages, **how).items()}
        return reduction.result(), Replies(rest)

    def log(self, **figures: float) -> None:
        self.figures.update(figures)

    def log_client(self, client: str, **figures: float) -> None:
        self.by_party[client] = figures


def wire(sources: int, length: int, hidden: int = 0, inputs: int = 6, n: int = 24, regress: bool = False) -> Wire:
    """Sources s0, s1, ... and the target t."""
    build = network(inputs, length, hidden)
    names = [*(f"s{i}" for i in range(sources)), "t"]
    parties = {}
    for i, name in enumerate(names):
        data: Any = party_data(i, n, inputs, regress=regress)
        parties[name] = Client(name, data, {}, torch.Generator().manual_seed(i), build, length, plain_numerics())
    return Wire(parties)


def plain_numerics() -> Numerics:
    return Numerics(channels_last=False)


def method(**changes: Any) -> EncryptedMMD:
    """Small insecure keys, plain SGD."""
    training = Training(lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=8, clip=0.0, augment=Augment(flip=False))
    settings: dict[str, Any] = {
        "rounds": 1, "exchanges": 1, "training": training, "head": HeadSettings("softmax"), "pretrain_rounds": 1,
        "compare": Compare(unit=False, radius=8.0), "classes": "shared", "min_batch": 2, "key_bits": BITS,
        "insecure_keys": True,
    }  # fmt: skip
    return EncryptedMMD(**settings | changes)


def start(how: EncryptedMMD, net: Wire) -> Server:
    client = next(iter(net.parties.values()))
    build = client.network
    setup = Setup(net.clients, 3, client.embedding, lambda: dict(build().state_dict()))
    return how.pretrain(how.start(setup), net)
