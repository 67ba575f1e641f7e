"""Tensors as safetensors bytes, written directly: for the small states of many clients the library's own writer is
slower than their training step. Reading stays with the library, which checks places, lengths and shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
MAX_DIMENSIONS = 16
KINDS = {name: kind for kind, name in NAMES.items()}


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """8 bytes of header length, a JSON header padded to 8 bytes, then the numbers; wide types first, so all align."""
    header, parts, end = {}, [], 0
    for key in sorted(tensors, key=lambda k: -tensors[k].element_size()):
        tensor = tensors[key].detach().cpu().contiguous()
        if tensor.dtype not in NAMES:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be written")
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [end, end + size]}
        if size:
            parts.append(tensor.view(-1).view(torch.uint8).numpy().data)
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def parse(data: bytes, limit: int) -> dict[str, Tensor]:
    """The tensors in safetensors bytes of anyone; ValueError where they are not what `dump` writes.

    The JSON header is the one part whose objects take many times its bytes, so its length has a `limit`.
    """
    if (length := int.from_bytes(data[:8], "little")) > limit:
        raise ValueError(f"a list of tensors of {length} bytes is over the limit of {limit}")
    try:
        return {name: _tensor(part) for name, part in deserialize(data)}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _tensor(part: Mapping[str, Any]) -> Tensor:
    kind, shape, numbers = KINDS.get(part["dtype"]), part["shape"], part["data"]
    if kind is None:
        raise ValueError(f"a tensor of {part['dtype']} cannot be read")
    if len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) >= 2**62:
        raise ValueError("a tensor whose shape is beyond counting")  # where a side is 0, the others need no numbers
    if not numbers:
        return torch.empty(shape, dtype=kind)
    if kind is torch.bool and int(torch.frombuffer(numbers, dtype=torch.uint8).max()) > 1:
        raise ValueError("a truth value is neither 0 nor 1")
    return torch.frombuffer(numbers, dtype=kind).reshape(shape)
