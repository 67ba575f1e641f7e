r"""Differential privacy for clients: the contribution of a client to an average is bounded, and noise hides it.

    [aggregation.dp]
    clip = 1.0       # largest L2 norm of a client's update
    epsilon = 8.0    # the run chooses its noise for this, and stops there

Below `Network.reduce`, for every method that averages (McMahan et al. 2018). Of the update $\Delta_i$ of a client, over
all fields that are averaged together, and with $m$ clients expected in a round:

    theta' = theta + (sum_i Delta_i min(1, C / |Delta_i|) + N(0, (z C)^2)) / m

All clients count alike. Updates are cut to a grid towards zero, which makes no norm longer, and the noise is a discrete
Gaussian on the same grid: the sum is one of integers, so its bits do not depend on the order of replies. `quantile`
makes $C$ follow that quantile of the norms (Andrew et al. 2021, Algorithm 1): one more number in the same sum counts
the clients within $C$, and a part of the noise is for it, so that the whole costs what noise z costs.

Batch norm's running statistics and counters have no such bound: they must come back as they were sent. Metrics and
counts of single clients are not part of what is protected, and are not passed on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from visard.aggregation.accounting import (
    NEVER,
    Sampling,
    Sum,
    empty_cohort,
    epsilon_amplified,
    epsilon_plain,
    largest_delta,
    noise_for,
)
from visard.core import ClientId, Disclosure, State, Weights, declared_kinds
from visard.crypto.discrete_gaussian import Integers, Stream, discrete_gaussian
from visard.disclosure import is_statistic
from visard.errors import PublicError, UsageError, VisardError

GRID = 24  # bits of an update of norm C: a grid of C 2^-24, up to a factor of 2
COUNTED = 20  # noise of the count of clients within C: their expected number by this (Andrew et al. 2021)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
STATISTICS = (
    "changes batch norm's running statistics, which aggregation.dp cannot bound: start from given weights "
    "(model.weights), where batch norm stays frozen, take a network without batch norm, or keep it at home "
    "(method.batch_norm = local)"
)


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """`[aggregation.dp]`."""

    clip: Positive = 1.0  # C; of the first round if it adapts
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None  # of the norms that C follows; None: it stays
    clip_rate: Positive = 0.2  # how fast it does
    noise: Annotated[float, Field(ge=0, le=1000)] | None = (
        None  # z; None: the least noise with which epsilon lasts for all rounds
    )
    epsilon: Positive | None = None  # the run ends before it would spend more; None: no limit
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: 1 / n^1.1 of n clients
    sampling: Sampling = "fixed"  # a cohort of fixed size, or each client drawn by itself
    colluders: Annotated[float, Field(ge=0, lt=0.5)] = (
        0.0  # share of the members of a secure sum that may reveal their noise to the server
    )
    unit: Literal["client", "person"] = "client"  # what is bounded and hidden: a whole client, or each person

    def __post_init__(self) -> None:
        if self.noise is None and self.epsilon is None:
            raise ValueError("give noise (how much), epsilon (a target, which chooses the noise), or both (a budget)")


class BudgetSpent(VisardError):
    """The next sum would exceed the privacy budget."""


@dataclass
class Account:
    """The privacy that a run has spent so far; `state` is part of the checkpoint, and changes with every sum.

    With `known`, epsilon holds towards the server, which knows the cohorts (`aggregation.secure`). With `unit` = person
    the clients of the account are people.
    """

    settings: Privacy
    state: State
    clients: int
    rounds: int
    known: bool = False

    @property
    def delta(self) -> float:
        """At most 1 / n^1.1: a larger delta would allow a client to be published in the clear."""
        most, delta = largest_delta(self.clients), self.settings.delta
        if delta is not None and delta > most:
            what = "people" if self.settings.unit == "person" else "clients"
            raise UsageError(f"aggregation.dp.delta = {delta:g}: with {self.clients} {what} at most {most:.3g}")
        return delta or most

    @property
    def clip(self) -> float:
        return float(self.state.get("clip", self.settings.clip))

    def sum_of(self, asked: int, share: float | None) -> Sum:
        """The sum that is about to be taken; `share` is that of a random cohort, None where a method chose it."""
        dp, people = self.settings, self.settings.unit == "person"
        if share is None or dp.sampling == "fixed":  # a cohort that is not random counts as known to everyone
            q = 1.0 if share is None or people else min(1.0, asked / self.clients)  # clients are drawn, not people
            found = Sum("fixed", asked, q, self.clients, dp.noise or 0.0)
        else:
            found = Sum("poisson", 0, share, self.clients, dp.noise or 0.0)
            if not people and empty_cohort(found, max(1, self.rounds)) > NEVER * self.delta:
                raise UsageError(
                    f"aggregation.dp.sampling = poisson: with {self.clients} clients and a share of {share:g} a round "
                    "without any client is too likely: take a larger method.participation, or sampling = fixed"
                )
        if dp.noise is None:
            found = replace(found, noise=self._chosen(found))
        return found

    def _chosen(self, sum: Sum) -> float:
        """The noise for the target, chosen at the first sum for all rounds of the run."""
        if "noise" not in self.state:
            target, rounds = self.settings.epsilon or 0.0, max(1, self.rounds)
            self.state["noise"] = noise_for(
                lambda z: self._epsilon({replace(sum, noise=z): rounds}, rounds / z**2), target
            )
        return float(self.state["noise"])

    def check(self, sum: Sum, clients: Collection[ClientId]) -> None:
        """Refuse a sum beyond the budget."""
        budget = self.settings.epsilon
        if budget is None:
            return
        sums, plain = self._after(sum, clients)
        if (epsilon := self._epsilon(sums, _most(sums, plain))) > budget:
            raise BudgetSpent(
                f"the budget of differential privacy is spent: one more round would make epsilon {epsilon:.3g}, "
                f"aggregation.dp.epsilon = {budget:g}"
            )

    def take(self, sum: Sum, clients: Collection[ClientId]) -> dict[str, float]:
        """Count a sum; returns the metrics of the round."""
        sums, plain = self._after(sum, clients)
        self.state["sums"] = [[*vars(each).values(), count] for each, count in sums.items()]
        self.state["plain"] = plain
        most = _most(sums, plain)
        metrics = {"epsilon": self._epsilon(sums, most), "delta": self.delta, "noise": sum.noise, "clip": self.clip}
        if not self.known and not all(each.everyone for each in sums):
            metrics["epsilon if cohorts are known"] = epsilon_plain(most, self.delta)
        return metrics

    def adapt(self, within: float) -> None:
        """Move C towards the quantile, by the (noisy) share of the clients whose updates are within it."""
        dp = self.settings
        assert dp.quantile is not None
        self.state["clip"] = self.clip * math.exp(-dp.clip_rate * (within - dp.quantile))

    def _after(self, sum: Sum, clients: Collection[ClientId]) -> tuple[dict[Sum, int], dict[ClientId, float]]:
        sums = {Sum(*each): int(count) for *each, count in self.state.get("sums", [])}
        sums[sum] = sums.get(sum, 0) + 1
        plain = dict(self.state.get("plain", {}))
        for client in clients if sum.noise else ():
            plain[client] = plain.get(client, 0.0) + 1 / sum.noise**2
        return sums, plain

    def _epsilon(self, sums: Mapping[Sum, int], plain: float) -> float:
        return epsilon_plain(plain, self.delta) if self.known else epsilon_amplified(tuple(sums.items()), self.delta)


def _most(sums: Mapping[Sum, int], plain: Mapping[ClientId, float]) -> float:
    """The total of the client that took part most often; infinite where a sum had no noise."""
    return math.inf if any(not each.noise for each in sums) else max(plain.values(), default=0.0)


def split_noise(noise: float, clip: float, expected: float, adaptive: bool) -> tuple[float, float]:
    r"""Standard deviations of the noise of the updates and of the count, which cost `noise` together.

    The count is of $b_i - 1/2$, so its sensitivity is 1/2: $z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}$.
    """
    if not adaptive or not noise:
        return noise * clip, 0.0
    counted = max(expected / COUNTED, noise)  # above z / 2, so that something is left for the updates
    return (noise**-2 - (2 * counted) ** -2) ** -0.5 * clip, counted


@dataclass(frozen=True)
class Grid:
    """The layout of an update as a vector of integers, and its unit."""

    places: dict[str, dict[str, torch.Size]]  # by field: the entries that are averaged
    unit: float

    @classmethod
    def of(cls, names: Collection[str], message: Any, clip: float, statistics: Collection[str]) -> Grid:
        places = {
            name: {
                key: value.shape
                for key, value in (entries_of(getattr(message, name, None)) or {}).items()
                if value.is_floating_point() and not is_statistic(key, statistics)
            }
            for name in names
        }
        return cls(places, 2.0 ** (math.floor(math.log2(clip)) - GRID))

    @property
    def size(self) -> int:
        return sum(shape.numel() for entries in self.places.values() for shape in entries.values())

    def update(self, message: Any, reply: Any) -> npt.NDArray[np.float64]:
        """The update of a reply relative to what was sent; a ValueError says what is wrong with it."""
        parts = [np.zeros(0)]
        for name, entries in self.places.items():
            sent, value = entries_of(getattr(message, name, None)), entries_of(getattr(reply, name))
            if value is None:
                parts.append(np.zeros(sum(shape.numel() for shape in entries.values())))
                continue
            if sent is None:
                raise ValueError(f"{name} has no update that aggregation.dp could bound: the clients are not sent it")
            for key, tensor in value.items():
                if key not in entries and not torch.equal(tensor, sent[key]):
                    raise ValueError(f"{name} {STATISTICS}")
            parts += [(value[k].detach().double() - sent[k].double()).numpy().reshape(-1) for k in entries]
        return np.concatenate(parts)

    def integers(self, update: npt.NDArray[np.float64], clip: float) -> tuple[Integers, bool]:
        """An update, shortened to norm C, in units of the grid and cut towards zero; and whether it was within C."""
        length = math.sqrt(float(np.square(update).sum()))  # the same for any number of threads
        if not math.isfinite(length):
            return np.zeros(len(update), np.int64), False
        scale = 1.0 if length <= clip else clip / length * (1 - 2.0**-40)  # rounding must not make it longer than C
        return np.trunc(update * (scale / self.unit)).astype(np.int64), length <= clip

    def result(self, total: npt.NDArray[np.float64], message: Any) -> dict[str, Any]:
        """What was sent, moved by `total`."""
        found: dict[str, Any] = {}
        place = 0
        for name, entries in self.places.items():
            sent = getattr(message, name, None)
            means: Weights = dict(entries_of(sent) or {})
            for key, shape in entries.items():
                part, place = total[place : place + shape.numel()], place + shape.numel()
                means[key] = (means[key].double() + torch.from_numpy(part).reshape(shape)).to(means[key].dtype)
            found[name] = None if sent is None else means[""] if isinstance(sent, Tensor) else means
        return found


class PrivateReduction:
    """One private sum at the server, with the interface of `Reduction`.

    `stream` gives the random bits of this place in the run for a digest of the sum: the same replies get the same
    noise, also after a restart, and other replies get other noise. With `read` a reply is already a sum over people: it
    gives their bounded updates, how many were within the bound, and how many there are.
    """

    def __init__(
        self,
        fields: tuple[str, ...],
        message: Any,
        account: Account,
        sum: Sum,
        asked: int,
        statistics: Collection[str],
        stream: Callable[[bytes], Stream],
        read: Callable[[ClientId, Any, Grid, float], tuple[Integers, int, int]] | None = None,
    ) -> None:
        self.fields, self.remarks = fields, list[Any]()
        self.left_out: dict[ClientId, tuple[str, str]] = {}
        self._message, self._account, self._of, self._expected = message, account, sum, sum.expected(asked)
        self._grid = Grid.of(fields, message, account.clip, statistics)
        self._stream, self._read = stream, read
        self._sum: Integers = np.zeros(self._grid.size, np.int64)
        self._within, self._units, self._clients = 0, 0, 0

    def known(self, reply: Any) -> tuple[str, ...]:
        return () if self._read is None else self.fields

    def close(self) -> None:
        """Nothing to close."""

    def take(self, client: ClientId, message: Any, reply: Any) -> Any:
        """Add a client's update; returns its reply without anything that the noise does not cover."""
        if any(getattr(message, f, None) is not getattr(self._message, f, None) for f in self.fields):
            raise VisardError("aggregation.dp: the clients of a sum were sent different weights")
        try:
            if self._read is not None:
                integers, within, units = self._read(client, reply, self._grid, self._account.clip)
            else:
                integers, within = self._grid.integers(self._grid.update(message, reply), self._account.clip)
                units = 1
        except ValueError as error:
            self.left_out[client] = "", str(error)
            return bare(reply, self.fields)
        self._sum += integers
        self._within += within
        self._units += units
        self._clients += 1
        return bare(reply, self.fields)

    def result(self) -> dict[str, Any]:
        """The fields with the mean update and its noise; also adapts C, if it adapts."""
        if not self._clients and self.left_out:
            client, (_, reason) = next(iter(self.left_out.items()))
            raise VisardError(f"no reply can count in the average: {client}: {reason}")
        clip, adaptive = self._account.clip, self._account.settings.quantile is not None
        sigma, counted = split_noise(self._of.noise, clip, self._expected, adaptive)
        digest = hashlib.sha256(self._sum.tobytes() + b"%d %d" % (self._within, self._units)).digest()
        stream = self._stream(digest)
        noisy = self._sum + discrete_gaussian(stream, sigma / self._grid.unit, len(self._sum))
        if adaptive:  # b_i - 1/2 of each client or person, in units of 2^-GRID
            half = (2 * self._within - self._units) * 2 ** (GRID - 1)
            bits = half + int(discrete_gaussian(stream, counted * 2.0**GRID, 1)[0])
            self._account.adapt(bits / 2.0**GRID / self._expected + 0.5)
        return self._grid.result(noisy.astype(np.float64) * (self._grid.unit / self._expected), self._message)


def bare(reply: Any, fields: Collection[str]) -> Any:
    """A reply without the averaged fields, and without metrics and counts of its client.

    Any other field is not part of a sum, so a method that sends one cannot have differential privacy.
    """
    empty: dict[str, Any] = {}
    for name, kind in declared_kinds(type(reply)).items():
        value = getattr(reply, name)
        if name in fields:
            empty[name] = {} if isinstance(value, dict) else None
        elif kind is Disclosure.metric:
            empty[name] = {} if isinstance(value, dict) else math.nan
        elif kind is Disclosure.count:
            empty[name] = {} if isinstance(value, dict) else int(name == "n")
        elif value is not None:
            raise PublicError(
                f"aggregation.dp: {type(reply).__name__}.{name} ({kind.value}) leaves each client by itself and is not "
                "averaged, so no noise covers it"
            )
    return replace(reply, **empty)


def entries_of(value: Any) -> Weights | None:
    """Weights as they are, one tensor as the entry ""; None for anything else."""
    if isinstance(value, Tensor):
        return {"": value}
    return value if isinstance(value, dict) else None
