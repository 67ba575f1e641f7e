"""What may leave a client: the kinds, and where a reply type declares them."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import fields
from enum import Enum
from typing import Any, cast, get_type_hints


class Leaves(Enum):
    """The kinds of things that may leave a client."""

    weights = "weights"
    class_vectors = "class_vectors"
    statistic = "statistic"
    ciphertext = "ciphertext"
    metric = "metric"
    count = "count"  # where its field is named n: the pictures behind a reply, which weigh it in averages
    public_key = "public_key"
    features = "features"  # of single pictures
    labels = "labels"
    pictures = "pictures"


def declared_kinds(reply: type) -> dict[str, Leaves]:
    """Field -> kind of a reply type; a field without a kind is a programming error."""
    return _kinds(cast(Hashable, reply))


@functools.cache
def _kinds(reply: Any) -> dict[str, Leaves]:
    hints = get_type_hints(reply, include_extras=True)
    kinds = {}
    for f in fields(reply):
        marks = [m for m in getattr(hints[f.name], "__metadata__", ()) if isinstance(m, Leaves)]
        if len(marks) != 1:
            raise TypeError(f"{reply.__name__}.{f.name} must be Annotated with exactly one kind of Leaves")
        kinds[f.name] = marks[0]
    return kinds
