"""Checks on features and labels: they must be finite, non-zero and of matching length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from visard.errors import VisardError
from visard.files import plain

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BLOCK = 16384  # rows normalised at a time: bounds the float64 scratch space


def matrix(features: Any, what: str) -> NDArray[Any]:
    """`features` as a non-empty real matrix (N, D)."""
    given = np.asarray(features)
    if given.ndim != 2 or given.shape[0] == 0 or given.shape[1] == 0:
        raise VisardError(f"{what}: expected a non-empty matrix (rows, dimensions), got shape {given.shape}")
    if given.dtype.kind not in "fiu":
        raise VisardError(f"{what}: expected real numbers, got {given.dtype}")
    return given


def unit_rows(features: Any, what: str = "features", order: Ints | None = None, pad: int = 1) -> Floats:
    """Rows of `features` (N, D) scaled to length one, as float32; lengths are taken in float64.

    Rows come in the given order; zero rows fill up to a multiple of `pad`. A row that is zero or not finite
    is an error that names it. Works in blocks, so that the only large array is the one returned.
    """
    given = matrix(features, what)
    index = np.arange(len(given)) if order is None else order
    unit = np.zeros((-(-len(index) // pad) * pad, given.shape[1]), np.float32)
    for start in range(0, len(index), BLOCK):
        taken = index[start : start + BLOCK]
        rows = given[taken].astype(np.float64)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise VisardError(f"{what}: row {taken[np.argmin(finite)]} is not finite")
        largest = np.abs(rows).max(axis=1, keepdims=True)
        if not largest.all():
            raise VisardError(f"{what}: row {taken[np.argmin(largest)]} is all zeros")
        rows /= largest  # squares of very large or very small entries would leave the range of float64
        rows /= np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
        unit[start : start + len(rows)] = rows
    return unit


def labels(values: Any, rows: int, what: str = "identity") -> Ints:
    """Integer labels (rows,), one for each row of the features."""
    given = np.asarray(values)
    if given.shape != (rows,):
        raise VisardError(f"{what}: expected {rows} labels, got shape {given.shape}")
    if given.dtype.kind not in "iu":
        raise VisardError(f"{what}: expected integers, got {given.dtype}")
    return given.astype(np.int64)


def shares(values: Any, what: str) -> tuple[float, ...]:
    """Error rates asked for: each a number in (0, 1]."""
    found = tuple(float(v) for v in values)
    for value in found:
        if not 0.0 < value <= 1.0:
            raise VisardError(f"{what}: {value} is not in (0, 1]")
    return found


def pair_counts(identity: Ints) -> tuple[int, int]:
    """Numbers of genuine and of impostor pairs i < j of a set."""
    sizes = np.unique(identity, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    return genuine, len(identity) * (len(identity) - 1) // 2 - genuine


class Result:
    """A record of metrics that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain numbers, strings, lists and dicts; None for NaN and infinity."""
        record: dict[str, Any] = plain(self)
        return record


def structured(kind: Any, value: Any) -> Any:
    """A value of a record's type from what `plain` made of it; where it does not fit, the plain value.

    Of types with alternatives (A | B) the smallest one that has all names of the value's keys.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, UnionType):
        records = [k for k in inner if is_dataclass(k)]
        names = set(value) if isinstance(value, Mapping) else set()
        fitting = [k for k in records if names <= {f.name for f in fields(k)}]
        fitting.sort(key=lambda k: len(fields(k)))
        simple = [k for k in inner if k is not NoneType and not is_dataclass(k)]
        best = (fitting or records or simple)[:1] if isinstance(value, Mapping) else simple[:1]
        return structured(best[0], value) if best else value
    if is_dataclass(kind) and isinstance(value, Mapping):
        types = get_type_hints(kind)
        known = {f.name for f in fields(kind)}
        try:
            return kind(**{name: structured(types[name], part) for name, part in value.items() if name in known})  # type: ignore[operator]
        except (TypeError, ValueError):  # a field is missing
            raise VisardError(
                f"this is no {getattr(kind, '__name__', 'result')}: {', '.join(list(value)[:8])}"
            ) from None
    if origin is tuple and isinstance(value, list):
        one = inner[0] if inner[1:] == (...,) else None
        parts = zip(inner if one is None else [one] * len(value), value, strict=False)
        return tuple(structured(k, part) for k, part in parts)
    if origin is dict and isinstance(value, Mapping):
        return {(int(k) if inner[0] is int else k): structured(inner[1], part) for k, part in value.items()}
    return value
