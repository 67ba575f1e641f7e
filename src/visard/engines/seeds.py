"""Random streams that depend on what is computed, never on where or in which order."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed from the run's seed and a path such as (stage, round, ask, client)."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A torch generator seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, *parts))


def seed_default(seed: int) -> None:
    """Seed the default generator of the CPU, and no other: `torch.manual_seed` also keeps a traceback for each
    call until a GPU is first used, which thousands of steps would feel."""
    torch.default_generator.manual_seed(seed)
