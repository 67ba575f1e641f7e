"""One client's training in FedFR (Liu et al. 2022): class vectors of own and public identities, a branch, Eq. 7."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Client, Setup, Weights
from visard.core.method import AtLeastOne, NotNegative, Number, Positive
from visard.data.faces import FaceView
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.features import class_means, features_of, shared_features
from visard.learning.heads import Head, HeadSettings, build_head, direction
from visard.learning.objective import Pictures, Terms, distillation, minimise, teacher
from visard.learning.train import Training
from visard.learning.weights import load_weights, weights_of
from visard.numerics import moved, on_device


@dataclass(frozen=True)
class BranchSettings:
    """The personal branch: f' = Pi(f) and the settings of its training."""

    weight: NotNegative = 10.0  # alpha_3; 0 = no branch
    kind: Literal["bce", "cosface"] = "bce"  # one-vs-all (Eq. 6), or CosFace over the client's own identities
    scale: float = 30.0  # s'
    margin: float = 0.4  # m'
    t: float = 3.0  # t' of g(z) = 2((z + 1)/2)^t' - 1
    balance: float = 0.7  # lambda
    bias: Literal["shared", "per_class"] = "shared"  # b: one number, or one for each head
    bias_start: Literal["balanced", "zero"] = "zero"  # balanced: positives and negatives pull equally at first
    detach: bool = False  # True: the gradient of the branch stops before the backbone

    def build_head(self, classes: int, embedding: int) -> Head:
        """Omega, freshly initialised."""
        if self.kind == "cosface":
            return build_head("cosface", classes, embedding, self.scale, self.margin)
        return build_head(
            "sphereface2", classes, embedding, self.scale, self.margin,
            t=self.t, balance=self.balance, bias=self.bias, bias_start=self.bias_start,
        )  # fmt: skip


class Branch(nn.Module):
    """Pi (E -> E, starts as the identity) and the heads Omega of the client's K_l identities."""

    def __init__(self, settings: BranchSettings, classes: int, embedding: int) -> None:
        super().__init__()
        self.settings = settings
        self.transform = nn.Linear(embedding, embedding)
        nn.init.eye_(self.transform.weight)
        nn.init.zeros_(self.transform.bias)
        self.head = settings.build_head(classes, embedding)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch; a label of -1 is a public picture.

        One-vs-all: a negative for every head. CosFace has no class for it and leaves it out.
        """
        if self.settings.detach:
            features = features.detach()
        if self.settings.kind == "cosface":
            own = labels >= 0
            if not own.any():
                return features.new_zeros(())
            features, labels = features[own], labels[own]
        return self.head.loss(self.transform(features), labels)


def transform_of(branch: Weights) -> Weights:
    """The entries of Pi, which a personal model carries after its backbone."""
    return {name: value for name, value in branch.items() if name.startswith("transform.")}


def start_at(head: Head, rows: Tensor) -> None:
    """Set the first class vectors of a head; a row of zeros leaves the head's own."""
    with torch.no_grad():
        known = torch.nonzero(rows.abs().sum(1)).flatten()
        head.weight[known] = rows[known].to(head.weight.dtype)


ROWS, COLUMNS = 1024, 4096  # of a block of cosines: 16 MB, whatever the number of pictures


def closest(pictures: Tensor, others: Tensor, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    r"""$\max_j \cos(p_i, o_j)$ (n,) for features p (n, E) against o (m, E), by blocks of one matrix product each."""
    if pictures.ndim != 2 or others.ndim != 2 or pictures.shape[1] != others.shape[1]:
        raise VisardError(f"mining: features {tuple(pictures.shape)} against {tuple(others.shape)}")
    # transposed once and laid out for the product: a block of columns is then a plain slice
    right = direction(moved(others)).t().contiguous()
    found = right.new_full((len(pictures),), -torch.inf)
    block = right.new_empty(min(rows, len(pictures)) * min(columns, len(others)))
    for i in range(0, len(pictures), rows):
        left = direction(moved(pictures[i : i + rows]))
        best = found[i : i + rows]
        for j in range(0, len(others), columns):
            part = right[:, j : j + columns]
            cosines = torch.mm(left, part, out=block[: len(left) * part.shape[1]].view(len(left), -1))
            torch.maximum(best, cosines.amax(1), out=best)
    return found.cpu()


def hard_negatives(pictures: Tensor, others: Tensor, threshold: float) -> Tensor:
    r"""Rows of `pictures` with $\max_j \cos(p_i, o_j) > t_{HN}$, in rising order."""
    return torch.nonzero(closest(pictures, others) > threshold).flatten()


@dataclass(frozen=True)
class PublicSettings:
    """Public pictures in a client's training; the softmax always has the class vectors of all public identities."""

    use: Literal["hard", "all", "none"] = "hard"  # none: own identities only, as FedAvg
    threshold: float = 0.4  # t_HN, a cosine
    mining: Literal["features", "proxies"] = "features"  # public pictures, or their class vectors, against own pictures
    cap: Number = 0  # most pictures in a round, drawn at random; 0 = no limit

    @property
    def used(self) -> bool:
        """Whether public identities take part at all."""
        return self.use != "none"

    def check(self, setup: Setup, needed: bool = False) -> None:
        """Refuse a run whose data or class vectors do not fit."""
        vectors = setup.class_vectors
        if (self.used or needed) and not setup.public_classes:
            raise UsageError("method.public needs public people: set partition.public_identities")
        if self.used and vectors is not None and len(vectors) != setup.public_classes:
            raise UsageError(f"model.class_vectors has {len(vectors)} rows for {setup.public_classes} public people")

    def choose(self, client: Client, model: nn.Module, theta: Weights, Phi: Tensor | None, own: Tensor) -> FaceView:
        """D_HN as a view of the public pictures; `model` holds `theta`, `own` are its features of the client's."""
        public = client.public
        if public is None:
            raise PublicError("has no public pictures")
        rows = torch.arange(len(public))
        if self.use == "hard" and self.mining == "features":
            features = shared_features(model, theta, public, client.numerics.channels_last)
            rows = hard_negatives(features, own, self.threshold)
        elif self.use == "hard" and Phi is not None:
            near = hard_negatives(Phi, own, self.threshold)
            rows = torch.nonzero(torch.isin(torch.from_numpy(public.labels), near)).flatten()
        if self.cap and len(rows) > self.cap:
            rows = rows[torch.randperm(len(rows), generator=client.rng)[: self.cap]]
        return public.take(rows.numpy())


@dataclass(frozen=True)
class JointTraining(Training):
    """Local training with the paper's settings; the paper does not give the batch size, its code has 256."""

    lr: Positive = 0.001
    batch_size: AtLeastOne = 256
    amount: AtLeastOne = 4  # E
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
    epochs: AtLeastOne = 4  # of that stage
    vectors: Literal["kept", "fresh"] = "kept"  # W of that stage: as the rounds left it, or as in a first round
    kd_weight: NotNegative = 1.0
    kd_temperature: Positive = 1.0


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
        """L_cos (Eq. 3) over K_l + K_g identities."""
        return {"cos": (weight, lambda x, f, y: self.head.loss(f, y))}

    def customised(self) -> Terms:
        """L_BCE (Eq. 6) or its CosFace variant on Pi(f); public identities are never positives."""
        branch, K = self.branch, self.own.n_classes
        if branch is None:
            return {}
        return {"branch": (branch.settings.weight, lambda x, f, y: branch.loss(f, torch.where(y < K, y, -1)))}

    def distilled(self, theta: Weights, how: PersonalSettings) -> Terms:
        """KL from the logits of the global model with the class vectors as they are now."""
        if how.stage != "kd":
            return {}
        glob, fixed = teacher(self.model, theta), on_device(copy.deepcopy(self.head))

        def term(x: Tensor, f: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                taught = fixed.logits(glob(x))
            return distillation(self.head.logits(f), taught, how.kd_temperature)

        return {"kd": (how.kd_weight, term)}

    def train(self, client: Client, terms: Terms, training: Training, lr: float, frozen_norm: bool) -> dict[str, float]:
        """Minimise the terms over own pictures and D_HN; the personal part is kept in the client's state.

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
        """Class vectors of the public identities."""
        K = self.own.n_classes
        return self.head.weight.detach()[K:].clone() if len(self.head.weight) > K else None


def personal_weights(state: dict[str, Weights], theta: Weights | None, which: str) -> Weights | None:
    """The weights of a client's own model before the last aggregation: with Pi, without, or the global ones."""
    if which == "global" or "theta" not in state:
        return theta
    return state["theta"] | (transform_of(state.get("branch", {})) if which == "transformed" else {})
