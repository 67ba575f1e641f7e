"""`visard client`: take part in runs as one party, write its policy, list its runs and forget them."""

from __future__ import annotations

import json
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from visard.cli import options
from visard.cli.console import say, table
from visard.cli.deploy import HealthOption, Log, LogOption, need_flower, own_folder, reporting, take_part
from visard.errors import UsageError, did_you_mean
from visard.files import PRIVATE, only_user, write_atomically
from visard.processes import Recipe

client = typer.Typer(invoke_without_command=True)
State = Annotated[Path, typer.Option(help="the party's folder of states and models")]
NEAR = 0.25  # largest distance of weights in a run that begins with pinned ones, which move less than new ones
ANSWERS = {"yes": True, "y": True, "no": False, "n": False}


@client.callback()
def serve(
    context: typer.Context,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the server")] = None,
    keys: Annotated[Path | None, typer.Option(help="the folder of its key (visard keys request)")] = None,
    node: Annotated[str | None, typer.Option(help="the number of this party")] = None,
    role: Annotated[list[str] | None, typer.Option(help="the client of the run that it is (may repeat)")] = None,
    state: Annotated[Path | None, typer.Option(help="a folder for this party's states and models")] = None,
    data: Annotated[str | None, typer.Option(help="its face set: a folder or a name, or 'synthetic'")] = None,
    partition: Annotated[
        Path | None, typer.Option(help="the partition.json of the run, where all parties share one face set")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="a TOML file of what this party allows (visard client policy writes one)")
    ] = None,
    trunk: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="a model file of this party: a run that freezes a part of it (model.train) need not send that part",
        ),
    ] = None,
    require: Annotated[Path | None, typer.Option(hidden=True)] = None,
    poll: Annotated[
        float, typer.Option(min=0.05, max=600, help="seconds between two calls to the server when idle")
    ] = 1.0,
    encrypt_with: options.EncryptWith = None,
    device: Annotated[
        str, typer.Option(help="where to compute, whatever the run says: cpu, cuda, cuda:N, xpu, mps, or auto")
    ] = "auto",
    health: HealthOption = "",
    log: LogOption = Log.text,
) -> None:
    """Take part in runs as one party. Pictures and states stay on this machine. Runs until Ctrl-C.

    Without --policy it shows at the terminal what a new run asks for, and waits for a yes.

    Examples:

      visard client --server server.example:9443 --keys node-1 --node 1 --role house-1 --data faces --state mine
      --policy policy.toml

      visard client --server server.example:9443 --keys node-1 --node 1 --role house-1 --data faces --state mine
      --policy policy.toml --device cuda:1 --health 9080 --log json
    """
    if context.invoked_subcommand is not None:
        return
    if require is not None:
        raise UsageError(f"--require is now --policy: add methods = [...] to {require} and give it with --policy")
    given = {"--server": server, "--keys": keys, "--node": node, "--role": role, "--state": state, "--data": data}
    if missing := [name for name, value in given.items() if not value]:
        raise UsageError(f"{missing[0]} is missing (visard client --help)")
    assert server is not None
    assert keys is not None
    assert node is not None
    assert role is not None
    assert state is not None
    assert data is not None
    need_flower()
    from visard.deployment.certificates import NAME
    from visard.deployment.policy import Policy

    for name in role:
        if not NAME.fullmatch(name):
            raise UsageError(f"--role {name!r}: letters, digits and . ~ - _ alone, at most 100")
    data = data if data == "synthetic" or not Path(data).is_dir() else str(Path(data).absolute())
    file = str(partition.absolute()) if partition else None
    if file is not None and not Path(file).is_file():
        raise UsageError(f"no partition at {partition}")
    allowed = Policy.load(policy).model_dump(mode="json") if policy else None
    home = own_folder(state)
    ask = agree if sys.stdin.isatty() and sys.stdout.isatty() else None
    if allowed is None and ask is None and not any((home / "consents").glob("*.toml")):
        from visard.deployment.consent import HOW

        raise UsageError(f"there is no policy and no terminal to ask at: {HOW}")
    if trunk is not None and not trunk.is_file():
        raise UsageError(f"--trunk {trunk}: there is no such file")
    files = {"encrypt_with": encrypt_with, "trunk": trunk}
    own = {name: str(path.absolute()) for name, path in files.items() if path}
    if device not in ("auto", "cpu"):  # which always exist; for others torch is asked first
        from visard.numerics import resolve

        resolve(device)
    own["device"] = device
    recipe = Recipe("visard.deployment.join:world_of_party", {"data": data, "file": file, "clients": role} | own)
    with reporting(log):
        take_part(server, keys, node, recipe, home, poll, allowed, ask, encrypt_with, health, log)


def agree(text: str) -> bool:
    """Show a question and wait for yes or no."""
    say("")
    say(text)
    say("")
    while True:
        try:
            word = input("Take part in this run? (yes or no) ").strip().lower()
        except EOFError:
            return False
        if word in ANSWERS:
            return ANSWERS[word]


@client.command("policy")
def policy(
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("policy.toml"),
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="a method to take part in (may repeat): no questions"),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="a kind that may leave beside weights, metric and count (may repeat)")
    ] = None,
    start: Annotated[
        list[Path] | None, typer.Option(metavar="MODEL", help="a model file that a run must begin with (may repeat)")
    ] = None,
    known: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FINGERPRINT", help="the key of a party that counts as one (visard keys show; may repeat)"
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="most rounds of a run")] = None,
    parties: Annotated[int | None, typer.Option(min=1, help="fewest parties in an average")] = None,
    distance: Annotated[
        float | None, typer.Option(help="how far weights may move from round to round, relative to their norm")
    ] = None,
    days: Annotated[float | None, typer.Option(help="days after which a quiet run is forgotten; 0: never")] = None,
) -> None:
    """Write down what this party allows: a file for visard client --policy.

    Asks questions, with safe default answers, or takes the answers from the options if --allow is given.

    Examples:

      visard client policy

      visard client policy --allow fedavg --kind statistic --out policy.toml
    """
    from visard.deployment.policy import SAFE, Bounds, Policy

    if out.exists():
        raise UsageError(f"{out} exists already: give another --out, or edit it")
    listed = json.loads((resources.files("visard.methods") / "listing.json").read_text())
    if not allow:
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask at: name what is allowed, for example --allow fedavg")
        allow, kind, bounds, files, days = interview(listed)
        start = [Path(file) for file in files]
    else:
        distance = NEAR if start and distance is None else distance
        bounds = {"rounds": rounds, "parties": parties, "distance": distance}
    for method in allow:
        if method not in listed and ":" not in method:
            raise UsageError(f"--allow {method}: unknown method{did_you_mean(method, listed)}")
    days = 30.0 if days is None else days
    tree: dict[str, Any] = {
        "methods": list(dict.fromkeys(allow)),
        "kinds": list(dict.fromkeys([*SAFE, *(kind or [])])),
        "known": list(dict.fromkeys(known or [])),
        "bounds": Bounds().model_dump(mode="json") | {k: v for k, v in bounds.items() if v is not None},
        "weights": {"start": [digest_of_file(file) for file in start or []], "frozen": []},
        "protect": {"batch_norm_at_home": False, "secure_aggregation": False},
        "retention": {"days": days} if days else {},
    }
    text = Policy.parse(tree, "visard client policy").to_toml()
    write_atomically(out, HEADING + text, PRIVATE, parents=True)
    say(f"wrote {out}; use it with: visard client --policy {out} ...")
    for method in allow:
        if lacking := [k for k in listed.get(method, {}).get("discloses", []) if k not in tree["kinds"]]:
            say(f"{method}: runs that would send {' or '.join(lacking)} are refused (kinds)")


HEADING = """# What this party allows, for visard client --policy. Pinned weights (weights.start) bind the first round:
# later ones are held by bounds.distance, one round at a time. Every entry: docs/policy.md.
"""


def interview(listed: dict[str, Any]) -> tuple[list[str], list[str], dict[str, Any], list[str], float]:
    """Ask for methods, more kinds, bounds, model files and days."""
    from visard.deployment.policy import SAFE, Bounds
    from visard.disclosure import Disclosure

    own = {name: about for name, about in listed.items() if not about["centralises"]}
    table("Methods in which pictures stay at home", ("name", "what"), [(n, a["title"]) for n, a in own.items()], 2)
    while True:
        said = typer.prompt("Which may this party take part in? (names, separated by commas)", default="fedavg")
        methods = [name.strip() for name in said.split(",") if name.strip()]
        if unknown := [name for name in methods if name not in listed and ":" not in name]:
            say(f"unknown method {unknown[0]!r}{did_you_mean(unknown[0], listed)}")
        elif methods:
            break
    kinds = []
    for kind in Disclosure:
        users = [n for n in methods if kind.value in listed.get(n, {}).get("discloses", ()) or n not in listed]
        if users and kind.value not in SAFE:
            say(f"\n{kind.value}: {kind.what}. {kind.reveals} ({', '.join(users)})")
            if typer.confirm(f"May {kind.value} leave this machine?", default=False):
                kinds.append(kind.value)
    say("")
    default = Bounds()
    bounds: dict[str, Any] = {
        "rounds": typer.prompt("Most rounds of a run", default=default.rounds, type=int),
        "parties": typer.prompt("Fewest parties in an average", default=default.parties, type=int),
        "pictures": typer.prompt("Fewest training pictures behind a reply", default=default.pictures, type=int),
        "batch": typer.prompt("Fewest pictures in a gradient step", default=default.batch, type=int),
    }
    say("\nA server that chooses the weights can choose them so that replies show faces.")
    file = typer.prompt("A model file that a run must begin with (empty: any weights)", default="", show_default=False)
    bounds["distance"] = typer.prompt(
        "How far weights may move from round to round, relative to their norm",
        default=NEAR if file.strip() else default.distance,
        type=float,
    )
    days = typer.prompt("Days after which a quiet run is forgotten (0: never)", default=30.0, type=float)
    return methods, kinds, bounds, [file] if file.strip() else [], days


def digest_of_file(path: Path) -> str:
    """The digest of the weights in a model file, as a run sends them."""
    from visard.deployment.policy import digest_of
    from visard.models.files import read_model, start

    spec = read_model(path)[1]
    return digest_of(start(path, spec["model"], None, int(spec["size"]))[1])


@client.command("runs")
def runs(state: State) -> None:
    """List the runs of which this party keeps states or agreements.

    Example: visard client runs --state mine
    """
    from visard.deployment.state_folder import StateFolder

    folder = StateFolder(_existing(state))
    table(
        "Runs of this party",
        ("run", "method", "began", "last asked", "requests", "models"),
        [
            (run, record.method, _day(record.begun), _day(record.used), record.requests, len(folder.models_of(run)))
            for run, record in folder.runs().items()
        ],
        2,
    )


@client.command("forget")
def forget(
    run: Annotated[str, typer.Argument(help="the run's id, or how it begins (visard client runs)")],
    state: State,
    models: Annotated[bool, typer.Option("--models", help="remove the party's models of the run too")] = False,
) -> None:
    """Remove what this party keeps of a run. The party cannot take part in this run again.

    Example: visard client forget 3f9a --state mine
    """
    from visard.deployment.state_folder import StateFolder

    home = _existing(state)
    with only_user(home):
        folder = StateFolder(home)
        found = folder.find(run)
        kept = folder.models_of(found)
        counts = folder.forget(found, models)
    removed = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no files"
    say(f"forgot run {found}: removed {removed}")
    if kept and not models:
        say(f"kept its {'models' if len(kept) > 1 else 'model'}: {', '.join(map(str, kept))} (--models removes them)")


def _existing(state: Path) -> Path:
    if not (state / "states").is_dir():
        raise UsageError(f"--state {state}: no party's folder (there is no {state / 'states'})")
    return state


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"
