"""`visard keys`: make, sign, renew and revoke the keys of a deployment; make key files for encryption."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from visard.cli.console import mark, say, table
from visard.cli.deploy import need_flower
from visard.errors import UsageError, VisardError

HELP = "Make, sign, renew and revoke the keys of a deployment; make a key file for encryption."
keys = typer.Typer(
    help=HELP,
    no_args_is_help=True,
)


@keys.callback()
def _keys() -> None:
    """Make, sign, renew and revoke the keys of a deployment; make a key file for encryption."""


@keys.command("make")
def make(
    out: Annotated[Path, typer.Option(help="an empty or new folder")],
    nodes: Annotated[int, typer.Option(min=0, max=10_000, help="for a trial: how many parties to make keys for")],
    host: Annotated[list[str], typer.Option(help="name or address at which parties reach the server (may repeat)")],
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE=ROLE", help="a role for this node's key alone (may repeat); a key has no others"),
    ] = None,
) -> None:
    """Make a CA and the server's certificate; for a trial, a key for each party too. Prints where each file belongs.

    Between real parties, each makes its own key with visard keys request, and --nodes is 0.

    Examples:

      visard keys make --out keys --nodes 0 --host server.example

      visard keys make --out keys --nodes 2 --host localhost --role 1=house-1 --role 2=house-2
    """
    need_flower()
    from visard.deployment.keys import Assignment, make_keys

    folders = make_keys(out, nodes, host, Assignment.parse(role or [], nodes))
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in folders.items()], 2)


@keys.command("add")
def add(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    out: Annotated[Path, typer.Option(help="an empty or new folder for the party's key")],
    role: Annotated[list[str] | None, typer.Option(help="a role for this key alone (may repeat)")] = None,
) -> None:
    """Make a key for one more party of a trial; the server takes it while it runs.

    Example: visard keys add --keys keys/server --out node-3 --role house-3
    """
    need_flower()
    from visard.deployment.keys import add_party

    folders = add_party(keys, out, role or [])
    table("Which folder goes where", ("folder", "what to do with it"), [(str(k), v) for k, v in folders.items()], 2)


@keys.command("bind")
def bind(
    keys: Annotated[Path, typer.Option(help="the folder `server` that visard keys make wrote")],
    role: Annotated[list[str], typer.Option(metavar="NODE=ROLE", help="a role for this node's key alone (may repeat)")],
) -> None:
    """Bind more roles to keys that exist; the server takes them while it runs, for the next run.

    Example: visard keys bind --keys keys/server --role 3=house-3
    """
    need_flower()
    from visard.deployment.keys import bind_roles

    bound = bind_roles(keys, role)
    table("Roles", ("node", "its roles"), [(party, ", ".join(clients)) for party, clients in bound.of.items()], 2)


@keys.command("show")
def show(
    keys: Annotated[Path, typer.Option(help="a folder of keys, of the server or of a party")],
) -> None:
    """Show the fingerprints of the keys in a folder: a policy names those of the parties it knows (known).

    For a server's folder also roles, until when each key is valid, and which are not.

    Example: visard keys show --keys keys/server
    """
    import time

    from visard.deployment.keys import ServerKeys, day, fingerprints

    if not (keys / "server.crt").exists():
        for party, fingerprint in fingerprints(keys).items():
            say(f"{party}: {fingerprint}")
        return
    held, now = ServerKeys.load(keys), time.time()
    listed, roles = sorted(held.entries, key=lambda e: e.party), held.assignment.of
    rows = [
        (e.party, e.fingerprint[:8], ", ".join(roles.get(e.party, ())), held.refusal(e, now) or day(e.ends))
        for e in listed
    ]
    table("Keys", ("node", "key", "its roles", "ends"), rows, 4)
    say("fingerprints of the keys:")
    for e in listed:  # whole, to be copied
        say(f"{e.party}: {e.fingerprint}")
    for problem in held.problems:
        mark("refused", problem)


@keys.command("request")
def ask(
    out: Annotated[Path, typer.Option(help="a folder for this party's key; the key stays there")],
    node: Annotated[str, typer.Option(help="the number or name of this party, as agreed with the operator")],
    role: Annotated[list[str] | None, typer.Option(help="the client of the run that it will be (may repeat)")] = None,
) -> None:
    """Make this party's own key, and a request to sign it for the operator of the server. The key never leaves.

    Example: visard keys request --out node-1 --node 1 --role house-1
    """
    from visard.deployment.key_lifecycle import request

    asked = request(out, node, role or [])
    say(f"made {out / f'{asked.party}.key'}, which stays here, and {out / f'{asked.party}.csr'} for the operator")
    say(f"give the operator this fingerprint on another channel than the request: {asked.fingerprint}")


@keys.command("sign")
def sign(
    request: Annotated[Path, typer.Argument(help="what visard keys request or renew made (node-N.csr)")],
    ca: Annotated[Path, typer.Option(help="the folder `ca` that visard keys make wrote")],
    keys: Annotated[Path, typer.Option(help="the folder `server`; a running server takes the entry at once")],
    out: Annotated[Path, typer.Option(help="a folder for what the party gets: ca.crt and its entry")],
    fingerprint: Annotated[str | None, typer.Option(help="as given by the party; any other is refused")] = None,
    role: Annotated[list[str] | None, typer.Option(help="a role (may repeat), instead of those in the request")] = None,
    days: Annotated[float, typer.Option(min=0.0001, max=825, help="how long the entry is valid")] = 90.0,
) -> None:
    """Sign the request of a party, or refuse it: show what it asks for, and wait for a yes.

    With --fingerprint it does not ask. A renewal, which the party's present key has signed too, needs neither.

    Example: visard keys sign node-1.csr --ca keys/ca --keys keys/server --out for-party-1 --fingerprint 1f0c...
    """
    from visard.deployment import key_lifecycle
    from visard.deployment.certificates import read_request
    from visard.deployment.keys import ServerKeys, bytes_of, day

    asked, held = read_request(bytes_of(request), request), ServerKeys.load(keys)
    renewal = key_lifecycle.check_request(asked, held)
    clients = asked.clients if role is None else tuple(role)
    say(f"{asked.party} asks for {', '.join(clients) or 'no role'} with the key {asked.fingerprint}")
    given = asked.fingerprint if fingerprint is None else re.sub("[: ]", "", fingerprint).lower()
    if given != asked.fingerprint:
        if given and asked.fingerprint.startswith(given):
            raise UsageError(f"--fingerprint {fingerprint}: give the whole of it, {len(asked.fingerprint)} characters")
        raise VisardError(f"{request} is refused: its key is not the one with the fingerprint {fingerprint}")
    same = set(clients) <= set(held.assignment.of.get(asked.party, ()))
    if fingerprint is None and not (renewal and same):
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask at: give the --fingerprint that you have from the party")
        if not agree("Did you get this fingerprint from the party itself, and may it take part? (yes or no) "):
            raise VisardError(f"{request} is refused: nothing was signed")
    entry = key_lifecycle.sign(asked, key_lifecycle.load_ca(ca), held, out, clients, days)
    say(f"signed until {day(entry.ends)}; send {out}/ca.crt and {out}/{asked.party}.crt to the party")


@keys.command("renew")
def renew(
    keys: Annotated[Path, typer.Option(help="the party's folder (with --node), or the server's (with --ca)")],
    node: Annotated[str | None, typer.Option(help="the number or name of this party")] = None,
    ca: Annotated[Path | None, typer.Option(help="the folder `ca`, to renew the server's certificate")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="name or address of the server (may repeat; default: as before)")
    ] = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="a new key for the server too")] = False,
) -> None:
    """Renew a party's key, or the server's certificate, while they run.

    A party gets a new key, and a request that its present key has signed. It continues with the present key until the
    signed entry is in its folder, then switches to the new one, without a restart. A server gets a new certificate.

    Examples:

      visard keys renew --keys node-1 --node 1

      visard keys renew --keys keys/server --ca keys/ca
    """
    from visard.deployment import key_lifecycle
    from visard.deployment.keys import day

    if (node is None) == (ca is None):
        raise UsageError("give --node to renew a party's key, or --ca to renew the server's certificate")
    if ca is not None:
        ends = key_lifecycle.renew_server(keys, key_lifecycle.load_ca(ca), host or [], new_key)
        say(f"the server's certificate ends {day(ends)}")
        return
    asked = key_lifecycle.renew_party(keys, str(node))
    say(f"made a new key, which stays here, and {keys / asked.party}.csr for the operator")
    say(f"once the signed {asked.party}.crt is in {keys}, a running party switches to the new key")
    say(f"its fingerprint, for policies that name it: {asked.fingerprint}")


@keys.command("revoke")
def revoke(
    keys: Annotated[Path, typer.Option(help="the folder `server`")],
    node: Annotated[str, typer.Option(help="the number or name of the party")],
    key: Annotated[str, typer.Option(help="one key, by the beginning of its fingerprint (default: all its keys)")] = "",
    reason: Annotated[str, typer.Option(help="the reason, which the party sees too")] = "",
) -> None:
    """Revoke a party's keys for ever; a running server closes its connections at once.

    Example: visard keys revoke --keys keys/server --node 1 --reason "the laptop was stolen"
    """
    from visard.deployment import key_lifecycle

    for entry in key_lifecycle.revoke(keys, f"node-{node}", key, reason):
        say(f"revoked {entry.fingerprint} of {entry.party}")


def agree(question: str) -> bool:
    """Ask for yes or no."""
    while True:
        try:
            word = input(question).strip().lower()
        except EOFError:
            return False
        if word in ("yes", "no"):
            return word == "yes"


@keys.command("file")
def key_file(out: Annotated[Path, typer.Option(help="the file to write")]) -> None:
    """Make a key file for --encrypt-with: 32 random bytes that only you can read.

    Example: visard keys file --out my.key
    """
    from visard.at_rest import Key

    Key.make(out)
    say(f"made {out}: keep a copy elsewhere, files encrypted with it are lost without it")
