"""The base class of methods: settings, server state, stages, client steps, and the resulting models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field
from torch import Tensor

from visard.core.client import ClientId, ClientStep, State, Weights
from visard.core.network import Network
from visard.disclosure import Disclosure, declared_kinds

S = TypeVar("S")

# bounds of settings, which are checked where settings are read
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
AtLeastOne = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]


# sentences of `Method.hostile` that several methods share
ALREADY_CENTRAL = (
    "Everything is in one place before the first round: there is nothing left to learn. Parties that keep their "
    "pictures refuse it."
)
SEES_UPDATES = (
    "It chooses the weights, the learning rate and the steps, and without aggregation.secure has each client's update "
    "in the clear: pictures can be reconstructed from it, more easily the fewer pictures and steps there are "
    "(bounds.batch, bounds.steps, bounds.pictures)."
)
CRAFTED_WEIGHTS = (
    "Weights crafted for that must be near those of the round before (bounds.distance), and the first ones must be "
    "those that are pinned (weights.start)."
)


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
    new_weights: Callable[[], Weights] = field(repr=False)  # model.weights, or a fresh backbone from the run's seed
    seed: int = 0
    given: bool = False  # whether the weights come from a file
    public_classes: int = 0  # identities of the public pictures; 0 = there are none
    class_vectors: Tensor | None = field(default=None, repr=False)  # model.class_vectors: rows of the public identities
    biases: Tensor | None = field(default=None, repr=False)  # of the same file, where the head that left it has some


class Method(ABC, Generic[S]):
    """A federated method: a frozen dataclass whose fields are its settings.

    Server state goes in and out of every round; the engine checkpoints it. Nothing hides on `self`.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # one line that describes it
    paper: ClassVar[str] = ""
    discloses: ClassVar[frozenset[Disclosure]]  # every kind that may leave a client; the engine refuses others
    compared: ClassVar[tuple[str, ...]] = ()  # names of `alternatives`
    hostile: ClassVar[str] = ""  # what a server that breaks the protocol can learn, and which setting prevents it
    singly: ClassVar[str] = ""  # what the server needs from single clients, which aggregation.secure does not hide
    centralises: ClassVar[frozenset[Disclosure]] = frozenset()  # kinds that move to one place before the first round

    extendable: ClassVar[bool] = False  # whether only `training.schedule` makes a round depend on the number of rounds

    @abstractmethod
    def start(self, setup: Setup) -> S:
        """Server state before the first round. Its return annotation is the type that checkpoints hold."""

    @abstractmethod
    def stages(self) -> list[Stage[S]]:
        """The phases, in order."""

    def leaving(self, moving: bool) -> frozenset[Disclosure]:
        """The kinds that leave a client with these settings, of those in `discloses`; parties are asked for them.

        `moving`: the network has running statistics that follow the batches, so that weights carry some.
        """
        replies = [step.__get__(self, type(self)).types[1] for step in self.steps().values()]
        own = any(Disclosure.statistic in declared_kinds(reply).values() for reply in replies)
        return self.discloses if moving or own else self.discloses - {Disclosure.statistic}

    def centralises_from(self, client: ClientId) -> frozenset[Disclosure]:
        """The kinds that a method that centralises data takes from one client; empty: its data stay there."""
        return self.centralises

    def centralises_public(self) -> bool:
        """Whether a method that centralises data takes the public pictures too."""
        return False

    def without_labels(self, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        """The clients whose pictures need no labels."""
        return ()

    def packages(self) -> dict[str, str]:
        """Modules that these settings need beside visard's own dependencies, and the extra that installs each.

        A run checks them before it starts.
        """
        return {}

    def trains_norm(self) -> bool:
        """Whether the settings ask for batch norm whose statistics follow the batches; see `model.frozen_norm`."""
        return False

    def oracle(self) -> str:
        """What the method needs to know that only labels tell, or empty: a run reports it, a deployment refuses it."""
        return ""

    def fixed_length(self) -> str:
        """Why a run cannot be extended by more rounds; empty if no round depends on how many follow it."""
        if not self.extendable:
            return "its rounds may depend on how many there are"
        schedule = getattr(getattr(self, "training", None), "schedule", "constant")
        return "" if schedule == "constant" else f"its learning rate follows a {schedule} over all rounds"

    def backbone(self, server: S) -> Weights | None:
        """The generic model to test, by default the server state's `theta`; None if the method has none."""
        return getattr(server, "theta", None)

    def class_vectors(self, server: S) -> Tensor | None:
        """Class vectors (identities, E) of the generic model, which a run saves beside it, or None."""
        return None

    def biases(self, server: S) -> Tensor | None:
        """Biases (identities,) that go with the class vectors, or None if the head has none."""
        return None

    def global_head(self, server: S) -> Tensor | None:
        """Class vectors (classes, E) of all identities if the clients share one head, else None."""
        return None

    def basis(self, server: S) -> Weights | None:
        """What a client gets to make its personal model from; default the generic model."""
        return self.backbone(server)

    def personal(self, state: State, theta: Weights | None) -> Weights | None:
        """The weights with which a client with this state recognises its own identities; default the generic model.

        Entries `transform.weight` and `transform.bias` beside the backbone's are the client's own last layer.
        """
        return theta

    def alternatives(self, state: State, theta: Weights | None) -> dict[str, Weights | None]:
        """Other models to test at a client beside its own, by the prefix of their metrics, one of `compared`."""
        return {}

    @classmethod
    def steps(cls) -> dict[str, ClientStep[Any, Any]]:
        """The client steps by name: nothing else of a method can be asked for."""
        names = {name for base in cls.__mro__ for name, v in vars(base).items() if isinstance(v, ClientStep)}
        return {name: value for name in sorted(names) if isinstance(value := _attribute(cls, name), ClientStep)}


def _attribute(cls: type, name: str) -> Any:
    """A class attribute without running descriptors."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
