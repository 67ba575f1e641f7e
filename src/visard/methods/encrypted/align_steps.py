"""Encrypted alignment at a client: the steps that a method with `methods/aligning.py` adds to its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visard.core import Client, Leaves, Method, Weights, client_step
from visard.core.method import S
from visard.crypto import exchange, session
from visard.crypto.costs import counted
from visard.crypto.exchange import Plan
from visard.crypto.session import Session
from visard.errors import Told
from visard.methods.domains import SOURCE
from visard.methods.encrypted.align_settings import Align
from visard.methods.encrypted.messages import Card, Cards, Draw, Drawn, Look, Mail, Post
from visard.methods.encrypted.party import one_question, operations
from visard.ops.alignment import Learner
from visard.ops.mmd import within
from visard.ops.training import Training

Penalty = Callable[[Tensor, Tensor], Tensor]  # of the pictures and embeddings of a local iteration
SEALED = frozenset({Leaves.ciphertext, Leaves.public_key, Leaves.statistic})  # what alignment adds to what leaves


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
            raise Told(f"exchange {msg.exchange} is over: this client is at {met.exchange}")
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
