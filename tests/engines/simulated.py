"""Runs on Flower's simulation, in a process of their own because Ray leaves warnings behind.

python -m tests.engines.simulated FOLDER METHODS SETTING...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

FAULTS = {"client-001": "nan", "client-003": "raise"}


def toy(folder: Path) -> None:
    """Three rounds with two bad clients; writes the sum and the problems of the last round to `toy.json`."""
    from tests.toys import Toy, toy_world

    from visard.engines.checkpoint import Checkpoint
    from visard.engines.flower.simulation import SimulationLink
    from visard.engines.pool import Recipe
    from visard.engines.remote import RemoteNetwork
    from visard.privacy.ledger import Ledger

    world = toy_world(folder, 5)
    states = Checkpoint(folder / "flower", "toy")
    recipe = Recipe("tests.toys:pool_world", {"folder": str(folder), "clients": 5, "faults": FAULTS})
    link = SimulationLink(world.clients, recipe, states.folder, 2)
    net = RemoteNetwork(world, states, Ledger(states.ledger), link, "ab" * 16)
    try:
        server = Toy().start(world.setup())
        for r in range(3):
            net.begin("add", r)
            server = Toy().round(server, net)
    finally:
        net.close()
    states_now = {c: states.client_state(c) for c in world.clients}
    told = {"w": server.w.tolist(), "problems": net.traffic.problems, "states": states_now}
    (folder / "toy.json").write_text(json.dumps(told))


def main(where: str, methods: str, *overrides: str) -> None:
    import visard

    torch.set_num_threads(1)
    toy(Path(where))
    for method in methods.split(","):
        visard.run(method, out=Path(where) / method, overrides=overrides)


if __name__ == "__main__":
    main(*sys.argv[1:])
