"""Turn result records into plain JSON values: numbers, strings, lists, dicts; None for NaN and infinity."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """`value` as JSON can hold it; dataclasses become dicts of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


class Result:
    """A record of figures that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain numbers, strings, lists and dicts; None for NaN and infinity."""
        record: dict[str, Any] = plain(self)
        return record
