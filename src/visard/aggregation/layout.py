r"""Where each number of a reply stands in the vector of a secure sum: wide fixed-point numbers, or levels of 8 bits.

With `compress` the updates of the trained entries are levels, 127 up and 127 down, of a width that clients take from
what they were sent. Several levels share one number of the vector, each with room for the sum over all clients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.aggregation.compression import WIDE, Compress, earlier_errors
from visard.aggregation.dp import entries_of
from visard.core import Client, Disclosure, Weights, declared_kinds
from visard.crypto.secure_sum import Vector, decoded, encoded
from visard.disclosure import MASKED, declared_names, is_statistic
from visard.errors import PublicError, VisardError

COARSE = 256.0  # running statistics and metrics are divided by this: they are larger, and need fewer digits
MOST = 127  # levels of a compressed update, up and down
BLOCK = 2**14  # numbers that are turned into fixed point at a time: they stay in the processor's cache
LEAST = 0.1  # least value taken for the largest number of an entry: biases begin at 0


@dataclass(frozen=True)
class Levels:
    """Entries whose updates are summed as levels of 8 bits, several in one number of the vector."""

    widths: dict[
        str, dict[str, float]
    ]  # width of a level by field and entry; the same for all clients, from what was sent
    feedback: bool

    @classmethod
    def of(cls, names: Sequence[str], message: Any, reply: type, statistics: Collection[str], by: Compress) -> Levels:
        kinds = declared_kinds(reply)
        return cls(
            {
                name: {
                    key: by.reach * max(float(value.abs().max()), LEAST) / MOST
                    for key, value in getattr(message, name).items()
                    if value.dtype in WIDE and value.numel() and not is_statistic(key, statistics)
                }
                for name in names
                if kinds.get(name) is Disclosure.weights and isinstance(getattr(message, name, None), dict)
            },
            by.feedback,
        )

    @staticmethod
    def lanes(members: int) -> tuple[int, int]:
        """(how many levels share a number, bits of each): a sum over all members stays within its bits."""
        bits = (2 * MOST * members).bit_length()
        return 32 // bits, bits

    def packed(self, client: Client, message: Any, reply: Any, weight: float, members: int) -> Vector:
        """The levels of a client's weighted update; the rounding error stays in its state for the next round."""
        found = []
        for name, widths in self.widths.items():
            sent, value = getattr(message, name), getattr(reply, name)
            left = earlier_errors(client.state, f"{type(reply).__name__}.{name}") if self.feedback else {}
            for key, width in widths.items():
                update = torch.zeros(sent[key].shape, dtype=torch.float64)
                if value is not None:
                    if key not in value or value[key].shape != sent[key].shape:
                        raise PublicError(f"{name} has other entries or shapes than what was sent")
                    update = weight * (value[key].detach().double() - sent[key].double())
                if not bool(torch.isfinite(update).all()):
                    raise PublicError("a number of a secure sum is not finite")
                if value is not None and key in left:
                    update += left[key].double()
                drawn = torch.rand(update.shape, generator=client.rng)
                q = (update / width + drawn).floor().clamp(-MOST, MOST)
                if value is not None and self.feedback:
                    left[key] = (update - width * q).float()
                found.append((q + MOST).to(torch.int64).reshape(-1).numpy())
        each, bits = self.lanes(members)
        levels = np.concatenate([*found, np.zeros(-sum(map(len, found)) % each, np.int64)]).reshape(-1, each)
        packed: Vector = (levels << (bits * np.arange(each))).sum(axis=1).astype(np.uint32)
        return packed

    def size(self, message: Any, members: int) -> int:
        """Numbers of the vector."""
        numbers = sum(int(getattr(message, name)[key].numel()) for name, of in self.widths.items() for key in of)
        return -(-numbers // self.lanes(members)[0])

    def updates(self, total: Vector, message: Any, members: int, arrived: int) -> dict[str, Weights]:
        """By field and entry: the sums of the updates."""
        each, bits = self.lanes(members)
        lanes = (total.astype(np.int64)[:, None] >> (bits * np.arange(each))) & ((1 << bits) - 1)
        levels, place, found = lanes.reshape(-1) - MOST * arrived, 0, dict[str, Weights]()
        for name, widths in self.widths.items():
            for key, width in widths.items():
                shape = getattr(message, name)[key].shape
                part, place = levels[place : place + shape.numel()], place + shape.numel()
                found.setdefault(name, {})[key] = torch.from_numpy(part * width).reshape(shape)
        return found


@dataclass(frozen=True)
class Layout:
    """The place of each number of a reply in the vector: the same for all clients that were sent the same."""

    entries: dict[str, dict[str, tuple[torch.Size, float]]]  # by field: shape of an entry, and what it is divided by
    metrics: tuple[tuple[str, str], ...]  # field and name; a field that is one number has the name ""
    levels: Levels | None = None  # of the entries that are none of the above

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        message: Any,
        reply: type,
        statistics: Collection[str],
        compress: Compress | None = None,
    ) -> Layout:
        levels = Levels.of(names, message, reply, statistics, compress) if compress is not None else None
        entries: dict[str, dict[str, tuple[torch.Size, float]]] = {}
        for name in names:
            sent = entries_of(getattr(message, name, None))
            entries[name] = {
                key: (value.shape, COARSE if is_statistic(key, statistics) else 1.0)
                for key, value in (sent or {}).items()
                if value.is_floating_point() and (levels is None or key not in levels.widths.get(name, ()))
            }
        allowed = declared_names(reply)
        metrics = [
            (name, word)
            for name, kind in declared_kinds(reply).items()
            if kind is Disclosure.metric
            for word in sorted(allowed[name].words) or [""]
        ]
        return cls(entries, tuple(metrics), levels)

    def vector(self, message: Any, reply: Any, weight: float, bits: int, largest: float) -> Vector:
        """The weighted numbers of a reply in fixed point: updates and metrics, each with a 1 before it; 0 for what is
        not there."""
        found, place, block = np.empty(self.size, np.uint32), 0, np.empty(BLOCK)
        for name, entries in self.entries.items():
            sent, value = entries_of(getattr(message, name, None)), entries_of(getattr(reply, name))
            if value is not None and sent is None:
                raise PublicError(f"{name} cannot be summed securely: the clients are not sent it")
            found[place] = encoded(np.array([weight * (value is not None)]), bits, largest)[0]
            place += 1
            for key, (shape, divisor) in entries.items():
                part, place = found[place : place + shape.numel()], place + shape.numel()
                if value is None:
                    part[:] = 0
                elif key not in value or value[key].shape != shape:
                    raise PublicError(f"{name} has other entries or shapes than what was sent")
                else:
                    back, before = _numbers(value[key]), _numbers(cast(Weights, sent)[key])
                    for start in range(0, len(part), BLOCK):
                        update = block[: min(BLOCK, len(part) - start)]
                        where = slice(start, start + len(update))
                        np.subtract(back[where], before[where], out=update, dtype=np.float64)
                        update *= weight / divisor  # a power of two
                        part[where] = encoded(update, bits, largest, update)
        for name, word in self.metrics:
            given = getattr(reply, name)
            number = given.get(word) if isinstance(given, dict) else given
            there = isinstance(number, int | float) and math.isfinite(number)
            pair = np.array([float(there), cast(float, number) / COARSE if there else 0.0])
            found[place : place + 2] = encoded(weight * pair, bits, largest)
            place += 2
        return found

    @property
    def size(self) -> int:
        """Numbers of the vector."""
        numbers = sum(1 + sum(shape.numel() for shape, _ in entries.values()) for entries in self.entries.values())
        return numbers + 2 * len(self.metrics)

    def without(self, reply: Any, vector: Tensor) -> Any:
        """The reply with the vector in its first field, without the other fields and its own counts."""
        empty: dict[str, Any] = {name: _nothing(getattr(reply, name)) for name in (*self.entries, *dict(self.metrics))}
        if declared_kinds(type(reply)).get("n") is Disclosure.count:
            empty["n"] = 1
        return replace(reply, **empty | {next(iter(self.entries)): {MASKED: vector}})

    def means(
        self, total: Vector, bits: int, message: Any, weight: float, levels: Mapping[str, Weights]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields, metrics): what was sent plus the mean update, and the mean of each metric.

        `weight` is that of all clients in the sum: no part can have more. `levels` are the sums of entries beside it.
        """
        found: dict[str, Any] = {}
        place = 0

        def number(at: int) -> float:
            return float(decoded(total[at : at + 1], bits)[0])

        for name, entries in self.entries.items():
            sent, there, place = getattr(message, name, None), _share(number(place), weight), place + 1
            means: Weights = dict(entries_of(sent) or {})
            for key, (shape, divisor) in entries.items():
                part, place = total[place : place + shape.numel()], place + shape.numel()
                if there > 0:
                    update = torch.from_numpy(decoded(part, bits) * (divisor / there)).reshape(shape)
                    means[key] = (means[key].double() + update).to(means[key].dtype)
            for key, update in levels.get(name, {}).items() if there > 0 else ():
                means[key] = (means[key].double() + update / there).to(means[key].dtype)
            found[name] = None if there <= 0 else means[""] if isinstance(sent, Tensor) else means
        metrics: dict[str, Any] = {}
        for name, word in self.metrics:
            there, value, place = _share(number(place), weight), number(place + 1) * COARSE, place + 2
            if word:
                metrics.setdefault(name, {})
            if there > 0 and word:
                metrics[name][word] = value / there
            elif not word:
                metrics[name] = value / there if there > 0 else float("nan")
        return found, metrics


def _share(total: float, weight: float) -> float:
    """The weight of the clients that contributed; 0 where only rounding is left."""
    if not -1e-3 <= total <= weight + 1e-3:
        raise VisardError("the masks of a secure sum do not cancel: its clients were asked different things")
    return float(total) if total > 1e-3 else 0.0


def _numbers(value: Tensor) -> npt.NDArray[Any]:
    """The numbers of an entry, in a row."""
    flat = value.detach().reshape(-1)
    return (flat if flat.dtype in WIDE else flat.double()).numpy()


def _nothing(value: Any) -> Any:
    """An empty value of the same type."""
    return (
        {}
        if isinstance(value, dict)
        else torch.empty(0)
        if isinstance(value, Tensor)
        else None
        if value is None
        else 0.0
    )
