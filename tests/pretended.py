"""A pretended device for tests: its tensors hold CPU numbers, say that they are elsewhere, and refuse to be mixed.

torch lets one device be written in Python (PrivateUse1). Here every operation on its tensors is the CPU's on the
numbers behind them, so results are the CPU's too; but an operation with a tensor of the CPU beside them raises, as on a
GPU, unless that is a single number or a copy between the two. Torch must hear of a device before it first computes
gradients, so importing this is enough, and is to be done at the top of a file of tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
_setup_privateuseone_for_python_backend(NAME, backend_module=(module := SimpleNamespace()))
DEVICE = torch.device(NAME, 0)
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
done: set[str] = set()  # operations that were done there, and seeds that were set: tests look at them
seeds: list[int] = []


class Mixed(RuntimeError):
    """Tensors of two devices in one operation."""


class There(Tensor):
    """A tensor on the pretended device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        there: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=DEVICE,
        )  # fmt: skip
        there.held = held
        return there

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The CPU's operation on the numbers behind the tensors; what it gives is there again."""
    if func not in COPIES:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not isinstance(x, There) and x.ndim:
                raise Mixed(f"{func}: tensors on {x.device} and on {NAME}")
    done.add(str(func))
    leaves = "device" in kwargs and torch.device(kwargs["device"]).type != NAME
    given = kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
    given |= {"pin_memory": False} if given.get("pin_memory") else {}
    numbers, named = tree_map_only(There, lambda x: x.held, (args, given))
    found = func(*numbers, **named)
    schema = func._schema
    if schema.is_mutable:  # what is written to is given back itself
        written = [
            kwargs.get(known.name, args[i] if i < len(args) else None)
            for i, known in enumerate(schema.arguments)
            if known.alias_info is not None and known.alias_info.is_write
        ]
        if len(schema.returns) == len(written):
            return written[0] if len(written) == 1 else tuple(written)
        if not schema.returns:
            return None
    return found if leaves else tree_map_only(Tensor, lambda x: x if isinstance(x, There) else There(x), found)


# what torch asks of the module of a device
module.is_available = module.is_initialized = lambda: True
module.device_count, module.current_device, module._is_in_bad_fork = lambda: 1, lambda: 0, lambda: False
module.manual_seed_all = seeds.append
module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]

_kernels: list[torch.library.Library] = []  # which live as long as these do


def _register() -> None:
    """Operations without a tensor among their arguments, as torch.zeros, do not come by `There`."""
    here = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        space, _, full = name.partition("::")
        base, _, overload = full.partition(".")
        operation = (
            getattr(getattr(torch.ops.aten, base, None), overload or "default", None) if space == "aten" else None
        )
        if operation is None:
            continue
        kinds = {argument.name: str(argument.type) for argument in operation._schema.arguments}
        gives = [str(value.type) for value in operation._schema.returns]
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
        if (
            "device" in kinds
            and gives == ["Tensor"]
            and not any("Tensor" in k for k in kinds.values())
            and not composite
        ):
            here.impl(full, _maker(operation), "PrivateUse1")
    here.impl("_copy_from", _copied, "PrivateUse1")
    outside = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    outside.fallback(torch.library.fallthrough_kernel)
    _kernels.extend([here, outside])


def _maker(operation: Any) -> Any:
    return lambda *args, **kwargs: compute(operation, args, kwargs | {"device": DEVICE})


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    compute(torch.ops.aten.copy_.default, (target, source), {})
    return target


_register()
