"""How numbers are computed: the device, and the precision, memory format and number of threads of a run.

A process computes on one device, the CPU unless `computing_on` chose another: networks and what goes into them are
there (`on_device`, `moved`), and the results of training, embedding and comparing are on the CPU again. So messages,
states and files do not depend on the device.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn

from visard.errors import UsageError

M = TypeVar("M", bound=nn.Module)
CPU = torch.device("cpu")
NAMES = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")
LOSS_SCALE = 1024.0  # where fp16 begins: a round is short, and steps that overflow are lost to it
SHARE = 0.5  # of the free memory of a device that a table may take
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt(3)
KEPT = 256 * 2**20  # bytes of a tensor up to which its memory stays with the process

_here = CPU
_exact = False  # whether torch's switches were set here


def device() -> torch.device:
    """Where this process computes."""
    return _here


def count(kind: str) -> int:
    """How many devices of a kind there are."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


def resolve(name: str) -> torch.device:
    """The device of this name; `auto` is the first CUDA device where there is one, or else the CPU."""
    if not NAMES.fullmatch(name):
        raise UsageError(f"device {name!r}: must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps")
    kind, _, number = name.partition(":")
    if kind == "auto":
        kind = "cuda" if count("cuda") else "cpu"
    if kind == "cpu":
        return CPU
    there = count(kind)
    if not there:
        raise UsageError(f"device {name}: torch {torch.__version__} finds none here; take cpu or auto")
    if int(number or 0) >= there:
        raise UsageError(f"device {name}: there are {there}, {kind}:0 to {kind}:{there - 1}")
    return torch.device(kind, int(number or 0))


def spread(name: str) -> list[str]:
    """The devices that worker processes share: all of a kind, or the one that is named by number."""
    first = resolve(name)
    if first == CPU or ":" in name:
        return [str(first)]
    return [f"{first.type}:{i}" for i in range(count(first.type))]


def compute_on(where: str | torch.device, deterministic: bool = False) -> torch.device:
    """Make this process compute on a device; returns the device before.

    With `deterministic` the device gives the same bits again, more slowly; the CPU always does.
    """
    global _here, _exact
    before, _here = _here, resolve(where) if isinstance(where, str) else where
    exact = deterministic and _here != CPU
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
    if exact != _exact:
        torch.use_deterministic_algorithms(exact)
        torch.backends.cudnn.deterministic = _exact = exact
    if _here != CPU and hasattr(module := torch.get_device_module(_here), "set_device"):
        module.set_device(_here)
    return before


@contextmanager
def computing_on(where: str | torch.device, deterministic: bool = False) -> Iterator[torch.device]:
    """The same for as long as the context lasts."""
    before = compute_on(where, deterministic)
    try:
        yield device()
    finally:
        compute_on(before)


def moved(x: Tensor) -> Tensor:
    """x on the device of this process; a GPU copies it while this process continues."""
    if x.device == _here:
        return x
    if _here.type == "mps" and x.dtype == torch.float64:  # which it does not know
        x = x.float()
    if _here.type == "cuda" and x.device == CPU:
        return x.pin_memory().to(_here, non_blocking=True)
    return x.to(_here)


def resident(table: Tensor) -> Tensor:
    """A table on the device if there is room for it, otherwise unchanged: parts of it are `moved` one by one."""
    return moved(table) if table.numel() * table.element_size() <= SHARE * _free() else table


def _free() -> float:
    """Bytes of the device that are free, as far as it says so."""
    if _here.type in ("cuda", "xpu"):
        return float(torch.get_device_module(_here).mem_get_info(_here)[0])
    if _here.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return float("inf")


def on_device(network: M) -> M:
    """A network, moved in place to the device of this process if any part of it is elsewhere."""
    keep_memory()
    parts = chain(network.parameters(), network.buffers())
    return network if all(part.device == _here for part in parts) else network.to(_here)


@functools.cache
def keep_memory() -> bool:
    """Make the C library reuse the memory of freed tensors; returns whether it does.

    By default it returns large blocks to the system after every layer, which must then clear and map them again: a
    fifth of the time of training on a CPU, and up to two thirds of embedding. Nothing is changed where the user has set
    malloc's own variables, or where the library is not glibc.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    library = ctypes.CDLL(None) if sys.platform == "linux" and not own else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    assert library is not None
    kept = library.mallopt(MMAP_THRESHOLD, KEPT) or library.mallopt(MMAP_THRESHOLD, KEPT // 8)  # older: 32 MB at most
    return bool(kept and library.mallopt(TRIM_THRESHOLD, 2**31 - 1))


def give_back_memory(but: int) -> bool:
    """From now on the memory of freed tensors goes back to the system, but for so many bytes: in a process with one
    large network what stays would be as much as the network, several times. What stays serves the gradients of one step
    after the other: the system would clear new memory for each, which takes longer than the step. Whether it did."""
    return keep_memory() and bool(ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, min(but, 2**31 - 1)))


def seed_device(seed: int) -> None:
    """Seed the random numbers that layers draw on a device; those of the CPU are not touched."""
    if _here != CPU:
        torch.get_device_module(_here).manual_seed_all(seed)


def fast_bf16() -> bool:
    """Whether this processor has bfloat16 instructions; without them bf16 is emulated, and slow."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


class Numerics(BaseModel):
    """`[numerics]`: training only; evaluation is always float32."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "auto"  # cpu, cuda, cuda:N, xpu, xpu:N, mps; auto: CUDA where there is one, else the CPU
    deterministic: bool = False  # the same bits again on one device; the CPU always gives them
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # on a CPU bf16 pays only with instructions for it, fp16 never
    channels_last: bool = True
    compile: bool = False  # torch.compile: about 40 s once, worth it for runs of more than ten minutes
    threads_per_step: int = Field(default=1, ge=1, le=64)  # torch threads of one client step; bits depend on it

    @field_validator("device")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not NAMES.fullmatch(name):
            raise ValueError("must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps")
        return name

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which a training forward pass runs."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(_here.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss, and the gradients back, so that small gradients of fp16 do not become 0."""
        return torch.amp.GradScaler(_here.type, init_scale=LOSS_SCALE, enabled=self.precision == "fp16")

    @property
    def loss_scale(self) -> float:
        """By which a loss is multiplied, and its gradients divided, where there is no optimiser to scale for."""
        return LOSS_SCALE if self.precision == "fp16" else 1.0

    def place(self, x: Tensor) -> Tensor:
        """A batch of pictures in the memory format of the run; vectors have no such format."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x

    def prepare(self, model: nn.Module) -> nn.Module:
        """A network on the device, in the memory format of the run."""
        where: dict[str, Any] = {} if _here == CPU else {"device": _here}
        if self.channels_last:
            where["memory_format"] = torch.channels_last
        return model.to(**where) if where else model
