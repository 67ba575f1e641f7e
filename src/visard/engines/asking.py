"""Asking clients: requests, checks of every reply, the ledger, client states, and missing clients."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from visard.aggregation.dp import Privacy, PrivateReduction
from visard.aggregation.reduction import Reduction, Remark
from visard.aggregation.rules import Mean
from visard.aggregation.secure import SecureReduction
from visard.core import PUBLIC, BoundStep, ClientId, M, Method, R, Replies, State
from visard.crypto.discrete_gaussian import Stream
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import sizes_of
from visard.engines.ledger import Ledger, parts_of
from visard.engines.reply_checks import refusal
from visard.engines.request import Reply, Request
from visard.engines.world import POOL, World, generator
from visard.errors import VisardError
from visard.methods.scoring import TEST
from visard.text import at_round

LONGEST_TRACEBACK = 20_000
SERVER = "\0server"  # a name that no client has, for the server's own secret


@dataclass
class Traffic:
    """Bytes and failures of one round."""

    bytes_up: int = 0
    bytes_down: int = 0
    once: int = 0  # of these, sent to each client once in a run: the frozen part of a network
    asked: int = 0
    replied: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    clients: dict[ClientId, dict[str, float]] = field(default_factory=dict)  # of those that the method logged
    seconds: dict[ClientId, float] = field(default_factory=dict)  # that the steps of each client took
    problems: list[dict[str, Any]] = field(default_factory=list)  # events of refused and missing replies


def plain(text: str) -> str:
    """Text from a party as one short line without control characters."""
    return "".join(c for c in " ".join(text[:2000].split()) if c.isprintable())[:500]


class Asking(ABC):
    """Asks clients and checks what they reply; an engine says how replies are obtained."""

    place = ""  # the id of the run, where clients are elsewhere
    settings: dict[str, Any]  # what clients elsewhere learn about the run

    def __init__(self, world: World, states: Checkpoint, ledger: Ledger | None) -> None:
        self.world = world
        self.clients, self.held_out = world.training, world.held_out
        self.states = states
        self.settings = {}
        self.ledger = ledger
        self.remembered: State = {}  # state of the aggregation from round to round; part of checkpoints
        self._streaming = False
        self._early: Callable[[Reply], None] = lambda reply: None  # called by engines for replies before their turn
        self._far: dict[ClientId, None] = {}  # clients whose update was far from the others', in order
        self._absent: dict[ClientId, str] = {}  # clients whose last reply is missing, and why
        self.begin("start", 0)

    @abstractmethod
    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        """One reply to each request, in their order."""

    def replies_together(self, step: BoundStep[Any, Any], requests: Sequence[Request], mean: str) -> Iterator[Reply]:
        """As `replies`, but the field `mean` of a value may be the mean over a cohort; here each client is alone."""
        return self.replies(step, requests)

    def request(self, client: ClientId, step: str, message: Any, timeout: float) -> Request:
        """The request for a step from the client's present state."""
        return Request(
            client=client, step=step, stage=self.stage, round=self.round, ask=self.asks, timeout=timeout,
            state=self.states.state_file(client), new_state=self.states.new_state(client), message=message,
        )  # fmt: skip

    def reach(self, clients: Collection[ClientId], needed: int) -> None:  # noqa: B027 (simulated clients are there)
        """Wait until so many of the clients can be asked."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Let go of processes and connections."""

    def begin(self, stage: str, round: int) -> None:
        """Start a round: fresh random streams and counters."""
        self.stage, self.round, self.asks = stage, round, 0
        self.rng = generator(self.world.seed, stage, round, "server")
        self.traffic = Traffic()
        self._share: float | None = None  # share of the clients that this round has drawn

    @property
    def _dp(self) -> Privacy | None:
        return self.world.aggregation.dp if isinstance(self.world.aggregation, Mean) else None

    def _stream(self, what: str, digest: bytes = b"") -> Stream:
        """Random bits that only the server knows: from its secret, or in a simulation from the run's seed."""
        real = self.states.remote
        secret = self.states.secret() if real else self.world.secret_of(SERVER)
        return Stream(secret, f"{self.place if real else ''} {self.stage} {self.round} {what}".encode(), digest)

    def sample(self, share: float) -> list[ClientId]:
        """See `Network.sample`."""
        count, dp, self._share = max(1, round(share * len(self.clients))), self._dp, share
        if dp is None:
            chosen = torch.randperm(len(self.clients), generator=self.rng)[:count].tolist()
            return [self.clients[i] for i in sorted(chosen)]
        if dp.unit == "person" and dp.sampling == "poisson":
            return list(self.clients)  # each of which draws its people
        stream = self._stream("cohort")
        while True:  # an empty cohort is practically impossible (`Account.sum_of`)
            drawn = stream.uniform(len(self.clients)).tolist()
            limit = share if dp.sampling == "poisson" else sorted(drawn)[count - 1]
            if found := [c for c, u in zip(self.clients, drawn, strict=True) if u <= limit]:
                return found

    def log(self, /, **metrics: float) -> None:
        """See `Network.log`; differential privacy leaves out some metrics of replies, which are NaN."""
        metrics = metrics if self._dp is None else {k: v for k, v in metrics.items() if not math.isnan(v)}
        self.traffic.figures.update({k: float(v) for k, v in metrics.items()})

    def log_client(self, client: ClientId, /, **metrics: float) -> None:
        """See `Network.log_client`; with differential privacy nothing is recorded of single clients."""
        if self._dp is not None:
            return
        self.traffic.clients.setdefault(client, {}).update({k: float(v) for k, v in metrics.items()})

    def ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """See `Network.ask`."""
        self._refuse_single(step, messages)
        return self._ask(step, messages, timeout, min_replies)

    def _refuse_single(self, step: BoundStep[Any, Any], messages: Mapping[ClientId, Any]) -> None:
        """With differential privacy clients reply only to sums, except in tests and with public pictures."""
        if self._dp is not None and step.name != TEST and not messages.keys() <= {PUBLIC}:
            raise VisardError(
                f"aggregation.dp: {step.name} of {step.owner.name} is asked of each client by itself, not for an "
                "average, so no noise covers the replies"
            )

    def _ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        missing: dict[ClientId, str] = {}
        return Replies(dict(self._replies(step, messages, timeout, min_replies, missing)), missing)

    def stream(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        """See `Network.stream`."""
        self._refuse_single(step, messages)
        return self._replies(step, messages, timeout, min_replies, {})

    def _replies(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        timeout: float | None,
        min_replies: int | None,
        missing: dict[ClientId, str],
        reduction: Reduction | SecureReduction | PrivateReduction | None = None,
        noise: float = 0.0,
        people: str = "",
    ) -> Iterator[tuple[ClientId, R]]:
        self.asks += 1
        good = 0
        timeout = self.world.timeout if timeout is None else timeout
        self.reach(messages.keys(), self._needed(messages, min_replies))
        self.traffic.asked += len(messages)
        self.traffic.bytes_down += sizes_of([m for c, m in messages.items() if c != POOL])  # which is at the server
        requests = [self.request(client, step.name, message, timeout) for client, message in messages.items()]
        if noise or people:
            requests = [dataclasses.replace(request, noise=noise, people=people) for request in requests]
        secure = reduction if isinstance(reduction, SecureReduction) else None
        if secure is not None:
            requests = [dataclasses.replace(request, secure=secure.plan(request.client)) for request in requests]
        looked: dict[ClientId, tuple[Any, tuple[str, str] | None]] = {}  # replies that have come before their turn

        def look(reply: Reply) -> tuple[Any, tuple[str, str] | None]:
            """A reply in the form that the step returned, and what is wrong with it."""
            message, client = messages[reply.client], reply.client
            opened, wrong = self._opened(message, reply.value)
            wrong = (secure.wrong(reply.value) if secure is not None else wrong) or refusal(
                step, message, opened, self.world.pictures(client), self.world.embedding,
                reduction.known(opened) if reduction else (), self.world.statistics, self._rows(step, client),
            )  # fmt: skip
            return opened, wrong

        def early(reply: Reply) -> None:
            """Do now what does not depend on the order of replies: the last one may keep all others waiting."""
            if isinstance(reduction, Reduction):
                opened, wrong = looked[reply.client] = look(reply)
                if not wrong:
                    reduction.measure(reply.client, messages[reply.client], opened)

        self._early = early
        if isinstance(reduction, Reduction) and self._grouped(step, reduction):
            replies = self.replies_together(step, requests, reduction.fields[0])
        else:
            replies = self.replies(step, requests)
        with self._only(step.name):
            for reply in replies:
                client, value, failure = reply.client, reply.value, reply.failure
                if failure is None and reply.seconds > timeout:
                    failure = f"took {reply.seconds:.1f} s, over the limit of {timeout:g} s"
                    self._not_accepted("late", reply, failure)
                if failure is not None:
                    missing[client] = plain(failure)
                    self._problem("missing", client, reason=failure, traceback=reply.traceback)
                    if self._absent.get(client) == failure:  # the screen has it already
                        self.traffic.problems[-1]["again"] = True
                    self._absent[client] = failure
                    continue
                opened, wrong = looked.pop(client) if client in looked else look(reply)
                if wrong:
                    self._refuse(client, value, *wrong, missing)
                    self._not_accepted("refused", reply, " ".join(wrong).strip())
                    continue
                if self.ledger is not None and client != POOL:
                    self.traffic.bytes_up += self.ledger.record(
                        self.stage, self.round, client, value, self.world.statistics
                    )
                if reply.state is not None:
                    self.states.adopt(client, reply.state)
                self.traffic.replied += 1
                self._absent.pop(client, None)
                self.traffic.seconds[client] = self.traffic.seconds.get(client, 0.0) + reply.seconds
                good += 1
                yield client, self._stated(client, opened)
        self._check_enough(good, messages, min_replies, missing)

    def _rows(self, step: BoundStep[Any, Any], client: ClientId) -> int:
        """How many class vectors a client may send; one that groups its pictures itself may find many people."""
        free = isinstance(step.owner, Method) and client in step.owner.without_labels(self.clients)
        return max(self.world.rows(client), self.world.pictures(client) if free else 0)

    def _opened(self, message: Any, value: Any) -> tuple[Any, tuple[str, str] | None]:
        """A reply in the form that the step returned, whatever form it was sent in; or what is wrong with it."""
        try:
            for postprocess in reversed(self.world.outgoing):
                value = postprocess.received(message, value)
        except ValueError as error:
            return value, ("", str(error))
        except Exception as error:  # nothing that a client sends may end the run
            return value, ("", f"cannot be read: {type(error).__name__}")
        return value, None

    def _needed(self, messages: Mapping[ClientId, Any], min_replies: int | None) -> int:
        return self.world.replies_needed(len(messages)) if min_replies is None else min_replies

    def _check_enough(
        self, good: int, messages: Mapping[ClientId, Any], min_replies: int | None, missing: dict[ClientId, str]
    ) -> None:
        needed = self._needed(messages, min_replies)
        if good < needed:
            why = "".join(f"; {c}: {reason}" for c, reason in list(missing.items())[:1])
            why += f"; updates far from the others' came from {', '.join(self._far)}" if self._far else ""
            raise VisardError(
                f"{at_round(self.stage, self.round)}: {good} good replies of {len(messages)}, {needed} needed{why}"
            )

    def _stated(self, client: ClientId, value: Any) -> Any:
        """A reply with at most the weight that the operator states for its client."""
        most = self.world.stated.get(client)
        n = getattr(value, "n", None)
        return value if most is None or not isinstance(n, int) or n <= most else dataclasses.replace(value, n=most)

    def _refuse(self, client: ClientId, value: Any, name: str, reason: str, missing: dict[ClientId, str]) -> None:
        kind = type(value).__name__
        missing[client] = plain(f"reply refused: {kind}{name and '.' + name} {reason}")
        self._problem("refused", client, message=kind, field=name, reason=reason)

    def _name_far(self, far: Remark) -> None:
        """Name a client whose update is far from the others'; on the screen once."""
        self._problem("far", far.client, field=far.field, reason=far.reason)
        self.traffic.problems[-1] |= {"norm": far.norm, "again": far.client in self._far}
        self._far.setdefault(far.client)

    def _grouped(self, step: BoundStep[Any, Any], reduction: Reduction) -> bool:
        """Whether clients may be done in one pass: the step supports it, and only the mean of one field is wanted."""
        rule = self.world.aggregation
        plain_mean = rule.of_groups and not rule.limited and len(reduction.fields) == 1 and not self.world.outgoing
        return step.together is not None and plain_mean

    @contextmanager
    def _only(self, name: str) -> Iterator[None]:
        """One ask at a time: workers and parties answer requests in order."""
        if self._streaming:
            raise VisardError(f"step {name} is asked for while replies of another ask are still to come")
        self._streaming = True
        try:
            yield
        finally:
            self._streaming = False

    def _not_accepted(self, event: str, reply: Reply, reason: str) -> None:
        """Record a reply that left its client and was not accepted."""
        if self.ledger is not None and reply.client != POOL:
            self.ledger.received.add(
                event, (reply.client, reply.stage, reply.round, reply.ask), reason=plain(reason),
                message=type(reply.value).__name__, parts=parts_of(reply.value, self.world.statistics),
            )  # fmt: skip

    def _problem(self, event: str, client: ClientId, traceback: str | None = None, **fields: str) -> None:
        known = {k: plain(v) for k, v in fields.items()}
        known |= {} if traceback is None else {"traceback": traceback[:LONGEST_TRACEBACK]}
        self.traffic.problems.append({"event": event, "client": client, **known})
