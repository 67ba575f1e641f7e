r"""The noise of a secure sum, in shares: each member adds a part, and the server never sees a sum without noise.

After Kairouz, Liu and Steinke 2021. A sum is opened only if at least `least` vectors have arrived, which every member
checks itself. Of these, `colluders` may reveal their noise to the server. So each member adds a discrete Gaussian of
variance $(z C)^2 / (least - colluders)$, and what is left in the sum has noise $z$ at least; it has more where more
arrive. On integers as fine as these a sum of discrete Gaussians is one, but for less than $10^{-100}$.

The vector of a member, modulo 2^32:

    1                        not noisy: the sum of these is how many vectors there are, or the masks do not cancel
    its update, shortened    as in `dp`, in units of the grid
    (b - 1/2) s              where the bound adapts: b is 1 for an update within it, s makes its noise that of the rest
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from visard.aggregation.dp import Grid, entries_of, split_noise
from visard.crypto.discrete_gaussian import Integers, Stream, discrete_gaussian
from visard.crypto.secure_sum import Vector, fraction_bits
from visard.errors import PublicError, UsageError, VisardError

TAILS = 8.0  # standard deviations of noise that the range of a sum has room for
COARSEST = 16.0  # units of the grid that the noise of one member must have at least


@dataclass(frozen=True)
class Shared:
    """What every member of a private sum must know; it travels with the plan."""

    label: str  # run, stage, round, ask
    members: int
    least: int  # vectors that must have arrived before the sum is opened
    colluders: int
    clip: float
    noise: float  # z, of the sum
    expected: float  # clients that the sum is divided by
    adaptive: bool
    people: int = field(default=1, repr=False)  # most people whose updates one member adds up

    @classmethod
    def of(
        cls,
        label: str,
        members: int,
        threshold: float,
        colluders: float,
        clip: float,
        noise: float,
        expected: float,
        adaptive: bool,
        people: int = 1,
    ) -> Shared:
        """From the shares of members in the settings; one line if too few would be left."""
        least, odd = max(2, math.ceil(threshold * members - 1e-9)), math.floor(colluders * members + 1e-9)
        if least - odd < 1 or members < 2:
            raise UsageError(
                f"aggregation.dp: of {members} clients {least} must be in a sum and {odd} may work with the server: "
                "no client would be left to add noise"
            )
        return cls(label, members, least, odd, float(clip), float(noise), float(expected), adaptive, people)

    @classmethod
    def parse(cls, tree: Mapping[str, Any]) -> Shared:
        """Parse what a server sent; one line if it makes no sense."""
        try:
            found = cls(
                str(tree["label"]), int(tree["members"]), int(tree["least"]), int(tree["colluders"]),
                float(tree["clip"]), float(tree["noise"]), float(tree["expected"]), bool(tree["adaptive"]),
                int(tree.get("people", 1)),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError):
            raise PublicError("the noise of a secure sum is malformed") from None
        sizes = found.clip > 0 and found.noise >= 0 and found.expected > 0
        finite = all(math.isfinite(x) and x < 1e6 for x in (found.clip, found.noise, found.expected))
        if not sizes or not finite or not 0 <= found.colluders < found.least <= found.members or found.people < 1:
            raise PublicError("the noise of a secure sum is out of bounds")
        return found

    @property
    def sigma(self) -> float:
        """Standard deviation of what one member adds to each number."""
        return self._split[0] / math.sqrt(self.least - self.colluders)

    @property
    def _split(self) -> tuple[float, float]:
        return split_noise(self.noise, self.clip, self.expected, self.adaptive)

    @property
    def count_scale(self) -> float:
        """The factor of b - 1/2."""
        whole, counted = self._split
        return whole / counted if counted else self.clip

    @property
    def unit(self) -> float:
        """The grid: as fine as sums of all members and their noise leave room for in 32 bits."""
        largest = self.people * max(self.clip, self.count_scale) + TAILS * self.sigma
        found = 2.0 ** -fraction_bits(self.members, largest)
        if 0 < self.sigma < COARSEST * found:
            raise PublicError(f"the noise of one of {self.members} clients is too small for sums of 32 bits")
        return found

    def grid(self, names: Collection[str], message: Any, statistics: Collection[str]) -> Grid:
        return Grid(Grid.of(names, message, self.clip, statistics).places, self.unit)

    def size(self, grid: Grid) -> int:
        """Numbers of a vector."""
        return 1 + grid.size + self.adaptive

    def vector(
        self, secret: bytes, names: Collection[str], message: Any, reply: Any, statistics: Collection[str]
    ) -> Vector:
        """The vector of a member with an update of its own."""
        grid = self.grid(names, message, statistics)
        try:
            integers, within = grid.integers(grid.update(message, reply), self.clip)
        except ValueError as error:
            raise PublicError(str(error)) from None
        return self.noisy(secret, names, message, integers, within - 0.5)

    def noisy(self, secret: bytes, names: Collection[str], message: Any, integers: Integers, within: float) -> Vector:
        """A member's vector with its share of the noise, which comes from its secret, the place in the run, what it was
        asked and what it answers: the same once more for the same, and never for anything else.

        `within` is the sum of b - 1/2 over the updates in it."""
        if self.adaptive:
            integers = np.append(integers, round(within * self.count_scale / self.unit))
        said = repr(self) + (f" {self.people}" if self.people > 1 else "")
        digest = hashlib.sha256(said.encode() + _bytes_of(names, message) + integers.tobytes()).digest()
        stream = Stream(secret, self.label.encode(), digest)
        noisy = integers + discrete_gaussian(stream, self.sigma / self.unit, len(integers))
        return np.concatenate([np.ones(1, np.int64), noisy]).astype(np.uint32)

    def opened(self, total: Vector, arrived: int, grid: Grid) -> tuple[npt.NDArray[np.float64], float]:
        """The mean update, and the share of the clients within the bound (0 where it does not adapt)."""
        signed = total.view(np.int32).astype(np.float64)
        if signed[0] != arrived:
            raise VisardError("the masks of a secure sum do not cancel: its clients were asked different things")
        mean = signed[1:] * (grid.unit / self.expected)
        return mean[: grid.size], float(mean[-1]) / self.count_scale + 0.5 if self.adaptive else 0.0

    def check_opening(self, arrived: int) -> None:
        """Refuse to open a sum in which too few shares of the noise are."""
        if arrived < self.least:
            raise PublicError(f"{arrived} of {self.members} vectors are in a secure sum, its noise needs {self.least}")


def _bytes_of(names: Collection[str], message: Any) -> bytes:
    """A digest of what is averaged, as it was sent."""
    found = hashlib.sha256()
    for name in names:
        for key, value in (entries_of(getattr(message, name, None)) or {}).items():
            found.update(f"\0{name}\0{key}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.digest()
