"""The methods by name. To add one: its file, its preset, its golden test, its docs card, and a line here."""

from __future__ import annotations

from typing import Any

from visard.core import Method
from visard.errors import UsageError
from visard.methods.central import Central
from visard.methods.fedavg import FedAvg
from visard.methods.local import Local
from visard.names import did_you_mean

METHODS: dict[str, type[Method[Any]]] = {m.name: m for m in (Central, Local, FedAvg)}


def find(name: str) -> type[Method[Any]]:
    """The class of a method; one clear line if there is none of that name."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]
