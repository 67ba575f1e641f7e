"""A client during one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, get_type_hints, overload

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from visard.data.faces import ClientData, FaceView
    from visard.numerics import Numerics


ClientId = str
Weights = dict[str, Tensor]
State = dict[str, Any]  # what a client keeps between steps: tensors, numbers, text, nested dicts and lists of these
PUBLIC: ClientId = "public"  # the client with the public pictures, where a run has some; it can be asked like a client


class Signs(Protocol):
    """Signs with the key of a party."""

    @property
    def fingerprint(self) -> str:
        """Of its public key."""

    def __call__(self, statement: bytes) -> bytes:
        """The signature of a statement."""


@dataclass
class Client:
    """A client during one step. The engine builds it for every step."""

    id: ClientId
    data: ClientData
    state: State  # all that survives the step
    rng: torch.Generator  # seeded by (run seed, stage, round, ask, client id)
    network: Callable[[], nn.Module]  # the run's backbone; its weights are undefined until you load some
    embedding: int  # length of a feature
    numerics: Numerics
    benchmarks: Mapping[str, FaceView] = field(default_factory=dict)  # public test sets that every client has
    public: FaceView | None = None  # training pictures that every client has
    others: FaceView | None = None  # for tests alone: the test pictures of all clients, its own among them
    secret: bytes = field(default=b"", repr=False)  # of this client alone; in a simulation it comes from the run's seed
    signer: Callable[[], Signs] | None = field(default=None, repr=False)  # with the key of its party


M = TypeVar("M")
R = TypeVar("R")
C = TypeVar("C", bound=Callable[..., Any])


class Work(NamedTuple):
    """The training in a client step: a party compares it with its policy before the step is done."""

    lr: float
    steps: int  # gradient steps
    batch: int  # pictures of a gradient step


Trains = Callable[[Any, Client, Any], Work | None]  # of method, client and message: what will be trained, if anything


def nothing(method: Any, client: Client, message: Any) -> None:
    """For `client_step(trains=nothing)`: a step that trains no network."""


@dataclass(frozen=True)
class BoundStep(Generic[M, R]):
    """A client step of one method, ready to be asked for."""

    owner: Any  # the method
    name: str
    function: Callable[[Any, Client, M], R]
    together: Callable[[Any, Sequence[Client], Sequence[M]], tuple[Weights, list[R]]] | None = None
    trains: Trains | None = None  # None: not stated, so no party of a deployment does this step

    def __call__(self, client: Client, message: M) -> R:
        return self.function(self.owner, client, message)

    @property
    def types(self) -> tuple[type[M], type[R]]:
        """The message type and the reply type, from the annotations."""
        return _step_types(self.function)


@functools.cache  # resolving annotations is slow, and a step is asked for thousands of times
def _step_types(function: Callable[..., Any]) -> tuple[Any, Any]:
    hints = get_type_hints(function)
    return hints[list(hints)[-2]], hints["return"]


class ClientStep(Generic[M, R]):
    """Marks a method's function as a step that runs at a client (see `client_step`)."""

    def __init__(self, function: Callable[[Any, Client, M], R], trains: Trains | None = None) -> None:
        self.function = function
        self.trains = trains
        self._when: Callable[[Any], bool] = lambda owner: False
        self._cohort: Callable[[Any, Sequence[Client], Sequence[M]], tuple[Weights, list[R]]] | None = None
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, owner: Any, cls: type) -> BoundStep[M, R]:
        together = self._cohort if owner is not None and self._when(owner) else None
        return BoundStep(owner, self.function.__name__, self.function, together, self.trains)

    def together(self, when: Callable[[Any], bool]) -> Callable[[C], C]:
        """Decorator of a function that does this step for many clients in one pass, where `when(method)` holds.

        `(self, clients, messages) -> (mean, replies)`: the weighted mean of the field that `Network.reduce`
        averages, and the clients' replies with {} in its place. An engine that simulates clients may use it.
        """

        def remember(cohort: C) -> C:
            self._when, self._cohort = when, cohort
            return cohort

        return remember


@overload
def client_step(function: Callable[[Any, Client, M], R], /) -> ClientStep[M, R]: ...


@overload
def client_step(*, trains: Trains) -> Callable[[Callable[[Any, Client, M], R]], ClientStep[M, R]]: ...


def client_step(function: Any = None, *, trains: Trains | None = None) -> Any:
    """Decorator: `def local(self, client: Client, message: Down) -> Up` runs at the client.

    `trains` says where learning rate, steps and batch of the step come from, settings or message, so that a party can
    check them against its policy; `trains=nothing` is a step without training. A party refuses a step that says
    neither.
    """
    return ClientStep(function) if function is not None else lambda f: ClientStep(f, trains)
