"""Model files of every kind: visard's own, weights that other projects publish, ONNX graphs. Nothing in them can run.

visard writes safetensors with the network's description (its spec) in the metadata. Published weights are pickles:
torch's weights-only reader builds tensors and refuses everything that could run code. What a file says of sizes is
compared with the bytes that are there before anything of that size is made.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

from visard.at_rest import Key, is_encrypted, refuse_encrypted
from visard.errors import UsageError, VisardError, one_line
from visard.files import PRIVATE, open_file, read_bytes, write_atomically
from visard.models import BACKBONES, build_spec, default_embedding
from visard.models.catalogue import entries, locate
from visard.models.convert import convert
from visard.models.inputs import PRESETS, Inputs, choose, preset
from visard.models.onnx import load_onnx
from visard.models.published import READS, is_iresnet, looks_like, recognise
from visard.plugins import is_loaded

NEEDED = ("model", "embedding", "size")
# Entries of a model's spec that are copied into models trained from it.
DESCRIBES = (*NEEDED, "graph", "order", "mean", "std", "align", "licence")
CHECK = 8  # random pictures on which a converted file is compared with onnxruntime
# Pictures go in as (x / 255 - mean) / std: [-1, 1] unless a network was trained otherwise.
NORMALISATION = {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5"}
WEIGHTS = (".pth", ".pt")
ENDINGS = (".safetensors", *WEIGHTS, ".onnx")
ZIP = b"PK\x03\x04"  # how a file of torch begins
WRAPPERS = ("state_dict_backbone", "state_dict", "model")  # where larger checkpoints hold the backbone's weights
NUMBERS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}  # types of weights
MAX_SIDE = 4096  # pixels
PREFIX = "transform."  # entries of a client's own layer in a personal model


def located(path: str | Path) -> Path:
    """A model file: at a path, or by the name of one that comes with visard (`tiny-synthetic`)."""
    here = Path(__file__).with_name("weights") / f"{Path(path).name}.safetensors"
    return here if Path(path).name == str(path) and here.is_file() else Path(path)


def open_model(
    path: str | Path,
    *,
    name: str | None = None,
    size: int | None = None,
    order: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    network: str | None = None,
) -> tuple[nn.Module, dict[str, str]]:
    """The network in a file, in evaluation mode, and its spec with `order`, `mean`, `std` and `size` of its pictures.

    `path` may be the name of a model in the catalogue, whose contract then counts. `name` (arcface, cosface, facenet,
    imagenet, raw), `order`, `mean` and `std` override what the file says; `size` is for networks that leave it open,
    and an error where one takes another. `network` is `package.module:factory`, for weights of a network of your own.
    """
    path, entry = locate(located(path))
    if name is not None:
        preset(name)
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise _no_model(path)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    if entry is not None:
        network = network or (entry.model if ":" in entry.model else None)
        size = size if size is not None else int(entry.size)
    made: nn.Module
    if ending == ".onnx":
        made, spec = load_onnx(path, size, name)
    elif ending in WEIGHTS or not _is_ours(path):
        spec, weights = published(path, network, None, size)
        try:
            made = filled(spec, weights)
        except VisardError as error:
            raise VisardError(f"{path}: {error}") from None
    else:
        made, spec = load(path)
    spec |= {} if entry is None else entry.contract
    own = Inputs.of_spec(spec, path)
    if size not in (None, own.size):
        raise UsageError(f"{path}: takes pictures of {own.size} pixels, not {size}")
    return made.eval(), spec | choose(own, name, order=order, mean=mean, std=std).to_spec()


def _no_model(path: Path) -> UsageError:
    if (path / "model.safetensors").is_file():
        return UsageError(f"{path} is a folder: give {path}/model.safetensors")
    names = [entry.name for entry in entries()]
    kept = f", or is the name of one that is kept: {', '.join(names)}" if names else ", and none is kept under a name"
    return UsageError(f"{path}: a model file ends in {', '.join(ENDINGS)}{kept}")


def published(
    path: Path, network: str | None, embedding: int | None, size: int | None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Spec and weights of a file that another project wrote: of `network`, or of a family that its names show."""
    weights = read_weights(path) if path.suffix.lower() in WEIGHTS else _tensors(path)[0]
    try:
        if network is not None:
            if ":" in network and not is_loaded(network):
                raise UsageError(f"the network {network} is a plug-in: name its module if you trust it (--plugin)")
            length = str(embedding or default_embedding(network))
            return {"model": network, "embedding": length, "size": str(size or 112)}, weights
        found = recognise(weights, size)
        if found is None:
            raise VisardError(f"looks like {looks_like(weights)}; visard reads {READS}")
    except VisardError as error:
        raise type(error)(f"{path}: {error}") from None
    return found


def load(path: str | Path) -> tuple[nn.Module, dict[str, str]]:
    """The network in a file of visard, in evaluation mode, and its spec; a personal one ends in its client's layer."""
    weights, spec = read_model(path)
    if ":" in spec["model"] and not is_loaded(spec["model"]):  # a file does not choose what is imported
        module = spec["model"].partition(":")[0]
        raise UsageError(f"{path}: its network is a plug-in, name its module if you trust it: --plugin {module[:100]}")
    try:
        theta, transform = split_transform(weights)
        model = filled(spec, theta)
        model = with_transform(model, transform, int(spec["embedding"]))
    except VisardError as error:
        raise VisardError(f"{path}: {error}") from None
    return model.eval(), spec


def filled(spec: dict[str, str], weights: dict[str, Tensor]) -> nn.Module:
    """The network of that spec with these weights; it takes no memory unless they fit."""
    name, embedding, size = spec["model"], int(spec["embedding"]), int(spec["size"])
    try:
        with torch.device("meta"):
            expected = build_spec(spec).state_dict()
    except VisardError:
        raise
    except Exception as error:  # sizes beyond counting, or a network of a plug-in that cannot be made without memory
        known = size <= MAX_SIDE and any(embedding in value.shape for value in weights.values())
        if ":" not in name or not known:
            raise VisardError(f"{name} of embedding {embedding} and size {size}: {one_line(error)}") from None
        expected = build_spec(spec).state_dict()
    fitted = fit(weights, expected)
    network = build_spec(spec)
    network.load_state_dict(fitted)
    return network


def save_model(
    path: str | Path, weights: dict[str, Tensor], spec: dict[str, str], mode: int = PRIVATE, key: Key | None = None
) -> None:
    """Write weights and spec, atomically; equal weights and spec give equal bytes.

    spec needs `model`, `embedding` and `size`; `mean`, `std` and visard's version are added where absent.
    """
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"cannot write {path}: the model's description lacks {', '.join(absent)}")
    metadata = {"format": "pt", "visard": version("visard"), **NORMALISATION, **spec}
    # A copy of each: safetensors refuses views, tensors that share memory, and channels-last order.
    plain = {k: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, v in weights.items()}
    data = _sorted_header(save(plain, metadata))
    write_atomically(path := Path(path), data if key is None else key.encrypt(data, _what(path)), mode)


def _what(path: Path) -> str:
    return f"model {path.name}"


@contextmanager
def _reading(path: Path, key: Key | None) -> Iterator[Any]:
    """The tensors of a file: from the disk, or decrypted in memory."""
    if key is None or not is_encrypted(path):
        refuse_encrypted(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
        return
    with open_file(path) as encrypted:
        content = bytes(key.decrypt(encrypted, _what(path), path))
    yield _Decrypted(load_tensors(content), json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


@dataclass(frozen=True)
class _Decrypted:
    """What `safe_open` gives of a file, of one that is in memory."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]

    def metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = self.header["__metadata__"]
        return metadata

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, key: str) -> Tensor:
        return self.tensors[key]


def read_model(path: str | Path, encrypt_with: Key | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights and the spec of a model file, encrypted or not; one clear line if it is anything else."""
    path = located(path)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    weights, spec = _tensors(path, encrypt_with)
    if absent := [key for key in NEEDED if key not in spec]:
        raise VisardError(f"{path} was not written by visard: its metadata lacks {', '.join(absent)}")
    for key in ("embedding", "size"):
        if not spec[key].isascii() or not spec[key].isdigit() or len(spec[key]) > 9:
            raise VisardError(f"{path} is damaged: {key} is {spec[key][:40]!r}, not a number")
    return weights, {key: value for key, value in spec.items() if key != "format"}


def _tensors(path: Path, encrypt_with: Key | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in a file of safetensors, and its metadata."""
    try:
        with _reading(path, encrypt_with) as file:
            spec: dict[str, str] = dict(file.metadata() or {})
            weights: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise VisardError(f"{path} is not a readable model file: {one_line(error)}") from None
    return weights, spec


def _is_ours(path: Path) -> bool:
    """Whether a file of safetensors is one of visard, or none at all, which reading it says."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            spec = file.metadata() or {}
            return any(key in spec for key in (*NEEDED, "visard")) or not list(file.keys())
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError, RuntimeError):
        return True


def _sorted_header(data: bytes) -> bytes:
    """The same file with its metadata in order: safetensors writes it in the random order of a hash map."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def fit(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` in the order and the types of `expected`; an absent batch counter starts at 0."""
    counters = {k: v for k, v in expected.items() if not v.is_floating_point()}  # absent in some published files
    found = counters | weights
    if missing := [key for key in expected if key not in found]:
        raise VisardError(f"{len(missing)} weights are missing, first {missing[0]!r}")
    if unknown := [key for key in found if key not in expected]:
        raise VisardError(f"{len(unknown)} weights are unknown to the network, first {unknown[0]!r}")
    for key, value in expected.items():
        if found[key].shape != value.shape:
            raise VisardError(f"{key!r} has the shape {tuple(found[key].shape)} instead of {tuple(value.shape)}")
        if found[key].dtype not in NUMBERS:
            raise VisardError(f"{key!r} is of {found[key].dtype}, which weights are not")
    fitted = {}
    for key, value in expected.items():
        if found[key] is value:
            fitted[key] = torch.zeros_like(value, device="cpu")
            continue
        fitted[key] = found[key].to(value.dtype).contiguous()
        if not torch.isfinite(fitted[key]).all():
            raise VisardError(f"{key!r} holds NaN or infinity")
    return fitted


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Named tensors of a torch file, unwrapped and without `module.` prefixes; no code is run."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no weights file at {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(_checked(path), map_location="cpu", weights_only=True)
    except VisardError as error:
        raise VisardError(f"{path}: {error}") from None
    except Exception as error:  # arbitrary bytes make the reader fail in more ways than it documents
        raise VisardError(f"{path}: {_reason(error)}") from None
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise VisardError(f"{path} holds no weights but {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise VisardError(f"{path} holds more than weights: {str(key)[:40]!r} is {type(value).__name__}")
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise VisardError(f"{path}: {key[:40]!r} is no plain tensor")
    there = path.stat().st_size
    if sum(value.nbytes for value in content.values()) > 2 * there or any(map(_is_repeated, content.values())):
        raise VisardError(f"{path}: its tensors have more numbers than the {there} bytes of the file hold")
    return {re.sub(r"^(module\.)+", "", key): value for key, value in content.items()}


def _checked(path: Path) -> Path | io.BytesIO:
    """A file of torch whose parts are no larger than it: torch allocates whatever they claim."""
    there = path.stat().st_size
    with open_file(path) as opened:
        begins = opened.read(len(ZIP))
    if begins == ZIP and zipfile.is_zipfile(path):  # the former alone decides for torch, the latter looks at the end
        with zipfile.ZipFile(path) as file:
            parts = file.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > there:
            raise VisardError("damaged or crafted: its parts are compressed, or larger than the file")
        return path
    if tarfile.is_tarfile(path):
        raise VisardError("a tar file of a very old torch: load and save it with a newer one")
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes seconds, and such files are from before 2020

    data = read_bytes(path)  # from a file, torch would make room for text of any length that a pickle announces
    with FakeTensorMode():  # tensors without memory
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    stores, todo = dict[int, int](), [content]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            store = value.untyped_storage()
            stores[store._cdata] = store.nbytes()
        elif isinstance(value, dict | list | tuple):
            todo += value.values() if isinstance(value, dict) else value
    if sum(stores.values()) > there:
        raise VisardError(f"damaged or crafted: it has {there} bytes and tensors of {sum(stores.values())}")
    return io.BytesIO(data)


def _is_repeated(value: Tensor) -> bool:
    """Whether a tensor has more numbers than its memory: a step of 0 from one to the next."""
    return value.nbytes > value.untyped_storage().nbytes()


def start(
    path: str | Path, name: str, embedding: int | None, side: int, check: bool = True
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Spec and weights of the network that a run starts from.

    A file that says or shows which network it holds decides; any other must fit the network `name`, for pictures of
    `side`. torchvision's ResNet-18 has no `embed`: it starts from seed 0, so that a run repeats, and its weights are
    made to take pictures in [-1, 1]. A converted ONNX file is compared with onnxruntime unless `check` is off.
    """
    path, entry = locate(located(path))
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise _no_model(path)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    known = None if entry is None else int(entry.size)
    if ending == ".onnx":
        found = convert(path, known, check=CHECK if check else 0)
        spec, weights = found.spec, found.weights
    elif ending in WEIGHTS or not _is_ours(path):
        spec, weights = _published_start(path, name if entry is None else entry.model, embedding, known or side)
    else:
        weights, spec = read_model(path)
        if ":" in spec["model"] and spec["model"] != name and not is_loaded(spec["model"]):
            raise UsageError(f"{path}: its network is a plug-in, name it if you trust it: model.name = {spec['model']}")
    spec = spec | ({} if entry is None else entry.contract)
    if embedding is not None and str(embedding) != spec["embedding"]:
        raise UsageError(f"model.embedding = {embedding}: the network of {path} gives {spec['embedding']} numbers")
    added = False
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected = build_spec(spec).state_dict()
        if "embed.weight" in expected and "embed.weight" not in weights:
            weights |= {key: value for key, value in expected.items() if key.startswith("embed.")}
            added = True
        fitted = fit(weights, expected)
    except VisardError as error:
        like = "" if "graph" in spec else f"; it looks like {looks_like(weights)}"
        raise VisardError(f"{path} does not fit the network {spec['model']}: {error}{like}") from None
    if "visard" not in spec:
        spec.setdefault("align", "five")  # as nearly every public network was trained
    kept = {key: value for key, value in spec.items() if key in DESCRIBES}
    return kept, for_plain_pictures(fitted) if added else fitted


def _published_start(
    path: Path, name: str, embedding: int | None, side: int
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Weights of another project: of the network `name` where that is a plug-in or fits, else of what they show."""
    weights = read_weights(path) if path.suffix.lower() in WEIGHTS else _tensors(path)[0]
    if name in BACKBONES and (":" in name or not is_iresnet(weights)):
        own = {"model": name, "embedding": str(embedding or default_embedding(name)), "size": str(side)}
        if ":" in name:
            return own, weights
        with torch.device("meta"):
            expected = build_spec(own).state_dict().keys()
        new = {key for key in expected if key not in weights and not key.endswith("num_batches_tracked")}
        if all(key.startswith("embed.") for key in new) and set(weights) <= set(expected):
            return own, weights
    return published(path, None, embedding, side)


def for_plain_pictures(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """ImageNet weights of a ResNet-18, for pictures x in [-1, 1] instead of (x / 2 + 1 / 2 - mean) / std.

    The factor 1 / (2 std) goes into the first convolution, and what the shift adds to its output into the mean of its
    batch norm. The same but for the border, where the padding is now mid-grey and was the mean colour.
    """
    imagenet, kernel = PRESETS["imagenet"], weights["conv1.weight"]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (imagenet.mean, imagenet.std))
    added = (kernel * (0.5 - mean) / std).sum(dim=(1, 2, 3))
    return weights | {"conv1.weight": kernel / (2 * std), "bn1.running_mean": weights["bn1.running_mean"] - added}


def _reason(error: Exception) -> str:
    text = str(error)
    # torch names what it refused as "Unsupported global: GLOBAL module.function was not an allowed global"
    if found := re.search(r"(?:GLOBAL|Unsupported class) ([A-Za-z_]\w*(?:\.\w+)+)", text):
        return f"refused, it holds pickled code ({found[1]}) and not only weights"
    if isinstance(error, EOFError) or "PytorchStreamReader" in text:
        return "truncated or damaged, cannot be read as weights"
    return f"not a file of weights ({type(error).__name__})"


class Transformed(nn.Module):
    """A personal model, a backbone and a linear layer of one client: (B, 3, size, size) -> (B, embedding)."""

    def __init__(self, backbone: nn.Module, transform: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.transform = backbone, transform

    def forward(self, x: Tensor) -> Tensor:
        # `forward` itself: a compiled backbone would be compiled again for evaluation
        out: Tensor = self.transform(self.backbone.forward(x))
        return out


def split_transform(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], nn.Linear | None]:
    """The backbone's entries, and the layer that follows it if there is one."""
    rest = {name: value for name, value in weights.items() if not name.startswith(PREFIX)}
    if len(rest) == len(weights):
        return weights, None
    weight, bias = (weights.get(PREFIX + name) for name in ("weight", "bias"))
    if len(weights) - len(rest) != 2 or weight is None or bias is None:
        raise VisardError("a personal model needs transform.weight and transform.bias")
    if weight.ndim != 2 or bias.shape != weight.shape[:1] or {weight.dtype, bias.dtype} - NUMBERS:
        raise VisardError(f"transform.weight {tuple(weight.shape)} and .bias {tuple(bias.shape)} do not fit together")
    weight, bias = weight.float(), bias.float()
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise VisardError("the transformation holds NaN or infinity")
    layer = nn.Linear(weight.shape[1], weight.shape[0]).requires_grad_(False)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return rest, layer


def with_transform(backbone: nn.Module, transform: nn.Linear | None, embedding: int) -> nn.Module:
    """The backbone alone, or followed by the client's own layer, which must take its features."""
    if transform is not None and transform.in_features != embedding:
        raise VisardError(f"transform.weight takes features of {transform.in_features}, the network gives {embedding}")
    return backbone if transform is None else Transformed(backbone, transform)
