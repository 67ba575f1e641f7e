"""The question before a party takes part in a run: who asks for what, what would leave, what could go wrong.

The worker process of the party, which knows the methods, writes it; the main process asks it (`consent`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from visard.core import Disclosure, Method
from visard.deployment.guard import averaged, leaving
from visard.deployment.policy import SAFE, Between, Bounds, Policy, Retention, leaves
from visard.engines.request import Request
from visard.engines.world import World
from visard.learning.train import Training
from visard.text import line, plural

ANY = Policy(methods=("any",))  # where nothing is checked against a policy
MATTER = (  # settings of a method that the question shows, by the last part of their names
    "rounds", "pretrain_rounds", "lr", "beta", "batch_size", "unit", "amount", "steps", "schedule", "share_head",
    "batch_norm", "participation", "in_turn", "negatives", "enrol", "init", "classes", "noise", "key_bits",
    "insecure_keys", "weight",
)  # fmt: skip
DAYS = 30.0  # after which an agreement at a terminal is forgotten


def preview_policy(run: Mapping[str, Any]) -> Policy:
    """The policy under which a run is described, before it is agreed to: its method, and no plug-ins."""
    settings = run.get("settings")
    method = settings.get("method") if isinstance(settings, Mapping) else None
    name = method.get("name") if isinstance(method, Mapping) else None
    return Policy(methods=(str(name),), kinds=tuple(kind.value for kind in Disclosure))


def question(request: Request, world: World, method: Method[Any], server: str) -> str:
    """JSON of the text to show and of the policy that a yes stands for."""
    policy = offered_policy(request, world, method, server)
    return json.dumps({"text": text(request, world, method, policy), "policy": policy.to_toml()})


def text(request: Request, world: World, method: Method[Any], policy: Policy) -> str:
    """The question in plain words; the main process, which knows its address, fills in {server}."""
    settings = request.settings.get("settings")
    section = settings.get("method") if isinstance(settings, Mapping) else None
    chosen = [
        f"{name} = {value}"
        for name, value in leaves(section if isinstance(section, Mapping) else {})
        if name.rpartition(".")[2] in MATTER
    ]
    own = [
        f"{client}: {plural(len(data.train), 'training picture')} of {plural(data.n_classes, 'person', 'people')}"
        for client, data in world.clients.items()
    ]
    kinds = leaving(method, world)
    lines = [
        "A server asks this party to take part in a run.",
        "",
        "  server    {server}",
        f"  run       {request.run}",
        f"  method    {method.name}: {method.title}",
        f"  parties   {averaged(request, world, method)} in an average, says the server",
        f"  on        {'; '.join(own)}",
        *(f"  {'settings' if not i else '        '}  {one}" for i, one in enumerate(chosen)),
        "",
        "What would leave this machine, and what it reveals:",
        *(f"  {kind.value}: {kind.what}. {kind.reveals}" for kind in Disclosure if kind in kinds),
        *(
            ["  When it joins, it also says how many people and pictures this party has."]
            if request.settings.get("own")
            else []
        ),
        "",
        "What a hostile server could do:",
        f"  {method.hostile or 'This method does not say: assume the worst.'}",
        f"  A yes allows learning rates of {policy.bounds.lr.at_least:g} to {policy.bounds.lr.at_most:g}, weights at "
        f"most {policy.bounds.distance:g} times their norm from those before.",
        "  The weights that the run begins with are the server's choice: pin them with visard client policy --start.",
    ]
    return "\n".join(line(shown, 2000) for shown in lines)


def offered_policy(request: Request, world: World, method: Method[Any], server: str) -> Policy:
    """The policy that a yes stands for: this run of this server, its kinds, and bounds around its settings."""
    settings = request.settings.get("settings")
    section = settings.get("method") if isinstance(settings, Mapping) else None
    name = section.get("name") if isinstance(section, Mapping) else method.name
    default, count = Bounds(), averaged(request, world, method)
    pictures = min((len(data.train) for data in world.clients.values()), default=0)
    trainings = [value for value in vars(method).values() if isinstance(value, Training) or hasattr(value, "beta")]
    rates = [float(getattr(value, "lr", 0.0) or getattr(value, "beta", 0.0)) for value in trainings]
    least = 0.0 if getattr(method, "enrol", False) else min(rates, default=default.lr.at_least) / 101
    bounds = {
        "rounds": max(1, sum(stage.rounds for stage in method.stages())),
        "lr": Between(at_least=least, at_most=1.001 * max(rates, default=default.lr.at_most)),
        "batch": max(1, min([default.batch, pictures, *(value.batch_size for value in trainings)])),
        "pictures": max(1, min(default.pictures, pictures)),
        "parties": max(1, min(default.parties, count)),
    }
    return Policy(
        methods=(str(name),),
        kinds=tuple(k.value for k in Disclosure if k.value in SAFE or k in leaving(method, world)),
        runs=(request.run,),
        servers=(server,) if server else (),
        bounds=default.model_copy(update=bounds),
        retention=Retention(days=DAYS),
    )
