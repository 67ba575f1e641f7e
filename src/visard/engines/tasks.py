"""The pool's tasks: a client's step or that of a cohort on its way to a worker, and the answer on its way back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from visard.core import BoundStep, ClientId
from visard.engines.codec import CodecError, build
from visard.engines.cohort import with_mean
from visard.engines.network import Outcome
from visard.engines.packs import StateFile
from visard.engines.shared import Mapped


@dataclass
class Task:
    """A client's step on its way, or that of a whole cohort."""

    clients: list[ClientId]
    position: int
    size: int
    request: dict[str, Any] = field(repr=False)
    tries: int = 0
    area: int = 0  # of its worker's two areas for replies


def together(tasks: list[Task], position: int, mean: str) -> Task:
    """One task for a cohort, whose replies have the average of the field `mean`."""
    request = {"cohort": [task.request for task in tasks], "mean": mean}
    return Task([c for task in tasks for c in task.clients], position, sum(task.size for task in tasks), request)


def pack_tasks(tasks: list[Task], area: int) -> bytes:
    """A hand-over: the tasks, with each message's header once however many of them share it."""
    numbers: dict[int, int] = {}
    trees: list[Any] = []

    def numbered(request: dict[str, Any]) -> dict[str, Any]:
        if "cohort" in request:
            return {**request, "cohort": [numbered(one) for one in request["cohort"]]}
        if id(tree := request["message"]) not in numbers:
            numbers[id(tree)] = len(trees)
            trees.append(tree)
        return {**request, "message": numbers[id(tree)]}

    requests = [numbered(task.request) for task in tasks]
    return json.dumps({"tasks": requests, "messages": trees, "area": area}, separators=(",", ":")).encode()


def read_outcomes(step: BoundStep[Any, Any], task: Task, answer: dict[str, Any], tensors: Mapped) -> list[Outcome]:
    """What came back for a task, one outcome for each of its clients."""
    tensors.forget()
    if "mean" in answer:
        return _together(step, task, answer, tensors)
    if "alone" in answer:  # something was wrong with one of a cohort: each has its own answer
        each = zip(task.clients, answer["alone"], strict=True)
        return [_alone(step, client, one, tensors) for client, one in each]
    return [_alone(step, task.clients[0], answer, tensors)]


def _alone(step: BoundStep[Any, Any], client: ClientId, answer: dict[str, Any], tensors: Mapped) -> Outcome:
    if "failure" in answer:
        return Outcome(client, failure=answer["failure"], traceback=answer.get("traceback"))
    try:
        reply = build(answer["reply"], step.types[1], tensors)
    except CodecError as error:
        return Outcome(client, failure=f"reply refused: {error}")
    return Outcome(client, reply, _state(answer), answer["seconds"])


def _together(step: BoundStep[Any, Any], task: Task, answer: dict[str, Any], tensors: Mapped) -> list[Outcome]:
    try:
        value = build(answer["mean"], dict, tensors)
        replies = [build(one["reply"], step.types[1], tensors) for one in answer["replies"]]
    except CodecError as error:
        return [Outcome(c, failure=f"reply refused: {error}") for c in task.clients]
    each = zip(task.clients, replies, answer["replies"], strict=True)
    mean = task.request["mean"]
    return [Outcome(c, with_mean(reply, mean, value), _state(a), a["seconds"]) for c, reply, a in each]


def _state(answer: dict[str, Any]) -> StateFile | None:
    return StateFile(*answer["state"]) if answer["state"] else None
