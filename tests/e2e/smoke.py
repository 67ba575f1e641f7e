"""Settings that make any preset run in a few seconds.

What a method needs beside `SMOKE` stands in the comments of its preset, in lines that begin with `# smoke:`.
"""

from __future__ import annotations

from visard.presets import presets

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


def smoke(method: str) -> tuple[str, ...]:
    """The settings that make the preset of a method run in a few seconds; later ones win."""
    lines = presets().get(method, "").splitlines()
    return SMOKE + tuple(s for line in lines if line.startswith("# smoke:") for s in line.split()[2:])
