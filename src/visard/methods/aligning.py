r"""Encrypted alignment beside another loss: a source and its targets pull their embeddings together every round.

    lambda    `align.weight`, of MMD in a client's loss          L, n    `align.length`, samples of a batch

Before local training every client looks at fresh batches with the round's common weights, and the packed protocol of
encrypted MMD (Kang et al. 2022) gives it $\nabla_v L_{p3}$ for them; the i-th batch joins the i-th local iteration as
$\lambda (L_{p1} + \langle \nabla_v L_{p3}, v \rangle)$. The source meets the mean over its targets, each target the
source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from visard.core import BoundStep, ClientId, M, Network, R, Replies, Setup, Weights
from visard.core.method import S
from visard.crypto import relay
from visard.crypto.session import Letters
from visard.methods.domains import SOURCE, targets
from visard.methods.encrypted.align_steps import AlignedSteps
from visard.methods.encrypted.messages import Cards, Draw, Look, Post
from visard.methods.encrypted.server import log, posts
from visard.ops.mmd import Polynomial
from visard.ops.noise import check_apart, epsilon
from visard.ops.training import Training


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
        offers = relay.deliver(posts(drawn))
        mail = _all(net, self.answer, {c: Post(plan, offers[c]) for c in clients})
        post = relay.deliver(posts(mail))
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
