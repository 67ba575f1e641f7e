"""Settings of encrypted alignment beside another loss (`methods/aligning.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from visard.core import ClientId
from visard.crypto.exchange import Plan
from visard.crypto.packed_ckks import block_of
from visard.crypto.paillier import BITS, check_bits
from visard.crypto.session import Scheme
from visard.errors import Told, UsageError
from visard.ops.compare import Compare
from visard.ops.mmd import Polynomial
from visard.ops.training import Training


@dataclass(frozen=True)
class Align:
    """How embeddings of a source and its targets are pulled together; off unless `weight` is positive."""

    weight: float = 0.0  # lambda of MMD in every client's loss
    length: int = 16  # L: of a fixed random projection in which embeddings are compared; 0 = as they are
    batch_size: int = 64  # n
    batches: int = 1  # of a round: each joins one local iteration, from the first on; more than there are go unused
    noise: float = 0.0  # multiplier of the Gaussian noise on a client's moments
    min_batch: int = 32  # smaller batches are refused
    scheme: Scheme = "paillier"  # or ckks
    key_bits: int = BITS
    insecure_keys: bool = False  # allow short keys, for tests
    keys: str = ""  # folder of key files at each client; "" = a new key in the client's state
    pins: dict[str, str] = field(default_factory=dict)  # client -> fingerprint of its key, which all check

    def __post_init__(self) -> None:
        if self.weight < 0 or self.length < 0 or not 0 <= self.noise < math.inf or self.batches < 1:
            raise UsageError("method.align: weight, length and noise must not be negative, batches at least 1")
        if self.batch_size < max(2, self.min_batch):
            raise UsageError(f"method.align.batch_size = {self.batch_size}: below min_batch")
        check_bits("method.align.key_bits", self.key_bits, self.insecure_keys)

    @property
    def compare(self) -> Compare:
        """Where and with which kernel embeddings are compared."""
        return Compare(project=self.length)

    @property
    def block(self) -> int:
        """Slots of a column under CKKS; 0 under Paillier."""
        return block_of(self.batch_size) if self.scheme == "ckks" else 0

    def check(self, training: Training, embedding: int) -> None:
        """One clear line where this does not go with the rest of the settings."""
        if self.length > embedding:
            raise UsageError(f"method.align.length = {self.length}: embeddings have {embedding} dimensions")
        if training.unit == "iterations" and training.amount < self.batches:
            raise UsageError(f"method.align.batches = {self.batches}: a round has {training.amount} iterations")

    def plan(self, embedding: int, source: ClientId, targets: Sequence[ClientId]) -> Plan:
        """What all clients agree on, but for the kernel. The source stands where encrypted MMD has its one target."""
        return Plan(
            "packed", Polynomial((1.0, -1.0, 1.0)), self.compare.length(embedding), self.batch_size, self.batches,
            self.key_bits, tuple(targets), source, noise=self.noise, scheme=self.scheme,
        )  # fmt: skip

    def agreed(self, plan: Plan, embedding: int, source: ClientId) -> Plan:
        """The server's plan, if it is this run's: a client does not compute what its settings do not say."""
        mine = self.plan(embedding, source, plan.sources)
        twice = len({*plan.sources, source}) <= len(plan.sources)  # somebody masks an answer for itself
        if not self.weight or plan != mine.with_kernel(plan.kernel) or plan.kernel.degree != 2 or twice:
            raise Told("the server's plan of alignment differs from this client's settings")
        return plan
