"""A run from settings to a finished run folder: data, partition, rounds, metrics, files, report."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visard.aggregation import accounting
from visard.aggregation.people import check_apart
from visard.aggregation.rules import Mean
from visard.at_rest import Key
from visard.config import Settings, load, parse
from visard.core import ClientId, Disclosure
from visard.data.faces import FaceSet, describe
from visard.data.joined import Joined
from visard.data.partition import Manifest, partition
from visard.data.sources.catalog import open_faces
from visard.deployment.remote import PartyLink, RemoteNetwork
from visard.engines.checkpoint import Checkpoint, rounds_done
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.loop import asking, run_rounds, stop_on_interrupt
from visard.engines.network import EngineNetwork
from visard.engines.pool import PoolNetwork
from visard.engines.shared_memory import in_memory, remove_folder
from visard.engines.watchers import Watcher, Watchers
from visard.engines.world import BIASES, CLASS_VECTORS, World, centralised, make_world, refuse_unlabelled, want
from visard.errors import Interrupted, UsageError, VisardError, did_you_mean
from visard.files import PRIVATE_FOLDER, SHARED, read_text, safe_name, write_atomically, write_json
from visard.models import ONNX, SENSORS
from visard.models.files import save_model
from visard.numerics import CPU, computing_on, device, fast_bf16, spread
from visard.plugins import again, modules_in, named, trust
from visard.processes import Recipe, cores
from visard.report.page import build_report
from visard.report.replay import FILE as REPLAY
from visard.report.run_folder import EventLog, Run, digest_of_tests, read_events, read_run, rounds, warnings_of
from visard.runs.evaluation import check_groups, final_metrics, in_brief, metrics_before, metrics_of_round
from visard.runs.folder import run_folder
from visard.runs.trackers import WATCHERS
from visard.text import plural


def run(
    source: str | Path | Settings | dict[str, Any],
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    watcher: Watcher | Iterable[Watcher] | None = None,
    plugins: Sequence[str | Path] = (),
    replay: Mapping[str, Any] | None = None,
) -> Run:
    """Run a preset, a TOML file or settings, and write a complete run folder.

    `watcher` is one watcher or several (see `engines.watchers.Watcher`), beside those that `engine.watchers` names:
    they follow the run, and never end it.
    `plugins` are files or modules with methods, heads and the like that the settings name. `replay` is what is known of
    the run that this one repeats without some clients (see `runs.replay`).

    >>> import visard
    >>> result = visard.run("demo", out="runs/demo")        # doctest: +SKIP
    >>> result.results["south"].verification.auc            # doctest: +SKIP
    """
    if isinstance(source, dict):
        source = parse(source)
    if isinstance(source, Settings):  # from a program, which may name plug-ins
        trust(modules_in(source.to_dict(), doubted=False))
    settings = source if isinstance(source, Settings) else load(source, overrides, plugins)
    folder = Path(out) if out is not None else Path("runs") / safe_name(settings.name)
    named = [WATCHERS.find(name) for name in settings.engine.watchers or ()]
    files = [name for make in named for name in getattr(make, "files", ())]
    how = settings.numerics
    with (
        computing_on(how.device, how.deterministic),
        run_folder(folder, settings, resume, overwrite, files),
        _threads(how.threads_per_step),
    ):
        if replay is not None:
            write_json(folder / REPLAY, replay, SHARED)
        watchers = Watchers([Watchers(watcher), *(make(folder) for make in named)])
        with _watched(watchers, folder):
            link = connect(settings, watchers.problem)
            with closing(link) if link is not None else nullcontext(), _memory(settings) as memory:
                job = _open(settings, folder, watchers, link, memory)
                server, metrics = _train(job)
            watchers.evaluation(in_brief(metrics))
            _save(job, server, metrics)
    return read_run(folder)


@contextmanager
def _watched(watchers: Watchers, folder: Path) -> Iterator[None]:
    """Tell watchers of the beginning and the end."""
    watchers.begun(folder)
    if done := rounds_done(folder / "checkpoint"):
        watchers.resumed(done)
    finished = False
    try:
        yield
        finished = True
    finally:
        watchers.ended(finished)


def resume(
    out: str | Path,
    watcher: Watcher | Iterable[Watcher] | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str | Path] = (),
) -> Run:
    """Continue the run in folder `out` with its own settings; `overrides` may only give it more rounds.

    `plugins` are those of the run, named again, because the folder may come from someone else.
    """
    config = Path(out) / "config.toml"
    if not config.exists():
        raise UsageError(f"{out} holds no run to resume (there is no config.toml)")
    return run(config, out=out, overrides=overrides, resume=True, watcher=watcher, plugins=plugins)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Job:
    """A run in progress: its inputs, and where it writes."""

    settings: Settings
    folder: Path
    watcher: Watcher
    link: PartyLink | None
    run_spec: dict[str, Any] | None  # what the parties of a deployment learn about the run
    faces: FaceSet
    world: World
    pooled: dict[ClientId, dict[Disclosure, int]]  # bytes that a method took from clients before the first round
    states: Checkpoint
    events: EventLog
    ledger: Ledger
    begun: float  # by time.perf_counter
    memory: Path | None = None  # the folder for activations that must not be on disk

    def warn(self, text: str) -> None:
        """Warn on the screen and in the report."""
        self.watcher.problem(text)
        self.events.write("warning", text=text)


@contextmanager
def _memory(settings: Settings) -> Iterator[Path | None]:
    """A folder in memory for activations that must not be on disk; removed when the run ends."""
    if settings.model.stored_in != "memory":
        yield None
        return
    folder = in_memory()
    try:
        yield folder
    finally:
        remove_folder(folder)


def _open(
    settings: Settings, folder: Path, watcher: Watcher, link: PartyLink | None, memory: Path | None = None
) -> _Job:
    """Open data, clients, checkpoint and logs of a run, and write its beginning into the event log."""
    if link is None and settings.partition.kind == "parties":
        raise UsageError("partition.kind = parties: the clients are elsewhere, give the server with --server")
    if settings.model.frozen_norm and settings.model.weights is None:
        raise UsageError(
            "model.frozen_norm: statistics of an untrained network fit no picture: give model.weights, "
            "for example the model of visard run pretrain"
        )
    begun, method = time.perf_counter(), settings.method
    for module, extra in method.packages().items():
        if find_spec(module) is None:
            raise UsageError(
                f"{method.name} needs the package {module} with these settings: pip install 'visard[{extra}]'"
            )
    dp = settings.aggregation.dp if isinstance(settings.aggregation, Mean) else None
    if dp is not None:
        accounting.package()
    key = Key.load(settings.engine.encrypt_with)
    faces = open_faces(settings.data, watcher.rendering)
    manifest = partition(faces, settings.partition, settings.seed)
    federation = manifest.federation(faces)
    refuse_unlabelled(method, federation.clients)
    if dp is not None and dp.unit == "person":
        check_apart(federation.training)
    manifest.save(folder / "partition.json")
    world, pooled = centralised(make_world(settings, faces, federation, memory=memory, check=True), method)
    check_groups(settings, world)
    inputs = manifest.hash + ("" if world.trunk is None else world.trunk.digest[:16])
    states = Checkpoint(
        folder / "checkpoint", settings.fingerprint(rounds=False) + inputs, link is not None,
        settings.fingerprint() + inputs, key,
    )  # fmt: skip
    resumed = states.resume()
    ledger = Ledger(states.ledger, states.committed.ledger_bytes)
    if not states.committed.ledger_bytes:
        for client, sizes in pooled.items():
            ledger.record_pooled(client, sizes)
    run_spec: dict[str, Any] | None = None
    notes: list[str] = []
    if link is not None:
        from visard.deployment.join import join

        world, run_spec, notes = join(
            link, settings, manifest, world, faces.size, run_id(states.folder), states, ledger
        )
    known = (*world.training, *world.held_out)
    if odd := [client for client in settings.parties if client not in known]:
        raise UsageError(f"parties.{odd[0]}: the run has no client of this name{did_you_mean(odd[0], known)}")
    events = EventLog(folder / "events.jsonl")
    events.write(
        "run_started", name=settings.name, method=method.name, seed=settings.seed, version=version("visard"),
        machine=machine(settings), clients=len(world.training if link else federation.training), classes=world.classes,
        parameters=sum(p.numel() for p in world.network().parameters()), synthetic=faces.synthetic,
        frozen_norm=settings.frozen_norm, resumed=resumed, data=_about(faces, manifest), **trained_part(world),
        stages=[{"name": s.name, "rounds": s.rounds} for s in method.stages()],
    )  # fmt: skip
    job = _Job(settings, folder, watcher, link, run_spec, faces, world, pooled, states, events, ledger, begun, memory)
    if world.activations is not None:
        want(world if link is None else replace(world, clients={}), settings)  # parties have theirs at home
        world.activations.prepare(watcher.activations)
    if device() == CPU and settings.numerics.precision == "bf16" and not fast_bf16():
        job.warn("this processor has no bfloat16 instructions: fp32 is several times faster here")
    if device() == CPU and settings.numerics.precision == "fp16":
        job.warn("fp16 is for GPUs: on a CPU fp32 is faster")
    if oracle := method.oracle():
        job.warn(f"{method.name} gets {oracle}, which only a simulation knows")
    own = [settings.note] if settings.note else []
    if settings.method.singly and getattr(settings.aggregation, "secure", False):
        own.append(
            f"aggregation.secure hides the updates of the network alone: {settings.method.name} needs the single "
            f"replies of the clients for their {settings.method.singly}"
        )
    for note in (*notes, *own, *_about_network(settings, world.spec, faces), *_doubts(faces)):
        job.warn(note)
    return job


def _about_network(settings: Settings, spec: Mapping[str, str], faces: FaceSet) -> Iterator[str]:
    """Warn where a model file decides the network or the size of pictures."""
    weights, model = settings.model.weights, settings.model
    if weights is None:
        return
    if "name" in model.model_fields_set and spec["model"] not in (model.name, ONNX):
        yield f"model.name = {model.name} does not count: {Path(weights).name} holds the network {spec['model']}"
    if int(spec["size"]) != faces.size and spec["model"] not in SENSORS:
        yield f"pictures of {faces.size} pixels are resized to {spec['size']}, which {Path(weights).name} takes"


def trained_part(world: World) -> dict[str, Any]:
    """The trained part of the network, for the event log and the metrics; empty if all of it trained."""
    if world.trunk is None:
        return {}
    tail, trunk = (sum(p.numel() for p in part.parameters()) for part in (world.network(), world.trunk.network()))
    how, _, value = world.trunk.trained.partition(":")
    return {"trained": {how: value, "parameters": tail, "frozen": trunk, "trunk": world.trunk.digest}}


def _train(job: _Job) -> tuple[Any, dict[str, Any]]:
    """Run the remaining rounds; returns the final server state and the metrics of its models."""
    settings, method, world, watcher, events = job.settings, job.settings.method, job.world, job.watcher, job.events
    network, before = make_network(job), job.states.folder / "before.json"
    try:
        with stop_on_interrupt(watcher.problem) as stop:
            server = run_rounds(
                method, network, job.states, job.ledger, events, partial(metrics_of_round, settings, method, world),
                settings.evaluation.every, watcher, stop,
                partial(metrics_before, settings, method, world, before) if world.start_from is not None else None,
            )  # fmt: skip
        with asking(network, "final", 0, events, watcher):
            metrics = final_metrics(settings, method, world, before, server, network) | trained_part(world)
        if isinstance(network, RemoteNetwork) and job.states.remote:
            for client, failure in network.keep(method.basis(server), settings.name).items():
                watcher.problem(f"{client} did not keep its own model: {failure}")
    except KeyboardInterrupt:
        events.write("run_stopped", reason="interrupted")
        more = again(settings.plugins, settings.to_dict())
        raise Interrupted(f"interrupted; continue with: visard run --resume --out {job.folder}{more}") from None
    except VisardError as error:
        events.write("run_stopped", reason=str(error))
        raise
    finally:
        network.close()
    return server, metrics


def _save(job: _Job, server: Any, metrics: dict[str, Any]) -> None:
    """Write the files of a finished run."""
    folder, faces = job.folder, job.faces
    _save_models(job, server)
    kinds = frozenset(kind for sizes in job.pooled.values() for kind in sizes)
    job.ledger.save(folder / "ledger.json", kinds, job.settings.to_dict().get("outgoing", ()))
    job.events.write("run_finished", seconds=time.perf_counter() - job.begun)
    pooled_bytes = sum(size for sizes in job.pooled.values() for size in sizes.values())
    write_json(folder / "metrics.json", metrics | _of_events(folder / "events.jsonl", pooled_bytes), SHARED)
    if faces.synthetic:  # of no real person, so the report may show some
        shown = np.arange(0, len(faces), max(1, len(faces) // 24))[:24]
        np.save(folder / "samples.npy", faces.read(shown), allow_pickle=False)
    build_report([folder])


def make_network(job: _Job) -> EngineNetwork:
    """The engine that the settings of a run ask for."""
    engine, world, states, ledger = job.settings.engine, job.world, job.states, job.ledger
    if job.link is not None:
        return RemoteNetwork(world, states, ledger, job.link, run_id(states.folder), job.run_spec)
    devices = ["cpu"] if device() == CPU else spread(job.settings.numerics.device)
    fitting = max(1, cores() // job.settings.numerics.threads_per_step)
    workers = engine.workers or (fitting if device() == CPU else len(devices) * engine.workers_per_device)
    memory = {} if job.memory is None else {"memory": str(job.memory)}
    given = {"folder": str(job.folder.absolute()), "trusted": named(), **memory}
    recipe = Recipe("visard.engines.world:world_of_run", given)
    if engine.kind == "flower":
        from visard.deployment import flower

        flower.require()
        from visard.deployment.flower.simulation import SimulationLink

        if device() != CPU:
            raise UsageError(f"engine.kind = flower: its simulation computes on the CPU, not on {device()}; take pool")
        simulation = SimulationLink(
            world.clients, recipe, states.folder.absolute(), workers, states.key.path if states.key else None
        )
        return RemoteNetwork(world, states, ledger, simulation, run_id(states.folder))
    if engine.kind == "pool" or (engine.kind == "auto" and min(workers, len(world.training)) > 1):
        return PoolNetwork(world, states, ledger, recipe, workers, devices)
    return LocalNetwork(world, states, ledger)


def run_id(checkpoint: Path) -> str:
    """The id under which parties know this run folder; made once."""
    path = checkpoint / "run.id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16))
    return read_text(path)


def connect(settings: Settings, say: Callable[[str], None]) -> PartyLink | None:
    """The link to the parties of a deployment; None where the clients are simulated."""
    if settings.engine.server is None:
        return None
    from visard.deployment import flower

    flower.require()
    from visard.deployment.flower.driver import DeploymentLink

    return DeploymentLink(Path(settings.engine.server), settings.engine.wait, say)


def _about(faces: FaceSet, manifest: Manifest) -> dict[str, Any]:
    """What the event log says about the pictures, without their paths on this machine."""
    name, tested = faces.path.name, digest_of_tests(manifest.content.faces, manifest.content.unseen)
    found = describe(faces) | {"name": "synthetic" if faces.synthetic else name, "path": name, "tested": tested}
    if isinstance(faces, Joined):
        kept = ("pictures", "identities", "size", "kind", "fingerprint")
        found["sets"] = [
            {"name": m.name, "role": m.role, "labels": not m.faces.unlabelled.any(), "align": m.faces.align}
            | {k: v for k, v in describe(m.faces).items() if k in kept}
            for m in faces.members
        ]
    return found


def _doubts(faces: FaceSet) -> list[str]:
    """Warnings about several face sets in one run."""
    if not isinstance(faces, Joined):
        return []
    doubts = [doubt for doubt in (faces.cut_differently(),) if doubt]
    if alike := faces.namesakes():
        some = ", ".join(alike[:3]) + (", ..." if len(alike) > 3 else "")
        doubts.append(
            f"{plural(len(alike), 'name')} of people to test on {'is' if len(alike) == 1 else 'are'} in other sets too "
            f"({some}): they are taken for other people"
        )
    return doubts


def _of_events(path: Path, pooled_bytes: int) -> dict[str, Any]:
    """The parts of `metrics.json` from the event log: last training metrics, traffic and warnings."""
    events = read_events(path)
    done, warnings = rounds(events), warnings_of(events)
    return {
        "training": done[-1].figures if done else {},
        "communication": {
            "rounds": len(done),
            "bytes_up": sum(r.bytes_up or 0 for r in done),
            "bytes_down": sum(r.bytes_down or 0 for r in done),
            "bytes_pooled": pooled_bytes,
        },
        **({"warnings": warnings} if warnings else {}),
    }


def _save_models(job: _Job, server: Any) -> None:
    """`model.safetensors`, and `clients/<id>.safetensors` where a client's own model differs from it.

    In a deployment a client's own model stays with its party.
    """
    method, folder = job.settings.method, job.folder
    spec = dict(job.world.spec)
    if job.faces.align != "none":
        spec["align"] = job.faces.align
    if job.world.trunk is not None:
        spec["trained"] = job.world.trunk.trained
    generic = method.backbone(server)
    if generic is not None:
        save_model(folder / "model.safetensors", job.world.whole(generic), spec, SHARED)
    vectors = method.class_vectors(server)
    if vectors is not None:
        biases = method.biases(server)
        held = {CLASS_VECTORS: vectors} | ({} if biases is None else {BIASES: biases})
        save_model(folder / "class_vectors.safetensors", held, spec, key=job.states.key)
    basis = method.basis(server)
    for client in () if job.states.remote else job.world.training:
        own = method.personal(job.states.client_state(client), basis)
        if own is None or (generic is not None and own.keys() == generic.keys() and _same(own, generic)):
            continue
        (folder / "clients").mkdir(PRIVATE_FOLDER, exist_ok=True)
        save_model(folder / "clients" / f"{safe_name(client)}.safetensors", job.world.whole(own), spec)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(a[k] is b[k] or torch.equal(a[k], b[k]) for k in a)


def machine(settings: Settings) -> dict[str, Any]:
    """The machine and versions behind the metrics."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": settings.numerics.threads_per_step,
        **({} if device() == CPU else {"device": str(device())}),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in read_text(info).splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
