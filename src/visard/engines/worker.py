"""A long-lived worker process of the pool (see `visard.processes`): one network, any client's steps.

A frame to a worker holds several jobs; each is answered separately. Tensors are in shared memory: those of
messages in a bundle of the ask, those of replies in an area of the worker, until a frame names that area again.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visard.aggregation.secure import SecureAggregation
from visard.at_rest import Key
from visard.core import BoundStep, Method
from visard.engines.checkpoint import Packs, PackStates
from visard.engines.codec import CodecError, build
from visard.engines.local import perform, perform_together, with_mean
from visard.engines.request import Reply, Request, StateFile
from visard.engines.shared_memory import Bundle, Mapped
from visard.engines.world import World
from visard.methods.scoring import steps_of
from visard.processes import Recipe, receive, send


@dataclass
class Job:
    """A client's step, or that of a cohort whose field `mean` is averaged.

    The message of a request here is the header of its tree in shared memory.
    """

    requests: list[Request]
    position: int  # in the ask
    size: int  # training pictures
    mean: str = ""
    tries: int = 0
    area: int = 0  # of its worker's two areas for replies


def pack_jobs(jobs: list[Job], bundle: Path, area: int) -> bytes:
    """A frame to a worker, with each message's header once however many requests share it."""
    numbers: dict[int, int] = {}
    trees: list[Any] = []

    def packed(request: Request) -> dict[str, Any]:
        if id(tree := request.message) not in numbers:
            numbers[id(tree)] = len(trees)
            trees.append(tree)
        return {k: v for k, v in vars(request).items() if v} | {"message": numbers[id(tree)]}

    each = [{"requests": [packed(request) for request in job.requests], "mean": job.mean} for job in jobs]
    return json.dumps(
        {"jobs": each, "messages": trees, "bundle": str(bundle), "area": area}, separators=(",", ":")
    ).encode()


def read_replies(step: BoundStep[Any, Any], job: Job, frame: bytes | bytearray, tensors: Mapped) -> list[Reply]:
    """What came back for a job, one reply for each of its requests."""
    tensors.forget()
    answer = json.loads(frame)
    try:
        shared = build(answer["mean"], dict, tensors) if "mean" in answer else None
    except CodecError as error:
        return [request.reply(failure=f"reply refused: {error}") for request in job.requests]
    replies = []
    for request, fields in zip(job.requests, answer["replies"], strict=True):
        try:
            if "value" in fields:
                value = build(fields["value"], step.types[1], tensors)
                fields["value"] = value if shared is None else with_mean(value, job.mean, shared)
                fields["state"] = StateFile(*fields["state"]) if fields["state"] else None
            replies.append(request.reply(**fields))
        except CodecError as error:
            replies.append(request.reply(failure=f"reply refused: {error}"))
    return replies


class JobRunner:
    """Does the jobs of a worker: it holds the world, the states, the messages of the ask and room for replies."""

    def __init__(self, made: tuple[World, Method[Any]], packs: Packs, replies: list[str]) -> None:
        self.world, self.method = made
        self.states = PackStates(packs)
        self._areas = [Bundle(Path(path), once=False) for path in replies]
        self._replies = self._areas[0]
        self._tensors = "", Mapped(Path())
        self._trees: list[Any] = []
        self._messages: dict[int, Any] = {}

    def clear(self, frame: dict[str, Any]) -> None:
        """Begin a new frame with the headers of its messages; the replies in its area have been read."""
        self._replies = self._areas[frame["area"]]
        self._replies.clear()
        self._trees, self._messages = frame["messages"], {}
        if self._tensors[0] != frame["bundle"]:
            self._tensors = frame["bundle"], Mapped(Path(frame["bundle"]))

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """The replies to a job; if a cohort fails, its clients are done one by one."""
        step = (steps_of(self.method) | SecureAggregation.steps())[job["requests"][0]["step"]]
        with suppress(Exception):
            if job["mean"]:
                requests = [self._request(fields, step) for fields in job["requests"]]
                shared, replies = perform_together(self.world, step, requests, self.states, job["mean"])
                return {"mean": self._replies.tree(shared), "replies": [self._packed(reply) for reply in replies]}
        return {"replies": [self._alone(fields, step) for fields in job["requests"]]}

    def _alone(self, fields: dict[str, Any], step: BoundStep[Any, Any]) -> dict[str, Any]:
        try:
            return self._packed(perform(self.world, step, self._request(fields, step), self.states, sent=True))
        except Exception as error:
            failed = Request().failed(error)
            return {"failure": failed.failure, "traceback": failed.traceback}

    def _request(self, fields: dict[str, Any], step: BoundStep[Any, Any]) -> Request:
        """A request; its message is built once for all that share it, and a step that may change it gets a copy."""
        number, state = fields["message"], fields.get("state")
        if number not in self._messages:
            self._messages[number] = build(self._trees[number], step.types[0], self._tensors[1])
        return Request(**fields | {"message": self._messages[number], "state": StateFile(*state) if state else None})

    def _packed(self, reply: Reply) -> dict[str, Any]:
        return {"value": self._replies.tree(reply.value), "state": reply.state, "seconds": reply.seconds}


def serve(
    channel: socket.socket, recipe: dict[str, Any], states: str, replies: list[str], encrypt_with: str | None = None
) -> None:
    """Build the world of the recipe, then do steps until the other side is gone."""
    torch.set_num_threads(1)
    runner = JobRunner(Recipe(**recipe).function()(), Packs(Path(states), Key.load(encrypt_with)), replies)
    torch.set_num_threads(runner.world.numerics.threads_per_step)
    send(channel, b"{}")
    while (frame := receive(channel)) is not None:
        given = json.loads(frame)
        runner.clear(given)
        for job in given["jobs"]:
            send(channel, json.dumps(runner.do(job)).encode())
        runner.states.packs.let_go()
