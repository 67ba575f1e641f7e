"""Tensors as safetensors bytes, written directly: for the small states of many clients the library's own writer is
slower than their training step. Reading stays with the library, which checks what it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip


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
