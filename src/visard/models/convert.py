"""ONNX graphs as networks that train: each node becomes a step of `visard.models.steps`, or is computed here once.

Sizes are known as soon as the pictures are, so nodes that compute with shapes (Shape, Gather, Concat, ...) are done
away with, and a Reshape says what one picture becomes: a graph that was exported for one picture at a time takes any
number of them. Graphs are read in the child process of `visard.onnx_process`, and the result is compared with
onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from visard.errors import VisardError, one_line
from visard.models.inputs import Inputs
from visard.models.onnx import OnnxNetwork, load_onnx
from visard.models.steps import Array, Draft, StepNetwork, Value, build, to_text

TOLERANCE = 1e-4  # largest difference from onnxruntime, relative to the largest number of a feature
ROUGH = 2e-2  # the same where the graph computes with 16 bits
NONE = "its result depends on how many pictures there are"
LOWEST = -3.4e38


@dataclass
class _Node:
    """A node with what goes in."""

    op: str
    name: str
    inputs: list[Value | Array | None]
    outputs: list[str]
    given: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def value(self, at: int = 0) -> Value:
        found = self.inputs[at] if at < len(self.inputs) else None
        if not isinstance(found, Value):
            raise VisardError("takes a constant where the network's values are expected")
        return found

    def array(self, at: int, name: str = "") -> Array | None:
        """An input that is known, or the attribute that older versions have in its place."""
        if at < len(self.inputs) and self.inputs[at] is not None:
            found = self.inputs[at]
            if isinstance(found, Value):
                raise VisardError(f"its input {at + 1} is computed from the pictures, not constant")
            return found
        return np.asarray(self.given[name]) if name in self.given else None

    def whole(self, at: int, name: str = "") -> list[int] | None:
        found = self.array(at, name)
        return None if found is None else [int(v) for v in found.reshape(-1)[:64]]

    def needed(self, at: int) -> Array:
        found = self.array(at)
        if found is None:
            raise VisardError(f"lacks its input {at + 1}")
        return found


def _dim(axis: int, dims: int) -> int:
    """A dimension counted from the front, behind the batch."""
    found = axis + dims if axis < 0 else axis
    if not 0 < found < dims:
        raise VisardError(NONE)
    return found


def _shape(s: Draft, x: Value, shape: Sequence[int]) -> Value:
    if not shape or shape[0] != x.shape[0] or math.prod(shape) != math.prod(x.shape):
        raise VisardError(NONE)
    return x if tuple(shape) == x.shape else s.add("reshape", [x], shape=[int(v) for v in shape[1:]])


def _float(array: Array) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(array, np.float32)


def _pads(n: _Node, x: Value, kernel: list[int], stride: list[int], dilation: list[int]) -> list[int]:
    """Above, left, below, right."""
    how = n.get("auto_pad", "NOTSET")
    if how in ("NOTSET", ""):
        return n.get("pads") or [0, 0, 0, 0]
    if how == "VALID":
        return [0, 0, 0, 0]
    first, second = [], []
    for side, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True):
        total = max(0, (math.ceil(side / s) - 1) * s + d * (k - 1) + 1 - side)
        less, more = total // 2, total - total // 2
        first.append(less if how == "SAME_UPPER" else more)
        second.append(more if how == "SAME_UPPER" else less)
    return [*first, *second]


def _window(n: _Node, x: Value, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Stride, dilation and pads of something that slides over a picture."""
    stride, dilation = n.get("strides") or [1, 1], n.get("dilations") or [1, 1]
    if x.dims != 4 or len(kernel) != 2 or min(*kernel, *stride, *dilation) < 1:
        raise VisardError("is not one over the height and width of pictures")
    return stride, dilation, _pads(n, x, kernel, stride, dilation)


def _conv(s: Draft, n: _Node) -> Value:
    x, weight, bias = n.value(), n.needed(1), n.array(2)
    if weight.ndim != 4:
        raise VisardError("is not one over the height and width of pictures")
    stride, dilation, pads = _window(n, x, [*weight.shape[2:]])
    if pads[:2] != pads[2:]:
        x = s.add("pad", [x], pads=[pads[1], pads[3], pads[0], pads[2]])
        pads = [0, 0, 0, 0]
    weights = {"weight": _float(weight)} | ({} if bias is None else {"bias": _float(bias).reshape(-1)})
    return s.add(
        "conv", [x], weights, width=weight.shape[0], channels=x.shape[1], kernel=[*weight.shape[2:]], stride=stride,
        pad=pads[:2], dilation=dilation, groups=n.get("group", 1), bias=bias is not None,
    )  # fmt: skip


def _norm(s: Draft, n: _Node) -> Value:
    x = n.value()
    if n.get("training_mode", 0) or not n.get("spatial", 1) or x.dims > 4:
        raise VisardError("is not batch norm as it is after training")
    scale, bias, mean, var = (_float(n.needed(at)).reshape(-1) for at in (1, 2, 3, 4))
    if var.size and var.min() < 0:
        raise VisardError("has negative variances")
    weights = {"weight": scale, "bias": bias, "running_mean": mean, "running_var": var}
    dims = 2 if x.dims == 4 else 1
    return s.add("norm", [x], weights, width=x.shape[1], eps=float(n.get("epsilon", 1e-5)), dims=dims)


def _prelu(s: Draft, n: _Node) -> Value:
    x, slope = n.value(), _float(n.needed(1))
    wanted = (1,) * (slope.ndim - x.dims + 1) + (x.shape[1],) + (1,) * (x.dims - 2)
    if slope.size != 1 and (1,) * (x.dims - 1 - slope.ndim) + slope.shape != wanted:
        raise VisardError(f"has slopes of shape {slope.shape}, not one for each channel")
    return s.add("prelu", [x], {"weight": slope.reshape(-1)}, width=slope.size)


def _binary(s: Draft, n: _Node, op: str) -> Value | Array:
    a, b = n.inputs[:2]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        s.spend(8 * math.prod(np.broadcast_shapes(a.shape, b.shape)))
        how = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op]
        if op == "div" and a.dtype.kind in "iu":
            how = np.floor_divide
        with np.errstate(all="ignore"):
            return np.asarray(how(a, b))
    if isinstance(a, Value) and isinstance(b, Value):
        return s.add(op, [a, b])
    left = isinstance(b, Value)
    x, known = (b, a) if left else (a, b)
    if not isinstance(x, Value) or not isinstance(known, np.ndarray):
        raise VisardError("lacks an input")
    if known.size == 1 and known.ndim <= x.dims:
        return s.add(op, [x], value=float(known.reshape(-1)[0]), left=left)
    if np.broadcast_shapes(known.shape, x.shape) != x.shape or (known.ndim == x.dims and known.shape[0] != 1):
        raise VisardError(f"has a constant of shape {known.shape} for values of shape {x.shape}")
    weights = {"weight": _float(known)}
    return s.add(f"{op}_constant", [x], weights, shape=[*known.shape], left=left, fixed=not s.trained)


def _gemm(s: Draft, n: _Node) -> Value:
    x, weight, bias = n.value(), _float(n.needed(1)), n.array(2)
    if n.get("transA", 0) or x.dims != 2 or weight.ndim != 2:
        raise VisardError("is not one matrix for each picture's vector")
    weight = np.float32(n.get("alpha", 1.0)) * (weight if n.get("transB", 0) else weight.T)
    weights = {"weight": _float(weight)}
    if bias is not None:
        width = weight.shape[0]
        if bias.size not in (1, width) or bias.shape[-1:] not in ((), (1,), (width,)):
            raise VisardError(f"adds an array of shape {bias.shape}")
        weights["bias"] = _float(np.float32(n.get("beta", 1.0)) * np.broadcast_to(_float(bias).reshape(-1), (width,)))
    return s.add("linear", [x], weights, width=weight.shape[0], channels=weight.shape[1], bias=bias is not None)


def _matmul(s: Draft, n: _Node) -> Value:
    x = n.value()
    if isinstance(n.inputs[1], Value):
        return s.add("matmul", [x, n.inputs[1]])
    weight = n.needed(1)
    if weight.ndim != 2:
        raise VisardError(f"has a constant of {weight.ndim} dimensions")
    weights = {"weight": _float(weight.T)}
    return s.add("linear", [x], weights, width=weight.shape[1], channels=weight.shape[0], bias=False)


def _clip(s: Draft, n: _Node) -> Value:
    ends = [n.array(1, "min"), n.array(2, "max")]
    low, high = (None if e is None or not np.isfinite(e).all() else float(e.reshape(-1)[0]) for e in ends)
    return n.value() if low is None and high is None else s.add("clip", [n.value()], low=low, high=high)


def _reshape(s: Draft, n: _Node) -> Value | Array:
    x, shape = n.inputs[0], n.whole(1, "shape")
    if x is None or shape is None:
        raise VisardError("lacks an input")
    if not n.get("allowzero", 0):
        shape = [x.shape[i] if v == 0 else v for i, v in enumerate(shape)]
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    if -1 in shape:
        rest = math.prod(v for v in shape if v != -1)
        shape[shape.index(-1)] = math.prod(x.shape) // max(1, rest)
    return _shape(s, x, shape)


def _flatten(s: Draft, n: _Node) -> Value:
    x = n.value()
    axis = n.get("axis", 1)
    if axis not in (1, 1 - x.dims):
        raise VisardError(NONE)
    return _shape(s, x, [x.shape[0], math.prod(x.shape[1:])])


def _transpose(s: Draft, n: _Node) -> Value | Array:
    x = n.inputs[0]
    if isinstance(x, np.ndarray):
        return x.transpose(n.get("perm"))
    x = n.value()
    perm = n.get("perm") or list(range(x.dims))[::-1]
    if perm[0] != 0:
        raise VisardError(NONE)
    return s.add("transpose", [x], dims=perm[1:])


def _pool(s: Draft, n: _Node, op: str) -> Value:
    x, kernel = n.value(), n.get("kernel_shape") or []
    stride, dilation, pads = _window(n, x, kernel)
    whole, ceil = bool(n.get("count_include_pad", 0)), bool(n.get("ceil_mode", 0))
    fits = pads[:2] == pads[2:] and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
    if not fits:
        if op == "avg_pool" and not whole:
            raise VisardError("has a border that differs from side to side")
        x = s.add("pad", [x], pads=[pads[1], pads[3], pads[0], pads[2]], value=0.0 if op == "avg_pool" else LOWEST)
        pads = [0, 0, 0, 0]
    if op == "max_pool":
        return s.add(op, [x], kernel=kernel, stride=stride, pad=pads[:2], dilation=dilation, ceil=ceil)
    if dilation != [1, 1]:
        raise VisardError("has a dilation")
    return s.add(op, [x], kernel=kernel, stride=stride, pad=pads[:2], ceil=ceil, whole=whole)


def _mean(s: Draft, n: _Node) -> Value:
    x = n.value()
    axes = n.whole(1, "axes")
    if not axes:
        raise VisardError(NONE)
    return s.add("mean", [x], dims=sorted(_dim(a, x.dims) for a in axes), keep=bool(n.get("keepdims", 1)))


def _length(s: Draft, n: _Node) -> Value:
    """The Euclidean length of features, which some graphs divide by at their end."""
    x, axes = n.value(), n.whole(1, "axes")
    if axes is None or len(axes) != 1 or not n.get("keepdims", 1):
        raise VisardError("is not the length of a feature")
    return s.add("length", [x], dim=_dim(axes[0], x.dims))


def _unit(s: Draft, n: _Node) -> Value:
    x = n.value()
    if n.get("p", 2) != 2:
        raise VisardError("is not by the Euclidean length")
    return s.add("div", [x, s.add("length", [x], dim=_dim(n.get("axis", -1), x.dims))])


def _concat(s: Draft, n: _Node) -> Value | Array:
    known = [x for x in n.inputs if isinstance(x, np.ndarray)]
    values = [x for x in n.inputs if isinstance(x, Value)]
    axis = n.get("axis", 0)
    if known and not values:
        s.spend(sum(x.nbytes for x in known))
        return np.concatenate(known, axis)
    if known or not values:
        raise VisardError("puts constants beside values")
    return s.add("concat", values, dim=_dim(axis, values[0].dims))


def _pad(s: Draft, n: _Node) -> Value:
    x, pads, value = n.value(), n.whole(1, "pads"), n.array(2, "value")
    axes, mode = n.whole(3), n.get("mode", "constant")
    if pads is None or mode not in ("constant", "reflect", "edge"):
        raise VisardError(f"of the kind {str(mode)[:20]}")
    axes = list(range(x.dims)) if axes is None else [a % x.dims for a in axes]
    sides = {a: (pads[i], pads[i + len(axes)]) for i, a in enumerate(axes)}
    if sides.get(0, (0, 0)) != (0, 0):
        raise VisardError(NONE)
    used = [d for d in range(1, x.dims) if sides.get(d, (0, 0)) != (0, 0)]
    if not used:
        return x
    if mode != "constant":  # torch wants both sides of a picture here
        used = [2]
    flat = [side for d in range(x.dims - 1, min(used) - 1, -1) for side in sides.get(d, (0, 0))]
    number = 0.0 if value is None else float(value.reshape(-1)[0])
    how = {"mode": "replicate" if mode == "edge" else mode} if mode != "constant" else {"value": number}
    return s.add("pad", [x], pads=flat, **how)


def _slice(s: Draft, n: _Node) -> Value | Array:
    x = n.inputs[0]
    if x is None:
        raise VisardError("lacks an input")
    starts, ends = n.whole(1, "starts") or [], n.whole(2, "ends") or []
    axes = n.whole(3, "axes") or list(range(len(starts)))
    steps = n.whole(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if isinstance(x, np.ndarray):
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, None if end < -(2**31) else end, step),)]
            continue
        dims = len(x.shape)
        first, last, step = slice(start, end, step).indices(x.shape[axis % dims])
        if (first, last, step) == (0, x.shape[axis % dims], 1):
            continue
        dim = _dim(axis, dims)
        if step == -1 and first == x.shape[dim] - 1 and (last == -1 or end < -x.shape[dim]):
            x = s.add("flip", [x], dim=dim)
        elif step > 0:
            x = s.add("slice", [x], dim=dim, start=first, end=last, step=step)
        else:
            raise VisardError("goes backwards over a part")
    return x


def _gather(s: Draft, n: _Node) -> Value | Array:
    x, index, axis = n.inputs[0], n.needed(1), n.get("axis", 0)
    if isinstance(x, np.ndarray):
        s.spend(x.itemsize * index.size * x.size // max(1, x.shape[axis]))
        return np.take(x, index, axis)
    x = n.value()
    dim = _dim(axis, x.dims)
    if index.ndim > 1:
        raise VisardError(f"has an index of {index.ndim} dimensions")
    taken = s.add("take", [x], dim=dim, index=[int(i) % x.shape[dim] for i in index.reshape(-1)])
    return taken if index.ndim else _shape(s, taken, [*x.shape[:dim], *x.shape[dim + 1 :]])


def _squeeze(s: Draft, n: _Node) -> Value | Array:
    x, axes = n.inputs[0], n.whole(1, "axes")
    if x is None:
        raise VisardError("lacks an input")
    dims = len(x.shape)
    gone = {i for i, side in enumerate(x.shape) if side == 1 and i} if axes is None else {a % dims for a in axes}
    if any(x.shape[i] != 1 for i in gone):
        raise VisardError("leaves out a dimension that is longer than 1")
    shape = [side for i, side in enumerate(x.shape) if i not in gone]
    return x.reshape(shape) if isinstance(x, np.ndarray) else _shape(s, x, shape)


def _unsqueeze(s: Draft, n: _Node) -> Value | Array:
    x, axes = n.inputs[0], n.whole(1, "axes")
    if x is None or axes is None:
        raise VisardError("lacks an input")
    shape = list(x.shape)
    dims = len(shape) + len(axes)
    for a in sorted(a % dims for a in axes):
        shape.insert(a, 1)
    return x.reshape(shape) if isinstance(x, np.ndarray) else _shape(s, x, shape)


def _cast(s: Draft, n: _Node) -> Value | Array:
    kinds = {1: np.float32, 10: np.float16, 11: np.float64, 6: np.int32, 7: np.int64, 9: np.bool_}
    x, kind = n.inputs[0], kinds.get(n.get("to"))
    if kind is None or (isinstance(x, Value) and not issubclass(kind, np.floating)):
        raise VisardError(f"to the type {n.get('to')}")
    if isinstance(x, np.ndarray):
        s.spend(8 * x.size)
        return x.astype(kind)
    return n.value()


def _shape_of(s: Draft, n: _Node) -> Array:
    x = n.inputs[0]
    if x is None:
        raise VisardError("lacks an input")
    return np.asarray(x.shape, np.int64)[slice(n.get("start", 0), n.get("end"))]


def _constant(s: Draft, n: _Node) -> Array:
    for name, kind in (("value", None), ("value_float", np.float32), ("value_floats", np.float32)):
        if name in n.given:
            return np.asarray(n.given[name], kind)
    for name in ("value_int", "value_ints"):
        if name in n.given:
            return np.asarray(n.given[name], np.int64)
    raise VisardError("is not of numbers")


def _same(s: Draft, n: _Node) -> Value | Array:
    found = n.inputs[0]
    if found is None:
        raise VisardError("lacks an input")
    return found


def _simple(op: str) -> Callable[[Draft, _Node], Value]:
    return lambda s, n: s.add(op, [n.value()])


OPERATORS: dict[str, Callable[[Draft, _Node], Value | Array]] = {
    "Conv": _conv, "BatchNormalization": _norm, "PRelu": _prelu, "Gemm": _gemm, "MatMul": _matmul,
    "Relu": _simple("relu"), "Sigmoid": _simple("sigmoid"), "Tanh": _simple("tanh"), "Clip": _clip,
    "LeakyRelu": lambda s, n: s.add("leaky_relu", [n.value()], slope=float(n.get("alpha", 0.01))),
    **{op: lambda s, n, op=op: _binary(s, n, op.lower()) for op in ("Add", "Sub", "Mul", "Div")},  # type: ignore[misc]
    "Flatten": _flatten, "Reshape": _reshape, "Transpose": _transpose, "Concat": _concat, "Pad": _pad,
    "AveragePool": lambda s, n: _pool(s, n, "avg_pool"), "MaxPool": lambda s, n: _pool(s, n, "max_pool"),
    "GlobalAveragePool": lambda s, n: s.add("mean", [n.value()], dims=list(range(2, n.value().dims)), keep=True),
    "ReduceMean": _mean, "ReduceL2": _length, "LpNormalization": _unit,
    "Constant": _constant, "Identity": _same, "Dropout": _same,
    "Shape": _shape_of, "Gather": _gather, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Slice": _slice, "Cast": _cast,
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """A network with its weights, how it was described, and how far it is from onnxruntime."""

    network: StepNetwork
    spec: dict[str, str]
    difference: float

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.network.state_dict()


def convert(path: str | Path, size: int | None = None, name: str | None = None, check: int = 8) -> Converted:
    """The network of an ONNX file, to train; `size` and the preset `name` as in `load_onnx`.

    Compared with onnxruntime on `check` random pictures.
    """
    given, spec = load_onnx(path, size, name)
    try:
        about, arrays = given.graph.nodes()
        batches = (given.batch,) if given.batch else (2, 3)
        found = [_steps(about, arrays, given, batch) for batch in batches]
        if any(s.steps != found[0].steps for s in found):
            raise VisardError(f"{path}: {NONE}")
        steps = found[0]
        text = to_text(steps.steps)
        network = build(text, given.embedding, int(spec["size"]))
        network.load_state_dict(steps.named(network), strict=True)
        spec |= {"graph": text}
        network.eval()
        difference = compare(network, given, Inputs.of_spec(spec, path), check)
        allowed = ROUGH if given.kind == np.float16 else TOLERANCE
        if not difference <= allowed:
            raise VisardError(f"{path}: as a network that trains it differs by {difference:.1e} from onnxruntime")
    finally:
        given.graph.close()
    return Converted(network, spec, difference)


def _steps(about: dict[str, Any], arrays: dict[str, Array], given: OnnxNetwork, batch: int) -> Draft:
    """The steps of a graph up to its features."""
    assert given.size is not None
    path, side = given.path, given.size
    steps = Draft(batch, 4 * path.stat().st_size + 2**26)
    first = Value(0, (batch, 3, side, side))
    if given.last:
        first = steps.add("transpose", [first], dims=[2, 3, 1])
    known: dict[str, Value | Array] = {**{k: v for k, v in arrays.items() if k[:1] != "\0"}, given.name: first}
    nodes = about["nodes"]
    for number in _needed(nodes, given.output):
        op, domain, name, inputs, outputs, settings = nodes[number]
        where = f"{path}: node {(name or outputs[0])[:100]!r} ({op[:40]})"
        if op not in OPERATORS or domain not in ("", "ai.onnx"):
            raise VisardError(f"{where}: this operator cannot be converted to train (visard eval can run the file)")
        if missing := [i for i in inputs if i and i not in known]:
            raise VisardError(f"{where} takes {missing[0][:60]!r}, which no node before it makes")
        for key, value in settings.items():
            if isinstance(value, dict):
                settings = settings | {key: arrays[value["tensor"]]}
        node = _Node(op, name, [known[i] if i else None for i in inputs], outputs, settings)
        try:
            made = OPERATORS[op](steps, node)
            known[outputs[0]] = made if isinstance(made, Value) else np.asarray(made)
        except VisardError as error:
            raise VisardError(f"{where}: {error}") from None
        except Exception as error:  # numpy and torch have exceptions of all kinds for what does not fit
            raise VisardError(f"{where}: {one_line(error)}") from None
    features = known.get(given.output)
    if not isinstance(features, Value) or math.prod(features.shape) != batch * given.embedding:
        raise VisardError(f"{path}: its output does not depend on the pictures, one vector for each")
    _shape(steps, features, [batch, given.embedding])
    return steps


def _needed(nodes: list[Any], output: str) -> list[int]:
    """Numbers of the nodes that an output depends on, in their order."""
    wanted, found = {output}, []
    for number in range(len(nodes) - 1, -1, -1):
        _, _, _, inputs, outputs, _ = nodes[number]
        if wanted & {o for o in outputs if o}:
            found.append(number)
            wanted |= set(inputs)
    return found[::-1]


def compare(one: StepNetwork, two: OnnxNetwork, inputs: Inputs, count: int) -> float:
    """Largest difference of the features of random pictures, relative to the largest number of all."""
    rng = np.random.default_rng(0)
    worst = largest = 0.0
    with torch.inference_mode():
        for start in range(0, count, 8):
            pixels = rng.integers(0, 256, (min(8, count - start), inputs.size, inputs.size, 3), np.uint8)
            x = inputs.tensor(pixels)
            a, b = one.forward(x), two.forward(x)
            worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(b.abs().max()))
    return worst / max(largest, 1e-30) if math.isfinite(worst) else math.inf
