"""Combines fields of many replies: replies are added one by one, or held where the run has limits or its rule needs all
of them at once."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from visard.aggregation import limits
from visard.aggregation.rules import Gathered, Rule, RuleOfAll, Weighing
from visard.core import ClientId, Weights
from visard.errors import VisardError
from visard.processes import mapped_at
from visard.text import plural

IN_MEMORY = 2**28  # bytes of held replies; the rest goes to an unnamed file
LARGE = 2**22  # bytes of a value that stays in the file that it came in
BEYOND = 2**62  # places of such values
PIECE = 2**22  # bytes of all replies together that a rule has in memory at once
SLICE = 2**26  # numbers of all replies together that are read, in the files that they came in, before memory is freed
THREADS = 2  # that average blocks: meanwhile all parties wait
BLOCK = 2**16  # numbers of each of them that are averaged at once: their sum stays in the cache

Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


@dataclass(frozen=True)
class Remark:
    """A reply that is far from the others in one field."""

    client: ClientId
    field: str
    reason: str
    norm: float


@dataclass(frozen=True)
class _Sent:
    """What a client was sent under the name of a field, and its norms by part."""

    given: Any  # as in the message; kept alive, so that its id is not reused
    weights: Weights | None
    lengths: dict[str, float]


@dataclass
class _Entry:
    """One value of a field, of one client or of several that were simulated together."""

    clients: list[ClientId]
    weight: float
    sent: _Sent
    lengths: dict[str, float]  # norms of its update, by part
    layout: Layout
    place: int = 0  # in the store, where values are held
    value: Weights | None = None  # else; None: it is in the sum

    @property
    def name(self) -> str:
        more = len(self.clients) - 1
        return self.clients[0] + (f" and {more} more" if more else "")


class Reduction:
    """Takes fields out of replies as they arrive and combines each by the run's rule.

    A field holds weights, one tensor, or None, which does not count. Clients that were simulated as a group share one
    value: it is added once, with the weight of all of them.

    Without limits a value is added as it comes, so memory does not grow with the clients. With limits no share and no
    median is known before the last reply: values are kept until then, in memory up to 256 MB and beyond in an unnamed
    file of `folder`, and read again one at a time; a rule that needs all of them at once reads them piece by piece. A
    value that came in a file stays there. Replies that are far from the others are found in either case.
    """

    def __init__(
        self, rule: Rule, fields: tuple[str, ...], by: Weighing, sent: Any = None, folder: Path | None = None
    ) -> None:
        self.fields, self.rule, self._by = fields, rule, by
        self.remarks: list[Remark] = []
        self.left_out: dict[ClientId, tuple[str, str]] = {}  # replies that cannot count, by field and reason
        self._first = {f: _as_weights(getattr(sent, f, None)) for f in fields}
        self._gathered: dict[str, Gathered] = {}
        if not isinstance(rule, RuleOfAll):
            self._gathered = {f: rule.begin(self._first[f]) for f in fields}
        self._entries: dict[str, list[_Entry]] = {f: [] for f in fields}
        self._last: dict[str, Any] = {}  # the value as it came
        self._sent: dict[int, _Sent] = {}  # most clients are sent the same object
        self._lengths: dict[tuple[ClientId, str], dict[str, float]] = {}  # of replies that wait for their turn
        self._layouts: dict[Layout, Layout] = {}
        self._tensors: set[str] = set()
        self._store = _Store(folder) if rule.limited else None

    def close(self) -> None:
        """Free the held replies."""
        if self._store is not None:
            self._store.close()

    def known(self, reply: Any) -> tuple[str, ...]:
        """The fields of a reply that are the same object as in the reply before."""
        return tuple(f for f in self.fields if f in self._last and getattr(reply, f, None) is self._last[f])

    def measure(self, client: ClientId, message: Any, reply: Any) -> None:
        """Measure a reply that is taken later, in its turn."""
        for name in self.fields:
            if (value := _as_weights(getattr(reply, name))) is not None:
                sent = self._sent_to(getattr(message, name, None))
                self._lengths[client, name] = limits.norms(value, sent.weights)

    def take(self, client: ClientId, message: Any, reply: Any) -> Any:
        """Add a client's reply to a message; returns it without the fields."""
        by = self._by
        weight = 1 if by is None else getattr(reply, by) if isinstance(by, str) else by(reply)
        rest = dataclasses.replace(
            reply, **{f: {} if isinstance(getattr(reply, f), dict) else None for f in self.fields}
        )
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            self.left_out[client] = "", f"has a weight of {weight} in the average: it must be positive and finite"
            return rest
        for name in self.fields:
            value, entries = getattr(reply, name), self._entries[name]
            if value is None:
                continue
            if name in self._last and value is self._last[name] and self._store is None:
                entries[-1].weight += weight
                entries[-1].clients.append(client)
                continue
            self._flush(name)
            entries.append(self._entry(name, client, weight, value, getattr(message, name, None)))
            if self._store is None:
                self._last[name] = value
        return rest

    def result(self) -> dict[str, Any]:
        """The result of each field; None where no client had it. Afterwards `remarks` and `left_out` are complete."""
        if self._store is not None:
            for name in self.fields:
                self._leave_out(name)
        if self.left_out and not any(self._entries.values()):
            raise VisardError(f"no reply can count in the average: {self._why()}")
        found: dict[str, Any] = {}
        for name in self.fields:
            if self._store is None:
                self._flush(name)
            entries = [e for e in self._entries[name] if e.clients[0] not in self.left_out]
            weights = [e.weight for e in entries]
            if self._store is not None:
                weights = limits.capped(weights, self.rule.max_weight or 1.0)
                self._shorten(name, entries, self._store)
            self._name_far(name, entries)
            if not self._entries[name]:
                found[name] = None
                continue
            if not entries:
                raise VisardError(f"no reply can count in the average of {name}: {self._why()}")
            value = self._combined(name, entries, weights)
            self._check_finite(name, value, entries)
            found[name] = value[""] if name in self._tensors else value
        return found

    def one_by_one(self) -> dict[ClientId, dict[str, Any]]:
        """With limits: the fields of each client by itself, no update longer than `bound` allows."""
        assert self._store is not None
        found: dict[ClientId, dict[str, Any]] = {}
        for name, entries in self._entries.items():
            self._shorten(name, entries, self._store)
            self._name_far(name, entries)
            for entry in entries:
                value = self._store.get(entry.place, entry.layout)
                found.setdefault(entry.clients[0], {})[name] = value[""] if name in self._tensors else value
        return found

    def _entry(self, name: str, client: ClientId, weight: float, value: Any, before: Any) -> _Entry:
        if isinstance(value, Tensor):
            self._tensors.add(name)
        sent_here = self._sent_to(before)
        weights = cast(Weights, _as_weights(value))
        layout = tuple((k, v.dtype, v.shape) for k, v in weights.items())
        layout = self._layouts.setdefault(layout, layout)
        lengths = self._lengths.pop((client, name), None)
        if lengths is None:
            lengths = limits.norms(weights, sent_here.weights)
        entry = _Entry([client], weight, sent_here, lengths, layout)
        if self._store is None:
            entry.value = weights
        else:
            entry.place = self._store.put(weights)
        return entry

    def _sent_to(self, given: Any) -> _Sent:
        """What a client was sent under the name of a field."""
        if id(given) not in self._sent:
            sent = _as_weights(given)
            lengths = {} if sent is None else limits.norms(sent, None)
            self._sent[id(given)] = _Sent(given, sent, lengths)
        return self._sent[id(given)]

    def _flush(self, name: str) -> None:
        """Without limits: add the last value, whose group is complete."""
        if (entries := self._entries[name]) and (last := entries[-1]).value is not None:
            if set(last.layout) == set(entries[0].layout):
                self._gathered[name].add(last.value, last.weight)
            else:
                reason = f"has other entries or shapes than that of {entries[0].name}"
                self.left_out |= dict.fromkeys(last.clients, (name, reason))
            last.value = None

    def _leave_out(self, name: str) -> None:
        """Leave out values that differ in form from most others, where nothing was sent to compare with."""
        entries = self._entries[name]
        usual = Counter(frozenset(e.layout) for e in entries).most_common(1)
        for entry in entries:
            if frozenset(entry.layout) != usual[0][0]:
                self.left_out[entry.clients[0]] = name, "has other entries or shapes than most replies"

    def _combined(self, name: str, entries: list[_Entry], weights: list[float]) -> Weights:
        """The rule's result for values within the limits; one line where there are too few."""
        if reason := self.rule.too_few(len(entries)):
            raise VisardError(f"the average of {name}: {reason}")
        if isinstance(self.rule, RuleOfAll):
            assert self._store is not None
            order = sorted(range(len(entries)), key=lambda i: entries[i].name)
            held = _Held(self._store, [entries[i] for i in order], [weights[i] for i in order], self._first[name])
            return self.rule.combine(held)
        if self._store is None:
            return self._gathered[name].result()
        if not self.rule.by_numbers:
            for entry, weight in zip(entries, weights, strict=True):
                self._gathered[name].add(self._store.get(entry.place, entry.layout), weight)
            return self._gathered[name].result()
        places = [_places(entry) for entry in entries]
        return {
            key: self._by_numbers([there[key] for there in places], weights, dtype, shape)
            for key, dtype, shape in entries[0].layout
        }

    def _by_numbers(self, places: list[int], weights: list[float], dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """The rule's result for one entry, of which never more than a slice of each value is in memory."""
        assert self._store is not None
        found = torch.empty(shape, dtype=dtype)
        store, flat = self._store, found.view(-1)
        step = max(LARGE // dtype.itemsize, SLICE // len(places)) // BLOCK * BLOCK

        def block(start: int) -> None:
            stop, gathered = min(start + BLOCK, len(flat)), self.rule.begin(None)
            for place, weight in zip(places, weights, strict=True):
                value = store.read(place + start * dtype.itemsize, stop - start, dtype)
                gathered.add({"": value}, weight)
            flat[start:stop] = gathered.result()[""]

        for first in range(0, len(flat), step):
            last = min(first + step, len(flat))
            blocks = range(first, last, BLOCK)
            if min(places) >= BEYOND and len(blocks) > 1:  # memory, which several threads can read at once
                with ThreadPoolExecutor(THREADS) as threads:
                    list(threads.map(block, blocks))
            else:
                for start in blocks:
                    block(start)
            for place in places:
                store.let_go(place + first * dtype.itemsize, last - first)
        return found

    def _shorten(self, name: str, entries: list[_Entry], store: _Store) -> None:
        """Shorten updates that exceed `bound`; from here on the shorter form is held."""
        if not self.rule.bound:
            return
        found = {part: [e.lengths[part] for e in entries] for part in (entries[0].lengths if entries else ())}
        for entry in entries:
            allowed = {p: limits.longest(found[p], self.rule.bound, entry.sent.lengths.get(p, 0.0)) for p in found}
            if long := [p for p in allowed if entry.lengths[p] > allowed[p]]:
                value = store.get(entry.place, entry.layout)
                value = limits.shortened(value, entry.sent.weights, allowed, entry.lengths)
                entry.place = store.put(value)
            for part in long:
                by = f"{entry.lengths[part] / allowed[part]:.3g} times" if allowed[part] else "longer than"
                self._remark(entry, name, part, f"was {by} the longest that is allowed, and is shortened to that")

    def _name_far(self, name: str, entries: list[_Entry]) -> None:
        for part in entries[0].lengths if entries else ():
            found, sent = [e.lengths[part] for e in entries], [e.sent.lengths.get(part, 0.0) for e in entries]
            for entry, reason in zip(entries, limits.far(found, sent), strict=True):
                if reason is not None:
                    self._remark(entry, name, part, reason)

    def _remark(self, entry: _Entry, name: str, part: str, reason: str) -> None:
        label = f"{name} ({part})" if part else name
        if not any((r.client, r.field) == (entry.name, label) for r in self.remarks):
            self.remarks.append(Remark(entry.name, label, reason, entry.lengths[part]))

    def _check_finite(self, name: str, value: Weights, entries: list[_Entry]) -> None:
        floats = [v for v in value.values() if v.is_floating_point()]
        if all(math.isfinite(v.sum()) or bool(torch.isfinite(v).all()) for v in floats):
            return
        first = max(entries, key=lambda e: max(e.lengths.values()))
        raise VisardError(
            f"the average of {name} over {plural(len(entries), 'reply', 'replies')} is not finite; the longest update, "
            f"of norm {max(first.lengths.values()):.3g}, came from {first.name}"
        )

    def _why(self) -> str:
        client, (name, reason) = next(iter(self.left_out.items()))
        return f"{client}: {name} {reason}"


class _Store:
    """Values one after the other, as bytes: in memory at first, then in an unnamed file.

    A value that is mapped from a file has a place beyond all others, and its memory is freed after each use.
    """

    def __init__(self, folder: Path | None) -> None:
        self._mapped: dict[int, Tensor] = {}  # by place
        self._starts: list[int] = []  # these places, in order
        self._end = BEYOND
        # closed by `close`; where the process dies the system removes it
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=None if folder is None else str(folder))  # noqa: SIM115

    def put(self, weights: Weights) -> int:
        """Keep a value; returns where."""
        if let_go := _ways_out(weights):
            start = self._end
            for tensor in weights.values():
                self._mapped[self._end] = tensor.contiguous().view(-1)
                self._starts.append(self._end)
                self._end += tensor.nbytes
            for out in let_go:
                out()
            return start
        place = self._file.seek(0, 2)
        for tensor in weights.values():
            self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return place

    def get(self, place: int, layout: Layout) -> Weights:
        """A value that was kept at a place."""
        found: Weights = {}
        if place >= BEYOND:
            for key, dtype, shape in layout:
                empty = not math.prod(shape)
                found[key] = torch.empty(shape, dtype=dtype) if empty else self._mapped[place].view(shape)
                place += found[key].nbytes
            return found
        self._file.seek(place)
        for key, dtype, shape in layout:
            data = bytearray(self._file.read(math.prod(shape) * dtype.itemsize))
            found[key] = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
        return found

    def read(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many numbers from a place on, which are not to be changed."""
        if not count:
            return torch.empty(0, dtype=dtype)
        if place >= BEYOND:
            start = self._starts[bisect_right(self._starts, place) - 1]
            held = self._mapped[start]
            first = (place - start) // held.element_size()
            return held[first : first + count]
        self._file.seek(place)
        return torch.frombuffer(bytearray(self._file.read(count * dtype.itemsize)), dtype=dtype)

    def let_go(self, place: int, count: int) -> None:
        """The memory of so many numbers that were read is not needed for now."""
        if place >= BEYOND:
            for out in _ways_out({"": self.read(place, count, torch.uint8)}):
                out()

    def close(self) -> None:
        self._file.close()
        self._mapped.clear()


def _ways_out(values: Weights) -> list[Callable[[], None]]:
    """What lets go of the memory of values that are mapped from files, if that is nearly all of it; else nothing."""
    if sum(v.nbytes for v in values.values()) < LARGE:
        return []
    found = {k: mapped_at(v.data_ptr(), v.nbytes) for k, v in values.items() if v.is_contiguous()}
    ways = {k: way for k, way in found.items() if way is not None}
    rest = sum(v.nbytes for k, v in values.items() if k not in ways)
    return list(ways.values()) if rest < LARGE // 4 else []


class _Held:
    """The values of a field for a rule that needs all of them (see `rules.Held`)."""

    def __init__(self, store: _Store, entries: list[_Entry], weights: list[float], sent: Weights | None) -> None:
        self.weights, self._store, self._places = weights, store, [_places(e) for e in entries]
        self.like = {key: torch.empty(shape, dtype=dtype, device="meta") for key, dtype, shape in entries[0].layout}
        self.sent = sent if sent is not None and sent.keys() == self.like.keys() else None

    def pieces(self, key: str) -> Iterator[tuple[slice, Tensor]]:
        like, places = self.like[key], [there[key] for there in self._places]
        step = max(1, PIECE // (len(places) * like.element_size()))
        for start in range(0, like.numel(), step):
            stop = min(start + step, like.numel())
            at = start * like.element_size()
            yield slice(start, stop), torch.stack([self._store.read(p + at, stop - start, like.dtype) for p in places])


def _places(entry: _Entry) -> dict[str, int]:
    """Where each entry of a held value begins."""
    found, place = {}, entry.place
    for key, dtype, shape in entry.layout:
        found[key] = place
        place += math.prod(shape) * dtype.itemsize
    return found


def _as_weights(value: Any) -> Weights | None:
    """Weights as they are, one tensor as the entry ""; None for anything else."""
    if isinstance(value, Tensor):
        return {"": value}
    return dict(value) if isinstance(value, Mapping) else None
