"""What is tested during and after a run: the generic model here, the clients' own models where they are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from visard.core import Method, Network
from visard.engines.world import World, derive
from visard.evaluation.metrics import brief, summarise, values
from visard.evaluation.protocols import identification, verification
from visard.learning.features import embed
from visard.learning.weights import load_weights
from visard.methods.scoring import ScoreRequest, steps_of

if TYPE_CHECKING:
    from visard.config import EvaluationSettings, Settings


def metrics_of_round(
    settings: Settings, method: Method[Any], world: World, server: Any, net: Network
) -> dict[str, Any]:
    """The metrics of an `evaluation` event: flat, quick, without confidence intervals."""
    once = replace(settings.evaluation.tuning, draws=1)
    quick = settings.evaluation.model_copy(update={"bootstrap": 0, "tuning": once})
    generic = {name: brief(test) for name, test in _generic(settings, quick, method, world, server).items()}
    tested = _clients(quick, method, world, server, net)
    return {"generic": generic, **{who: found["summary"] for who, found in tested.items()}}


def final_metrics(settings: Settings, method: Method[Any], world: World, server: Any, net: Network) -> dict[str, Any]:
    """`metrics.json`, but for the traffic that the event log knows."""
    generic = _generic(settings, settings.evaluation, method, world, server)
    for test in generic.values():
        test["headline"] = headline(test)
    return {
        "name": settings.name,
        "method": method.name,
        "seed": settings.seed,
        "generic": generic,
        **_clients(settings.evaluation, method, world, server, net),
    }


def _generic(
    settings: Settings, evaluation: EvaluationSettings, method: Method[Any], world: World, server: Any
) -> dict[str, dict[str, Any]]:
    theta = method.backbone(server)
    if theta is None:
        return {}
    model = world.network()
    load_weights(model, theta)
    tests = {}
    for name, view in world.benchmarks.items():
        features = embed(model, view, flip=evaluation.flip)
        seed = derive(settings.seed, "test", name) % 2**32
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
    for who, clients in (("clients", net.clients), ("held_out", net.held_out)):
        if not clients and who == "held_out":
            continue
        if tuning is not None:  # a client that took no part has no rows of its own in a global head
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
