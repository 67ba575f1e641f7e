"""The long-lived worker process of a party: it holds torch, the data and the client states.

Started by `engines.node` as `python -m visard.engines.party_worker FD`. The first frame says how to build worlds and
where states live; after that every request is two frames, header and payload, and so is every answer.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from visard.engines.party import OwnStates, Party
from visard.engines.shared import receive, send


def serve(channel: socket.socket) -> None:
    """Answer requests until the other side is gone."""
    frame = receive(channel)
    if frame is None:
        return
    first = json.loads(frame)
    module, _, name = first["factory"].partition(":")
    make_world = partial(getattr(importlib.import_module(module), name), **first["arguments"])
    home = Path(first["state"])
    party = Party(make_world, OwnStates(home / "states"), models=home / "models")
    send(channel, b"{}")
    while (header := receive(channel)) is not None and (payload := receive(channel)) is not None:
        for part in party.do(header, payload):
            send(channel, part)


if __name__ == "__main__":
    os.environ["VISARD_WORKER"] = "1"
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as connection, suppress(BrokenPipeError, KeyboardInterrupt):
        serve(connection)
