"""`visard keys`, `visard server`, and what `visard client` does: a deployment on Flower, with TLS and node keys."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli.console import say, table
from visard.errors import UsageError
from visard.files import only_user
from visard.processes import Recipe

if TYPE_CHECKING:
    from visard.deployment.flower.client import Fleet
    from visard.deployment.front import Front
    from visard.deployment.sent import Sent


def _limit(least: float, text: str) -> Any:
    """An option for a limit at the port."""
    return typer.Option(min=least, rich_help_panel="Limits at the port", help=text)


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
    need_flower()
    from visard.deployment.keys import Assignment, make_keys

    folders = make_keys(out, nodes, host, Assignment.parse(role or [], nodes))
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in folders.items()])


@keys.command("add")
def add(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    out: Annotated[Path, typer.Option(help="an empty or new folder for the party's key")],
    role: Annotated[list[str] | None, typer.Option(help="a role for this key alone (may repeat)")] = None,
) -> None:
    """Make a key for one more party; the server knows it after a restart.

    Example: visard keys add --keys keys/server --out node-3 --role house-3
    """
    need_flower()
    from visard.deployment.keys import add_party

    folders = add_party(keys, out, role or [])
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in folders.items()])


@keys.command("bind")
def bind(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    role: Annotated[list[str], typer.Option(metavar="NODE=ROLE", help="a role for this node's key alone (may repeat)")],
) -> None:
    """Bind roles to keys that exist; the server knows them after a restart.

    Example: visard keys bind --keys keys/server --role 3=house-3
    """
    need_flower()
    from visard.deployment.keys import bind_roles

    bound = bind_roles(keys, role)
    table("Roles", ("node", "its roles"), [(party, ", ".join(clients)) for party, clients in bound.of.items()])


@keys.command("show")
def show(
    keys: Annotated[Path, typer.Option(help="a folder that visard keys make wrote, of the server or of a party")],
) -> None:
    """Show the fingerprints of the keys in a folder: a policy names those of the parties it knows (known).

    Example: visard keys show --keys keys/server
    """
    from visard.deployment.keys import fingerprints

    table("Keys", ("node", "fingerprint"), list(fingerprints(keys).items()))


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
    connections: Annotated[int, _limit(1, "connections without a key at once, in all")] = 4096,
    address_connections: Annotated[int, _limit(1, "connections without a key at once, from one address")] = 2048,
    party_connections: Annotated[int, _limit(1, "connections at once with the key of one party")] = 32,
    handshake_seconds: Annotated[float, _limit(0.1, "seconds until the TLS connection stands")] = 10.0,
    header_seconds: Annotated[float, _limit(0.1, "seconds for the header of a request")] = 10.0,
    request_seconds: Annotated[float, _limit(1.0, "seconds for the rest of a request and its answer")] = 300.0,
    header_bytes: Annotated[int, _limit(4096, "length of the header of a request")] = 2**14,
    body_bytes: Annotated[int, _limit(6 * 2**20, "length of the body of a request")] = 2**23,
) -> None:
    """Let parties connect: TLS and registered node keys only. Runs until Ctrl-C.

    Connections that show no registered key take one another's place where there are too many, never a party's.

    Example: visard server --keys keys/server --port 9443 --state server-state
    """
    need_flower()
    from visard.deployment.door import Limits
    from visard.deployment.flower.server import serve
    from visard.deployment.keys import ServerKeys

    loaded = ServerKeys.load(keys)
    state = own_folder(state)

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


def take_part(
    server: str,
    keys: Path,
    node: str,
    recipe: Recipe,
    state: Path,
    poll: float,
    policy: dict[str, Any] | None,
    ask: Callable[[str], bool] | None = None,
    encrypt_with: Path | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; without a policy those that somebody agrees to, whom `ask` asks.

    States are encrypted if a key is named.
    """
    from visard.at_rest import Key
    from visard.deployment.flower.client import Fleet
    from visard.deployment.front import Consent, Front
    from visard.deployment.keys import PartyKeys
    from visard.deployment.sent import Sent

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--server {server}: must look like HOST:PORT")
    own = PartyKeys.load(keys, node)
    key = Key.load(encrypt_with)  # a wrong one is said at once
    fleet = Fleet(server, own.ca, own.private, _say)
    with only_user(state):
        front = Front(recipe, state, _say, policy, own.fingerprint, key.path if key else None, own.file)
        sent = Sent(state, server, node, lambda: front.carried)
        do = front.do
        if policy is None:
            do = Consent(front.do, state, f"{server}, CA fingerprint {own.fingerprint}", _say, ask).do
        _answer(fleet, front, do, poll, sent)


def _answer(
    fleet: Fleet, front: Front, do: Callable[[bytes, bytes], tuple[bytes, bytes]], poll: float, sent: Sent
) -> None:
    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM or fleet.stopping:
            front.stop()
        else:
            _say("stopping after the step at hand (Ctrl-C again stops at once)")
        fleet.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        fleet.serve(do, poll, sent)
    finally:
        front.close()
        sent.close()
    _say("stopped")


def own_folder(path: Path) -> Path:
    """A folder that only this account can read."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make the folder {path}: {error.strerror}") from None
    if path.stat().st_mode & 0o077:
        raise UsageError(f"--state {path}: other accounts can open this folder; give a new one, or: chmod 700 {path}")
    return path.absolute()


def need_flower() -> None:
    """One clear line where Flower is not installed."""
    from visard.deployment import flower

    flower.require()


def _say(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}")
