"""Batch norm where a client may hold a single identity: what is refused, and what to do instead."""

from __future__ import annotations

from visard.core import Weights
from visard.errors import Told, UsageError
from visard.ops.average import kept_local

INSTEAD = "take a backbone without batch norm (model.name = tiny_nobn, spherenet20 or spherenet64)"


def has_statistics(theta: Weights) -> bool:
    """Whether a network keeps statistics of its batches."""
    return bool(kept_local(theta, "parameters"))


def check_frozen(theta: Weights, trained: bool) -> None:
    """Frozen statistics must have been learnt: those of a new network fit no picture."""
    if has_statistics(theta) and not trained:
        raise UsageError(
            "the backbone has batch norm, whose statistics stay as they are, and it is untrained: "
            f"give model.weights or method.pretrain_rounds, or {INSTEAD}"
        )


def check_not_alone(theta: Weights, identities: int) -> None:
    """Statistics of one person's pictures normalise away what tells this person from others."""
    if has_statistics(theta) and identities < 2:
        raise Told(f"one identity alone spoils batch norm's statistics: set method.batch_norm = frozen, or {INSTEAD}")
