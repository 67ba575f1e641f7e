"""`visard server`, and what `visard client` does: a deployment on Flower, with TLS and node keys."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli.console import say
from visard.errors import UsageError, VisardError, one_line
from visard.files import only_user
from visard.processes import Recipe
from visard.text import line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from visard.deployment.flower.client import Fleet
    from visard.deployment.keys import PartyKeys
    from visard.deployment.party_ledger import PartyLedger
    from visard.deployment.supervisor import Do, Supervisor


class Log(StrEnum):
    """How lines of a server or a party look."""

    text = "text"
    json = "json"


Report = Callable[[str], None]
HealthOption = Annotated[
    str,
    typer.Option(
        metavar="[HOST:]PORT",
        help="answer at http://.../health (see visard health), on this machine unless a host is given",
    ),
]
LogOption = Annotated[Log, typer.Option(help="lines as text, or each as a JSON object")]


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
    handshake_seconds: Annotated[float, _limit(0.1, "seconds for the TLS handshake")] = 10.0,
    header_seconds: Annotated[float, _limit(0.1, "seconds for the header of a request")] = 10.0,
    request_seconds: Annotated[float, _limit(1.0, "seconds for the rest of a request and its answer")] = 300.0,
    header_bytes: Annotated[int, _limit(4096, "length of the header of a request")] = 2**14,
    body_bytes: Annotated[int, _limit(6 * 2**20, "length of the body of a request")] = 2**23,
    party_bytes: Annotated[int, _limit(2**20, "bytes of one party's replies that wait at the server")] = 2**32,
    free_bytes: Annotated[int, _limit(0, "bytes of the disk of --state that stay free")] = 2**30,
    health: HealthOption = "",
    log: LogOption = Log.text,
) -> None:
    """Let parties connect: TLS and registered node keys only. Runs until Ctrl-C.

    Where there are too many connections without a registered key, they displace one another, never a party.

    Examples:

      visard server --keys keys/server --port 9443 --state server-state

      visard server --keys keys/server --port 9443 --state server-state --health 9080 --log json
    """
    need_flower()
    from visard.deployment.flower.server import serve
    from visard.deployment.keys import ServerKeys
    from visard.deployment.listener import Limits

    report = reporter(log)
    limits = Limits(
        connections, address_connections, party_connections, handshake_seconds, header_seconds, request_seconds,
        header_bytes, body_bytes, party_bytes, free_bytes,
    )  # fmt: skip

    def ready() -> None:
        report(f"listening on {host}:{port} for {len(loaded.parties)} registered nodes")
        if idle := [party for party in loaded.parties if not loaded.assignment.of.get(party)]:
            more = " ..." if len(idle) > 5 else ""
            report(
                f"no role is bound to {', '.join(idle[:5])}{more}: such a node takes part in nothing (visard keys bind)"
            )
        report(f"start a run with: visard run PRESET --engine flower --server {folder}")

    with reporting(log):
        loaded, folder = ServerKeys.load(keys), own_folder(state)
        serve(loaded, folder, host, port, ready, report, limits, health)
        report("stopped")


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
    health: str = "",
    log: Log = Log.text,
) -> None:
    """Answer requests until SIGINT or SIGTERM; without a policy, `ask` asks before each new run.

    States are encrypted if a key is named.
    """
    report = reporter(log)
    report(f"connecting to {server}")  # at once: what follows takes seconds to import
    from visard.at_rest import Key
    from visard.deployment.consent import Consent
    from visard.deployment.flower.client import Fleet
    from visard.deployment.health import Health
    from visard.deployment.keys import SOON, PartyKeys, day
    from visard.deployment.party_ledger import PartyLedger
    from visard.deployment.supervisor import Supervisor

    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--server {server}: must look like HOST:PORT")
    own = PartyKeys.load(keys, node)
    key = Key.load(encrypt_with)  # fails at once if it is wrong
    if own.ends - time.time() < SOON:
        report(f"the entry of this node's key ends {day(own.ends)}: visard keys renew")
    with only_user(state):
        supervisor = Supervisor(recipe, state, report, policy, own.fingerprint, key.path if key else None, own.file)
        fleet = Fleet(server, own.ca, own.private, report, _new_keys(keys, node, own, supervisor, report), state)
        ledger = PartyLedger(state, server, node, lambda: supervisor.carried)
        do = supervisor.do
        if policy is None:
            do = Consent(supervisor.do, state, f"{server}, CA fingerprint {own.fingerprint}", report, ask).do
        watched = Health(health, fleet.health) if health else None
        try:
            _answer(fleet, supervisor, do, poll, ledger, report)
        finally:
            if watched is not None:
                watched.close()


def _new_keys(
    folder: Path, node: str, own: PartyKeys, supervisor: Supervisor, report: Report
) -> Callable[[], ec.EllipticCurvePrivateKey | None]:
    """A function that returns a new key of the party once its entry is there; the worker, which signs, is restarted."""
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
                report(str(error))
            said = str(error)
            return None
        before, held, seen, said = held, found, found.stamp(), ""
        if found.private.public_key() == before.private.public_key():
            return None
        supervisor.close()
        return found.private

    return renewed


def _answer(fleet: Fleet, supervisor: Supervisor, do: Do, poll: float, ledger: PartyLedger, report: Report) -> None:
    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM or fleet.stopping:
            supervisor.stop()
        else:
            report("stopping after the step at hand (Ctrl-C again stops at once)")
        fleet.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        fleet.serve(do, poll, ledger)
    finally:
        supervisor.close()
        ledger.close()
    report("stopped")


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


def health(
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port of its --health option")],
    host: Annotated[str, typer.Option(help="the address of --health")] = "127.0.0.1",
) -> None:
    """Ask a server or a party for its health; exit code 1 if it is not well.

    Example: visard health --port 9080
    """
    import http.client
    from contextlib import closing

    try:
        with closing(http.client.HTTPConnection(host, port, timeout=5)) as link:
            link.request("GET", "/health")
            answer = link.getresponse()
            say(answer.read(4096).decode(errors="replace").strip())
            well = answer.status == 200
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error
        raise VisardError(f"nothing answers at {host}:{port}: {reason}") from None
    if not well:
        raise typer.Exit(1)


def reporter(log: Log, level: str = "info") -> Report:
    """Says a line with its time, as text or as JSON."""

    def report(text: str) -> None:
        if log is Log.text:
            return say(f"{time.strftime('%H:%M:%S')} {text}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return print(json.dumps({"time": now, "level": level, "text": line(text)}), flush=True)

    return report


@contextmanager
def reporting(log: Log) -> Iterator[None]:
    """In a log of JSON the line of a failure is JSON too."""
    try:
        yield
    except VisardError as error:
        if log is Log.text:
            raise
        reporter(log, "error")(one_line(error))
        raise typer.Exit(error.exit_code) from None
