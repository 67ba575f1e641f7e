"""A long-lived worker process of the pool (see `visard.processes`): one network, any client's steps."""

from __future__ import annotations

import json
import socket
import traceback
from pathlib import Path
from typing import Any

import torch

from visard.core import Method
from visard.engines.checkpoint import Packs, StateFile
from visard.engines.codec import build
from visard.engines.network import perform_together
from visard.engines.shared_memory import Bundle, Mapped
from visard.engines.world import Place, World, perform
from visard.errors import VisardError
from visard.methods.scoring import steps_of
from visard.processes import receive, resolve, send


class Desk:
    """What a worker has at hand: the world, the states, the messages of the ask and room for replies."""

    def __init__(self, made: tuple[World, Method[Any]], states: Path, replies: list[str]) -> None:
        self.world, self.method = made
        self.packs = Packs(states)
        self._areas = [Bundle(Path(path), once=False) for path in replies]
        self.replies = self._areas[0]
        self._tensors = "", Mapped(Path())
        self._trees: list[Any] = []
        self._messages: dict[int, Any] = {}

    def clear(self, trees: list[Any], area: int) -> None:
        """A new hand-over with the headers of its messages; what its area for replies held was read."""
        self.replies = self._areas[area]
        self.replies.clear()
        self._trees, self._messages = trees, {}

    def message(self, task: dict[str, Any], kind: type) -> Any:
        """The message of a task, made once for all tasks that share it: who may write on it gets a copy."""
        number, path = task["message"], task["bundle"]
        if self._tensors[0] != path:
            self._tensors = path, Mapped(Path(path))
        if number not in self._messages:
            self._messages[number] = build(self._trees[number], kind, self._tensors[1])
        return self._messages[number]


def serve(channel: socket.socket, factory: str, arguments: dict[str, Any], states: str, replies: list[str]) -> None:
    """Build the world that `factory` names, then do steps until the other side is gone.

    A frame holds several tasks; each has an answer of its own, whose tensors stay until a frame names their area again.
    """
    torch.set_num_threads(1)
    desk = Desk(resolve(factory)(**arguments), Path(states), replies)
    torch.set_num_threads(desk.world.numerics.threads_per_step)
    send(channel, b"{}")
    while (frame := receive(channel)) is not None:
        given = json.loads(frame)
        desk.clear(given["messages"], given["area"])
        for task in given["tasks"]:
            reply = answer_together(desk, task) if "cohort" in task else answer(desk, task)
            send(channel, json.dumps(reply).encode())
        desk.packs.let_go()


def answer(desk: Desk, task: dict[str, Any]) -> dict[str, Any]:
    """Do one step; failures come back as one line."""
    try:
        step = steps_of(desk.method)[task["step"]]
        before = StateFile(*task["state"]) if task["state"] else None
        message = desk.message(task, step.types[0])
        state, place = desk.packs.read(before), Place(*task["place"])
        done = perform(desk.world, step, task["client"], message, state, place, sent=True)
        after = desk.packs.write(task["pack"], done.state, before)
        tree = desk.replies.tree(done.reply)
    except Exception as error:
        text = " ".join(str(error).splitlines()) or type(error).__name__
        if isinstance(error, VisardError):
            return {"failure": text}
        return {"failure": f"{type(error).__name__}: {text}", "traceback": traceback.format_exc()}
    return {
        "reply": tree,
        "type": type(done.reply).__name__,
        "state": after.place if after else None,
        "seconds": done.seconds,
    }


def answer_together(desk: Desk, task: dict[str, Any]) -> dict[str, Any]:
    """Do the steps of a cohort in one pass; if anything is wrong, one by one."""
    tasks: list[dict[str, Any]] = task["cohort"]
    try:
        step, place = steps_of(desk.method)[tasks[0]["step"]], Place(*tasks[0]["place"])
        before = {one["client"]: StateFile(*one["state"]) if one["state"] else None for one in tasks}
        messages = [desk.message(one, step.types[0]) for one in tasks]
        states = {client: desk.packs.read(file) for client, file in before.items()}
        asked = dict(zip(before, messages, strict=True))
        value, done = perform_together(desk.world, step, asked, states, place, task["mean"])
        after = [desk.packs.write(tasks[0]["pack"], d.state, b) for d, b in zip(done, before.values(), strict=True)]
        mean, trees = desk.replies.tree(value), [desk.replies.tree(one.reply) for one in done]
    except Exception:
        return {"alone": [answer(desk, one) for one in tasks]}
    replies = [
        {"reply": tree, "state": state.place if state else None, "seconds": one.seconds}
        for tree, state, one in zip(trees, after, done, strict=True)
    ]
    return {"mean": mean, "replies": replies}
