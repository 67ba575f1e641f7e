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

# what a method needs beside that; later settings win
ALSO: dict[str, tuple[str, ...]] = {
    "encrypted-mmd": (
        "method.training.batch_size=4",
        "method.min_batch=4",
        "method.exchanges=2",
        "method.pretrain_rounds=1",
        "method.key_bits=512",
        "method.insecure_keys=true",
        "method.compare.project=4",
        "data.images_per_identity=8",
    ),
    "central-mmd": ("method.pretrain_rounds=1", "partition.test_identities=0", "data.identities=4"),
    "pretrain": ("partition.public_identities=6",),
    "fedface": ("method.pretrain_rounds=0", "model.name=tiny_nobn", "partition.public_identities=6"),
    "fedfr-joint": ("method.pretrain_rounds=0", "partition.public_identities=6"),
    "fedfr-da": ("method.pretrain_rounds=2", "method.training.amount=2", "data.images_per_identity=8"),
    "finetune": ("method.pretrain_rounds=2", "method.training.amount=2", "data.images_per_identity=8"),
    "hf-maml": ("method.training.steps=2", "partition.hold_out=1", "evaluation.tuning.pairs=20"),
}


def smoke(method: str) -> tuple[str, ...]:
    """The settings that make the preset of a method run in a few seconds."""
    return SMOKE + ALSO.get(method, ())
