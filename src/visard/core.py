"""The contract: what a method is, what a client is, and the one channel between them.

A method talks to clients only through `Network.ask`. A client step is a function `(client, message) -> reply`;
of the client only `client.state` survives it. Every field of a reply carries the kind of thing that leaves.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from visard.data.faces import ClientData, FaceView
    from visard.numerics import Numerics

ClientId = str
Weights = dict[str, Tensor]
State = dict[str, Any]  # what a client keeps between steps: tensors, numbers, text, nested dicts and lists of these

S = TypeVar("S")
M = TypeVar("M")
R = TypeVar("R")
M_contra = TypeVar("M_contra", contravariant=True)


class Leaves(Enum):
    """The kinds of things that may leave a client."""

    weights = "weights"
    class_vectors = "class_vectors"
    statistic = "statistic"
    ciphertext = "ciphertext"
    metric = "metric"
    count = "count"
    public_key = "public_key"
    features = "features"  # of single pictures
    labels = "labels"
    pictures = "pictures"


@dataclass
class Client:
    """One party during one step. The engine builds it anew for every step."""

    id: ClientId
    data: ClientData
    state: State  # all that survives the step
    rng: torch.Generator  # seeded by (run seed, stage, round, ask, client id)
    network: Callable[[], nn.Module]  # the run's backbone; its weights are undefined until you load some
    embedding: int  # length of a feature
    numerics: Numerics
    benchmarks: Mapping[str, FaceView] = field(default_factory=dict)  # public test sets that every party has


class Replies(dict[ClientId, R], Generic[R]):
    """Replies by client, in the order asked; `missing` says who did not answer and why."""

    def __init__(self, replies: Mapping[ClientId, R] = {}, missing: Mapping[ClientId, str] = {}) -> None:
        super().__init__(replies)
        self.missing = dict(missing)


@dataclass(frozen=True)
class BoundStep(Generic[M, R]):
    """A client step of one method, ready to be asked for."""

    owner: Method[Any]
    name: str
    function: Callable[[Any, Client, M], R]

    def __call__(self, client: Client, message: M) -> R:
        return self.function(self.owner, client, message)

    @property
    def types(self) -> tuple[type[M], type[R]]:
        """The message type and the reply type, from the annotations."""
        return _step_types(self.function)


@functools.cache  # resolving annotations is slow, and a step is asked for thousands of times
def _step_types(function: Callable[..., Any]) -> tuple[Any, Any]:
    hints = get_type_hints(function)
    return hints[list(hints)[1]], hints["return"]


class ClientStep(Generic[M, R]):
    """Marks a method's function as a step that runs at a client (see `client_step`)."""

    def __init__(self, function: Callable[[Any, Client, M], R]) -> None:
        self.function = function
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, owner: Any, cls: type) -> BoundStep[M, R]:
        return BoundStep(owner, self.function.__name__, self.function)


def client_step(function: Callable[[Any, Client, M], R]) -> ClientStep[M, R]:
    """Decorator: `def local(self, client: Client, message: Down) -> Up` runs at the client."""
    return ClientStep(function)


class Network(Protocol):
    """All that a method can do with its clients."""

    clients: tuple[ClientId, ...]  # those that take part in training
    round: int  # in this stage, from 0
    rng: torch.Generator  # the server's, seeded by (run seed, stage, round)

    def ask(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Replies[R]:
        """Send each client its message and gather the replies.

        `timeout` (seconds) and `min_replies` default to the run's settings. Fewer than `min_replies` good
        replies end the round with a clear error.
        """
        ...

    def stream(
        self,
        step: BoundStep[M, R],
        messages: Mapping[ClientId, M],
        *,
        timeout: float | None = None,
        min_replies: int | None = None,
    ) -> Iterator[tuple[ClientId, R]]:
        """As `ask`, but one reply at a time in the order of `messages`: memory does not grow with the clients."""
        ...

    def log(self, **figures: float) -> None:
        """Record figures of this round (a loss, a diagnostic) for the event log and the report."""
        ...


@dataclass(frozen=True)
class Stage(Generic[S]):
    """A phase of a method: a name, a number of rounds, and the function that does one round."""

    name: str
    rounds: int
    run: Callable[[S, Network], S]


@dataclass(frozen=True)
class Setup:
    """What the server knows before the first round."""

    clients: tuple[ClientId, ...]
    classes: int  # identities over all clients
    embedding: int  # length of a feature
    new_weights: Callable[[], Weights] = field(repr=False)  # a freshly initialised backbone, from the run's seed
    seed: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """Test your own model, made from the generic one if there is one, also on these public test sets."""

    theta: Weights | None
    benchmarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scores:
    """A client's test figures."""

    figures: Annotated[dict[str, float], Leaves.metric]
    pictures: Annotated[int, Leaves.count]


class Method(ABC, Generic[S]):
    """A federated method: a frozen dataclass whose fields are its settings.

    Server state goes in and out of every round; the engine checkpoints it. Nothing hides on `self`.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # one line for people
    paper: ClassVar[str] = ""
    leaves: ClassVar[frozenset[Leaves]]  # every kind that may leave a client; the engine refuses others
    pools: ClassVar[frozenset[Leaves]] = frozenset()  # kinds that the method moves to one place before it starts

    @abstractmethod
    def start(self, setup: Setup) -> S:
        """Server state before the first round. Its return annotation is the type that checkpoints hold."""

    @abstractmethod
    def stages(self) -> list[Stage[S]]:
        """The phases, in order."""

    def backbone(self, server: S) -> Weights | None:
        """The generic model to test, or None if the method has none."""
        return None

    def basis(self, server: S) -> Weights | None:
        """What a client gets to make its personal model from; default the generic model."""
        return self.backbone(server)

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        """The weights with which a client with this state recognises its own people; default the generic model."""
        return theta

    @client_step
    def score(self, client: Client, message: ScoreRequest) -> Scores:
        """Test the client's own model where its pictures are; only figures leave."""
        from visard.evaluation.clients import score_client

        theta = self.personal(client.state, message.theta)
        return Scores(*score_client(client, theta, message.benchmarks))

    @classmethod
    def steps(cls) -> dict[str, ClientStep[Any, Any]]:
        """The client steps by name: nothing else of a method can be asked for."""
        names = {name for base in cls.__mro__ for name, v in vars(base).items() if isinstance(v, ClientStep)}
        return {name: value for name in sorted(names) if isinstance(value := _attribute(cls, name), ClientStep)}


def _attribute(cls: type, name: str) -> Any:
    """A class attribute without running descriptors."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def declared_kinds(reply: type) -> dict[str, Leaves]:
    """Field -> kind of a reply type; a field without a kind is a programming error."""
    return _kinds(cast(Hashable, reply))


@functools.cache
def _kinds(reply: Any) -> dict[str, Leaves]:
    hints = get_type_hints(reply, include_extras=True)
    kinds = {}
    for f in fields(reply):
        marks = [m for m in getattr(hints[f.name], "__metadata__", ()) if isinstance(m, Leaves)]
        if len(marks) != 1:
            raise TypeError(f"{reply.__name__}.{f.name} must be Annotated with exactly one kind of Leaves")
        kinds[f.name] = marks[0]
    return kinds
