"""Which kinds leave with a reply: running statistics are of the kind `statistic`, whatever the field is called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
import torch
from tests.toys import Toy, ToyDown, ToyUp, toy_engine, toy_network, toy_world
from torch import Tensor, nn

from visard import models
from visard.core import Client, Disclosure, Names, Weights, client_step, declared_kinds
from visard.disclosure import carried_kinds, declared_names, pieces, possible_kinds
from visard.engines.ledger import Ledger
from visard.errors import VisardError
from visard.methods import METHODS
from visard.methods.scoring import steps_of

GATHERED = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    personal: Annotated[Weights | None, Disclosure.weights]
    W: Annotated[Tensor | None, Disclosure.class_vectors]


def whole() -> Weights:
    return {k: v.clone() for k, v in toy_network().state_dict().items()}


def test_the_network_says_which_entries_are_no_parameters(tmp_path: Path) -> None:
    world = toy_world(tmp_path)
    before = torch.get_rng_state()
    assert world.statistics == GATHERED
    assert torch.equal(torch.get_rng_state(), before), "no random numbers are used up"
    world.network()
    assert toy_world(tmp_path).statistics == GATHERED


def test_running_statistics_are_rows_of_their_own(tmp_path: Path) -> None:
    theta = whole()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    total = ledger.record("federate", 0, "client-000", Up(theta, theta, None), GATHERED)
    ledger.flush()
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    kinds = [(row[4], row[5]) for row in rows]
    both = [("theta", "weights"), ("theta", "statistic"), ("personal", "weights"), ("personal", "statistic")]
    assert kinds == [*both, ("W", "class_vectors")]
    assert sum(row[6] for row in rows) == total
    assert rows[1][6] >= 4 * 4 * 2 + 8, "two vectors of four numbers and a counter"


def test_buffers_under_any_name_are_statistics() -> None:
    net = models.build("mlp", embedding=4, size=6)  # its own running mean is called `mean`
    gathered = set(net.state_dict()) - {k for k, _ in net.named_parameters()}
    found = dict[str, set[str]]()
    for _, kind, value in pieces(Up(net.state_dict(), None, None), gathered):
        found.setdefault(kind.value, set()).update(value or ())
    assert found["statistic"] == gathered
    assert found["weights"] == {k for k, _ in net.named_parameters()}


def test_torchs_own_names_count_where_the_network_is_not_known() -> None:
    assert Disclosure.statistic in carried_kinds(Up({"a.running_mean": torch.ones(2)}, None, None), ())
    assert carried_kinds(Up({"a.weight": torch.ones(2)}, {}, None), ()) == {Disclosure.weights}


def test_kinds_that_a_reply_may_carry() -> None:
    assert possible_kinds(Up) == {Disclosure.weights, Disclosure.statistic, Disclosure.class_vectors}
    assert possible_kinds(ToyUp) >= {Disclosure.statistic}


class Careless(Toy):
    """Sends a whole network and does not say that statistics are in it."""

    name = "careless"

    @client_step
    def add(self, client: Client, msg: ToyDown) -> ToyUp:
        return ToyUp(msg.w, msg.theta, 1, 0.0)


class Renamed(nn.Module):
    """A network whose running mean has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("centre", torch.zeros(2))


@pytest.mark.parametrize(("build", "entry"), [(toy_network, "1.running_mean"), (Renamed, "centre")])
def test_undeclared_statistics_are_refused(tmp_path: Path, build: type, entry: str) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, build=build))
    messages = {c: ToyDown(torch.zeros(4), build().state_dict()) for c in net.clients}
    with pytest.raises(Exception, match="0 good replies of 3"):
        net.ask(Careless().add, messages)
    assert f"holds the running statistic '{entry}'" in net.traffic.problems[0]["reason"]

    class Declared(Careless):
        discloses = Toy.discloses | {Disclosure.statistic}

    assert len(net.ask(Declared().add, messages)) == 3


@dataclass(frozen=True)
class Told:
    figures: Annotated[dict[str, float], Disclosure.metric, Names("loss", "steps")]


@dataclass(frozen=True)
class Untold:
    figures: Annotated[dict[str, float], Disclosure.metric]


PICTURE = bytes(torch.randint(97, 123, (3072,), generator=torch.Generator().manual_seed(0)).tolist()).decode()


@dataclass(frozen=True)
class Talkative(Toy):
    """Tells of itself under the given names; `listed`: in a field that lists some."""

    names: tuple[str, ...] = ("loss",)
    listed: bool = True

    @client_step
    def tell(self, client: Client, msg: ToyDown) -> Told:
        return Told(dict.fromkeys(self.names, 1.0))

    @client_step
    def tell_more(self, client: Client, msg: ToyDown) -> Untold:
        return Untold(dict.fromkeys(self.names, 1.0))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), None),
        (("loss", "steps"), None),
        (("loss", "accuracy"), "has the name 'accuracy', which Told.figures does not list"),
        (tuple(PICTURE[i : i + 66] for i in range(0, 3072, 66)), f"has the name '{PICTURE[:66]}', which"),
    ],
)
def test_names_of_metrics_come_from_a_list(tmp_path: Path, names: tuple[str, ...], says: str | None) -> None:
    net, method = toy_engine(tmp_path, toy_world(tmp_path)), Talkative(names=names)
    messages = {c: ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)}) for c in net.clients}
    if says is None:
        assert len(net.ask(method.tell, messages)) == 3
        return
    with pytest.raises(VisardError, match="0 good replies"):
        net.ask(method.tell, messages)
    assert says in net.traffic.problems[0]["reason"]
    net.ledger.flush()  # type: ignore[union-attr]
    assert not net.states.ledger.read_text()


def test_a_field_without_a_list_has_no_names(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    with pytest.raises(VisardError, match=r"has the name 'loss', which Untold\.figures does not list"):
        net.ask(Talkative().tell_more, {c: ToyDown(torch.zeros(4), {}) for c in net.clients})


def test_lists_of_names_are_bounded() -> None:
    with pytest.raises(TypeError, match="is no name of a metric"):
        Names("x" * 101)
    with pytest.raises(TypeError, match="is no name of a metric"):
        Names("a\nb")
    many = [f"m{i}" for i in range(2000)]
    assert Names(of=lambda method, message: many).undeclared(many, None, None) is not None
    assert Names(of=lambda method, message: ["x" * 101]).undeclared(["x" * 101], None, None) is not None
    assert Names("loss", of=lambda method, message: message).undeclared(["loss", "a"], None, ["a"]) is None


@pytest.mark.parametrize("name", METHODS)
def test_every_dict_of_metrics_lists_its_names(name: str) -> None:
    for step in steps_of(METHODS[name]).values():
        reply = step.types[1]
        for field, kind in declared_kinds(reply).items():
            if kind in (Disclosure.metric, Disclosure.count) and "dict" in str(get_type_hints(reply)[field]):
                names = declared_names(reply)[field]
                assert names.words or names.of, f"{reply.__name__}.{field}"
