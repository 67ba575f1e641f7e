"""`visard server`, and what `visard client` does: a deployment on Flower, with TLS and node keys."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli.console import say
from visard.errors import UsageError
from visard.files import only_user
from visard.processes import Recipe

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from visard.deployment.flower.client import Fleet
    from visard.deployment.front import Front
    from visard.deployment.keys import PartyKeys
    from visard.deployment.sent import Sent


def _limit(least: float, text: str) -> Any:
    """An option for a limit at the port."""
    return typer.Option(min=least, rich_help_panel="Limits at the port", help=text)


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
    from visard.deployment.keys import SOON, PartyKeys, day
    from visard.deployment.sent import Sent

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--server {server}: must look like HOST:PORT")
    own = PartyKeys.load(keys, node)
    key = Key.load(encrypt_with)  # a wrong one is said at once
    if own.ends - time.time() < SOON:
        _say(f"the entry of this node's key ends {day(own.ends)}: visard keys renew")
    with only_user(state):
        front = Front(recipe, state, _say, policy, own.fingerprint, key.path if key else None, own.file)
        fleet = Fleet(server, own.ca, own.private, _say, _new_keys(keys, node, own, front))
        sent = Sent(state, server, node, lambda: front.carried)
        do = front.do
        if policy is None:
            do = Consent(front.do, state, f"{server}, CA fingerprint {own.fingerprint}", _say, ask).do
        _answer(fleet, front, do, poll, sent)


def _new_keys(folder: Path, node: str, own: PartyKeys, front: Front) -> Callable[[], ec.EllipticCurvePrivateKey | None]:
    """Looks whether a new key of the party has got its entry; the worker, which signs with it too, is started anew."""
    from visard.deployment.keys import PartyKeys

    held, seen, said = own, own.stamp(), ""

    def renewed() -> ec.EllipticCurvePrivateKey | None:
        nonlocal held, seen, said
        if held.stamp() == seen:
            return None
        try:
            found = PartyKeys.load(folder, node)
        except UsageError as error:  # half copied, or of another key
            if str(error) != said:
                _say(str(error))
            said = str(error)
            return None
        before, held, seen, said = held, found, found.stamp(), ""
        if found.private.public_key() == before.private.public_key():
            return None
        front.close()
        return found.private

    return renewed


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
