"""What is tested during and after a run: the generic model here, the clients' own models where they are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from visard.core import Method, Network
from visard.engines.world import World, derive
from visard.errors import UsageError
from visard.evaluation.groups import DOMAIN, errors_by
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
    made: dict[str, Any] = {}
    generic = _generic(settings, settings.evaluation, method, world, server, made)
    for test in generic.values():
        test["headline"] = headline(test)
    groups = _groups(settings, world, made)
    return {
        "name": settings.name,
        "method": method.name,
        "seed": settings.seed,
        "generic": generic,
        **({"groups": groups} if groups else {}),
        **_clients(settings.evaluation, method, world, server, net),
    }


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
        except UsageError as error:  # the test pictures are of one group: no reason to lose a run
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
