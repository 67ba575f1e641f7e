"""Networks described by a list of steps: ONNX graphs are converted to them for training and for model files.

A step is `[operation, numbers of its inputs, settings]`; value 0 is the pictures (B, 3, size, size), value i is what
step i makes, and the last one is the features (B, embedding). The text is data: an operation is one of the few here, it
leaves the batch (dimension 0) alone, and what the steps cost is counted before anything runs.

Steps are gathered into blocks, each with one value in and one out, so that the network can be cut between any two.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visard.errors import VisardError, one_line

MAX_TEXT, MAX_STEPS = 2**19, 5000  # characters and steps
MAX_VALUE = 2**24  # numbers of one picture in any place
MAX_WORK = 2**38  # multiplications for one picture: 20 times those of IResNet-100
MAX_LIST = 1024  # numbers in a setting
MATRICES = ("conv", "linear")  # operations that make a block worth training by itself
Pair = Sequence[int]
Array = npt.NDArray[Any]


class Step(NamedTuple):
    """One operation."""

    op: str
    inputs: tuple[int, ...]
    settings: dict[str, Any]


class Constant(nn.Module):
    """An array that is added, multiplied, ... It trains unless it is part of the graph's normalisation of pixels."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor], shape: Pair, left: bool, fixed: bool) -> None:
        super().__init__()
        self.how, self.left = how, left
        self.weight = nn.Parameter(torch.zeros(*shape), requires_grad=not fixed)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.weight, x) if self.left else self.how(x, self.weight)


def _conv(
    width: int, channels: int, kernel: Pair, stride: Pair, pad: Pair, dilation: Pair, groups: int, bias: bool
) -> nn.Module:
    k, s, p, d = ((h, w) for h, w in (kernel, stride, pad, dilation))
    return nn.Conv2d(channels, width, k, s, p, d, groups, bias)


def _linear(width: int, channels: int, bias: bool) -> nn.Module:
    return nn.Linear(channels, width, bias)


def _norm(width: int, eps: float, dims: int) -> nn.Module:
    return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims](width, eps=eps)


def _prelu(width: int) -> nn.Module:
    return nn.PReLU(width)


BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv
}  # fmt: skip


def _binary(op: str, *x: Tensor, value: float | None = None, left: bool = False) -> Tensor:
    (a, b) = x if len(x) == 2 else (value, *x) if left else (*x, value)
    return BINARY[op](a, b)


def _behind_batch(dims: Sequence[int], x: Tensor) -> list[int]:
    if not all(0 < d < x.ndim for d in dims):
        raise ValueError(f"dimensions {list(dims)} of {x.ndim}")
    return list(dims)


def _pad(x: Tensor, pads: Sequence[int], value: float = 0.0, mode: str = "constant") -> Tensor:
    if len(pads) > 2 * x.ndim - 2:
        raise ValueError("pads the batch")
    return F.pad(x, list(pads), mode, value) if mode == "constant" else F.pad(x, list(pads), mode)


def _slice(x: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    _behind_batch([dim], x)
    return x[(slice(None),) * dim + (slice(start, end, step),)]


def _mean(x: Tensor, dims: Sequence[int], keep: bool) -> Tensor:
    return x.mean(_behind_batch(dims, x), keep)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    if min(x.ndim, y.ndim) < 3:
        raise ValueError("multiplies over the batch")
    return x @ y


def _concat(*x: Tensor, dim: int) -> Tensor:
    return torch.cat(x, *_behind_batch([dim], x[0]))


MODULES: dict[str, Callable[..., nn.Module]] = {
    "conv": _conv,
    "linear": _linear,
    "norm": _norm,
    "prelu": _prelu,
    **{f"{op}_constant": functools.partial(Constant, how) for op, how in BINARY.items()},
}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{op: functools.partial(_binary, op) for op in BINARY},
    "relu": lambda x: F.relu(x),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "sigmoid": lambda x: torch.sigmoid(x),
    "tanh": lambda x: torch.tanh(x),
    "clip": lambda x, low=None, high=None: torch.clamp(x, low, high),
    "reshape": lambda x, shape: x.reshape(x.shape[0], *shape),
    "transpose": lambda x, dims: x.permute(0, *_behind_batch(dims, x)),
    "max_pool": lambda x, kernel, stride, pad, dilation, ceil: F.max_pool2d(x, kernel, stride, pad, dilation, ceil),
    "avg_pool": lambda x, kernel, stride, pad, ceil, whole: F.avg_pool2d(x, kernel, stride, pad, ceil, whole),
    "mean": _mean,
    "concat": _concat,
    "pad": _pad,
    "slice": _slice,
    "flip": lambda x, dim: x.flip(_behind_batch([dim], x)),
    "take": lambda x, dim, index: x.index_select(_behind_batch([dim], x)[0], torch.tensor(index, device=x.device)),
    "matmul": _matmul,
    "length": lambda x, dim: x.norm(2, _behind_batch([dim], x), True),
}


@functools.cache
def _parameters(op: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(MODULES.get(op) or FUNCTIONS[op]).parameters


def _bind(op: str, settings: dict[str, Any]) -> None:
    """Refuse unknown operations and settings."""
    if op not in MODULES and op not in FUNCTIONS:
        raise VisardError(f"unknown operation {op[:40]!r}")
    known = _parameters(op)
    for name, value in settings.items():
        if name not in known or known[name].kind is inspect.Parameter.VAR_POSITIONAL or name == "how":
            raise VisardError(f"{op}: unknown setting {name[:40]!r}")
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) > MAX_LIST or (isinstance(value, list) and not all(type(v) is int for v in value)):
            raise VisardError(f"{op}: {name} must be at most {MAX_LIST} whole numbers")
        for v in numbers:
            if v is None or (isinstance(v, str) and v in ("constant", "reflect", "replicate")):
                continue
            if not isinstance(v, int | float) or not math.isfinite(v) or (isinstance(v, int) and abs(v) >= 2**31):
                raise VisardError(f"{op}: {name} must be a number")


def parse(text: str) -> list[Step]:
    """The steps in a text; one clear line if it is anything else."""
    try:
        if len(text) > MAX_TEXT:
            raise VisardError(f"{len(text)} characters, more than {MAX_TEXT}")
        found = json.loads(text)
        if not isinstance(found, list) or not 1 <= len(found) <= MAX_STEPS:
            raise VisardError(f"must be a list of 1 to {MAX_STEPS} steps")
        steps = []
        for number, (op, inputs, settings) in enumerate(found):
            if not isinstance(op, str) or not isinstance(inputs, list) or not isinstance(settings, dict):
                raise VisardError(f"step {number + 1} is none")
            _bind(op, settings)
            if not 1 <= len(inputs) <= 64 or not all(type(i) is int and 0 <= i <= number for i in inputs):
                raise VisardError(f"step {number + 1} ({op}) takes what is not there yet")
            steps.append(Step(op, tuple(inputs), settings))
    except (ValueError, TypeError, RecursionError) as error:
        raise VisardError(f"the network's steps are damaged: {one_line(error)}") from None
    except VisardError as error:
        raise VisardError(f"the network's steps are damaged: {error}") from None
    return steps


def to_text(steps: Sequence[Step]) -> str:
    """The same as text; equal steps give equal text."""
    text = json.dumps(steps, separators=(",", ":"), sort_keys=True, allow_nan=False)
    if len(text) > MAX_TEXT or len(steps) > MAX_STEPS:
        raise VisardError(f"a network of {len(steps)} operations is too large to convert")
    return text


def module_of(step: Step) -> nn.Module | None:
    """The layer of a step, None where it has no parameters."""
    return MODULES[step.op](**step.settings) if step.op in MODULES else None


def run(step: Step, module: nn.Module | None, inputs: Sequence[Tensor]) -> Tensor:
    """The output of a step."""
    if module is not None:
        (x,) = inputs
        made: Tensor = module(x)
        return made
    return FUNCTIONS[step.op](*inputs, **step.settings)


def work(step: Step, module: nn.Module | None, inputs: Sequence[Tensor], made: Tensor) -> int:
    """About how many multiplications a step needs."""
    if step.op == "conv":
        assert isinstance(module, nn.Conv2d)
        return made.numel() * math.prod(module.weight.shape[1:])
    if step.op in ("linear", "matmul"):
        return made.numel() * int(inputs[0].shape[-1])
    kernel = step.settings.get("kernel")
    return made.numel() * (math.prod(kernel) if kernel else 1)


def blocks_of(steps: Sequence[Step]) -> list[range]:
    """Runs of steps between places that one value alone crosses; each has its own matrix or convolution."""
    last = {value: number for number, step in enumerate(steps) for value in step.inputs}  # who takes a value last
    change = [0] * (len(steps) + 1)
    for value, number in last.items():  # it crosses the places before the steps `value` to `number`
        change[value] += 1
        change[number + 1] -= 1
    crossing = list(itertools.accumulate(change))
    single = [number for number in range(len(steps)) if crossing[number] == 1]
    starts = [0]
    for a, b in itertools.pairwise([*single, len(steps)]):
        before, here = (any(step.op in MATRICES for step in steps[i:j]) for i, j in ((starts[-1], a), (a, b)))
        if before and here:
            starts.append(a)
    return [range(a, b) for a, b in itertools.pairwise([*starts, len(steps)])]


class Block(nn.Module):
    """Some steps with one value in and one out."""

    def __init__(self, steps: Sequence[Step], where: range) -> None:
        super().__init__()
        self.steps: list[tuple[int, Step, str]] = []
        counts: dict[str, int] = {}
        for number in where:
            step, name = steps[number], ""
            if (module := module_of(step)) is not None:
                kind = step.op.removesuffix("_constant")
                name = f"{kind}{counts.setdefault(kind, 0)}"
                counts[kind] += 1
                self.add_module(name, module)
            self.steps.append((number + 1, step, name))
        made = set(range(where.start + 1, where.stop + 1))
        outside = {v for k in where for v in steps[k].inputs} - made
        if len(outside) != 1:
            raise VisardError("the network's steps do not depend on the pictures alone")
        (self.entry,) = outside

    def forward(self, x: Tensor) -> Tensor:
        values = {self.entry: x}
        made = x
        for number, step, name in self.steps:
            module = getattr(self, name) if name else None
            made = values[number] = run(step, module, [values[v] for v in step.inputs])
        return made


class StepNetwork(nn.Module):
    """(B, 3, size, size) -> (B, embedding), as the steps say; its layers are block0, block1, ..."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.count = 0
        self.places: dict[int, str] = {}  # number of a value -> the layer that makes it
        for where in blocks_of(steps):
            block = Block(steps, where)
            self.add_module(f"block{self.count}", block)
            self.places |= {number: f"block{self.count}.{name}" for number, _, name in block.steps if name}
            self.count += 1

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.count):
            x = getattr(self, f"block{number}")(x)
        return x


def build(text: str, embedding: int, size: int) -> StepNetwork:
    """The network of these steps with fresh weights; it must take pictures of `size` and give `embedding` numbers."""
    if (found := checked(text, size)) != embedding:
        raise VisardError(f"the network's steps give {found} numbers, not {embedding}")
    return StepNetwork(parse(text))


@functools.lru_cache(maxsize=8)
def checked(text: str, size: int) -> int:
    """The length of the features; nothing is computed. Refuses steps that do not fit together or cost too much."""
    steps = parse(text)
    if not 1 <= size <= 4096:
        raise VisardError(f"size = {size}: must be 1 to 4096 pixels")
    try:
        with torch.device("meta"):
            shape = _measure(steps, 3, size)
    except VisardError:
        raise
    except Exception as error:  # torch has exceptions of all kinds for settings that do not fit
        raise VisardError(f"the network's steps do not fit together: {one_line(error)}") from None
    if len(shape) != 2:
        raise VisardError("the network's steps do not give one vector for each picture")
    return shape[1]


def _measure(steps: Sequence[Step], batch: int, size: int) -> tuple[int, ...]:
    values = {0: torch.empty(batch, 3, size, size)}
    last = {value: number for number, step in enumerate(steps) for value in step.inputs}
    spent = 0
    for number, step in enumerate(steps):
        inputs, module = [values[v] for v in step.inputs], module_of(step)
        made = run(step, module, inputs)
        spent += work(step, module, inputs, made)
        check_cost(step.op, made, batch, spent)
        values[number + 1] = made
        for v in {*step.inputs}:
            if last[v] == number:
                del values[v]
    return tuple(made.shape)


def check_cost(what: str, made: Tensor, batch: int, spent: int) -> None:
    """Refuse values and sums of work beyond what recognisers need."""
    if made.ndim < 2 or made.shape[0] != batch:
        raise VisardError(f"{what} does not keep one row for each picture")
    if made.numel() > MAX_VALUE * batch:
        raise VisardError(f"{what} makes {made.numel() // batch} numbers of one picture, more than {MAX_VALUE}")
    if spent > MAX_WORK * batch:
        raise VisardError(f"needs more than {MAX_WORK} multiplications for a picture")


@dataclass(frozen=True)
class Value:
    """The output of one node: its number among the steps, and its shape with the batch."""

    number: int
    shape: tuple[int, ...]

    @property
    def dims(self) -> int:
        return len(self.shape)


@dataclass
class Draft:
    """The steps so far, for a batch of `batch` pictures; sizes come from torch's meta device, nothing is computed."""

    batch: int
    room: int  # bytes of arrays that may still be made
    steps: list[Step] = field(default_factory=list)
    weights: dict[int, dict[str, Array]] = field(default_factory=dict)  # of the step that makes a value
    spent: int = 0

    def add(self, op: str, inputs: Sequence[Value], weights: dict[str, Array] | None = None, **settings: Any) -> Value:
        step = Step(op, tuple(v.number for v in inputs), settings)
        with torch.device("meta"):
            module, tensors = module_of(step), [torch.empty(v.shape) for v in inputs]
            made = run(step, module, tensors)
        self.spent += work(step, module, tensors, made)
        check_cost(op, made, self.batch, self.spent)
        self.steps.append(step)
        if weights is not None:
            self.spend(sum(w.nbytes for w in weights.values()))
            self.weights[len(self.steps)] = weights
        return Value(len(self.steps), tuple(made.shape))

    def spend(self, count: int) -> None:
        self.room -= count
        if self.room < 0:
            raise VisardError("makes arrays many times larger than its file")

    @property
    def trained(self) -> bool:
        """Whether a layer came already: what is before works on pixels."""
        return any(step.op in ("conv", "linear") for step in self.steps)

    def named(self, network: StepNetwork) -> dict[str, Tensor]:
        """The weights under the names that the network has for them."""
        expected = network.state_dict()
        found = {
            f"{network.places[at]}.{k}": torch.from_numpy(v.copy())
            for at, w in self.weights.items()
            for k, v in w.items()
        }
        counters = {k: torch.zeros_like(v) for k, v in expected.items() if not v.is_floating_point()}
        for key, value in found.items():
            if key not in expected or expected[key].shape != value.shape:
                raise VisardError(f"{key} has the shape {tuple(value.shape)}, which does not fit")
            if not torch.isfinite(value).all():
                raise VisardError("holds NaN or infinity among its weights")
        return counters | found
