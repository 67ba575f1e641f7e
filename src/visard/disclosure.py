"""The kinds of data that may leave a client, with everything that pages and checks need to know of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, cast, get_type_hints


class Disclosure(Enum):
    """A kind of data that may leave a client: its name, what it is, what it reveals, and which types it may have."""

    what: str  # for the ledger and the report
    reveals: str  # what can be learned from it
    types: tuple[str, ...]  # allowed types of a field of this kind; empty: any
    private: bool  # about single pictures: a federated method does not send it

    def __new__(
        cls, name: str, what: str, reveals: str, types: tuple[str, ...] = (), private: bool = False
    ) -> Disclosure:
        kind = object.__new__(cls)
        kind._value_, kind.what, kind.reveals, kind.types, kind.private = name, what, reveals, types, private
        return kind

    weights = (
        "weights",
        "network weights",
        "Weights of one client in the clear. Compared with what the server sent they give the client's update: "
        "attacks by gradient inversion and membership inference apply, and work better with fewer pictures and steps.",
        ("dict",),
    )
    class_vectors = (
        "class_vectors",
        "class vectors: one feature-space direction for each identity",
        "A class vector lies close to the features of one person: treat it as a face template, which is personal "
        "data. It shows whether two clients know the same person.",
        ("Tensor", "dict"),
    )
    noisy_vectors = (
        "noisy_vectors",
        "class vectors with noise for differential privacy",
        "As much of one person as the epsilon that the run logs allows: little where it is below 1, nearly the class "
        "vector itself where it is far above 10.",
        ("Tensor",),
    )
    statistic = (  # also the running statistics in weights: see `pieces`
        "statistic",
        "statistics over many pictures, such as batch norm's running means",
        "A statistic over many pictures. It says something about the whole data of the client and, taken often enough "
        "with small changes, about single pictures. Running means of a client with one person give that person's "
        "mean face, if the server chooses the weights.",
    )
    ciphertext = (
        "ciphertext",
        "encrypted numbers",
        "Nothing but its length and time, as long as the server does not hold the key.",
        ("bytes", "list", "tuple", "dict"),
    )
    masked = (
        "masked",
        "weights and metrics behind masks, of which the server learns the sum over all clients alone",
        "Nothing by itself. The sum over the clients of a round says what an average says of them all.",
        ("dict",),
    )
    share = (
        "share",
        "shares of the secrets behind masks, given away when a secure sum is opened",
        "Nothing but the sum that it opens, as long as too few clients work with the server.",
        ("dict",),
    )
    metric = (
        "metric",
        "figures such as a loss or an accuracy",
        "How well the client does: a loss, a hit rate. Small differences can tell whether a picture was trained on.",
        ("int", "float", "dict"),
    )
    count = (  # where its field is named n: the pictures behind a reply, which weigh it in averages
        "count",
        "counts such as the number of pictures",
        "How many pictures or people the client has.",
        ("int", "dict"),
    )
    public_key = ("public_key", "public keys", "Nothing secret: a public key, made for the run.", ("bytes", "dict"))
    features = (
        "features",
        "features of single pictures",
        "A feature of one picture is a face template: it finds the person again.",
        (),
        True,
    )
    labels = ("labels", "identity labels of pictures", "Who is on which picture.", (), True)
    pictures = ("pictures", "pictures of faces", "Everything.", (), True)


MASKED = "masked"  # the one entry of a field of weights that is behind masks
MOST_NAMES = 1024  # that a field may have
LONGEST_NAME = 100


class Names:
    """The names that a field with a dict of metrics or counts may have: a reply with any other is refused.

    `figures: Annotated[dict[str, float], Disclosure.metric, Names("loss", "steps")]`. Where they depend on what was
    asked for, `of` gives them from the method and the message.
    """

    def __init__(self, *words: str, of: Callable[[Any, Any], Collection[str]] | None = None) -> None:
        self.words, self.of = frozenset(words), of
        if odd := _unfit(self.words):
            raise TypeError(f"{odd!r} is no name of a metric")

    def undeclared(self, names: Collection[str], method: Any, message: Any) -> str | None:
        """The first of these names that the field may not have, or None."""
        allowed = self.words if self.of is None else self.words | frozenset(self.of(method, message))
        odd = _unfit(allowed) or next((name for name in names if name not in allowed), None)
        return "" if odd is None and len(names) > MOST_NAMES else odd


def _unfit(names: Collection[str]) -> str | None:
    return next((name for name in names if len(name) > LONGEST_NAME or not name.isprintable()), None)


RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # how torch names what batch norm gathers


def declared_kinds(reply: type) -> dict[str, Disclosure]:
    """Field -> kind of a reply type; a field without a kind is a programming error."""
    return _kinds(cast(Hashable, reply))


@functools.cache
def _kinds(reply: Any) -> dict[str, Disclosure]:
    hints = get_type_hints(reply, include_extras=True)
    kinds = {}
    for f in fields(reply):
        marks = [m for m in getattr(hints[f.name], "__metadata__", ()) if isinstance(m, Disclosure)]
        if len(marks) != 1:
            raise TypeError(f"{reply.__name__}.{f.name} must be Annotated with exactly one kind of Disclosure")
        kinds[f.name] = marks[0]
    return kinds


def declared_names(reply: type) -> dict[str, Names]:
    """Field -> the names that its dict may have; a field that lists none has no dict, or an empty one."""
    return _names(cast(Hashable, reply))


@functools.cache
def _names(reply: Any) -> dict[str, Names]:
    hints = get_type_hints(reply, include_extras=True)
    marks = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(reply)}
    return {name: next((m for m in of if isinstance(m, Names)), Names()) for name, of in marks.items()}


def possible_kinds(reply: type) -> frozenset[Disclosure]:
    """All kinds that a reply of this type may carry; weights may hold running statistics."""
    kinds = frozenset(declared_kinds(reply).values())
    return kinds | {Disclosure.statistic} if Disclosure.weights in kinds else kinds


def is_statistic(entry: str, statistics: Collection[str]) -> bool:
    """Whether an entry of weights is a running statistic, not learnt: one of the network's `statistics`, or one with a
    name that torch gives them. So a sender cannot hide a statistic by its name."""
    return entry in statistics or entry.rpartition(".")[2] in RUNNING


def pieces(reply: Any, statistics: Collection[str]) -> Iterator[tuple[str, Disclosure, Any]]:
    """(field, kind, value) of all that a reply carries; running statistics are split from the other weights.

    `statistics` are the entries of the run's network that are no parameters (`World.statistics`).
    """
    for name, kind in declared_kinds(type(reply)).items():
        value = getattr(reply, name)
        if isinstance(value, dict) and value.keys() == {MASKED}:
            yield name, Disclosure.masked, value
            continue
        if kind is Disclosure.weights and isinstance(value, dict):
            gathered = {k: v for k, v in value.items() if is_statistic(k, statistics)}
            if gathered:
                yield name, kind, {k: v for k, v in value.items() if k not in gathered}
                yield name, Disclosure.statistic, gathered
                continue
        yield name, kind, value


def carried_kinds(reply: Any, statistics: Collection[str]) -> frozenset[Disclosure]:
    """The kinds of data in a reply; a field that is None or an empty dict or list carries nothing."""
    return frozenset(
        kind
        for _, kind, value in pieces(reply, statistics)
        if value is not None and not (isinstance(value, dict | list | tuple) and not value)
    )
