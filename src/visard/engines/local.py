"""How every engine performs a client step, and the engine that runs one client after the other in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from visard.aggregation.compression import Compress
from visard.aggregation.dp import Grid
from visard.aggregation.people import Total, Virtual, alone, present
from visard.aggregation.secure import Plan, masked
from visard.core import BoundStep, Client, M, R, State, Weights
from visard.engines.checkpoint import PackStates
from visard.engines.codec import own
from visard.engines.network import EngineNetwork
from visard.engines.reply_checks import refusal
from visard.engines.request import Reply, Request, StateFile
from visard.engines.world import POOL, World, derive, generator, seed_default
from visard.errors import PublicError, VisardError
from visard.numerics import CPU, device

PICTURES = 256  # most pictures of one cohort, unless a single client has more: this bounds the memory


class States(Protocol):
    """Where the states of clients are kept."""

    def read(self, request: Request) -> State:
        """The client's state before the step; empty before its first one."""

    def write(self, request: Request, state: State) -> StateFile | None:
        """Keep the state after the step, without adopting it; None if nothing changed."""


class Check(Protocol):
    """A party's policy, which checks a step and its reply; both raise what it does not allow."""

    def before(self, step: BoundStep[Any, Any], client: Client, message: Any) -> None:
        """Before anything is computed."""

    def after(self, message: Any, reply: Any) -> None:
        """Before anything is kept or sent."""


def perform(
    world: World,
    step: BoundStep[M, R],
    request: Request,
    states: States,
    sent: bool = False,
    check: Check | None = None,
    given: Callable[[], M] | None = None,
) -> Reply:
    """Run `step` at the client, then the postprocessors of the reply.

    The reply and the state share no memory with anything that exists afterwards. A reply that is `sent` to another
    process before the next step is copied there, not here. `check` is the policy of a party for this request. `given`
    makes another copy of the message of the request, where that costs less memory than copying it.
    """
    client = enter(world, request, states.read(request))
    begun = time.perf_counter()
    plan = Plan.parse(request.secure) if request.secure else None
    compress = world.compress if request.secure else None  # behind masks it is a part of these
    if request.people:
        value, total = _of_people(world, step, request, client, plan, check, given)
    else:
        if check is not None:
            check.before(step, client, request.message)
            seed_default(_default_seed(world, request))  # as if there had been no check
            begun = time.perf_counter()
        value, total = _done(world, step, request, client, compress, check, given), None
    if plan is not None:
        value = masked(client, plan, request.message, value, world.statistics, request.settings, compress, total)
    value = value if sent else own(value)
    seconds = time.perf_counter() - begun
    return request.reply(value=value, state=states.write(request, client.state), seconds=seconds)


def _done(
    world: World,
    step: BoundStep[M, R],
    request: Request,
    client: Client,
    compress: Compress | None,
    check: Check | None,
    given: Callable[[], M] | None,
) -> R:
    """The reply of the step, after all postprocessors."""
    value = step(client, own(request.message) if given is None else given())
    if device() != CPU:  # replies and states are on the CPU
        value, client.state = own(value), own(client.state)
    for postprocess in world.outgoing if request.client != POOL else ():  # the pool's data left before the run
        value = value if postprocess is compress else postprocess(client, request.message, value)
    if check is not None:
        check.after(request.message, value)
    return value


def _of_people(
    world: World,
    step: BoundStep[M, R],
    request: Request,
    client: Client,
    plan: Plan | None,
    check: Check | None,
    given: Callable[[], M] | None,
) -> tuple[Any, Total]:
    """Do the step for each drawn person of a client; returns one reply, and the sum of their updates."""
    how, dp = Virtual.parse(request.people), getattr(world.aggregation, "dp", None)
    if dp is None or dp.unit != "person" or (plan is not None and plan.private is None):
        raise PublicError("the request is for a sum over people, the settings of the run are not (aggregation.dp.unit)")
    if plan is None or plan.private is None:
        grid = Grid.of(how.fields, request.message, how.clip, world.statistics)
    elif (plan.fields, plan.private.clip) == (how.fields, how.clip) and client.data.n_classes <= plan.private.people:
        grid = plan.private.grid(how.fields, request.message, world.statistics)
    else:
        raise PublicError("the request for a sum over people is not that of its secure sum")
    if not (labels := present(client.data)):
        raise PublicError("has no training pictures")
    total, kept, value = Total(grid, how.clip), client.state.setdefault("people", {}), None
    path = (request.stage, request.round, request.ask, request.client, "person")
    for label in (drawn := how.drawn(client.secret, client.data)) or labels[:1]:
        state = own(kept.get(str(label), {}))
        rng = generator(world.seed, *path, label)
        person = replace(client, data=alone(client.data, label), state=state, rng=rng)
        if check is not None:
            check.before(step, person, request.message)
        seed_default(derive(world.seed, *path, label, "default"))
        value = _done(world, step, request, person, None, check, given)
        if drawn:  # else it only gives the form of a reply
            total.add(request.message, value)
            kept[str(label)] = person.state
    return total.sent(value, how.fields), total


def _default_seed(world: World, request: Request) -> int:
    return derive(world.seed, request.stage, request.round, request.ask, request.client, "default")


def enter(world: World, request: Request, state: State) -> Client:
    """A new client for a step, with its own random streams; nothing is shared."""
    path = (request.stage, request.round, request.ask, request.client)
    seed_default(_default_seed(world, request))  # for layers that draw by themselves
    return Client(
        id=request.client,
        data=world.clients[request.client],
        state=state,
        rng=generator(world.seed, *path),
        network=world.network,
        embedding=world.embedding,
        numerics=world.numerics,
        benchmarks=world.benchmarks,
        public=world.public,
        others=world.others,
        secret=world.secret_of(request.client),
        signer=partial(world.signer_of, request.client),
    )


def cohorts(world: World, requests: Iterable[Request]) -> Iterator[list[Request]]:
    """The requests in their order, cut into groups of clients with at most PICTURES training pictures.

    The groups depend only on the clients' pictures, so every engine and number of workers gives the same bits.
    """
    group: list[Request] = []
    held = 0
    for request in requests:
        size = len(world.clients[request.client].train)
        if group and held + size > PICTURES:
            yield group
            group, held = [], 0
        group.append(request)
        held += size
    if group:
        yield group


def perform_together(
    world: World, step: BoundStep[M, R], requests: Sequence[Request], states: States, mean: str
) -> tuple[Weights, list[Reply]]:
    """Run `step` at the clients of a cohort in one pass: the mean of the field `mean`, and the replies without it.

    An error at any client ends the pass: the engine then asks the clients one by one, to find out which.
    """
    assert step.together is not None
    copies: dict[int, torch.Tensor] = {}
    clients = [enter(world, request, states.read(request)) for request in requests]
    begun = time.perf_counter()
    shared, values = step.together(step.owner, clients, [own(r.message, copies) for r in requests])
    if device() != CPU:
        values = [own(value) for value in values]
    seconds = (time.perf_counter() - begun) / len(clients)
    checked: tuple[str, ...] = ()
    for request, value in zip(requests, values, strict=True):
        whole, pictures = with_mean(value, mean, shared), world.pictures(request.client)
        rows, statistics = world.rows(request.client), world.statistics
        if wrong := refusal(step, request.message, whole, pictures, world.embedding, checked, statistics, rows):
            raise VisardError(f"{mean} of a cohort: {' '.join(wrong)}")
        checked = (mean,)
    return own(shared), [
        request.reply(value=own(value), state=states.write(request, client.state), seconds=seconds)
        for request, client, value in zip(requests, clients, values, strict=True)
    ]


def with_mean(value: R, mean: str, shared: Weights) -> R:
    """A reply of a cohort with the mean of all in place of its own value: the same size, and the same mean."""
    return replace(value, **{mean: shared})  # type: ignore[type-var]


class LocalNetwork(EngineNetwork):
    """Runs client steps in this process."""

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        states = PackStates(self.states.packs)
        for request in requests:
            try:
                yield perform(self.world, step, request, states)
            except Exception as error:  # one client's failure must not end the round
                yield request.failed(error)

    def replies_together(self, step: BoundStep[Any, Any], requests: Sequence[Request], mean: str) -> Iterator[Reply]:
        states = PackStates(self.states.packs)
        for group in cohorts(self.world, requests):
            try:
                shared, replies = perform_together(self.world, step, group, states, mean)
            except Exception:
                yield from self.replies(step, group)
                continue
            for reply in replies:
                yield replace(reply, value=with_mean(reply.value, mean, shared))
