"""A client: one party during one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from visard.data.faces import ClientData, FaceView
    from visard.numerics import Numerics

ClientId = str
Weights = dict[str, Tensor]
State = dict[str, Any]  # what a client keeps between steps: tensors, numbers, text, nested dicts and lists of these
PUBLIC: ClientId = "public"  # the party with the public pictures, where a run has some; it can be asked like a client


@dataclass
class Client:
    """One party during one step. The engine builds it anew for every step."""

    id: ClientId
    data: ClientData
    state: State  # all that survives the step
    rng: torch.Generator  # seeded by (run seed, stage, round, ask, client id)
    network: Callable[[], nn.Module]  # the run's backbone; its weights are undefined until you load some
    embedding: int  # length of a feature
    numerics: Numerics
    benchmarks: Mapping[str, FaceView] = field(default_factory=dict)  # public test sets that every party has
    public: FaceView | None = None  # training pictures that every party has
    others: FaceView | None = None  # for tests alone: the test pictures of all parties, its own among them
