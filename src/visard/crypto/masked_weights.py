r"""Weights of several clients of which a server learns the sum and no part.

    masked weights of s = round(2^40 w_s) + sum over the others r of  +F(k_sr) if s < r, -F(k_sr) if s > r    mod 2^64

F expands the secret of two clients, which the server does not know, to uniform numbers, as for answers (`packed.py`);
the masks cancel in the sum over all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from visard.crypto.packed import Seeds
from visard.errors import VisardError

FRACTION = 40  # bits after the point
LARGEST = 2.0**22  # of a sum of weights


def mask_weights(weights: Mapping[str, Tensor], seeds: Seeds) -> dict[str, Tensor]:
    """The weights of one client as int64 with its masks; `seeds` are for each of the others."""
    if not seeds:
        raise VisardError("weights of one client alone cannot be masked")
    masked = {}
    for name, value in weights.items():
        x = value.detach().double()
        if not bool((x.abs() * (len(seeds) + 1) < LARGEST).all()):  # also not finite
            raise VisardError(f"{name}: a weight is too large to be masked, or not finite")
        total = torch.round(x * 2.0**FRACTION).to(torch.int64)
        for sign, seed in seeds:
            stream = hashlib.shake_256(seed + name.encode()).digest(8 * x.numel())
            total = total + sign * torch.from_numpy(np.frombuffer(stream, "<i8").copy()).reshape(x.shape)
        masked[name] = total
    return masked


def mean_of_masked(parts: Sequence[Mapping[str, Tensor]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of the weights behind the masks, in the types of `like`; float32 where it says nothing."""
    names = set(parts[0])
    if any(set(part) != names for part in parts):
        raise VisardError("masked weights of different networks")
    found = {}
    for name in parts[0]:
        shapes = {part[name].shape for part in parts}
        if len(shapes) != 1 or any(part[name].dtype != torch.int64 for part in parts):
            raise VisardError(f"{name}: masked weights do not fit each other")
        total = torch.stack([part[name] for part in parts]).sum(0)  # modulo 2^64, as integers of 64 bits add
        if not bool((total.abs() < LARGEST * 2.0**FRACTION).all()):
            raise VisardError("masks do not cancel: not all clients masked the same step")
        kind = like[name].dtype if name in like else torch.float32
        value = total.double() / (2.0**FRACTION * len(parts))
        found[name] = (value if kind.is_floating_point else value.round()).to(kind)
    return found
