r"""Smaller replies: the update of the weights in 16 or 8 bits a number, with error feedback.

    [[outgoing]]
    name = "compress"
    to = "int8"

Instead of an entry $\theta$ of the weights the client sends its update $u = \theta - \theta_0 + e$ with $\theta_0$ of
the message and $e$ the error of earlier rounds (Seide et al. 2014; Karimireddy et al. 2019, Algorithm 1), as

    fp16   half-precision floats in the shape of the entry;
    int8   bytes: two float32, the least value $l$ and the width $w$ of a level, then a byte $q$ for each number, which
           stands for $l + w q$. $u$ is rounded up or down at random so that $E[l + w q] = u$ (Alistarh et al. 2017).

With `aggregation.secure` (int8 alone) all clients have the same levels, 127 up and 127 down, so that they can be summed
behind masks: see `layout.Levels`.

The server adds the update to $\theta_0$ first, so that checks, limits and rules see ordinary weights.
The difference is the next $e$, which stays with the client as a part of its state. Running statistics, counters, and
entries that would not become smaller are sent as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from visard.aggregation.outgoing import Postprocessor
from visard.core import Client, Disclosure, R, State, Weights, declared_kinds
from visard.disclosure import is_statistic

LEVELS = 255  # between the least and the largest value
HEAD = 8  # bytes before the levels: two float32
LARGEST = torch.finfo(torch.float16).max
WIDE = (torch.float32, torch.float64)  # types that are made smaller


@dataclass(frozen=True)
class Compress(Postprocessor):
    """The update of the weights in fewer bits."""

    name = "compress"
    title = "sends the update of the weights in 16 or 8 bits a number"
    last = True

    to: Literal["fp16", "int8"] = "int8"
    feedback: bool = True  # whether the error of a round is added to the next one
    # with aggregation.secure: largest change of a number in one reply, relative to the largest of its entry
    reach: Annotated[float, Field(gt=0, le=100)] = 0.1

    def __call__(self, client: Client, message: Any, reply: R) -> R:
        changes = {}
        for field, sent, value in _weights(message, reply):
            if sent.keys() == value.keys():
                left = earlier_errors(client.state, f"{type(reply).__name__}.{field}") if self.feedback else {}
                changes[field] = {k: self._entry(client, k, sent[k], v, left) for k, v in value.items()}
        return replace(reply, **changes) if changes else reply  # type: ignore[type-var]

    def _entry(self, client: Client, key: str, sent: Tensor, value: Tensor, left: Weights) -> Tensor:
        if value.dtype not in WIDE or is_statistic(key, ()) or not self._smaller(value):
            return value
        update = value.double() - sent.double()
        if key in left:
            update += left[key].double()
        if not bool(torch.isfinite(update).all()):  # the server refuses it
            return value
        packed = halves(update) if self.to == "fp16" else levels(update, client.rng)
        left[key] = (sent.double() + update - opened(packed, sent).double()).float()
        return packed

    def _smaller(self, value: Tensor) -> bool:
        return self.to == "fp16" or HEAD + value.numel() < value.numel() * value.element_size()

    def received(self, message: Any, reply: R) -> R:
        changes = {}
        for field, sent, value in _weights(message, reply):
            found = {k: opened(v, sent[k]) if k in sent and v.dtype != sent[k].dtype else v for k, v in value.items()}
            changes[field] = found
        return replace(reply, **changes) if changes else reply  # type: ignore[type-var]


def halves(update: Tensor) -> Tensor:
    """An update in half precision; values beyond its range become the largest number."""
    return update.clamp(-LARGEST, LARGEST).to(torch.float16)


def levels(update: Tensor, rng: torch.Generator) -> Tensor:
    """An update (float64) as bytes: least value, width of a level, and a level for each number, rounded at random."""
    least, largest = (float(x) for x in torch.aminmax(update)) if update.numel() else (0.0, 0.0)
    low = np.float32(least)
    low = np.nextafter(low, np.float32(-np.inf)) if float(low) > least else low
    width = np.float32((largest - float(low)) / LEVELS)
    if LEVELS * float(width) < largest - float(low):
        width = np.nextafter(width, np.float32(np.inf))
    head = torch.from_numpy(np.array([low, width], dtype="<f4").view(np.uint8).copy())
    places = (update.reshape(-1) - float(low)) / (float(width) or 1.0)
    drawn = torch.rand(places.shape, generator=rng)
    return torch.cat([head, (places + drawn).floor().clamp(0, LEVELS).nan_to_num().to(torch.uint8)])


def opened(packed: Tensor, sent: Tensor) -> Tensor:
    """The entry from a packed update; ValueError if it does not fit this entry."""
    if packed.dtype == torch.float16 and packed.shape == sent.shape:
        update = packed.double()
    elif packed.dtype == torch.uint8 and packed.shape == (HEAD + sent.numel(),):
        low, width = np.frombuffer(packed[:HEAD].numpy().tobytes(), dtype="<f4").astype(float)
        if not (math.isfinite(low) and math.isfinite(width) and width >= 0):
            raise ValueError("has levels that are not finite")
        update = (low + width * packed[HEAD:].double()).view(sent.shape)
    else:
        raise ValueError(f"has an entry of {packed.dtype} and shape {tuple(packed.shape)}, which is no update of it")
    return (sent.double() + update).to(sent.dtype)


def _weights(message: Any, reply: Any) -> Iterator[tuple[str, Weights, Weights]]:
    """(field, sent, value) of the weights in a reply that answer weights of the same name."""
    for field, kind in declared_kinds(type(reply)).items():
        sent, value = getattr(message, field, None), getattr(reply, field)
        if kind is Disclosure.weights and isinstance(sent, dict) and isinstance(value, dict):
            yield field, sent, value


def earlier_errors(state: State, where: str) -> Weights:
    """The errors of earlier rounds in a field; changes to it are changes of the state."""
    found: Weights = state.setdefault("compress", {}).setdefault(where, {})
    return found
