"""The base of all engines: beside asking, averages over replies in the clear, with noise, or as secure sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any

from visard.aggregation.accounting import Sum
from visard.aggregation.dp import Account, Grid, Privacy, PrivateReduction, bare
from visard.aggregation.dp_shares import Shared
from visard.aggregation.limits import capped
from visard.aggregation.optimisers import FIELD
from visard.aggregation.people import Virtual, read
from visard.aggregation.reduction import Reduction
from visard.aggregation.rules import Mean, Weighing
from visard.aggregation.secure import PHASES, Begun, SecureAggregation, SecureReduction
from visard.core import BoundStep, ClientId, M, R, Replies
from visard.engines.asking import Asking
from visard.engines.codec import MAX_HEADER_OF_FILES, decode, encode
from visard.errors import VisardError
from visard.files import PRIVATE, read_bytes, write_atomically
from visard.text import at_round

HERE = "0" * 32  # the run's id where clients are simulated: messages are as long as between parties
SUM = "sum.bin"  # in the checkpoint folder: the secure sum that may have been opened (`Begun`)


class EngineNetwork(Asking):
    """All that a method can do with its clients (`visard.core.Network`)."""

    def reduce(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        mean: str | tuple[str, ...],
        by: Weighing,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> tuple[dict[str, Any], Replies[R]]:
        """See `Network.reduce`."""
        missing: dict[ClientId, str] = {}
        fields = (mean,) if isinstance(mean, str) else mean
        if isinstance(self.world.aggregation, Mean) and self.world.aggregation.secure:
            return self._reduce_securely(self.world.aggregation, step, messages, fields, timeout, min_replies)
        if self._dp is not None:
            return self._reduce_privately(self._dp, step, messages, fields, timeout, min_replies)
        first = next(iter(messages.values()), None)
        if messages and (reason := self.world.aggregation.too_few(len(messages))):
            raise VisardError(f"{at_round(self.stage, self.round)}: {reason}")
        with closing(Reduction(self.world.aggregation, fields, by, first, self.states.folder)) as reduction:
            replies = self._replies(step, messages, timeout, min_replies, missing, reduction)
            rest = {client: reduction.take(client, messages[client], reply) for client, reply in replies}
            try:
                means = reduction.result()
            finally:
                for far in reduction.remarks:
                    self._name_far(far)
                for client, (name, reason) in reduction.left_out.items():
                    self._refuse(client, rest.pop(client), name, reason, missing)
        self._check_enough(len(rest), messages, min_replies, missing)
        return self._stepped(step, messages, means), Replies(rest, missing)

    def hand_on(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        fields: tuple[str, ...],
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """See `Network.hand_on`."""
        rule, missing = self.world.aggregation, dict[ClientId, str]()
        if other := rule.beyond_mean():
            raise VisardError(f"{step.name} of {step.owner.name} hands on single replies: it goes without {other}")
        if not rule.limited:
            return self._ask(step, messages, timeout, min_replies)
        first = next(iter(messages.values()), None)
        with closing(Reduction(rule, fields, None, first, self.states.folder)) as reduction:
            replies = self._replies(step, messages, timeout, min_replies, missing, reduction)
            rest = {client: reduction.take(client, messages[client], reply) for client, reply in replies}
            within = reduction.one_by_one()
            for far in reduction.remarks:
                self._name_far(far)
        found = {client: dataclasses.replace(reply, **within.get(client, {})) for client, reply in rest.items()}
        return Replies(found, missing)

    def _account(self, dp: Privacy, messages: Mapping[ClientId, Any], known: bool) -> tuple[Account, Sum]:
        """The privacy account of the run, and the next sum, which its budget allows."""
        state = self.remembered.setdefault("dp", {})
        account = Account(dp, state, self._units(dp, self.clients), self.world.rounds, known)
        of = account.sum_of(self._units(dp, messages), self._share)
        account.check(of, messages)
        return account, of

    def _units(self, dp: Privacy, clients: Collection[ClientId]) -> int:
        """How many units of differential privacy (clients or people) these clients are."""
        return sum(self.world.people(c) for c in clients) if dp.unit == "person" else len(clients)

    def _of_people(self, dp: Privacy, account: Account, of: Sum, fields: tuple[str, ...]) -> str:
        """How clients sum over their people, where differential privacy is for people."""
        if dp.unit == "client":
            return ""
        place = f"{self.place} " if self.states.remote else ""
        share = of.share if of.sampling == "poisson" else 1.0
        return Virtual(fields, account.clip, share, f"{place}{self.stage} {self.round} {self.asks + 1}").text()

    def _sum_of_people(self, fields: tuple[str, ...]) -> Callable[[ClientId, Any, Grid, float], Any]:
        return lambda client, reply, grid, clip: read(reply, fields, grid, clip, self.world.people(client))

    def _reduce_privately(
        self,
        dp: Privacy,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        fields: tuple[str, ...],
        timeout: float | None,
        min_replies: int | None,
    ) -> tuple[dict[str, Any], Replies[R]]:
        """As `reduce`, with updates of bounded length and noise; the clients count alike."""
        (account, of), missing = self._account(dp, messages, known=False), dict[ClientId, str]()
        stream = functools.partial(self._stream, f"{self.asks + 1} noise")
        first, people = next(iter(messages.values())), self._of_people(dp, account, of, fields)
        asked, sums = self._units(dp, messages), self._sum_of_people(fields) if people else None
        reduction = PrivateReduction(fields, first, account, of, asked, self.world.statistics, stream, sums)
        replies = self._replies(step, messages, timeout, min_replies, missing, reduction, of.noise, people)
        rest = {client: reduction.take(client, messages[client], reply) for client, reply in replies}
        for client, (name, reason) in reduction.left_out.items():
            self._refuse(client, rest.pop(client), name, reason, missing)
        metrics = account.take(of, rest)
        means = reduction.result()
        self._check_enough(len(rest), messages, min_replies, missing)
        self.log(**metrics)
        return self._stepped(step, messages, means), Replies(rest, missing)

    def _stepped(
        self, step: BoundStep[Any, Any], messages: Mapping[ClientId, Any], means: dict[str, Any]
    ) -> dict[str, Any]:
        """The rule's result after the server's optimiser, where the run has one."""
        optimiser = self.world.aggregation.optimiser
        if optimiser is None:
            return means
        sent = [getattr(message, FIELD, None) for message in messages.values()]
        if not isinstance(means.get(FIELD), dict) or not isinstance(sent[0], dict):
            raise VisardError(
                f"aggregation.optimiser = {optimiser.name}: {step.name} of {step.owner.name} does not average the "
                f"weights {FIELD} that it sends, which is what an optimiser works on"
            )
        if any(other is not sent[0] for other in sent):
            raise VisardError(
                f"aggregation.optimiser = {optimiser.name}: {step.name} of {step.owner.name} sends the clients "
                "different weights, and an optimiser needs one place to go on from"
            )
        state = self.remembered.setdefault("optimiser", {}).setdefault(step.name, {})
        return means | {FIELD: optimiser.apply(sent[0], means[FIELD], state, self.world.statistics)}

    def _reduce_securely(
        self,
        rule: Mean,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        fields: tuple[str, ...],
        timeout: float | None,
        min_replies: int | None,
    ) -> tuple[dict[str, Any], Replies[R]]:
        """As `reduce`, but the server learns only the sums; a client that is lost on the way is missing."""
        stated = [self.world.stated.get(client) for client in messages]
        equal = rule.dp is not None or not all(stated)
        weights = capped([1.0 if equal else float(n or 1) for n in stated], rule.max_weight or 1.0)
        ask, missing = self.asks + 1, dict[ClientId, str]()
        place = f"{self.place or HERE} {self.stage} {self.round} {ask}"
        account, of, private, people = None, None, None, ""
        if rule.dp is not None:
            account, of = self._account(rule.dp, messages, known=True)
            people = self._of_people(rule.dp, account, of, fields)
            label = place if self.states.remote else f"{self.stage} {self.round} {ask}"
            private = functools.partial(
                Shared.of, label, threshold=rule.threshold, colluders=rule.dp.colluders, clip=account.clip,
                noise=of.noise, expected=of.expected(self._units(rule.dp, messages)),
                adaptive=rule.dp.quantile is not None,
                people=max(self.world.people(c) for c in messages) if people else 1,
            )  # fmt: skip
        begun = self._attempt(place)
        own = dict(zip(messages, weights, strict=True))
        with closing(SecureReduction(fields, begun.context, rule, own, private, self.world.compress)) as reduction:
            if begun.arrived:
                circles, shares = reduction.again(begun)
                self._phase("secure_keys", 1, reduction.invitations(begun.keys), {})  # for the ledger: these were sent
                self._phase("secure_shares", 2, circles, {})
                missing |= {c: "was not in the sum when the run ended" for c in messages if c not in begun.arrived}
            else:
                keys = self._phase("secure_keys", 1, reduction.invitations(messages), missing)
                shares = self._phase("secure_shares", 2, reduction.circles(keys), missing)
            there = {client: messages[client] for client in messages if client in (begun.arrived or shares)}
            first = next(iter(there.values()), None)
            reduction.begin(shares, first, step.types[1], self.world.statistics, self.settings)
            self._check_enough(len(there), messages, min_replies, missing)
            noise = 0.0 if of is None else of.noise
            replies = self._replies(step, there, timeout, min_replies, missing, reduction, noise, people)
            rest = {client: reduction.take(client, messages[client], reply) for client, reply in replies}
            if lost := [client for client in begun.arrived if client not in rest]:
                raise VisardError(
                    f"{at_round(self.stage, self.round)}: {', '.join(lost)} must come back ({missing[lost[0]]}): the "
                    "sum with what it sent was being opened when the run ended, and no client opens another one"
                )
            lists = reduction.lists()
            if self.place and not begun.arrived:
                self._keep(reduction.begun(begun))
            agreed = self._phase("secure_agree", 4, lists, {})
            opened = self._phase("secure_open", 3, reduction.openings(agreed), {})
            means, metrics = reduction.result(opened)
        self._check_enough(len(rest), messages, min_replies, missing)
        if account is not None and of is not None:
            self.log(**account.take(of, rest))
            if account.settings.quantile is not None:
                account.adapt(reduction.within)
            rest = {client: bare(reply, fields) for client, reply in rest.items()}
        ups = Replies({c: dataclasses.replace(r, **metrics) for c, r in rest.items()}, missing)
        return self._stepped(step, there, means), ups

    def _attempt(self, place: str) -> Begun:
        """The next attempt at a sum, or the last one if clients may have opened it."""
        if not self.place:  # simulated clients are resumed with the run
            return Begun(place, 1)
        path = self.states.folder / SUM
        last = decode(read_bytes(path), Begun, MAX_HEADER_OF_FILES) if path.exists() else Begun("", 0)
        if last.place != place:
            last = Begun(place, 0)
        if not last.arrived:
            last = Begun(place, last.attempt + 1)
            self._keep(last)
        return last

    def _keep(self, begun: Begun) -> None:
        write_atomically(self.states.folder / SUM, encode(begun), PRIVATE, parents=True)

    def _phase(self, name: str, number: int, messages: Mapping[ClientId, Any], missing: dict[ClientId, str]) -> Any:
        """One of the small steps of a secure sum, which does not change the numbers of the method's asks."""
        if not messages:
            return {}
        ask, self.asks = self.asks, number * PHASES + self.asks
        try:
            replies = self._ask(SecureAggregation.steps()[name], messages, min_replies=0)
        finally:
            self.asks = ask
        missing.update(replies.missing)
        return replies
