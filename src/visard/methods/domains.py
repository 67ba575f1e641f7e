"""Source and target clients: what the methods of domain adaptation share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from visard.core import ClientId, Leaves, Setup, State, Weights
from visard.errors import UsageError, VisardError
from visard.heads import Head
from visard.ops.training import HeadSettings, load_weights, weights_of

SOURCE: ClientId = "source"  # the client with labels; every other client is a target


@dataclass(frozen=True)
class Labelled:
    """What a client tells of its pseudo labels."""

    clusters: Annotated[int, Leaves.count]
    kept: Annotated[int, Leaves.count]  # pictures with a label
    figures: Annotated[dict[str, float], Leaves.metric]


def targets(clients: Iterable[ClientId]) -> list[ClientId]:
    """The clients without labels."""
    return [c for c in clients if c != SOURCE]


def check_start(method: str, setup: Setup, pretrain_rounds: int) -> None:
    """Pseudo labels of an untrained network would be noise: there is a file to start from, or a first stage."""
    if not pretrain_rounds and not setup.given:
        raise UsageError(f"{method} starts from a trained network: give model.weights or method.pretrain_rounds")


def losses_of_sides(losses: dict[ClientId, float]) -> dict[str, float]:
    """The mean loss of the source and of the targets, where there are some."""
    sides = {"source": [v for c, v in losses.items() if c == SOURCE], "target": [losses[c] for c in targets(losses)]}
    return {f"loss_{side}": sum(values) / len(values) for side, values in sides.items() if values}


def given_head(how: HeadSettings, setup: Setup) -> Weights:
    """The head of `model.class_vectors`: class vectors (classes, E) and, where heads of that kind have some, biases.

    Nothing if no file is given. Zeros in the place of biases would be another classifier than the one that was trained.
    """
    W, b = setup.class_vectors, setup.biases
    if W is None:
        return {}
    if how.biased != (b is not None):
        has, lacks = ("biases", "none") if b is not None else ("no biases", "some")
        raise UsageError(f"model.class_vectors holds {has}, the {how.kind} head has {lacks}")
    return {"weight": W.clone()} | ({} if b is None else {"bias": b.clone()})


def restore_head(how: HeadSettings, classes: int, embedding: int, state: State, start: Weights) -> Head:
    """A head as the state has it, or else with what `start` gives of it, or else fresh."""
    head = how.build(classes, embedding)
    if "head" in state:
        load_weights(head, state["head"])
    elif start:
        if (shape := tuple(start["weight"].shape)) != (classes, embedding):
            raise VisardError(f"class vectors {shape} do not fit {classes} people of {embedding} dimensions")
        load_weights(head, weights_of(head) | start)
    return head
