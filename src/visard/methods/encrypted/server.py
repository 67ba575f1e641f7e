"""Small things the server of encrypted MMD does with replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from visard.core import ClientId, Network, Setup, Weights
from visard.crypto.session import Letters
from visard.errors import UsageError
from visard.methods.domains import given_head
from visard.methods.encrypted.messages import Drawn, Mail, Moved
from visard.ops.average import weighted_mean
from visard.ops.training import HeadSettings


def mean(parts: Iterable[Weights]) -> Weights:
    """The plain mean of weights; of empty ones nothing."""
    return weighted_mean((part, 1) for part in parts)


def head_of(how: HeadSettings, setup: Setup) -> Weights:
    """The common classifier of a file, where one is given; else none yet."""
    head = given_head(how, setup)
    if head and len(head["weight"]) != setup.classes:
        raise UsageError(f"model.class_vectors holds {len(head['weight'])} classes, the data have {setup.classes}")
    return head


def posts(mail: Mapping[ClientId, Mail | Moved | Drawn]) -> dict[ClientId, tuple[Letters, Letters]]:
    """What each party posted: messages and tags."""
    return {c: (m.letters, m.tags) for c, m in mail.items()}


def log(net: Network, replies: Sequence[Mapping[ClientId, Mail | Moved | Drawn]], **more: float) -> None:
    """Over all steps of a round: losses as means over the parties that know them, operations by party and as sums."""
    losses: dict[str, list[float]] = {}
    operations: dict[ClientId, dict[str, float]] = {}
    for party, m in (pair for step in replies for pair in step.items()):
        for name, value in m.figures.items():
            if name in ("task", "mmd", "total"):
                losses.setdefault(name, []).append(value)
            else:
                mine = operations.setdefault(party, {})
                mine[name] = mine.get(name, 0.0) + value
    names = dict.fromkeys(name for mine in operations.values() for name in mine)
    sums = {name: sum(mine.get(name, 0.0) for mine in operations.values()) for name in names}
    net.log(**{name: sum(values) / len(values) for name, values in losses.items()} | sums | more)
    for party, mine in operations.items():
        net.log_client(party, **mine)
