"""Clients on Flower's Ray backend, which uses every core of a machine and can span several.

The simulation runs in a thread; its ServerApp does nothing but hand over the grid and wait until the run is done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType

from visard.at_rest import Key
from visard.core import ClientId
from visard.deployment.flower.link import GridLink, parts, record
from visard.deployment.party import Party
from visard.engines.checkpoint import Packs, PackStates
from visard.errors import VisardError, one_line
from visard.processes import Recipe

START_SECONDS = 180.0
AHEAD = 8  # requests in line for each Ray actor

_parties: dict[tuple[str, str], Party] = {}  # of an actor: one world, kept between steps


class SimulationLink(GridLink):
    """One virtual node for each client; the actors build the world from the recipe, as the pool's workers do."""

    poll = 0.02
    queue = AHEAD

    def __init__(
        self,
        clients: Collection[ClientId],
        recipe: Recipe,
        states: Path,
        workers: int,
        encrypt_with: Path | None = None,
    ) -> None:
        super().__init__()
        self.window = AHEAD * workers
        self._clients = tuple(clients)
        self._nodes: dict[ClientId, int] = {}
        self._ready, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        app = client_app(recipe, str(states), str(encrypt_with) if encrypt_with else None)
        self._thread = threading.Thread(target=self._simulate, args=(app, workers), daemon=True)
        self._thread.start()

    def _simulate(self, app: ClientApp, workers: int) -> None:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, _: Context) -> None:
            self.grid = grid
            self._ready.set()
            self._over.wait()

        init: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        if not os.environ.get("RAY_ADDRESS"):  # a Ray that spans machines has its own number of workers
            init |= {"address": "local", "num_cpus": workers}
        try:
            _run_simulation(
                num_supernodes=len(self._clients),
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=app,
                server_app=server,
                backend_config={"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
            )
        except BaseException as error:  # raised where the next request is sent
            self._error = error
        finally:
            self._ready.set()

    def gather(self, clients: Collection[ClientId], needed: int) -> None:
        """Wait for Ray to start."""
        if not self._ready.wait(START_SECONDS):
            raise VisardError(f"Flower's simulation did not start within {START_SECONDS:g} s")
        while not self._nodes and self._error is None:
            ids = sorted(self.grid.get_node_ids())
            if len(ids) == len(self._clients):
                self._nodes = dict(zip(self._clients, ids, strict=True))
            else:
                self._over.wait(0.05)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise VisardError(f"Flower's simulation failed: {one_line(self._error.__cause__ or self._error)}")

    def node_of(self, client: ClientId) -> int | None:
        self._check()
        return self._nodes.get(client)

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)


def client_app(recipe: Recipe, states: str, encrypt_with: str | None = None) -> ClientApp:
    """The ClientApp of an actor: a thin shell around a party."""
    app = ClientApp()

    @app.query()
    def query(message: Message, _: Context) -> Message:
        header, payload = _party(recipe, states, encrypt_with).do(*parts(message))
        return Message(record(header, payload), reply_to=message)

    return app


def _party(recipe: Recipe, states: str, encrypt_with: str | None) -> Party:
    key = (recipe.factory, states)
    if key not in _parties:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        make = recipe.function()
        packs = Packs(Path(states), Key.load(encrypt_with))
        _parties[key] = Party(lambda *_: make(), PackStates(packs, shared=True), None, all_local=True)
    return _parties[key]
