"""Checks of a reply: all of it is declared by the method, fits what was sent, and could come from training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Hashable
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor

from visard.core import BoundStep, Disclosure, declared_kinds
from visard.disclosure import LONGEST_NAME, declared_names, is_statistic
from visard.text import plural

_TYPES: dict[str, type] = {"Tensor": Tensor} | {t.__name__: t for t in (dict, list, tuple, bytes, int, float)}
ABSURD = 1e6  # times the largest number that was sent, or 1: no weight or class vector is larger
EXACT = 2**53  # integers below this are the same as floats, which sums and reports make of them


def refusal(
    step: BoundStep[Any, Any],
    message: Any,
    reply: Any,
    pictures: int,
    embedding: int,
    checked: Collection[str] = (),
    statistics: Collection[str] = (),
    rows: int | None = None,
) -> tuple[str, str] | None:
    """(field, reason) of the first thing wrong with a reply, or None; fields in `checked` are known to be good.

    A field that goes down and comes up under the same name must come back with the same keys, shapes and dtypes; a
    count `n` is the reply's weight in averages, so it lies between 1 and the `pictures` that the client has; class
    vectors are at most `rows` rows of `embedding` numbers, and their biases `b` a row. Numbers are finite, and those
    of a network and of class vectors not absurdly large. `statistics` are the entries of weights that are gathered over
    pictures: only a method that declares the kind `statistic` may send them.
    """
    try:
        return _refusal(step, message, reply, pictures, embedding, checked, statistics, rows)
    except Exception as error:  # nothing that a client sends may end the run
        return "", f"cannot be checked: {type(error).__name__}"


def _refusal(
    step: BoundStep[Any, Any],
    message: Any,
    reply: Any,
    pictures: int,
    embedding: int,
    checked: Collection[str],
    statistics: Collection[str],
    rows: int | None,
) -> tuple[str, str] | None:
    if wrong := undeclared(step, message, reply, statistics, checked):
        return wrong
    for name, kind in declared_kinds(type(reply)).items():
        if name in checked or (value := getattr(reply, name)) is None:
            continue
        if (kind, name) == (Disclosure.count, "n") and not (isinstance(value, int) and 1 <= value <= pictures):
            return name, f"is {str(value)[:20]}, but the client has {pictures} pictures"
        if reason := _not_finite(value, allow_nan=kind is Disclosure.metric):
            return name, reason
        sent = getattr(message, name, None)
        if reason := _differs(sent, value) if sent is not None else _no_rows(name, kind, value, embedding, rows):
            return name, reason
        if kind in MODEL and (reason := _absurd(value, sent)):
            return name, reason
    return None


def undeclared(
    step: BoundStep[Any, Any], message: Any, reply: Any, statistics: Collection[str], checked: Collection[str] = ()
) -> tuple[str, str] | None:
    """(field, reason) of the first thing in a reply that its method does not declare: a type, a kind, a name.

    A party checks this before a reply leaves it, and the server when it arrives.
    """
    expected, method = step.types[1], step.owner
    if type(reply) is not expected:
        return "", f"is a {type(reply).__name__}, the step declares {expected.__name__}"
    names = declared_names(expected)
    for name, kind, shapes, declared, optional in _plan(cast(Hashable, expected), method.discloses):
        if name in checked:
            continue
        if not declared:
            return name, f"is of kind {kind.value}, which {method.name} does not declare"
        value: Any = getattr(reply, name)
        if value is None:
            if not optional:
                return name, "is missing"
            continue
        if not isinstance(value, shapes) or isinstance(value, bool):
            return name, f"is declared as {kind.value} but is a {type(value).__name__}"
        weights = value if isinstance(value, dict) and kind is Disclosure.weights else {}
        gathered = [k for k in weights if is_statistic(k, statistics)]
        if gathered and Disclosure.statistic not in method.discloses:
            return name, f"holds the running statistic {gathered[0]!r}, a kind that {method.name} does not declare"
        if kind in (Disclosure.metric, Disclosure.count):
            if reason := _no_figures(value, kind):
                return name, reason
            if isinstance(value, dict) and (odd := names[name].undeclared(value, method, message)) is not None:
                return name, f"has the name {odd[:LONGEST_NAME]!r}, which {expected.__name__}.{name} does not list"
    return None


VECTORS = frozenset({Disclosure.class_vectors, Disclosure.noisy_vectors})
MODEL = VECTORS | {Disclosure.weights, Disclosure.statistic}  # kinds that a model is made from


@functools.cache
def _plan(reply: Any, discloses: frozenset[Disclosure]) -> list[tuple[str, Disclosure, tuple[type, ...], bool, bool]]:
    """For each field: its name, kind and types, whether the method declares the kind, whether it may be empty."""
    hints = get_type_hints(reply)
    return [
        (n, k, tuple(_TYPES[t] for t in k.types) or (object,), k in discloses, type(None) in get_args(hints[n]))
        for n, k in declared_kinds(reply).items()
    ]


def _no_rows(name: str, kind: Disclosure, value: Any, embedding: int, rows: int | None) -> str | None:
    """What is wrong with class vectors that come up for the first time."""
    if kind not in VECTORS or not isinstance(value, Tensor):
        return None
    fits = value.ndim == 1 if name == "b" else value.ndim == 2 and value.shape[1] == embedding
    if not fits:
        return f"has shape {tuple(value.shape)}, a feature has {embedding} numbers"
    if rows is not None and len(value) > rows:
        return f"has {len(value)} rows, but the client has {plural(rows, 'identity', 'identities')}"
    return None


def _absurd(value: Any, sent: Any) -> str | None:
    """What training cannot leave in weights, class vectors or statistics, and would spoil an average."""
    parts = value if isinstance(value, dict) else {"": value}
    for key, part in parts.items():
        if not isinstance(part, Tensor) or not part.numel():
            continue
        where = f" in {key}" if key else ""
        low, high = (float(x) for x in torch.aminmax(part.detach()))
        before = sent.get(key) if isinstance(sent, dict) else sent
        if low < 0 and before is not None and key.endswith("running_var"):
            return f"has a negative variance{where}"
        if not part.is_floating_point():
            if max(high, -low) >= EXACT:
                return f"has an integer that is too large{where}"
            continue
        largest = max(high, -low)
        if largest > ABSURD and largest > ABSURD * (float(before.abs().max()) if before is not None else 1.0):
            return f"has an absurd value of {largest:.3g}{where}"
    return None


def _no_figures(value: Any, kind: Disclosure) -> str | None:
    """What is wrong with a number, or with a dict of numbers."""
    metrics = value if isinstance(value, dict) else {"": value}
    if not all(isinstance(v, int | float if kind is Disclosure.metric else int) for v in metrics.values()):
        return f"is declared as {kind.value} but holds more than numbers"
    least = 0 if kind is Disclosure.count else 1 - EXACT
    if not all(least <= v < EXACT for v in metrics.values() if isinstance(v, int)):
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
