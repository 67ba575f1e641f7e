"""Which public pictures a client trains on beside its own (Liu et al. 2022, hard negative sampling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Client, Setup, Weights
from visard.data.faces import FaceView
from visard.errors import Told, UsageError
from visard.ops.features import shared_features
from visard.ops.mining import hard_negatives


@dataclass(frozen=True)
class PublicSettings:
    """Public pictures in a client's training; the softmax always has the class vectors of all public people."""

    use: Literal["hard", "all", "none"] = "hard"  # none: own people only, as FedAvg
    threshold: float = 0.4  # t_HN, a cosine
    mining: Literal["features", "proxies"] = "features"  # public pictures, or their class vectors, against own pictures
    cap: int = 0  # at most so many in a round, drawn at random; 0 = no limit

    def __post_init__(self) -> None:
        if self.cap < 0:
            raise UsageError(f"method.public.cap = {self.cap}: must not be negative")

    @property
    def used(self) -> bool:
        """Whether public people take part at all."""
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
            raise Told("has no public pictures")
        rows = torch.arange(len(public))
        if self.use == "hard" and self.mining == "features":
            features = shared_features(model, theta, public, client.numerics.channels_last)
            rows = hard_negatives(features, own, self.threshold)
        elif self.use == "hard" and Phi is not None:
            people = hard_negatives(Phi, own, self.threshold)
            rows = torch.nonzero(torch.isin(torch.from_numpy(public.labels), people)).flatten()
        if self.cap and len(rows) > self.cap:
            rows = rows[torch.randperm(len(rows), generator=client.rng)[: self.cap]]
        return public.take(rows.numpy())
