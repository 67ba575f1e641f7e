"""The model-contrastive term: stay near the global model, leave the last local one behind (Liu et al. 2022, Eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import softplus

from visard.core import Weights
from visard.errors import UsageError
from visard.heads import direction
from visard.ops.objective import Terms, teacher, untrained


def model_contrastive(f: Tensor, f_glob: Tensor, f_prev: Tensor, tau: float) -> Tensor:
    r"""Mean over the batch of $-\log\frac{e^{c_g/\tau}}{e^{c_g/\tau} + e^{c_p/\tau}}$, $c = \cos(f, \cdot)$.

    Features are (B, E). Written as softplus((c_p - c_g) / tau), which neither overflows nor cancels.
    """
    unit = direction(f)
    c_g, c_p = ((unit * direction(other)).sum(1) for other in (f_glob, f_prev))
    return softplus((c_p - c_g) / tau).mean()


@dataclass(frozen=True)
class ContrastSettings:
    """When and how strongly the term counts."""

    weight: float = 5.0  # alpha_2; 0 = none
    tau: float = 0.5
    first: Literal["skip", "random"] = "skip"  # a client's first round has no f_prev: no term, or an untrained network

    def __post_init__(self) -> None:
        if self.weight < 0 or self.tau <= 0:
            raise UsageError("method.contrast: weight must not be negative, tau must be positive")

    def terms(self, model: nn.Module, theta: Weights, previous: Weights | None) -> Terms:
        """Eq. 5 with frozen teachers in evaluation mode; nothing where there is nothing to leave behind."""
        if not self.weight or (previous is None and self.first == "skip"):
            return {}
        glob, prev = teacher(model, theta), untrained(model) if previous is None else teacher(model, previous)
        return {"con": (self.weight, lambda x, f, y: model_contrastive(f, glob(x), prev(x), self.tau))}
