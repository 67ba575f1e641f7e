"""A network in two: a trunk that stays as it is, and a tail that trains. forward(x) = tail(trunk(x)), bit for bit.

A cut is named after the first layer of the tail: any layer with its own matrix or convolution through whose input alone
everything before it reaches what follows. Blocks with a shortcut are not taken apart. Entries of the
weights keep their names on both sides, so those of trunk and tail together are those of the network.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from visard.errors import UsageError, VisardError, did_you_mean

SHARE = 0.25  # of the parameters: what a tail that no layer names has at least
NUMBERS = 8192  # of one picture's activation, 16 kB in fp16: what it takes at most, where a network allows that
Weights = dict[str, Tensor]
HOW = re.compile(r"all|tail|last:[1-9]\d{0,3}|from:[\w.]{1,200}|lora:[1-9]\d{0,3}")


@dataclass(frozen=True)
class Cut:
    """A place where a network can be cut."""

    layer: str  # the first one of the tail
    parameters: int  # of the tail
    share: float  # of all parameters
    shape: tuple[int, ...]  # of one picture's activation, which the tail takes

    @property
    def numbers(self) -> int:
        """How many numbers the activation of one picture has."""
        return math.prod(self.shape)


class _Layers(fx.Tracer):
    """Sees a network as its layers: plain sequences are opened, everything else is one step."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is not nn.Sequential


def _graph(network: nn.Module) -> fx.Graph:
    try:
        return _Layers().trace(network)
    except Exception as error:  # a plug-in's forward may do anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{type(network).__name__} cannot be cut: {reason[:200]}") from None


def _places(network: nn.Module, graph: fx.Graph) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Layer -> its step and the one step whose value the tail takes, in the order of the network."""
    steps = list(graph.nodes)
    order = {step: number for number, step in enumerate(steps)}
    calls = [str(step.target) if step.op == "call_module" else "" for step in steps]
    found: dict[str, tuple[fx.Node, fx.Node]] = {}
    for number, (step, name) in enumerate(zip(steps, calls, strict=True)):
        if not name or not any(p.ndim > 1 for p in network.get_submodule(name).parameters()):
            continue
        crossing = {a for later in steps[number:] for a in later.all_input_nodes if order[a] < number}
        twice = {*calls[:number]} & {*calls[number:]} - {""}  # a layer on both sides would train and not train
        fronts = (network.get_submodule(call) for call in calls[:number] if call)
        if len(crossing) == 1 and not twice and any(True for front in fronts for _ in front.parameters()):
            found[name] = step, crossing.pop()
    return found


def cuts(network: nn.Module, shape: Sequence[int]) -> list[Cut]:
    """Where a network can be cut, from front to back; `shape` is of one input."""
    graph = _graph(network)
    places = _places(network, graph)
    sizes = _shapes(network, graph, {layer: taken for layer, (_, taken) in places.items()}, shape)
    steps, total = list(graph.nodes), sum(p.numel() for p in network.parameters())
    found = []
    for layer, (first, _) in places.items():
        names = tuple(f"{s.target}." for s in steps[steps.index(first) :] if s.op in ("call_module", "get_attr"))
        tail = sum(p.numel() for name, p in network.named_parameters() if f"{name}.".startswith(names))
        found.append(Cut(layer, tail, tail / total, sizes[layer]))
    return found


def activation_shape(network: nn.Module, layer: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the input of a tail that begins with `layer`; `shape` is of one input of the network."""
    trunk = split(network, layer)[0]
    return tuple(trunk(torch.zeros(2, *shape)).shape[1:])


def _shapes(
    network: nn.Module, graph: fx.Graph, wanted: dict[str, fx.Node], shape: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    values: dict[str, tuple[int, ...]] = {}

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                values[n.name] = tuple(value.shape[1:])
            return value

    modes = {module: module.training for module in network.modules()}
    network.eval()
    with torch.no_grad():
        Shapes(fx.GraphModule(network, graph)).run(torch.zeros(2, *shape))
    for module, mode in modes.items():
        module.training = mode
    return {layer: values[node.name] for layer, node in wanted.items()}


def choose(network: nn.Module, how: str, shape: Sequence[int]) -> str:
    """The layer that the tail begins with: `from:LAYER`, `last:K` layers, or by the rule of `tail`.

    `tail`: the latest cut whose tail holds at least a quarter of the parameters, of those whose activation has at most
    8,192 numbers (16 kB in fp16); where a network has none of these, of those with the smallest activation.
    """
    kind, _, value = how.partition(":")
    known = cuts(network, shape)
    if not known:
        raise UsageError(f"model.train = {how}: {type(network).__name__} cannot be cut anywhere")
    layers = [cut.layer for cut in known]
    if kind == "from":
        if value not in layers:
            raise UsageError(f"model.train = {how}: no layer to begin with{did_you_mean(value, layers)}")
        return value
    if kind == "last":
        if int(value) > len(layers):
            raise UsageError(f"model.train = {how}: the network can be cut before its last 1 to {len(layers)} layers")
        return layers[-int(value)]
    heavy = [cut for cut in known if cut.share >= SHARE]
    if not heavy:
        return layers[0]
    small = [cut for cut in heavy if cut.numbers <= NUMBERS]
    least = min(cut.numbers for cut in heavy)
    return (small or [cut for cut in heavy if cut.numbers == least])[-1].layer


def _halves(network: nn.Module, layer: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    whole = _graph(network)
    if layer not in (places := _places(network, whole)):
        raise VisardError(f"{type(network).__name__} cannot be cut before {layer!r}")
    first, taken = places[layer]
    trunk, tail = fx.Graph(), fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    steps = list(whole.nodes)
    begins = steps.index(first)
    for step in steps[:begins]:
        here[step] = trunk.node_copy(step, here.__getitem__)
    trunk.output(here[taken])
    there = {taken: tail.placeholder("x")}
    for step in steps[begins:]:
        there[step] = tail.node_copy(step, there.__getitem__)
    return fx.GraphModule(network, trunk, "Trunk"), fx.GraphModule(network, tail, "Tail")


def split(network: nn.Module, layer: str) -> tuple[Frozen, nn.Module]:
    """Trunk and tail, which hold the modules of the network itself: it is taken apart, and its trunk is frozen."""
    trunk, tail = _halves(network, layer)
    return Frozen(trunk), tail


class Frozen(nn.Module):
    """A network that never trains: in evaluation mode for good, without gradients."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()  # parameters that need no gradient would let a GRU compute in another way

    def train(self, mode: bool = True) -> Frozen:
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.network.forward(x)
        return found


@dataclass
class Trunk:
    """The frozen part of a run's network: how it is made, and whose weights it has.

    `load` gives the weights when they are first needed: a party may have to fetch them.
    """

    build: Callable[[], nn.Module]  # the whole network
    layer: str  # the first one of the tail
    digest: str  # of the weights
    load: Callable[[], Weights] = field(default=dict, repr=False)
    _weights: Weights | None = field(default=None, repr=False)

    @classmethod
    def of(cls, build: Callable[[], nn.Module], layer: str, whole: Weights) -> Trunk:
        """The trunk of a network with these weights."""
        trunk = cls(build, layer, "")
        weights = trunk.of_trunk(whole)
        return replace(trunk, digest=digest_of(weights), load=lambda: weights)

    @property
    def trained(self) -> str:
        """The trained part in the form of `model.train`."""
        return f"from:{self.layer}"

    @property
    def weights(self) -> Weights:
        """Its entries, checked against the digest."""
        if self._weights is None:
            found = self.load()
            if digest_of(found) != self.digest:
                raise VisardError("the weights of the trunk are not those of the run: their digest differs")
            self._weights = found
        return self._weights

    def network(self) -> Frozen:
        """The trunk as a separate network."""
        trunk = _untouched(self.build, self.layer)[0]
        trunk.network.load_state_dict(self.weights)
        return trunk

    def tail(self) -> nn.Module:
        """A new tail; its weights are fresh."""
        return split(self.build(), self.layer)[1]

    def outline(self) -> nn.Module:
        """A tail of which only names and shapes count: it needs no weights of the trunk."""
        return self.tail()

    def start(self, whole: Weights, seed: int) -> Weights:
        """The tail with which a run that is given a whole network's weights begins."""
        return self.of_tail(whole)

    def fresh(self, seed: int) -> Weights:
        """An untrained tail, drawn with this seed; its batch norm has mean 0 and variance 1."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {name: value.detach().clone() for name, value in self.tail().state_dict().items()}

    def of_trunk(self, whole: Weights) -> Weights:
        """The trunk's entries of a whole network's weights."""
        return {name: whole[name] for name in _untouched(self.build, self.layer)[0].network.state_dict()}

    def of_tail(self, whole: Weights) -> Weights:
        """The tail's entries of a whole network's weights."""
        return {name: value for name, value in whole.items() if name not in self.weights}

    def effective(self, tail: Weights) -> Weights:
        """The entries by which two tails are compared."""
        return tail

    def whole(self, tail: Weights) -> Weights:
        """The weights of the whole network with this tail."""
        return {**self.weights, **tail}


def _untouched(build: Callable[[], nn.Module], layer: str) -> tuple[Frozen, nn.Module]:
    with torch.random.fork_rng(devices=[]):  # draws no random numbers of the caller
        return split(build(), layer)


def digest_of(weights: Weights) -> str:
    """SHA-256 over names, types, shapes and values, in hexadecimal; the order of the entries does not matter."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.detach().contiguous().reshape(-1).numpy().data)
    return found.hexdigest()
