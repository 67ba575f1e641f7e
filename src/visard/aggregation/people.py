r"""Differential privacy for people: each person of a client is a virtual client with its own bounded update.

    [aggregation.dp]
    unit = "person"

After DP-FedEmb (Xu et al., CVPR 2023). A client does its step once for each of its people, from the same weights, with
the pictures of that person alone and a head that stays at home, shortens each update to the norm C and sends their sum.
One person more or less moves the sum over all clients by C at most, so noise and accounts are those of `dp` with people
instead of clients. In the paper a virtual client is a group of people. Here it is one, who learns to differ from
public people: one person more or less in a group can move its update by 2 C.

With `sampling = "poisson"` all clients are asked, and each draws its people one by one, by its own secret. Otherwise
all people of the clients that are asked take part, and the random choice of clients does not reduce epsilon.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from visard.aggregation.dp import Grid, bare
from visard.core import ClientId
from visard.crypto.discrete_gaussian import Integers, Stream
from visard.data.faces import ClientData, FaceView
from visard.errors import PublicError, UsageError

SUMMED = "summed"  # the one entry of a field in which a client sends the sum over its people


@dataclass(frozen=True)
class Virtual:
    """What a client must know to sum over its people; it travels with the request."""

    fields: tuple[str, ...]  # that are summed
    clip: float
    share: float  # with which each person is drawn
    label: str  # run, stage, round, ask

    def text(self) -> str:
        """As JSON."""
        return json.dumps(vars(self))

    @classmethod
    def parse(cls, text: str) -> Virtual:
        """What a server sent; one line if it makes no sense."""
        try:
            tree = json.loads(text)
            fields = tuple(str(name) for name in tree["fields"])
            found = cls(fields, float(tree["clip"]), float(tree["share"]), str(tree["label"]))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise PublicError("the request for a sum over people is malformed") from None
        if not fields or not 0 < found.clip < 1e6 or not 0 < found.share <= 1:
            raise PublicError("the request for a sum over people is out of bounds")
        return found

    def drawn(self, secret: bytes, data: ClientData) -> list[int]:
        """The labels of the people who take part: of those with training pictures, each drawn by itself."""
        numbers = Stream(secret, b"people", self.label.encode()).uniform(data.n_classes)
        return [label for label in present(data) if numbers[label] < self.share or self.share >= 1]


@dataclass
class Total:
    """The sum of the bounded updates of people."""

    grid: Grid
    clip: float
    integers: Integers = field(init=False)
    within: int = 0  # people whose updates were not longer than the bound
    people: int = 0

    def __post_init__(self) -> None:
        self.integers = np.zeros(self.grid.size, np.int64)

    def add(self, message: Any, reply: Any) -> None:
        """Bound the update of a person and add it."""
        try:
            integers, within = self.grid.integers(self.grid.update(message, reply), self.clip)
        except ValueError as error:
            raise PublicError(str(error)) from None
        self.integers += integers
        self.within += within
        self.people += 1

    def sent(self, reply: Any, fields: tuple[str, ...]) -> Any:
        """The reply of the client, in the form of a person's reply: the sum alone."""
        vector = torch.from_numpy(np.append(self.integers, [self.within, self.people]))
        return replace(bare(reply, fields), **{fields[0]: {SUMMED: vector}})


def read(reply: Any, fields: tuple[str, ...], grid: Grid, clip: float, most: int) -> tuple[Integers, int, int]:
    """The sum that a client of at most `most` people sent, how many were within the bound, and how many there were.

    A ValueError says what is wrong with it. That each update is bounded is up to the client; the sum is bounded here.
    """
    found = getattr(reply, fields[0])
    vector = found.get(SUMMED) if isinstance(found, dict) and len(found) == 1 else None
    if not isinstance(vector, torch.Tensor) or vector.dtype != torch.int64 or vector.shape != (grid.size + 2,):
        raise ValueError("is not a sum over people of the length that was asked for")
    integers, (within, people) = vector.numpy()[:-2], vector.tolist()[-2:]
    if not 0 <= within <= people <= most:
        raise ValueError(f"is of {people} people, but the client has {most}")
    length = math.sqrt(float(np.square(integers.astype(np.float64)).sum())) * grid.unit
    if length > people * clip * (1 + 1e-9):
        raise ValueError(f"is longer than the bounded updates of {people} people can be")
    return integers, within, people


def present(data: ClientData) -> list[int]:
    """The labels that have training pictures."""
    return sorted(set(data.train.labels.tolist()))


def alone(data: ClientData, label: int) -> ClientData:
    """The training pictures of one person, as if the client had no other."""
    train, classes = data.train, data.train.classes[label : label + 1]
    none = FaceView.of(train.faces, [], classes)
    return ClientData(FaceView.of(train.faces, train.index[train.labels == label], classes), none, none)


def check_apart(clients: Mapping[ClientId, ClientData]) -> None:
    """Refuse clients with people in common: such a person would be in two updates."""
    owner: dict[int, ClientId] = {}
    for client, data in clients.items():
        for label in present(data):
            number = int(data.train.classes[label])
            if (other := owner.setdefault(number, client)) != client:
                name = data.train.faces.names[number]
                raise UsageError(
                    f"aggregation.dp.unit = person: {name} is at {other} and at {client}, and each person may be at "
                    "one client alone"
                )
