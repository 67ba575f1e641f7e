"""The kinds of things that may leave a client: one entry for each, with all that any page or check says of it."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import fields
from enum import Enum
from typing import Any, cast, get_type_hints


class Disclosure(Enum):
    """A kind of thing that may leave a client: its name, what it is, what it reveals, and which types it may have."""

    what: str  # for the ledger and the report
    reveals: str  # what somebody who keeps everything can make of it
    types: tuple[str, ...]  # a field of this kind is one of these; none: anything
    private: bool  # of single pictures: what a federated method keeps at home

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
        "attacks by gradient inversion and membership inference apply, the better the fewer pictures and steps.",
        ("dict",),
    )
    class_vectors = (
        "class_vectors",
        "class vectors: one feature-space direction for each identity",
        "A class vector lies close to the features of one person: treat it as a face template, which is personal "
        "data. It shows whether two clients know the same person.",
        ("Tensor", "dict"),
    )
    statistic = (
        "statistic",
        "statistics over many pictures",
        "A figure over many pictures. It says something about the whole data of the client and, taken often enough "
        "with small changes, about single pictures.",
    )
    ciphertext = (
        "ciphertext",
        "encrypted numbers",
        "Nothing but its length and time, as long as the server does not hold the key.",
        ("bytes", "list", "tuple", "dict"),
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
