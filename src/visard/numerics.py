"""How numbers are computed in a run: precision, memory format, compilation, threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn


def fast_bf16() -> bool:
    """Whether this processor has bfloat16 instructions; without them bf16 is emulated, and slow."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


class Numerics(BaseModel):
    """`[numerics]`: training only; evaluation is always float32."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 pays only on a processor with instructions for it
    channels_last: bool = True
    compile: bool = False  # torch.compile: about 40 s once, worth it for runs of more than ten minutes
    threads_per_step: int = Field(default=1, ge=1, le=64)  # torch threads of one client step; bits depend on it

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which a training forward pass runs."""
        if self.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()

    def place(self, x: Tensor) -> Tensor:
        """A batch of pictures in the memory format of the run; vectors have no such format."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x

    def prepare(self, model: nn.Module) -> nn.Module:
        """A network in the memory format of the run."""
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]
