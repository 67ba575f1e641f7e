"""Settings that make any preset run in a few seconds."""

from __future__ import annotations

SMOKE = (
    "method.rounds=2",
    "method.training.batch_size=16",
    "data.identities=24",
    "data.images_per_identity=6",
    "data.size=32",
    "partition.clients=3",
    "partition.test_identities=6",
    "model.embedding=16",
    "evaluation.every=1",
    "evaluation.pairs=100",
    "evaluation.bootstrap=10",
    "numerics.threads_per_step=1",
    "engine.kind=local",
)
