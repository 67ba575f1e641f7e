"""FedFR, joint optimisation: Liu et al., FedFR: Joint Optimization Federated Framework for Generic and Personalized
Face Recognition, AAAI 2022. Lines are those of Algorithm 1 in its supplement.

    theta  backbone Theta     Phi  class vectors of the K_g public identities     D_HN  public pictures of a round
    W      class vectors of a client's K_l identities     Pi, Omega, b  its transformation, binary heads and bias
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from torch import Tensor

from visard.core import (
    PUBLIC,
    Client,
    Disclosure,
    Names,
    Network,
    Setup,
    Stage,
    State,
    Weights,
    client_step,
    mean_metrics,
    sample_clients,
)
from visard.core.method import CRAFTED_WEIGHTS, SEES_UPDATES, NotNegative, Number, Share
from visard.errors import UsageError
from visard.learning.objective import ContrastSettings
from visard.learning.train import Training
from visard.methods.domain_adaptation import given_head
from visard.methods.fedfr_joint_client import (
    BranchSettings,
    Joint,
    JointHead,
    JointTraining,
    PersonalSettings,
    PublicSettings,
    personal_weights,
)
from visard.methods.supervised import Fit, Supervised, WithProxies, pretraining

# terms of the loss, their weighted sum, steps of an epoch, pictures of D_HN
TERMS = Names("cos", "branch", "con", "kd", "loss", "steps", "public")


@dataclass(frozen=True)
class Server:
    theta: Weights
    Phi: Tensor | None  # None: not known yet, or no public identities in use


@dataclass(frozen=True)
class Down:
    theta: Weights
    Phi: Tensor | None
    lr: float


@dataclass(frozen=True)
class Up:  # W, Pi, Omega and b are not in it: they stay in the client's state
    theta: Annotated[Weights, Disclosure.weights]
    Phi: Annotated[Tensor | None, Disclosure.class_vectors]
    n: Annotated[int, Disclosure.count]
    figures: Annotated[dict[str, float], Disclosure.metric, TERMS]


@dataclass(frozen=True)
class Personalised:
    n: Annotated[int, Disclosure.count]
    figures: Annotated[dict[str, float], Disclosure.metric, TERMS]


@dataclass(frozen=True)
class FedFRJoint(WithProxies[Server]):
    """A generic model at the server and a personal one at each client, trained together."""

    name = "fedfr-joint"
    title = "one generic model for all, one personal model for each"
    paper = "Liu et al. 2022 (AAAI)"
    hostile = (
        f"{SEES_UPDATES} The class vectors of a client's own people stay at home; those of public people, which "
        "come back changed, tell which of them look like the client's (kind class_vectors). Running means of "
        "batch norm are prevented by keeping statistic out of kinds, as a policy does by default. "
        f"{CRAFTED_WEIGHTS}"
    )
    compared = ("global", "local")
    extendable = True
    discloses = frozenset(
        {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors, Disclosure.count, Disclosure.metric}
    )

    rounds: Number = 30  # T; 0 = only test model.weights
    training: JointTraining = JointTraining()
    head: JointHead = JointHead()  # s, m of Eqs. 1 and 3
    cosine_weight: NotNegative = 1.0  # alpha_1
    public: PublicSettings = PublicSettings()
    contrast: ContrastSettings = ContrastSettings()
    branch: BranchSettings = BranchSettings()
    personalise: PersonalSettings = PersonalSettings()
    start_vectors: Literal["mean", "random"] = "mean"  # W and Omega: mean features of the identities, or random
    weighting: Literal["local", "trained", "uniform"] = "local"  # N_l; or with the public pictures that were used
    participation: Share = 1.0  # share of the clients that are asked in a round
    frozen_norm: bool = False  # batch norm keeps the statistics that it came with
    pretrain_rounds: Number = 0  # a first stage at the public client
    pretrain: Training = Training()

    def __post_init__(self) -> None:
        if self.personalise.stage != "none" and self.branch.weight:
            raise UsageError("method.personalise.stage is the alternative to a branch: set method.branch.weight=0")

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        kinds = super().leaving(moving and (not self.frozen_norm or self.pretrain_rounds > 0))
        return kinds if self.public.used or self.pretrain_rounds else kinds - {Disclosure.class_vectors}

    def start(self, setup: Setup) -> Server:  # line 2
        self.public.check(setup, bool(self.pretrain_rounds))
        return Server(setup.new_weights(), given_head(self.head, setup).get("weight") if self.public.used else None)

    def stages(self) -> list[Stage[Server]]:
        last = Stage("personalise", int(self.personalise.stage != "none"), self.personal_round)
        ours = [stage for stage in (Stage("federate", self.rounds, self.round), last) if stage.rounds]
        how = (self.pretrain_rounds, self.pretrain, PUBLIC, self.fit, partial(Fit, class_vectors=True))
        return [*pretraining(*how, lambda s, done: Server(done.theta, done.W if self.public.used else None)), *ours]

    def supervised(self) -> Supervised:
        return Supervised(max(1, self.pretrain_rounds), self.pretrain, self.head)

    def down(self, s: Server, net: Network, lr: float) -> Down:
        known = s.Phi is not None or not self.public.used
        return Down(s.theta, s.Phi if known else self.public_means(s.theta, net), lr)

    def round(self, s: Server, net: Network) -> Server:
        down = self.down(s, net, self.training.lr_at(net.round, self.rounds))
        asked = dict.fromkeys(sample_clients(net, self.participation), down)  # line 5
        fields = ("theta", "Phi") if self.public.used else ("theta",)
        means, ups = net.reduce(self.local, asked, mean=fields, by=self.weigh)  # lines 8 and 9, Eqs. 2 and 4
        net.log(**mean_metrics((up.figures, up.n) for up in ups.values()) | {"lr": down.lr})
        return Server(means["theta"], means.get("Phi"))

    def weigh(self, up: Up) -> float:
        """The weight of a client: its own pictures N_l, with the public ones that it used, or the same for all."""
        public = up.figures.get("public", 0.0)
        trained = up.n + (public if 0 <= public < math.inf else 0.0)
        return {"local": up.n, "trained": trained, "uniform": 1}[self.weighting]

    def personal_round(self, s: Server, net: Network) -> Server:
        down = self.down(s, net, self.training.lr)
        replies = net.stream(self.alone, dict.fromkeys(net.clients, down))
        net.log(**mean_metrics((done.figures, done.n) for _, done in replies))
        return s

    @client_step(trains=lambda self, client, msg: self.training.work(msg.lr, len(client.data.train)))
    def local(self, client: Client, msg: Down) -> Up:  # ClientTraining
        joint = self.joint(client, msg)
        terms = joint.cosface(self.cosine_weight) | joint.customised()  # line 19, Eq. 7
        terms |= self.contrast.terms(joint.model, msg.theta, client.state.get("theta"))
        metrics = joint.train(client, terms, self.training, msg.lr, self.frozen_norm)  # lines 17-26
        return Up(client.state["theta"], joint.Phi, len(joint.own), metrics)

    @client_step(trains=lambda self, client, msg: self.alone_training.work(msg.lr, len(client.data.train)))
    def alone(self, client: Client, msg: Down) -> Personalised:  # two stages, Table 2
        if self.personalise.vectors == "fresh":
            client.state.pop("W", None)
        joint, training = self.joint(client, msg), self.alone_training
        terms = joint.cosface(self.cosine_weight) | joint.distilled(msg.theta, self.personalise)
        return Personalised(len(joint.own), joint.train(client, terms, training, msg.lr, self.frozen_norm))

    @property
    def alone_training(self) -> JointTraining:
        return replace(self.training, amount=self.personalise.epochs)

    def joint(self, client: Client, msg: Down) -> Joint:  # lines 14-16
        return Joint.prepare(client, msg.theta, msg.Phi, self.head, self.branch, self.public, self.start_vectors)

    def class_vectors(self, s: Server) -> Tensor | None:
        return s.Phi

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        return personal_weights(state, theta, self.personalise.model)

    def alternatives(self, state: State, theta: Weights | None) -> dict[str, Weights | None]:
        return {m: personal_weights(state, theta, m) for m in ("global", "local") if self.personalise.compare}
