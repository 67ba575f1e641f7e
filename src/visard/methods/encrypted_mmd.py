r"""Encrypted MMD: Kang, Li, Zhang, Communicational and Computational Efficient Federated Domain Adaptation, TPDS 2022.

    theta      extractor: the sources pre-train one (Eq. 1), then every party has its own weights
    lambda     `weight`, of MMD in the loss (Eq. 2)           S    number of sources (Eqs. 18-20)

The parties talk through sealed messages under Paillier keys; the server hands them on and can read none of them.
What a party does, and the settings, are in `encrypted/steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from visard.core import BoundStep, ClientId, M, Network, R, Replies, Setup, Stage, State, Weights
from visard.crypto import session
from visard.crypto.exchange import Plan
from visard.crypto.moments import check_apart, epsilon
from visard.crypto.session import Letters
from visard.errors import UsageError
from visard.learning.mmd import Polynomial
from visard.methods.encrypted_mmd_party import (
    Begin,
    Cards,
    EncryptedSteps,
    Go,
    Heads,
    Look,
    Mail,
    Moved,
    Post,
    head_of,
    log,
    mean,
    posts,
)


@dataclass(frozen=True)
class Server:
    theta: Weights  # the pre-trained extractor; of pooled sources their common one
    head: Weights  # the sources' common classifier, where classes are shared
    length: int  # L, of what is compared
    hellos: Letters = field(default_factory=dict)  # public keys and nonces
    exchange: int = 0  # how many there have been


@dataclass(frozen=True)
class EncryptedMMD(EncryptedSteps[Server]):
    """Sources with labels and a target without align their features without showing them."""

    name = "encrypted-mmd"
    title = "domain adaptation by MMD under homomorphic encryption: features stay at home"
    paper = "Kang, Li, Zhang 2022"

    def start(self, setup: Setup) -> Server:
        if len(setup.clients) < 2:
            raise UsageError("encrypted-mmd needs a source and a target: two clients or more")
        if self.target and self.target not in setup.clients:
            raise UsageError(f"method.target = {self.target}: no such client; there are {', '.join(setup.clients)}")
        if not self.pretrain_rounds and not setup.given:
            raise UsageError("encrypted-mmd starts from a trained network: give model.weights or pretrain_rounds")
        head = head_of(self.head, setup) if self.task == "classify" and self.classes == "shared" else {}
        theta = setup.new_weights()
        if self.noise:
            check_apart(theta)
        return Server(theta, head, self.compare.length(setup.embedding))

    def stages(self) -> list[Stage[Server]]:
        first = [Stage("pretrain", self.pretrain_rounds, self.pretrain)] if self.pretrain_rounds else []
        return [*first, *([Stage("align", self.rounds, self.round)] if self.rounds else [])]

    def pretrain(self, s: Server, net: Network) -> Server:
        """Section 4.1; several sources train together by averaging."""
        lr = self.training.lr_at(net.round, self.pretrain_rounds)
        ups = self.all(net, self.fit, {c: Begin(s.theta, s.head, lr) for c in self.plan(s, net).sources})
        net.log(loss=sum(u.loss for u in ups.values()) / len(ups), lr=lr)
        s = replace(s, theta=mean(u.theta for u in ups.values()), head=mean(u.classifier for u in ups.values()))
        if self.classes == "shared" and net.round == self.pretrain_rounds - 1:  # without adaptation: to be beaten
            self.tell(net, Heads(self.plan(s, net), [s.head], s.theta))
        return s

    def round(self, s: Server, net: Network) -> Server:
        """Section 4.2: in each exchange offers, answers (and decryptions for each other), then every party's step."""
        s, secrets = (s, {}) if s.hellos else self.meet(s, net)
        plan, lr = self.plan(s, net), self.training.lr_at(net.round, self.rounds)
        seen = self.all(net, self.measure, {c: Look(plan) for c in plan.sources})
        kernel = torch.stack([m.kernel for m in seen.values()]).mean(0)
        plan = replace(plan, kernel=Polynomial(tuple(kernel.tolist())))
        received: dict[ClientId, Letters] = {}
        done: list[Mapping[ClientId, Mail | Moved]] = []
        for i in range(self.exchanges):
            if self.pooled and received:  # pooled sources need their common weights before they offer again
                s, moved = self.move(s, net, plan, lr, received, more=False)
                done, received = [*done, moved], {}
            s, moved = self.move(s, net, plan, lr, received, secrets if not i else {})
            mail = self.ask_mail(net, self.answer, plan, session.deliver(posts(moved)))
            done += [moved, mail]
            if self.protocol != "packed":
                mail = self.ask_mail(net, self.unveil, plan, session.deliver(posts(mail)))
                done.append(mail)
            received = session.deliver(posts(mail))
        s, moved = self.move(s, net, plan, lr, received, more=False)
        log(net, [*done, moved], lr=lr)
        if self.classes == "shared":  # the end of Section 4.2.3
            self.tell(net, Heads(plan, [moved[c].classifier for c in plan.sources]))
        s = replace(s, exchange=s.exchange + self.exchanges)
        if self.noise:
            net.log(epsilon_of_a_batch=epsilon(self.noise))
        return s

    def tell(self, net: Network, heads: Heads) -> None:
        net.log(**self.all(net, self.predict, {heads.plan.target: heads})[heads.plan.target].figures)

    def meet(self, s: Server, net: Network) -> tuple[Server, dict[ClientId, Letters]]:
        """Keys, and a secret between any two parties that will talk."""
        cards = self.all(net, self.hello, {c: Begin(s.theta, s.head, 0.0) for c in net.clients})
        s = replace(s, hellos={c: card.hello for c, card in cards.items()})
        mail = self.all(net, self.introduce, {c: Cards(self.plan(s, net), s.hellos) for c in net.clients})
        return s, {c: {other: m.letters[c] for other, m in mail.items() if c in m.letters} for c in net.clients}

    def plan(self, s: Server, net: Network) -> Plan:
        target = self.target or net.clients[-1]
        sources = tuple(c for c in net.clients if c != target)
        return Plan(
            self.protocol, Polynomial((1.0, -1.0)), s.length, self.training.batch_size, self.batches, self.key_bits,
            sources, target, self.pooled, self.monitor, self.sums, self.noise, self.scheme,
        )  # fmt: skip

    def move(
        self, s: Server, net: Network, plan: Plan, lr: float, received: Mapping[ClientId, Letters],
        secrets: Mapping[ClientId, Letters] = {}, more: bool = True,
    ) -> tuple[Server, Replies[Moved]]:  # fmt: skip
        """Every party learns from what it received and offers anew; pooled sources go on with their mean weights."""
        common = {c: (s.theta, s.head) for c in plan.sources if self.pooled}
        none: tuple[Weights, Weights] = ({}, {})
        go = {c: Go(plan, received.get(c, {}), secrets.get(c, {}), *common.get(c, none), lr, more) for c in net.clients}
        moved = self.all(net, self.advance, go)
        if self.pooled:
            ups = [moved[c] for c in plan.sources]
            s = replace(s, theta=mean(u.weights for u in ups), head=mean(u.classifier for u in ups))
        return s, moved

    def ask_mail(
        self, net: Network, step: BoundStep[Post, Mail], plan: Plan, post: Mapping[ClientId, Letters]
    ) -> Replies[Mail]:
        return self.all(net, step, {c: Post(plan, post[c]) for c in net.clients})

    def all(self, net: Network, step: BoundStep[M, R], messages: Mapping[ClientId, M]) -> Replies[R]:
        """Ask; the protocol needs every answer."""
        return net.ask(step, messages, min_replies=len(messages))

    def backbone(self, s: Server) -> Weights | None:
        return s.theta

    def class_vectors(self, s: Server) -> Tensor | None:
        return s.head.get("weight") if self.classes == "shared" else None

    def biases(self, s: Server) -> Tensor | None:
        return s.head.get("bias") if self.classes == "shared" else None

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return theta if self.pooled and "head" in state else state.get("theta", theta)  # a pooled source has no own
