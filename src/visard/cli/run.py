"""`visard run`, its report, and what settings can name: methods, presets, plug-ins."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli import options
from visard.cli.console import RunWatcher, mark, say, share, table
from visard.cli.watch import PageWatcher
from visard.errors import UsageError, VisardError, did_you_mean
from visard.methods import METHODS
from visard.plugins import BUILT_IN, KINDS, Registry
from visard.presets import about
from visard.presets import presets as all_presets
from visard.text import duration, listing, plural, ranges, size

if TYPE_CHECKING:
    from visard.core import Method
    from visard.report.run_folder import Run
    from visard.runs.replay import Part

# the registries of all that settings can name
REGISTRIES = (
    "visard.methods:METHODS",
    "visard.models:BACKBONES",
    "visard.learning.heads:HEADS",
    "visard.data.partition_kinds:PARTITIONS",
    "visard.data.sources:SOURCES",
    "visard.clustering.cluster:CLUSTERINGS",
    "visard.aggregation.registries:RULES",
    "visard.aggregation.optimisers:OPTIMISERS",
    "visard.aggregation.registries:POSTPROCESSORS",
    "visard.evaluation.metrics:METRICS",
    "visard.runs.trackers:WATCHERS",
)


def run(
    source: Annotated[
        str | None, typer.Argument(metavar="PRESET_OR_TOML", help="a preset's name, a TOML file, or a plug-in's method")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="change a setting: --set method.rounds=5 (may repeat; visard presets PRESET lists them)"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=SET", help="a face set and its role: clients, public, source or test (may repeat)"),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="where client steps run: auto, local, pool, flower")] = None,
    server: Annotated[
        Path | None, typer.Option(help="with --engine flower: the state folder of a running visard server")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run folder (default: runs/<name>)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier run in the folder")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLIENT", help="with --from: leave out this client, as if it had never been there (may repeat)"
        ),
    ] = None,
    origin: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="the folder of the run to repeat, see --without")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="show the run on a web page while it goes on")] = False,
    encrypt_with: options.EncryptWith = None,
    plugin: options.Plugin = None,
) -> None:
    """Train with a method and leave a run folder with metrics, models, ledger and report.

    Examples:

      visard run demo

      visard run fedavg --set method.rounds=5 --set partition.clients=4 --out runs/short

      visard run fedavg --data clients=hospital --data clients=campus --data test=visitors

      visard run fedavg --watch

      visard run --resume --out runs/short

      visard run --resume --out runs/short --set method.rounds=10

      visard run --plugin examples/scaffold.py scaffold

      visard run --without client-003 --from runs/short
    """
    from visard.runs.run import resume as resume_run
    from visard.runs.run import run as run_settings

    if resume and overwrite:
        raise UsageError("--resume continues a run, --overwrite replaces it: give one of them")
    others = [text for text in sets or () if text.partition("=")[0].strip() != "method.rounds"]
    given = {"--set": others, "--data": data, "--engine": engine, "--server": server}
    if source is None and origin is None and (odd := next((name for name, value in given.items() if value), None)):
        raise UsageError(
            f"--resume --out FOLDER continues with the settings in the folder: leave out {odd} "
            "(only more rounds can be set: --set method.rounds=N)"
        )
    if (origin is None) == bool(without):
        raise UsageError("--without CLIENT and --from RUN belong together: give both")
    if origin is not None and without:
        if odd := next(
            (n for n, v in {"PRESET_OR_TOML": source, **given, "--set": sets}.items() if v and n != "--engine"), None
        ):
            raise UsageError(f"--from {origin} has settings of its own: leave out {odd}")
        _run_without(origin, without, engine, out, resume, overwrite, watch, encrypt_with, plugin)
        return
    moved_key = [f"engine.encrypt_with={str(encrypt_with.absolute())!r}"] if encrypt_with else []
    watcher = PageWatcher() if watch else RunWatcher()
    if (
        not sets and (text := all_presets().get(source or "")) is not None
    ):  # its description holds for the preset unchanged
        say(f"{source}: {about(text)}")
    try:
        if source is None:
            if not (resume and out):
                raise UsageError("give a preset or a TOML file (visard presets lists them), or --resume with --out")
            result = resume_run(out, watcher, [*(sets or ()), *moved_key], plugin or ())
        else:
            overrides = [*_sets(data or ()), *(sets or []), *([f"engine.kind={engine}"] if engine else [])]
            overrides += moved_key
            overrides += [f"engine.server={str(server.absolute())!r}"] if server else []
            result = run_settings(
                source, out=out, overrides=overrides, resume=resume, overwrite=overwrite, watcher=watcher,
                plugins=plugin or (),
            )  # fmt: skip
    finally:
        watcher.close()
    show(result)


def _run_without(
    origin: Path,
    without: Sequence[str],
    engine: str | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    watch: bool,
    encrypt_with: Path | None,
    plugin: Sequence[str] | None,
) -> None:
    """Repeat a run without some clients and show what changed; for real parties, list the rounds they took part in."""
    from visard.report import replay as kept
    from visard.runs.replay import replay, settings_of, took_part

    overrides = [f"engine.kind={engine}"] if engine else []
    overrides += [f"engine.encrypt_with={str(encrypt_with.absolute())!r}"] if encrypt_with else []
    if settings_of(origin, (), plugin or ()).real_parties:
        for part in [took_part(origin, client) for client in without]:
            _show_part(part)
        raise VisardError(
            f"{origin} was made with parties that are elsewhere, so it cannot be repeated here: revoke the key of the "
            "party to leave out (visard keys revoke) and start a new run with the others"
        )
    watcher = PageWatcher() if watch else RunWatcher()
    try:
        result = replay(
            origin, without, out=out, overrides=overrides, resume=resume, overwrite=overwrite, watcher=watcher,
            plugins=plugin or (),
        )  # fmt: skip
    finally:
        watcher.close()
    show(result)
    record = kept.read(result) or {}
    rows = [(row.what, row.before, row.after, row.change) for row in kept.changed(result, record)]
    table(kept.title(record), ("", "with", "without", "change"), rows)
    for note in kept.notes(result, record):
        mark("note", note)
    say(f"{origin} is as it was: delete it, and what was made from it, once the new model is in use")


def _show_part(part: Part) -> None:
    stages = dict.fromkeys(stage for stage, _ in part.rounds)
    for stage in stages:
        numbers = [number + 1 for name, number in part.rounds if name == stage]
        sent = sum(left for (name, _), left in part.rounds.items() if name == stage)
        say(f"{part.client}: {stage}: {ranges(numbers)}, {size(sent)} left it")
    if part.refused:
        said = [f"{stage} {ranges([number + 1])}" for stage, number in part.refused]
        say(f"{part.client}: replies that did not count: {listing(said)}")


def _sets(given: Sequence[str]) -> list[str]:
    """The settings that --data stands for: these sets instead of the section [data], and each site a client."""
    if not given:
        return []
    listed = []
    for text in given:
        role, equals, path = text.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--data {text}: must look like clients=SET, public=SET, source=SET or test=SET")
        listed.append(f"{{role = {json.dumps(role.strip())}, path = {json.dumps(path.strip())}}}")
    clients = any(text.partition("=")[0].strip() == "clients" for text in given)
    return [f"data={{sets = [{', '.join(listed)}]}}", *(["partition.kind=sites"] if clients else [])]


def show(result: Run) -> None:
    """The table at the end of a run: metrics of its models, what left the clients, how long it took."""
    from visard.report.disclosure import add_up, judge
    from visard.report.run_folder import absences

    metrics = result.metrics
    how = metrics.get("trained", {})
    part = f" (trained from {how['from']})" if "from" in how else f" (LoRA of rank {how['lora']})" if how else ""
    shown = "change" in metrics and _show_change(result, part)
    rows = [] if shown else [row for name, test in metrics["generic"].items() for row in _generic_rows(name, test)]
    if rows:
        table(f"Generic model on identities that no client has{part}", ("metric", "value", "95 % interval"), rows)
    from visard.evaluation.metrics import doubts

    for name, test in metrics["generic"].items():
        for text in doubts(test):
            mark("caution", f"{name}: {text}")
    if "groups" in metrics:
        from visard.cli.groups import show_groups

        for errors in metrics["groups"].values():
            show_groups(errors)
    summary = metrics["clients"]["summary"]
    if summary:
        table(
            f"Clients on their own held-out pictures{part}",
            ("metric", "mean", "std", "worst", "worst client"),
            [(k, share(v["mean"]), share(v["std"]), share(v["worst"]), v["worst_client"]) for k, v in summary.items()],
        )
    traffic, leaving = metrics["communication"], add_up(result)
    verdict = judge(leaving)
    kinds = [re.split(",| such| over", leaving.name(kind))[0] for kind in leaving.kinds] if leaving else []
    what = f" ({listing(kinds)})" if kinds else ""
    say(
        f"{plural(traffic['rounds'], 'round')} in {duration(result.seconds)}: {size(traffic['bytes_up'])} left the "
        f"clients{what}, {size(traffic['bytes_down'])} went to them"
    )
    if verdict.level == "good":
        say(verdict.title)
    else:
        mark(verdict.level, f"{verdict.title}. {verdict.text}")
    if traffic["bytes_pooled"]:
        mark("pooled", f"{size(traffic['bytes_pooled'])} of the clients' data in one place")
    for warning in (*metrics.get("warnings", ()), *absences(result.events)):
        mark("warning", warning)
    say(f"report: {result.report}")


def _show_change(result: Run, part: str) -> bool:
    """The table of metrics before and after the run; returns whether there is one."""
    from visard.report.change import tests

    rows = [
        (
            f"{name}: {key}",
            share(c.before),
            share(c.after),
            c.difference.removesuffix(" points"),
            c.interval,
            c.verdict[1],
        )
        for name, found in tests(result).items()
        for key, c in found.items()
        if key in {row["figure"] for row in result.metrics["generic"][name]["headline"]}
    ]
    if rows:
        columns = ("metric", "before", "after", "change,\npoints", "95 % interval", "")
        table(f"Before and after: the weights that were given, and the final model{part}", columns, rows)
    return bool(rows)


def _generic_rows(name: str, test: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(f"{name}: {row['figure']}", share(row["value"]), row["interval"]) for row in test["headline"]]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="one or more run folders")],
    out: Annotated[Path | None, typer.Option(help="the HTML file to write")] = None,
    values: Annotated[
        Path | None, typer.Option("--table", metavar="FILE", help="every metric of the runs, .csv or .parquet, instead")
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several side by side. It opens offline.

    Examples:

      visard report runs/demo

      visard report runs/fedavg runs/local runs/central --out comparison.html

      visard report runs/fedavg runs/local --table figures.csv
    """
    if values is not None:
        from visard.report.table import write_table

        if out is not None:
            raise UsageError("--out writes a page, --table a table: give one of them")
        say(f"{plural(write_table(runs, values), 'row')}: {values}")
        return
    from visard.report.page import build_report

    say(f"report: {build_report(runs, out)}")


def methods(
    plugin: options.Plugin = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, only the methods that come with visard")] = False,
) -> None:
    """List the methods, their papers, and what leaves a client in each.

    Example: visard methods
    """
    if as_json:
        print(json.dumps({name: summary(METHODS[name]) for name in METHODS.built_in}, indent=1, ensure_ascii=False))
        return
    options.load_plugins(plugin)
    listed = json.loads((resources.files("visard.methods") / "listing.json").read_text())  # quicker than importing them
    rows = []
    for name in METHODS:
        about = listed[name] if METHODS.origin(name) == BUILT_IN else summary(METHODS[name])
        leaves = [kind.upper() for kind in about["centralises"]] + about["discloses"]
        what = about["title"] + (f" ({about['paper']})" if about["paper"] else "")
        rows.append((name, what, ", ".join(leaves), METHODS.origin(name)))
    columns = ("name", "what", "leaves a client", "comes from")
    shown = 3 if all(row[3] == BUILT_IN for row in rows) else 4
    table(
        "Methods (data that is moved to one place is in capitals)",
        columns[:shown],
        [row[:shown] for row in rows],
        text=shown,
    )


def summary(method: type[Method[Any]]) -> dict[str, Any]:
    """What a listing says of a method."""
    from visard.disclosure import Disclosure

    kinds = {k: [d.value for d in Disclosure if d in getattr(method, k)] for k in ("discloses", "centralises")}
    return {"title": method.title, "paper": method.paper, **kinds}


def plugins(
    plugin: options.Plugin = None,
    everything: Annotated[bool, typer.Option("--all", help="also list what comes with visard")] = False,
) -> None:
    """List the plug-ins that settings can name, and where each comes from.

    Example: visard plugins --plugin my_method.py
    """
    options.load_plugins(plugin)
    known: list[Registry[Any]] = [Registry(kind, {}) for kind in KINDS]
    if everything:  # which imports most of visard
        known = [getattr(import_module(module), name) for module, name in (where.split(":") for where in REGISTRIES)]
    rows = []
    for registry in known:
        names: dict[str, list[str]] = {}
        for entry in registry:
            names.setdefault(registry.origin(entry), []).append(entry)
        rows += [(registry.kind, origin, ", ".join(found)) for origin, found in names.items()]
    if rows:
        table("What settings can name", ("kind", "comes from", "names"), rows, text=3)
    else:
        say("no plug-ins; visard plugins --all lists what comes with visard")


def presets(
    preset: Annotated[str | None, typer.Argument(metavar="[PRESET]", help="one of them: show all its settings")] = None,
) -> None:
    """List the presets that `visard run` knows, or show all settings of one, to be changed with --set.

    Examples:

      visard presets

      visard presets fedavg
    """
    if preset is not None:
        from visard.config import load

        if preset not in all_presets():
            raise UsageError(f"no preset {preset!r}{did_you_mean(preset, all_presets())}")
        print(load(preset).to_toml(), end="")
        return
    rows = []
    for name, text in all_presets().items():
        command = text.splitlines()[0].lstrip("# ")
        rows.append((name, about(text) + ("" if command == f"visard run {name}" else f" ({command})")))
    table("Presets (visard run NAME)", ("name", "what"), rows, text=2)
