"""Checks of a reply before the server sees it: its type, its kinds, its shapes, its numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Hashable
from typing import Any, cast

import torch
from torch import Tensor

from visard.core import BoundStep, Leaves, declared_kinds

_SHAPES: dict[Leaves, tuple[type, ...]] = {
    Leaves.metric: (int, float, dict),
    Leaves.count: (int, dict),
    Leaves.ciphertext: (bytes, list, tuple, dict),
    Leaves.public_key: (bytes, dict),
    Leaves.weights: (dict,),
    Leaves.class_vectors: (Tensor, dict),
}
EXACT = 2**53  # integers below this are the same as floats, which sums and reports make of them
LONGEST = 100  # of the name of a figure


def refusal(
    step: BoundStep[Any, Any], message: Any, reply: Any, pictures: int, embedding: int, checked: Collection[str] = ()
) -> tuple[str, str] | None:
    """(field, reason) of the first thing wrong with a reply, or None; fields in `checked` are known to be good.

    A field that goes down and comes up under the same name must come back with the same keys, shapes and dtypes; a
    count `n` is the reply's weight in averages, so it lies between 1 and the `pictures` that the client has; class
    vectors are rows of `embedding` numbers, and their biases `b` a row.
    """
    try:
        return _refusal(step, message, reply, pictures, embedding, checked)
    except Exception as error:  # nothing that a client sends may end the run
        return "", f"cannot be checked: {type(error).__name__}"


def _refusal(
    step: BoundStep[Any, Any], message: Any, reply: Any, pictures: int, embedding: int, checked: Collection[str]
) -> tuple[str, str] | None:
    expected = step.types[1]
    if type(reply) is not expected:
        return "", f"is a {type(reply).__name__}, the step declares {expected.__name__}"
    for name, kind, shapes, declared in _plan(cast(Hashable, expected), step.owner.leaves):
        if name in checked:
            continue
        if not declared:
            return name, f"is of kind {kind.value}, which {step.owner.name} does not declare"
        value = getattr(reply, name)
        if value is None:
            continue
        if not isinstance(value, shapes) or isinstance(value, bool):
            return name, f"is declared as {kind.value} but is a {type(value).__name__}"
        if kind in (Leaves.metric, Leaves.count) and (reason := _no_figures(value, kind)):
            return name, reason
        if (kind, name) == (Leaves.count, "n") and isinstance(value, int) and not 1 <= value <= pictures:
            return name, f"is {value}, but the client has {pictures} pictures"
        if reason := _not_finite(value, allow_nan=kind is Leaves.metric):
            return name, reason
        sent = getattr(message, name, None)
        if reason := _differs(sent, value) if sent is not None else _no_rows(name, kind, value, embedding):
            return name, reason
    return None


@functools.cache
def _plan(reply: Any, leaves: frozenset[Leaves]) -> list[tuple[str, Leaves, tuple[type, ...], bool]]:
    """Of each field: its name, its kind, what it may be, and whether the method declares its kind."""
    return [(n, k, _SHAPES.get(k, (object,)), k in leaves) for n, k in declared_kinds(reply).items()]


def _no_rows(name: str, kind: Leaves, value: Any, embedding: int) -> str | None:
    """What is wrong with class vectors that come up for the first time."""
    if kind is not Leaves.class_vectors or not isinstance(value, Tensor):
        return None
    fits = value.ndim == 1 if name == "b" else value.ndim == 2 and value.shape[1] == embedding
    return None if fits else f"has shape {tuple(value.shape)}, a feature has {embedding} numbers"


def _no_figures(value: Any, kind: Leaves) -> str | None:
    """What is wrong with a number, or with a dict of numbers."""
    figures = value if isinstance(value, dict) else {"": value}
    if not all(isinstance(v, int | float if kind is Leaves.metric else int) for v in figures.values()):
        return f"is declared as {kind.value} but holds more than numbers"
    if not all(len(k) <= LONGEST and k.isprintable() for k in figures):
        return f"has a figure whose name is longer than {LONGEST} or cannot be printed"
    least = 0 if kind is Leaves.count else 1 - EXACT
    if not all(least <= v < EXACT for v in figures.values() if isinstance(v, int)):
        return f"holds an integer that is {'negative or ' if not least else ''}too large"
    return None


def _not_finite(value: Any, allow_nan: bool, path: str = "") -> str | None:
    if isinstance(value, Tensor):
        # a finite sum has only finite terms; a sum that is not may have overflowed, so then each term is looked at
        if value.is_floating_point() and not math.isfinite(value.sum()) and not bool(torch.isfinite(value).all()):
            return f"has values that are not finite{path and ' in ' + path}"
        return None
    if isinstance(value, float):
        return None if allow_nan or math.isfinite(value) else f"is {value}{path and ' in ' + path}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        for key, part in value.items():
            if reason := _not_finite(part, allow_nan, f"{path}.{key}" if path else str(key)):
                return reason
        return None
    if isinstance(value, list | tuple):
        return next((f for f in (_not_finite(v, allow_nan, path) for v in value) if f), None)
    return None


def _differs(sent: Any, back: Any) -> str | None:
    if isinstance(sent, Tensor):
        if not isinstance(back, Tensor):
            return f"should be a tensor, is a {type(back).__name__}"
        if sent.shape != back.shape:
            return f"has shape {tuple(back.shape)}, expected {tuple(sent.shape)}"
        return f"has dtype {back.dtype}, expected {sent.dtype}" if sent.dtype != back.dtype else None
    if isinstance(sent, dict) and isinstance(back, dict):
        if sent.keys() != back.keys():
            odd = sorted(sent.keys() ^ back.keys())
            return f"{'lacks' if odd[0] in sent else 'has the unexpected'} entry {odd[0]!r}"
        for key, part in sent.items():
            if reason := _differs(part, back[key]):
                return f"entry {key!r} {reason}"
    return None
