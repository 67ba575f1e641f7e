"""FedFR-DA: Zhuang et al., Towards Unsupervised Domain Adaptation for Deep Face Recognition under Privacy Constraints
via Federated Learning, 2021 (the paper calls it FedFR). One client has labelled faces, the others have faces only.

    theta_r  backbone of round r           E      local iterations of a round (training.amount)
    lambda   strength of DCL, Eq. 3        K, N   target clients, all clients (K + 1)
    d        distance of C-FINCH           R, M   rounds, and all iterations M = R E
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from visard.clustering.cluster import Clustering, metrics_of, pseudo_labels
from visard.core import (
    Client,
    ClientId,
    Disclosure,
    Network,
    Setup,
    Stage,
    Weights,
    client_step,
    mean_metrics,
    nothing,
    sample_clients,
)
from visard.core.method import CRAFTED_WEIGHTS, SEES_UPDATES, AtLeastOne, NotNegative, Number, Share
from visard.data.faces import FaceView
from visard.errors import UsageError, VisardError
from visard.learning.features import class_means, features_of
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, train
from visard.learning.weights import load_weights, weights_of
from visard.methods.domain_adaptation import (
    SOURCE,
    Labelled,
    check_start,
    given_head,
    losses_of_sides,
    restore_head,
    targets,
)
from visard.methods.encrypted_alignment import Aligning, Met
from visard.methods.encrypted_mmd import SEALED, Relayed
from visard.methods.negatives import Shown, WithNegatives
from visard.methods.supervised import fit, pretraining


@dataclass(frozen=True)
class Server:
    theta: Weights
    head: Weights  # the source's, where it continues with one from a file
    labelled: list[ClientId]  # target clients that found clusters
    begun: bool = False  # whether the source has trained with the targets: its head is its own from then on
    met: Met = Met()  # of alignment
    shown: Shown = field(default_factory=dict)  # class vectors that clients have shown, for others' negatives


@dataclass(frozen=True)
class Down:
    theta: Weights
    lr: float
    first: bool = False  # the source has not trained with the targets yet
    head: Weights = field(default_factory=dict)  # which it then starts with
    pull: Relayed | None = None  # the peers' messages about alignment, if any
    negatives: Tensor | None = None  # rows that the other clients have shown, or the client's own, corrected


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


def labelled(client: Client) -> int:
    """Pictures that a client trains on: all of the source's, of a target's those in a cluster."""
    labels = client.state.get("labels")
    return len(client.data.train) if client.id == SOURCE or labels is None else int((labels >= 0).sum())


@dataclass(frozen=True)
class FedFRDA(Aligning[Server], WithNegatives[Server]):
    """Pre-train at the source, cluster at each target, then federate with the source held back by DCL."""

    name = "fedfr-da"
    title = "adapt to people whose pictures have no labels, without sharing any"
    paper = "Zhuang et al. 2021 (FedFR)"
    hostile = (
        f"{SEES_UPDATES} Running means of batch norm say what the pictures of a client are like on average: "
        "prevented by keeping statistic out of kinds, as a policy does by default; model.weights then keeps "
        "batch norm frozen. With weights of its choice it also chooses what the clusters of a target mean, and "
        "learns how many there are. With negatives = class_vectors it gets a class vector of each cluster, which "
        "is a face template: prevented by keeping class_vectors out of kinds, also the default; noisy sends them "
        "with noise, once in a run (kind noisy_vectors; how much noise: require.method.negatives_by.noise). "
        f"{CRAFTED_WEIGHTS}"
    )
    extendable = True
    discloses = (
        frozenset({Disclosure.weights, Disclosure.statistic, Disclosure.count, Disclosure.metric})
        | {Disclosure.class_vectors, Disclosure.noisy_vectors}  # with negatives alone
        | SEALED  # with align.weight alone
    )

    rounds: AtLeastOne = 20  # R
    training: Training = Training(unit="iterations", amount=100)  # amount = E
    head: HeadSettings = HeadSettings("arcface", 30.0, 0.5)
    dcl: NotNegative = 0.002  # lambda; 0 = plain averaging
    with_source: bool = True  # whether the source takes part after pre-training
    clustering: Clustering = Clustering()
    relabel_every: Number = 0  # rounds after which targets cluster again; the paper labels once
    target_head: Literal["random", "means"] = "means"  # how a target's head starts: from the means of its clusters
    source_head: Literal["pretrained", "random", "means"] = "pretrained"  # means: of the features of its people
    weighting: Literal["uniform", "data"] = "uniform"
    participation: Share = 1.0  # share of the clients that are drawn in a round; the source takes part in each
    pretrain_rounds: Number = 0  # stage 1 in this run; 0: model.weights has the source's network
    pretraining: Training = Training()
    measure: bool = True  # targets compare their clusters with the identities of their files, where there are some

    def __post_init__(self) -> None:
        if self.align.weight and not self.with_source:
            raise UsageError("method.align: needs the source, which method.with_source leaves out")
        self.check_negatives(self.head)

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        kinds = super().leaving(moving) - {Disclosure.class_vectors, Disclosure.noisy_vectors} | self.shows()
        if self.align.weight:
            return kinds
        return kinds - SEALED | ({Disclosure.statistic} if moving else set())

    def packages(self) -> dict[str, str]:
        return super().packages() | self.clustering.packages()

    def without_labels(self, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        return tuple(targets(clients))

    def start(self, setup: Setup) -> Server:
        if not targets(setup.clients):
            raise UsageError("fedfr-da needs target clients: partition.kind = domains or sites")
        if SOURCE not in setup.clients and (self.with_source or self.pretrain_rounds):
            raise UsageError(
                "fedfr-da needs a source (partition.kind = domains, or a face set with that role); "
                "without one: method.with_source = false, and model.weights instead of method.pretrain_rounds"
            )
        check_start(self.name, setup, self.pretrain_rounds)
        self.check_public(setup)
        goes_on = self.with_source and self.source_head == "pretrained" and not self.pretrain_rounds
        head = given_head(self.head, setup) if goes_on else {}
        if goes_on and not head:
            raise UsageError("method.source_head = pretrained: give model.class_vectors too, or set it to random")
        return Server(setup.new_weights(), head, [], met=self.before(setup, self.training))

    def stages(self) -> list[Stage[Server]]:
        first: list[Stage[Server]] = pretraining(  # lines 1-2
            self.pretrain_rounds, self.pretraining, SOURCE, self.fit, Down
        )
        return [*first, Stage("label", 1, self.label_all), Stage("federate", self.rounds, self.round)]

    def oracle(self) -> str:
        return self.clustering.oracle

    def label_all(self, s: Server, net: Network) -> Server:  # lines 4-8
        ups = net.ask(self.label, {c: Down(s.theta, 0.0) for c in targets(net.clients)})
        labelled = [c for c, up in ups.items() if up.clusters > 0]
        if not labelled:
            raise VisardError("no target client found a cluster: raise clustering.d or lower clustering.min_size")
        metrics = mean_metrics((u.figures, u.kept) for u in ups.values())
        clusters, kept = (sum(getattr(u, name) for u in ups.values()) for name in ("clusters", "kept"))
        ours = {"clusters": clusters, "kept": kept, "left_out": len(targets(net.clients)) - len(labelled)}
        net.log(**metrics | ours)
        shown = self.gathered(s.shown, net, s.theta, labelled, net.round, self.head.scale)
        return replace(s, labelled=labelled, shown=shown)

    def round(self, s: Server, net: Network) -> Server:  # lines 12-22
        if self.relabel_every and net.round and net.round % self.relabel_every == 0:
            s = self.label_all(s, net)
        lr = self.training.lr_at(net.round, self.rounds)
        asked = self.drawn(s.labelled, net)
        met, pulls = self.exchanged(s.met, net, s.theta, asked)
        # the source neither shows its people nor is shown any: as negatives, people of another population do harm
        messages = {c: Down(s.theta, lr, pull=pulls.get(c), negatives=self.rows_for(s.shown, c)) for c in asked}
        if self.with_source:
            head = {} if s.begun else s.head
            messages = {SOURCE: Down(s.theta, lr, not s.begun, head, pulls.get(SOURCE)), **messages}
        means, ups = net.reduce(  # line 21
            self.local, messages, mean="theta", by="n" if self.weighting == "data" else None
        )
        net.log(lr=lr, **losses_of_sides({c: up.loss for c, up in ups.items()}))
        shown = self.gathered(s.shown, net, means["theta"], targets(ups), net.round + 1, self.head.scale)
        return replace(s, theta=means["theta"], begun=s.begun or SOURCE in ups, met=met, shown=shown)

    def drawn(self, labelled: list[ClientId], net: Network) -> list[ClientId]:
        """The targets that train in this round."""
        found: list[ClientId] = labelled if self.participation == 1 else []
        while not found:
            chosen = set(sample_clients(net, self.participation))
            found = [client for client in labelled if client in chosen]
        return found

    @client_step(trains=lambda self, client, msg: self.pretraining.work(msg.lr, len(client.data.train)))
    def fit(self, client: Client, msg: Down) -> Up:
        done = fit(client, msg.theta, self.pretraining, self.head, msg.lr)
        return Up(weights_of(client.network()), len(client.data.train), done.loss)

    @client_step(trains=nothing)
    def label(self, client: Client, msg: Down) -> Labelled:
        model, view = client.network(), client.data.train
        load_weights(model, msg.theta)
        pseudo = pseudo_labels(model, view, self.clustering, client.numerics.channels_last)  # lines 6-7
        client.state.pop("head", None)  # a new numbering of clusters needs a new head
        client.state.update(labels=pseudo.labels, start={"weight": pseudo.means} if self.target_head == "means" else {})
        metrics = {"d": pseudo.found.d} if pseudo.found.d else {}
        metrics |= metrics_of(pseudo.labels, view) if self.measure and view.labelled else {}
        return Labelled(pseudo.found.clusters, int((pseudo.labels >= 0).sum()), metrics)

    def people(self, client: Client) -> tuple[FaceView, Tensor]:
        if client.id == SOURCE:
            return super().people(client)
        known = client.state["labels"] >= 0
        return client.data.train.take(known.numpy()), client.state["labels"][known]

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, labelled(client)))
    def local(self, client: Client, msg: Down) -> Up:  # lines 14-19
        model, view, source = client.network(), client.data.train, client.id == SOURCE
        load_weights(model, msg.theta)
        labels, classes, start = None, client.data.n_classes, msg.head
        if source and msg.first and self.source_head != "pretrained":
            client.state.pop("head", None)
            if self.source_head == "means":
                features = features_of(model, view, client.numerics.channels_last)
                start = {"weight": class_means(features, torch.from_numpy(view.labels), classes)}
        if not source:
            (view, labels), start = self.people(client), client.state.pop("start", {})
            classes = int(labels.max()) + 1
        head = restore_head(self.head, classes, client.embedding, client.state, start)
        taught = head if source else self.against(client, head, model, msg.theta, msg.negatives)
        done = train(
            model, taught, view, self.training, client.rng, client.numerics, lr=msg.lr, labels=labels,
            anchor=msg.theta, mu=self.dcl if source else 0.0,  # Eq. 3 at the source alone
            penalty=self.pull(client, msg.theta, msg.pull) if msg.pull else None,
        )  # fmt: skip
        client.state["head"] = weights_of(head)
        return Up(weights_of(model), len(view), done.loss)
