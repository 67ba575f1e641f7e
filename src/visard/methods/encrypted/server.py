"""Small things the server of encrypted MMD does with replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from visard.core import ClientId, Setup, Weights
from visard.crypto.session import Letters
from visard.errors import UsageError
from visard.methods.encrypted.messages import Drawn, Mail, Moved
from visard.ops.average import weighted_mean
from visard.ops.training import HeadSettings, weights_of


def mean(parts: Iterable[Weights]) -> Weights:
    """The plain mean of weights; of empty ones nothing."""
    return weighted_mean((part, 1) for part in parts)


def head_of(how: HeadSettings, setup: Setup) -> Weights:
    """The common classifier with the class vectors and biases of a file, where one is given; else none yet."""
    W, b = setup.class_vectors, setup.biases
    if W is None:
        return {}
    if len(W) != setup.classes:
        raise UsageError(f"model.class_vectors holds {len(W)} classes, the data have {setup.classes}")
    fresh = weights_of(how.build(*W.shape))
    if ("bias" in fresh) != (b is not None):  # zeros in their place would be another classifier than was trained
        has, lacks = ("biases", "none") if b is not None else ("no biases", "some")
        raise UsageError(f"model.class_vectors holds {has}, a {how.kind} head has {lacks}")
    return fresh | {"weight": W.clone()} | ({} if b is None else {"bias": b.clone()})


def posts(mail: Mapping[ClientId, Mail | Moved | Drawn]) -> dict[ClientId, tuple[Letters, Letters]]:
    """What each party posted: messages and tags."""
    return {c: (m.letters, m.tags) for c, m in mail.items()}


def figures(replies: Iterable[Mapping[ClientId, Mail | Moved | Drawn]]) -> dict[str, float]:
    """Over all steps of a round: losses as means over the parties that know them, operations as sums."""
    losses: dict[str, list[float]] = {}
    operations: dict[str, float] = {}
    for step in replies:
        for m in step.values():
            for name, value in m.figures.items():
                if name in ("task", "mmd", "total"):
                    losses.setdefault(name, []).append(value)
                else:
                    operations[name] = operations.get(name, 0.0) + value
    return {name: sum(values) / len(values) for name, values in losses.items()} | operations
