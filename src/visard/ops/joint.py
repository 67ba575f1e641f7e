"""One client's training in FedFR (Liu et al. 2022): class vectors of own and public people, a branch, Eq. 7."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Client, Weights
from visard.data.faces import FaceView
from visard.errors import UsageError
from visard.heads import Head
from visard.ops.decoupled import Branch, BranchSettings, start_at, transform_of
from visard.ops.distil import distillation
from visard.ops.features import class_means, features_of
from visard.ops.objective import Pictures, Terms, minimise, teacher
from visard.ops.public import PublicSettings
from visard.ops.training import HeadSettings, Training, load_weights, weights_of


@dataclass(frozen=True)
class JointTraining(Training):
    """Local training with the paper's settings; the paper does not give the batch size, its code has 256."""

    lr: float = 0.001
    batch_size: int = 256
    amount: int = 4  # E
    schedule: Literal["constant", "cosine"] = "constant"


@dataclass(frozen=True)
class JointHead(HeadSettings):
    """CosFace with the paper's s and m; only class vectors, so that all of the head is either W or Phi."""

    margin: float = 0.4

    def __post_init__(self) -> None:
        if self.kind not in ("cosface", "arcface"):
            raise UsageError(f"method.head.kind = {self.kind}: must be cosface or arcface")


@dataclass(frozen=True)
class PersonalSettings:
    """Which model is a client's own, and how it is made."""

    model: Literal["transformed", "local", "global"] = "transformed"  # [Theta_l, Pi], Theta_l or Theta_g
    compare: bool = False  # clients test all three
    stage: Literal["none", "finetune", "kd"] = "none"  # a second stage at each client alone, without a branch
    epochs: int = 4  # of that stage
    kd_weight: float = 1.0
    kd_temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.kd_weight < 0 or self.kd_temperature <= 0:
            raise UsageError("method.personalise: epochs >= 1, kd_weight >= 0 and kd_temperature > 0 are needed")


@dataclass(frozen=True)
class Joint:
    """A client in a round: the pictures it trains on, a head with rows [W; Phi], and the branch if there is one."""

    model: nn.Module
    head: Head
    branch: Branch | None
    own: FaceView
    public: FaceView | None  # D_HN

    @classmethod
    def prepare(
        cls,
        client: Client,
        theta: Weights,
        Phi: Tensor | None,
        head: HeadSettings,
        branch: BranchSettings,
        public: PublicSettings,
        start: Literal["mean", "random"],
    ) -> Joint:
        """Backbone and Phi as sent; W, Pi and Omega as the client left them, or fresh; D_HN by the network as sent."""
        model, view = client.network(), client.data.train
        load_weights(model, theta)
        features = features_of(model, view, client.numerics.channels_last)
        joined = head.build(view.n_classes + (0 if Phi is None else len(Phi)), client.embedding)
        added = Branch(branch, view.n_classes, client.embedding) if branch.weight else None
        if start == "mean":
            means = class_means(features, torch.from_numpy(view.labels), view.n_classes)
            for fresh in (joined,) if added is None else (joined, added.head):
                start_at(fresh, means)
        if "W" in client.state:
            start_at(joined, client.state["W"])
        if added is not None and "branch" in client.state:
            load_weights(added, client.state["branch"])
        if Phi is not None:
            joined.weight.data[view.n_classes :] = Phi
        chosen = public.choose(client, model, theta, Phi, features) if public.used else None
        return cls(model, joined, added, view, chosen)

    def cosface(self, weight: float) -> Terms:
        """L_cos (Eq. 3) over K_l + K_g people."""
        return {"cos": (weight, lambda x, f, y: self.head.loss(f, y))}

    def customised(self) -> Terms:
        """L_BCE (Eq. 6) or its CosFace variant on Pi(f); public people are nobody's positives."""
        branch, K = self.branch, self.own.n_classes
        if branch is None:
            return {}
        return {"branch": (branch.settings.weight, lambda x, f, y: branch.loss(f, torch.where(y < K, y, -1)))}

    def distilled(self, theta: Weights, how: PersonalSettings) -> Terms:
        """KL from the logits of the global model with the class vectors as they are now."""
        if how.stage != "kd":
            return {}
        glob, fixed = teacher(self.model, theta), copy.deepcopy(self.head)

        def term(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                told = fixed.logits(glob(x))
            return distillation(self.head.logits(f), told, how.kd_temperature)

        return {"kd": (how.kd_weight, term)}

    def train(self, client: Client, terms: Terms, training: Training, lr: float, frozen_norm: bool) -> dict[str, float]:
        """Minimise the terms over own pictures and D_HN; what stays at the client goes to its state.

        Returns the mean of each term, their weighted sum `loss`, the `steps` of an epoch and the `public` pictures.
        """
        views = [self.own] if self.public is None else [self.own, self.public]
        labels = [torch.from_numpy(self.own.labels)]
        if self.public is not None:
            labels.append(torch.from_numpy(self.public.labels) + self.own.n_classes)
        heads = [self.head] if self.branch is None else [self.head, self.branch]
        done = minimise(
            self.model, heads, terms, Pictures(views), torch.cat(labels), training, client.rng, client.numerics,
            lr=lr, frozen_norm=frozen_norm,
        )  # fmt: skip
        K = self.own.n_classes
        client.state.update(theta=weights_of(self.model), W=self.head.weight.detach()[:K].clone())
        if self.branch is not None:
            client.state["branch"] = weights_of(self.branch)
        epochs = training.amount if training.unit == "epochs" else done.pictures / sum(map(len, views))
        public = 0.0 if self.public is None else float(len(self.public))
        return done.terms | {"loss": done.loss, "steps": done.steps / epochs, "public": public}

    @property
    def Phi(self) -> Tensor | None:
        """Class vectors of the public people."""
        K = self.own.n_classes
        return self.head.weight.detach()[K:].clone() if len(self.head.weight) > K else None


def personal_weights(state: dict[str, Weights], theta: Weights | None, which: str) -> Weights | None:
    """The weights of a client's own model before the last aggregation: with Pi, without, or the global ones."""
    if which == "global" or "theta" not in state:
        return theta
    return state["theta"] | (transform_of(state.get("branch", {})) if which == "transformed" else {})
