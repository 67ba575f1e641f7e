"""Model files: safetensors with the network's description in the metadata. Nothing in them can run."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from visard.errors import UsageError, VisardError
from visard.files import write_atomically

NEEDED = ("model", "embedding", "size")
# Pictures go in as (x / 255 - mean) / std: [-1, 1] unless a network was trained otherwise.
NORMALISATION = {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5"}


def save_model(path: str | Path, weights: dict[str, Tensor], spec: dict[str, str]) -> None:
    """Write weights and spec, atomically; equal weights and spec give equal bytes.

    spec needs `model`, `embedding` and `size`; `mean`, `std` and visard's version are added where absent.
    """
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"cannot write {path}: the model's description lacks {', '.join(absent)}")
    metadata = {"format": "pt", "visard": _version(), **NORMALISATION, **spec}
    # A copy of each: safetensors refuses views, tensors that share memory, and channels-last order.
    plain = {k: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, v in weights.items()}
    write_atomically(Path(path), _sorted_header(save(plain, metadata)))


def read_model(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights and the spec of a model file; one clear line if it is anything else."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            spec: dict[str, str] = dict(file.metadata() or {})
            weights: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VisardError(f"{path} is not a readable model file: {reason}") from None
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"{path} was not written by visard: its metadata lacks {', '.join(absent)}")
    for key in ("embedding", "size"):
        if not spec[key].isascii() or not spec[key].isdigit():
            raise VisardError(f"{path} is damaged: {key} is {spec[key]!r}, not a number")
    return weights, {key: value for key, value in spec.items() if key != "format"}


def _sorted_header(data: bytes) -> bytes:
    """The same file with its metadata in order: safetensors writes it in the random order of a hash map."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _version() -> str:
    try:
        return version("visard")
    except PackageNotFoundError:
        return "unknown"
