"""Runs on Flower's simulation, in a process of their own because Ray leaves warnings behind.

python -m tests.engines.simulated toy FOLDER | python -m tests.engines.simulated METHOD OUT SETTING...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

FAULTS = {"client-001": "nan", "client-003": "raise"}


def toy(folder: Path) -> None:
    """Three rounds with two bad clients; prints the sum and the problems of the last round."""
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
    print(json.dumps({"w": server.w.tolist(), "problems": net.traffic.problems, "states": states_now}))


def main(what: str, where: str, *overrides: str) -> None:
    torch.set_num_threads(1)
    if what == "toy":
        toy(Path(where))
    else:
        import visard

        visard.run(what, out=where, overrides=overrides)


if __name__ == "__main__":
    main(*sys.argv[1:])
