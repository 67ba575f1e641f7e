"""Domain adaptation by MMD with all data in one place: the centralised references of Kang, Li, Zhang 2022.

    theta_p    extractor of client p, with its own weights after pre-training
    lambda     `weight`, of MMD in the loss (Eq. 2)           S    number of sources (Eqs. 16, 18)

The same loss and optimiser as in `encrypted-mmd`, without ciphers and, by default, with the exact Gaussian kernel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from visard.core import Client, ClientId, Disclosure, Names, Network, Setup, State, Weights, Work, client_step
from visard.core.method import ALREADY_CENTRAL
from visard.data.faces import ClientData, FaceView
from visard.errors import VisardError
from visard.learning import mmd
from visard.methods.domain_adaptation import check_start
from visard.methods.encrypted_mmd import AdaptingByMMD, Begin, Start, head_of
from visard.methods.encrypted_mmd_party import QUALITY, Learner, begun, quality, untouched

SOURCES: ClientId = "sources"  # all of them as one client


@dataclass(frozen=True)
class Up:
    extractor: Annotated[Weights, Disclosure.weights]
    classifier: Annotated[Weights, Disclosure.class_vectors]
    figures: Annotated[dict[str, float], Disclosure.metric, Names("loss", *QUALITY)]


@dataclass(frozen=True)
class Aligned:
    figures: Annotated[dict[str, float], Disclosure.metric, Names("task", "mmd", *QUALITY)]


@dataclass(frozen=True)
class CentralMMD(AdaptingByMMD[Start]):
    """Sources with labels and a target without, in one place."""

    name = "central-mmd"
    title = "domain adaptation by MMD on pooled data: the reference of encrypted-mmd"
    paper = "Kang, Li, Zhang 2022"
    hostile = ALREADY_CENTRAL
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.metric, Disclosure.count}
    )
    centralises = frozenset({Disclosure.pictures, Disclosure.labels})

    target: ClientId = "target"  # as partition.kind = one_domain calls it
    exact: bool = True  # the Gaussian kernel itself; false: the polynomial of `compare`

    def start(self, setup: Setup) -> Start:
        check_start(self.name, setup, self.pretrain_rounds)
        return Start(setup.new_weights(), head_of(self.head, setup))

    def pretrain(self, s: Start, net: Network) -> Start:
        lr = self.training.lr_at(net.round, self.pretrain_rounds)
        (everyone,) = net.clients
        up = net.ask(self.fit, {everyone: Begin(s.theta, s.head, lr)})[everyone]
        net.log(lr=lr, **up.figures)
        return Start(up.extractor, up.classifier)

    def round(self, s: Start, net: Network) -> Start:
        lr = self.training.lr_at(net.round, self.rounds)
        (everyone,) = net.clients
        net.log(lr=lr, **net.ask(self.align, {everyone: Begin(s.theta, s.head, lr)})[everyone].figures)
        return s

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def fit(self, client: Client, msg: Begin) -> Up:
        """Eq. 1 on all sources' data."""
        state: State = begun(msg.theta, msg.head)
        learner = self._learner(client, SOURCES, state, msg.lr, drawn=False)
        loss = learner.fit()
        target = self._learner(client, self.target, {"theta": state["theta"]}, 0.0, drawn=False)
        found = quality(target.client, target.model, [learner.head], self.tested == "all")
        return Up(state["theta"], state["head"], {"loss": loss} | found)

    @client_step(trains=lambda self, client, msg: Work(msg.lr, self.exchanges, self.training.batch_size))
    def align(self, client: Client, msg: Begin) -> Aligned:
        """Eq. 2, with Eq. 18 or Eq. 16: every client's gradients are those of one loss."""
        names = [SOURCES] if self.pooled else [c for c in client.data.parts if c != self.target]
        start: State = begun(msg.theta, msg.head)
        states: dict[str, State] = client.state.setdefault("parties", {c: dict(start) for c in (*names, self.target)})
        learners = {c: self._learner(client, c, states[c], msg.lr) for c in (*names, self.target)}
        target, sources = learners[self.target], [learners[c] for c in names]
        seen = [learner.sample() for learner in sources]
        if not self.exact:
            state = dict(states[self.target])
            seen.append(self._learner(untouched(client), self.target, state, 0.0).sample())
        kernel = self._kernel(seen)
        sums = np.zeros(2)
        for _ in range(self.exchanges):
            unlabelled = target.forward(target.draw(1)[0])
            b = self.compare.inside(unlabelled).double()
            pull = self.weight * mmd.within(b, kernel) + target.guidance(unlabelled)
            for learner in sources:
                batch = learner.draw(1)[0]
                features = learner.forward(batch)
                a = self.compare.inside(features).double()
                task = learner.head.loss(features, learner.labels(batch)).cpu()
                own = mmd.within(a, kernel) + mmd.between(a, b.detach(), kernel)
                pull = pull + self.weight * mmd.between(a.detach(), b, kernel) / len(sources)
                learner.update(task + self.weight * own)
                sums += np.array([float(task.detach()), float(own.detach() + mmd.within(b.detach(), kernel))])
            target.update(pull)
        for learner in learners.values():
            learner.save()
        task_mean, gap = (sums / (self.exchanges * len(sources))).tolist()
        found = quality(target.client, target.model, [s.head for s in sources], self.tested == "all")
        return Aligned({"task": task_mean, "mmd": gap} | found)

    def _kernel(self, seen: list[Tensor]) -> mmd.Kernel:
        """The mean over the sources of the kernel that suits their features; of a polynomial the target comes last."""
        if not self.exact:
            longest, (*seen, _) = max(map(mmd.spoken_length, seen)), seen
            c = torch.tensor([self.compare.polynomial(v, longest).c for v in seen], dtype=torch.float64).mean(0)
            return mmd.Polynomial(tuple(c.tolist()))
        alpha = self.compare.alpha or sum(map(mmd.median_alpha, seen)) / len(seen)
        return lambda d: torch.exp(-alpha * d)

    def _learner(self, everyone: Client, name: ClientId, state: State, lr: float, drawn: bool = True) -> Learner:
        """Of the sources in one place `drawn` batches have S n samples (Eq. 16); those of pre-training have n."""
        client = client_within(everyone, name, self.target, state)
        training = self.training_of(name == self.target)
        if name == SOURCES and drawn:  # as many as the sources draw that are not in one place
            training = replace(training, batch_size=training.batch_size * (len(everyone.data.parts) - 1))
        unlabelled = self.unlabelled(drawn and name == self.target)
        return Learner(client, training, self.compare, self.head, name != self.target, lr, self.optimiser, unlabelled)

    def backbone(self, s: Start) -> Weights | None:
        return None  # every domain has its own

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        """The target's extractor."""
        parties: dict[str, State] = state.get("parties", {})
        own: Weights | None = parties.get(self.target, {}).get("theta", theta)
        return own


def client_within(everyone: Client, name: ClientId, target: ClientId, state: State) -> Client:
    """One of the clients whose data are in one place, with a network of its own."""
    data, own = everyone.data, copy.deepcopy(everyone.network())
    if target not in data.parts or len(data.parts) < 2:
        raise VisardError(f"has no client {target!r} beside others: partition.kind = one_domain is needed")
    views = [data.parts[c] for c in ([c for c in data.parts if c != target] if name == SOURCES else [name])]
    domains = np.unique(np.concatenate([view.domain for view in views]))

    def of(view: FaceView, index: np.ndarray) -> FaceView:
        return FaceView.of(view.faces, index, data.train.classes)

    train = of(views[0], np.concatenate([view.index for view in views]))
    val, test = (of(view, view.index[np.isin(view.domain, domains)]) for view in (data.val, data.test))
    numerics = everyone.numerics
    return Client(name, ClientData(train, val, test), state, everyone.rng, lambda: own, everyone.embedding, numerics)
