"""The engine that the settings of a run ask for."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visard.engines.checkpoint import Checkpoint
from visard.engines.local import LocalNetwork
from visard.engines.network import EngineNetwork
from visard.engines.pool import PoolNetwork, Recipe
from visard.engines.remote import PartyLink, RemoteNetwork
from visard.engines.world import World
from visard.files import write_atomically
from visard.privacy.ledger import Ledger

if TYPE_CHECKING:
    from visard.config import Settings


def make_network(
    settings: Settings,
    folder: Path,
    world: World,
    states: Checkpoint,
    ledger: Ledger | None,
    link: PartyLink | None = None,
    told: dict[str, Any] | None = None,
) -> EngineNetwork:
    """The engine of a run; a deployment brings its `link`, and `told` is what its parties are told of the run."""
    engine = settings.engine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = engine.workers or max(1, cores // settings.numerics.threads_per_step)
    recipe = Recipe("visard.runs:world_of_run", {"folder": str(folder.absolute())})
    if link is not None:
        return RemoteNetwork(world, states, ledger, link, run_id(states.folder), told)
    if engine.kind == "flower":
        from visard.engines import flower

        flower.require()
        from visard.engines.flower.simulation import SimulationLink

        simulation = SimulationLink(world.clients, recipe, states.folder.absolute(), workers)
        return RemoteNetwork(world, states, ledger, simulation, run_id(states.folder))
    if engine.kind == "pool" or (engine.kind == "auto" and min(workers, len(world.training)) > 1):
        return PoolNetwork(world, states, ledger, recipe, workers)
    return LocalNetwork(world, states, ledger)


def connect(settings: Settings, say: Callable[[str], None]) -> PartyLink | None:
    """The link to the parties of a deployment; None where the clients are simulated."""
    if settings.engine.server is None:
        return None
    from visard.engines import flower

    flower.require()
    from visard.engines.flower.driver import DeploymentLink

    return DeploymentLink(Path(settings.engine.server), settings.engine.wait, say)


def run_id(checkpoint: Path) -> str:
    """The id under which parties know this run folder; made once."""
    path = checkpoint / "run.id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16))
    return path.read_text()
