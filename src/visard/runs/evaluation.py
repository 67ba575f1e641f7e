"""Tests during and after a run: of the generic model at the server, and of the clients' own models at the clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from visard.config import EvaluationSettings, Settings, load
from visard.core import Method, Network
from visard.data.faces import FaceView
from visard.data.partition import Manifest
from visard.data.sources.catalog import open_faces
from visard.engines.world import World, derive
from visard.errors import UsageError
from visard.evaluation.groups import DOMAIN, errors_by
from visard.evaluation.metrics import brief, summarise, values
from visard.evaluation.paired import Samples, change, change_of_clients, resampled
from visard.evaluation.protocols import identification, verification
from visard.files import plain, read_json, write_json
from visard.learning.features import embed
from visard.learning.weights import load_weights
from visard.methods.scoring import ScoreRequest, steps_of

CLIENTS = ("clients", "held_out")  # whose own models are tested


def metrics_of_round(
    settings: Settings, method: Method[Any], world: World, server: Any, net: Network
) -> dict[str, Any]:
    """The metrics of an `evaluation` event: flat, quick, without confidence intervals."""
    once = replace(settings.evaluation.tuning, draws=1)
    quick = settings.evaluation.model_copy(update={"bootstrap": 0, "tuning": once})
    generic = {name: brief(test) for name, test in _generic(settings, quick, method, world, server).items()}
    tested = _clients(quick, method, world, server, net)
    return {"generic": generic, **{who: found["summary"] for who, found in tested.items()}}


def metrics_before(
    settings: Settings, method: Method[Any], world: World, file: Path, server: Any, net: Network
) -> dict[str, Any]:
    """Test the weights that a run starts from as its final model will be tested, and keep the result in a file.

    Returns the metrics of an `evaluation` event.
    """
    samples: dict[str, Samples] = {}
    found = _tested(settings, method, world, server, net, samples)
    write_json(file, plain({"metrics": found, "samples": samples}))
    return in_brief(found)


def in_brief(found: dict[str, Any]) -> dict[str, Any]:
    """Final metrics in the form of an `evaluation` event."""
    generic = {name: brief(test) for name, test in found["generic"].items()}
    return {"generic": generic} | {who: found[who]["summary"] for who in CLIENTS if who in found}


def final_metrics(
    settings: Settings, method: Method[Any], world: World, file: Path, server: Any, net: Network
) -> dict[str, Any]:
    """The content of `metrics.json` without traffic, which is in the event log; with the result of `metrics_before`."""
    samples: dict[str, Samples] = {}
    found = _tested(settings, method, world, server, net, samples)
    about = {"name": settings.name, "method": method.name, "seed": settings.seed}
    if world.start_from is None or not file.exists():
        return about | found
    kept = read_json(file)
    changed = _changes(kept["metrics"], found, kept["samples"], samples)
    return about | found | {"before": kept["metrics"], "change": changed}


def _changes(
    before: dict[str, Any], after: dict[str, Any], was: dict[str, Any], now: dict[str, Samples]
) -> dict[str, Any]:
    generic = {
        name: change(before["generic"][name], test, was.get(name, {}), now.get(name, {}))
        for name, test in after["generic"].items()
        if name in before["generic"]
    }
    return {"generic": generic} | {
        who: change_of_clients(before[who]["figures"], after[who]["figures"])
        for who in CLIENTS
        if who in before and who in after
    }


def _tested(
    settings: Settings, method: Method[Any], world: World, server: Any, net: Network, samples: dict[str, Samples]
) -> dict[str, Any]:
    """All tests of a model, with confidence intervals; `samples` gets the resamples of each test set."""
    made: dict[str, Any] = {}
    generic = _generic(settings, settings.evaluation, method, world, server, made)
    for name, test in generic.items():
        test["headline"] = headline(test)
        if world.start_from is not None:  # for the comparison with the given weights
            view, seed = world.benchmarks[name], seed_of_test(settings, name)
            samples[name] = resampled(made[name], view.identity, test, settings.evaluation, seed)
    groups = _groups(settings, world, made)
    return {
        "generic": generic,
        **({"groups": groups} if groups else {}),
        **_clients(_last(settings.evaluation), method, world, server, net),
    }


def _last(evaluation: EvaluationSettings) -> EvaluationSettings:
    """The metrics of the last test, which is always on test pictures."""
    return evaluation.model_copy(update={"tuning": replace(evaluation.tuning, between="test")})


def seed_of_test(settings: Settings, test_set: str) -> int:
    """The seed of all random choices for a test set."""
    return derive(settings.seed, "test", test_set) % 2**32


def held_out_people(folder: Path) -> tuple[Settings, Mapping[str, FaceView]]:
    """The settings of a run, and the pictures of each of its test sets: people that no client has."""
    config = folder / "config.toml"
    if not config.is_file():
        raise UsageError(f"{folder} holds no run (there is no config.toml)")
    settings = load(config)
    faces = open_faces(settings.data)
    views = Manifest.load(folder / "partition.json").federation(faces).unseen
    if not views:
        raise UsageError(f"{folder}: the run set no people aside to test on (partition.test_identities)")
    return settings, views


def check_groups(settings: Settings, world: World) -> None:
    """Refuse errors by an attribute that a test set does not know, before the run."""
    for name in settings.evaluation.by or ():
        for view in world.benchmarks.values() if name != DOMAIN else ():
            view.faces.attribute(name)


def _groups(settings: Settings, world: World, made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Errors by group over the people of all test sets together: as asked for, else by domain if there are several."""
    evaluation, views = settings.evaluation, [world.benchmarks[name] for name in made]
    by = evaluation.by
    if by is None:
        domains = {(view.faces.path, number) for view in views for number in view.domain.tolist()}
        by = (DOMAIN,) if len(domains) > 1 else ()
    seed, found = derive(settings.seed, "groups") % 2**32, {}
    for name in by if views else ():
        try:
            found[name] = errors_by(
                list(made.values()), views, name, fmr=evaluation.fmr, bootstrap=evaluation.bootstrap, seed=seed
            ).to_dict()
        except UsageError as error:  # the test pictures are of one group, which must not end the run
            found[name] = {"by": name, "warnings": [f"{error}."]}
    return found


def _generic(
    settings: Settings,
    evaluation: EvaluationSettings,
    method: Method[Any],
    world: World,
    server: Any,
    made: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """The tests of the generic model on each test set; `made` gets the features of each."""
    theta = method.backbone(server)
    if theta is None:
        return {}
    model = world.network()
    load_weights(model, theta)
    tests = {}
    for name, view in world.benchmarks.items():
        features = embed(model, view, flip=evaluation.flip)
        if made is not None:
            made[name] = features
        seed = seed_of_test(settings, name)
        tests[name] = {
            "verification": verification(features, view.identity, evaluation, seed),
            "identification": identification(features, view.identity, seed),
        }
    return tests


def _clients(
    evaluation: EvaluationSettings, method: Method[Any], world: World, server: Any, net: Network
) -> dict[str, Any]:
    """Metrics of the clients' own models: of those that trained, and of those that were held out."""
    if not evaluation.clients or method.centralises:
        return {"clients": {"figures": {}, "summary": {}}}
    public = tuple(world.benchmarks) if evaluation.client_benchmarks else ()
    tuning = evaluation.tuning if evaluation.tuning.batches else None
    request = ScoreRequest(method.basis(server), public, tuning)
    found = {}
    for who, clients in zip(CLIENTS, (net.clients, net.held_out), strict=True):
        if not clients and who == "held_out":
            continue
        if tuning is not None:  # a client that took no part has no rows in a global head
            request = replace(request, W=method.global_head(server) if who == "clients" else None)
        scores = net.ask(steps_of(method)["score"], dict.fromkeys(clients, request), min_replies=0)
        measured = {c: {k: v for k, v in s.figures.items() if math.isfinite(v)} for c, s in scores.items()}
        summary = {name: s.to_dict() for name, s in summarise(measured).items()} if measured else {}
        found[who] = {"figures": measured, "summary": summary}
    return found


def headline(test: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table at the end of a run: metric, value, 95 % interval as text."""
    return [
        {"figure": v.name, "value": v.value, "interval": "" if v.low is None else f"{v.low:.4f} to {v.high:.4f}"}
        for v in values(test)
        if v.brief
    ]
