"""A party of encrypted MMD during one step: its networks, its end of the session, and the plan that all agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visard.core import Client, State
from visard.crypto import exchange
from visard.crypto.costs import Costs
from visard.crypto.exchange import Plan
from visard.crypto.session import Mail, Session
from visard.errors import Told
from visard.ops.alignment import Learner
from visard.ops.mmd import within

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

    def offer(self) -> Mail:
        """Draw the next batches and send what the peers need of them."""
        batches = self.learner.draw(self.plan.batches)
        features = self.learner.look(batches, apart=bool(self.plan.noise))
        self.state.update(batches=batches, features=features)
        return exchange.offer(self.session, self.plan, features)

    def answer(self, offers: Mapping[str, bytes]) -> Mail:
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

    def unveil(self, answers: Mapping[str, bytes]) -> Mail:
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
        raise Told(f"exchange {exchange}: another question was answered before")
    state["answered"] = (session.exchange, digest)


def operations(costs: Costs) -> dict[str, float]:
    """The counters that are the same whatever the machine."""
    return {name: float(getattr(costs, name)) for name in OPERATIONS}
