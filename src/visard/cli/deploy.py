"""`visard keys`, `visard server`, `visard client`: a deployment on Flower, with TLS and node keys."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from visard.cli import options
from visard.cli.console import say, table
from visard.errors import UsageError
from visard.files import only_user
from visard.processes import Recipe

if TYPE_CHECKING:
    from visard.deployment.flower.client import Fleet
    from visard.deployment.front import Front
    from visard.deployment.sent import Sent

LIMITS = "Limits at the port"

keys = typer.Typer(help="Make keys: of a deployment, or a file to encrypt with.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Make keys: of a deployment, or a file to encrypt with."""


@keys.command("make")
def make(
    out: Annotated[Path, typer.Option(help="an empty or new folder")],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="how many parties")],
    host: Annotated[list[str], typer.Option(help="name or address that the parties reach the server by (may repeat)")],
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=ROLE", help="a role for this node's key alone (may repeat); a key has no others"),
    ] = None,
) -> None:
    """Make a CA, the server's certificate and a key for each party, and say which file goes where.

    Example: visard keys make --out keys --nodes 2 --host server.example --role 1=house-1 --role 2=house-2
    """
    _require()
    from visard.deployment.keys import Assignment, make_keys

    told = make_keys(out, nodes, host, Assignment.parse(role or [], nodes))
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in told.items()])


@keys.command("add")
def add(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    out: Annotated[Path, typer.Option(help="an empty or new folder for the party's key")],
    role: Annotated[list[str] | None, typer.Option(help="a role for this key alone (may repeat)")] = None,
) -> None:
    """Make a key for one more party; the server knows it after a restart.

    Example: visard keys add --keys keys/server --out node-3 --role house-3
    """
    _require()
    from visard.deployment.keys import add_party

    told = add_party(keys, out, role or [])
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in told.items()])


@keys.command("bind")
def bind(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    role: Annotated[list[str], typer.Option(metavar="NODE=ROLE", help="a role for this node's key alone (may repeat)")],
) -> None:
    """Bind roles to keys that exist; the server knows them after a restart.

    Example: visard keys bind --keys keys/server --role 3=house-3
    """
    _require()
    from visard.deployment.keys import bind_roles

    bound = bind_roles(keys, role)
    table("Roles", ("node", "its roles"), [(party, ", ".join(clients)) for party, clients in bound.of.items()])


@keys.command("file")
def key_file(out: Annotated[Path, typer.Option(help="the file to write")]) -> None:
    """Make a key file for --encrypt-with: 32 random bytes that only you can read.

    Example: visard keys file --out my.key
    """
    from visard.at_rest import Key

    Key.make(out)
    _say(f"made {out}: keep a copy elsewhere, what is encrypted with it is lost without it")


def server(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    state: Annotated[Path, typer.Option(help="a folder of the server; visard run --server takes it")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port that the parties reach")],
    host: Annotated[str, typer.Option(help="the address to listen on")] = "0.0.0.0",
    connections: Annotated[
        int, typer.Option(min=1, rich_help_panel=LIMITS, help="connections without a key at once, in all")
    ] = 4096,
    address_connections: Annotated[
        int, typer.Option(min=1, rich_help_panel=LIMITS, help="connections without a key at once, from one address")
    ] = 2048,
    party_connections: Annotated[
        int, typer.Option(min=1, rich_help_panel=LIMITS, help="connections at once with the key of one party")
    ] = 32,
    handshake_seconds: Annotated[
        float, typer.Option(min=0.1, rich_help_panel=LIMITS, help="seconds until the TLS connection stands")
    ] = 10.0,
    header_seconds: Annotated[
        float, typer.Option(min=0.1, rich_help_panel=LIMITS, help="seconds for the header of a request")
    ] = 10.0,
    request_seconds: Annotated[
        float, typer.Option(min=1.0, rich_help_panel=LIMITS, help="seconds for the rest of a request and its answer")
    ] = 300.0,
    header_bytes: Annotated[
        int, typer.Option(min=4096, rich_help_panel=LIMITS, help="length of the header of a request")
    ] = 2**14,
    body_bytes: Annotated[
        int, typer.Option(min=6 * 2**20, rich_help_panel=LIMITS, help="length of the body of a request")
    ] = 2**23,
) -> None:
    """Let parties connect: TLS and registered node keys only. Runs until Ctrl-C.

    Connections that show no registered key take one another's place where there are too many, never a party's.

    Example: visard server --keys keys/server --port 9443 --state server-state
    """
    _require()
    from visard.deployment.door import Limits
    from visard.deployment.flower.server import serve
    from visard.deployment.keys import ServerKeys

    loaded = ServerKeys.load(keys)
    state = _own_folder(state)

    limits = Limits(
        connections, address_connections, party_connections, handshake_seconds, header_seconds, request_seconds,
        header_bytes, body_bytes,
    )  # fmt: skip

    def ready() -> None:
        _say(f"listening on {host}:{port} for {len(loaded.parties)} registered nodes")
        if idle := [party for party in loaded.parties if not loaded.assignment.of.get(party)]:
            more = " ..." if len(idle) > 5 else ""
            _say(
                f"no role is bound to {', '.join(idle[:5])}{more}: such a node takes part in nothing (visard keys bind)"
            )
        _say(f"start a run with: visard run PRESET --engine flower --server {state}")

    serve(loaded, state, host, port, ready, _say, limits)
    _say("stopped")


def client(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="the server")],
    keys: Annotated[Path, typer.Option(help="the folder `node-N` that visard keys make wrote")],
    node: Annotated[str, typer.Option(help="the number of this party")],
    role: Annotated[list[str], typer.Option(help="the client of the run that this party is (may repeat)")],
    state: Annotated[Path, typer.Option(help="a folder for this party's states and models")],
    data: Annotated[str, typer.Option(help="the party's face set: a folder or a name, or 'synthetic'")],
    partition: Annotated[
        Path | None, typer.Option(help="the partition.json of the run, where all parties share one face set")
    ] = None,
    require: Annotated[
        Path | None, typer.Option(help="a TOML file of what this party insists on, whatever a run says")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, max=600, help="seconds between looks for work when idle")] = 1.0,
    encrypt_with: options.EncryptWith = None,
) -> None:
    """Take part in runs as one party. Pictures and states stay on this machine. Runs until Ctrl-C.

    Example: visard client --server server.example:9443 --keys node-1 --node 1 --role house-1 --data faces --state mine
    """
    _require()
    from visard.deployment.keys import NAME
    from visard.deployment.requirements import Requirements

    for name in role:
        if not NAME.fullmatch(name):
            raise UsageError(f"--role {name!r}: letters, digits and . ~ - _ alone, at most 100")
    data = data if data == "synthetic" or not Path(data).is_dir() else str(Path(data).absolute())
    file = str(partition.absolute()) if partition else None
    if file is not None and not Path(file).is_file():
        raise UsageError(f"no partition at {partition}")
    required = asdict(Requirements.load(require)) if require else None
    arguments = {"data": data, "file": file, "clients": role, "required": required}
    recipe = Recipe("visard.deployment.join:world_of_party", arguments)
    take_part(server, keys, node, recipe, _own_folder(state), poll, encrypt_with)


def take_part(
    server: str, keys: Path, node: str, recipe: Recipe, state: Path, poll: float, encrypt_with: Path | None = None
) -> None:
    """Answer requests until SIGINT or SIGTERM; states are encrypted if a key is named."""
    from visard.at_rest import Key
    from visard.deployment.flower.client import Fleet
    from visard.deployment.front import Front
    from visard.deployment.keys import PartyKeys
    from visard.deployment.sent import Sent

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--server {server}: must look like HOST:PORT")
    own = PartyKeys.load(keys, node)
    key = Key.load(encrypt_with)  # a wrong one is said at once
    fleet = Fleet(server, own.ca, own.private, _say)
    with only_user(state):
        front = Front(recipe, state, _say, key.path if key else None)
        sent = Sent(state, server, node, lambda: front.carried)
        _answer(fleet, front, poll, sent)


def _answer(fleet: Fleet, front: Front, poll: float, sent: Sent) -> None:
    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM or fleet.stopping:
            front.stop()
        else:
            _say("stopping after the step at hand (Ctrl-C again stops at once)")
        fleet.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        fleet.serve(front.do, poll, sent)
    finally:
        front.close()
        sent.close()
    _say("stopped")


def _own_folder(path: Path) -> Path:
    """A folder that only this account can read."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}") from None
    if path.stat().st_mode & 0o077:
        raise UsageError(f"--state {path}: other accounts can open this folder; give a new one, or: chmod 700 {path}")
    return path.absolute()


def _require() -> None:
    from visard.deployment import flower

    flower.require()


def _say(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}")
