"""A long-lived worker process of the pool: one torch thread setting, one network, any client's steps.

Started by `engines.pool` as `python -m visard.engines.worker FD`; frames of JSON come over that socket.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from visard.core import Method
from visard.engines.checkpoint import StateFile, read_state, write_state
from visard.engines.perform import Place, perform
from visard.engines.shared import Bundle, read, receive, send
from visard.engines.world import World
from visard.errors import VisardError


def serve(channel: socket.socket) -> None:
    """Build the world that the first frame names, then do steps until the other side is gone."""
    frame = receive(channel)
    if frame is None:
        return
    first = json.loads(frame)
    module, _, name = first["factory"].partition(":")
    world, method = getattr(importlib.import_module(module), name)(**first["arguments"])
    torch.set_num_threads(world.numerics.threads_per_step)
    send(channel, b"{}")
    while (frame := receive(channel)) is not None:
        send(channel, json.dumps(answer(world, method, json.loads(frame))).encode())


def answer(world: World, method: Method[Any], task: dict[str, Any]) -> dict[str, Any]:
    """Do one step; failures come back as one line."""
    try:
        step = getattr(method, task["step"])
        before = StateFile(*task["state"]) if task["state"] else None
        states = Path(task["states"])
        message = read(task["message"], step.types[0], Path(task["bundle"]))
        done = perform(world, step, task["client"], message, read_state(states, before), Place(*task["place"]))
        after = write_state(states, task["new_state"], done.state, before)
        bundle = Bundle(Path(task["reply"]))
        tree = bundle.tree(done.reply)
        bundle.write()
    except Exception as error:
        text = " ".join(str(error).splitlines()) or type(error).__name__
        if isinstance(error, VisardError):
            return {"failure": text}
        return {"failure": f"{type(error).__name__}: {text}", "traceback": traceback.format_exc()}
    return {
        "reply": tree,
        "type": type(done.reply).__name__,
        "state": [after.name, after.digest] if after else None,
        "seconds": done.seconds,
    }


if __name__ == "__main__":
    os.environ["VISARD_WORKER"] = "1"
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(connection)
