"""Knowledge distillation: a student's logits follow a teacher's."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax


def distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r"""$T^2 \, \mathrm{KL}(\mathrm{softmax}(z_t/T) \,\|\, \mathrm{softmax}(z_s/T))$, mean over the batch.

    Logits are (B, K). The factor T^2 keeps the size of the gradient when the temperature changes.
    """
    told, said = log_softmax(teacher / temperature, 1), log_softmax(student / temperature, 1)
    return kl_div(said, told, reduction="batchmean", log_target=True) * temperature**2
