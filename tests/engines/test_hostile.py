"""A client that wants to spoil the run: what it sends is refused, shortened or named, and the run goes on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.e2e.smoke import SMOKE, smoke
from tests.engines.test_parties import HOUSES, Heard, OwnLink, living
from tests.policies import ANYTHING
from tests.toys import noise_faces, toy_engine, toy_world
from torch import Tensor

import visard
from visard import plugins
from visard.aggregation.rules import Mean
from visard.cli import main
from visard.config import load, parse
from visard.core import declared_kinds
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party
from visard.engines import local
from visard.engines.reply_checks import MODEL, refusal
from visard.errors import UsageError, VisardError
from visard.methods.fedavg import Down, FedAvg, Up
from visard.methods.fedface import Down as FaceDown
from visard.methods.fedface import FedFace
from visard.methods.fedface import Up as FaceUp

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in an empty folder; all share the synthetic faces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISARD_CACHE", str(cache))


EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = ("aggregation.bound=3.0", "aggregation.max_weight=0.5")
Change = Callable[[Any, Any], Any]  # (message, reply) -> reply


def times(factor: float) -> Change:
    """Multiplies the update of every field of a network, or the field where nothing was sent."""

    def scaled(value: Any, sent: Any) -> Any:
        if isinstance(value, dict):
            changed = {k: scaled(v, None if sent is None else sent[k]) for k, v in value.items()}
            return {k: v.abs() if k.endswith("running_var") else v for k, v in changed.items()}
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        base = torch.zeros_like(value) if sent is None else sent
        return base + (value - base) * factor

    def change(message: Any, reply: Any) -> Any:
        found = {n for n, kind in declared_kinds(type(reply)).items() if kind in MODEL}
        return replace(reply, **{n: scaled(getattr(reply, n), getattr(message, n, None)) for n in found})

    return change


@contextmanager
def hostile(client: str, change: Change) -> Iterator[None]:
    """One client of the engine in this process answers with what `change` makes of its reply, and knows no shame."""
    honest = local.perform

    def perform(world: Any, step: Any, request: Any, states: Any, sent: bool = False) -> Any:
        reply = honest(world, step, request, states, sent)
        return replace(reply, value=change(request.message, reply.value)) if request.client == client else reply

    with patch.object(local, "perform", perform):
        yield


def largest(run: Path) -> float:
    """The largest trained weight that a run left behind."""
    models = [visard.load_model(f).network for f in run.rglob("*.safetensors") if "class" not in f.name]
    return max(float(p.detach().abs().max()) for model in models for p in model.parameters())


AVERAGING = [
    ("fedavg", "client-002", ()),
    ("fedavg", "client-002", ("method.share_head=true",)),
    ("hf-maml", "client-001", ("partition.clients=3",)),
    ("fedface", "client-002", ()),
    ("fedfr-da", "target-1", ()),
    ("fedfr-joint", "client-002", ()),
    ("encrypted-mmd", "target-0", ()),
    ("scaffold", "client-002", ()),
    ("fedbabu", "client-002", ()),
]


@pytest.mark.parametrize(("method", "client", "more"), AVERAGING)
def test_every_method_that_averages_stands_a_hostile_client(method: str, client: str, more: tuple[str, ...]) -> None:
    own = [EXAMPLES / f"{method}.py"] if method == "scaffold" else []
    sets = [*(smoke(method) if not own else SMOKE), *more, *LIMITS, "evaluation.every=0"]
    with patch.object(plugins, "_added", {kind: {} for kind in plugins.KINDS}):
        visard.run(method, out="honest", overrides=sets, plugins=own)
        # encrypted-mmd needs every reply of its exchange, so there only the pre-training is attacked
        stage = "pretrain" if method == "encrypted-mmd" else "federate"
        with hostile(client, during(stage, times(1e4))):
            visard.run(method, out="poisoned", overrides=sets, plugins=own)
    found = json.loads(Path("poisoned/metrics.json").read_text())
    assert any(line.startswith(f"{client}: an update of ") for line in found["warnings"]), found["warnings"]
    assert not any(line.startswith(f"{other}: ") for other in others(client) for line in found["warnings"])
    assert largest(Path("poisoned")) < 3 * largest(Path("honest"))


def others(client: str) -> list[str]:
    return [name for name in (f"{client[:-1]}{i}" for i in range(4)) if name != client]


def during(stage: str, change: Change) -> Change:
    """The same, in the steps whose replies are averaged."""

    def changed(message: Any, reply: Any) -> Any:
        averaged = {"theta", "dy"} & {f.name for f in dataclasses.fields(reply)}
        return change(message, reply) if averaged and (stage != "pretrain" or "classifier" in vars(reply)) else reply

    return changed


@pytest.mark.parametrize("limits", [(), LIMITS])
def test_absurd_weights_are_refused_on_any_run_and_named_to_the_end(limits: tuple[str, ...]) -> None:
    heard = Heard()
    with hostile("client-001", times(1e30)):
        visard.run("fedavg", out="run", overrides=[*SMOKE, *limits, "evaluation.every=0"], watcher=heard)
    assert any("client-001: reply refused (theta): has an absurd value of" in text for text in heard.problems)
    (line,) = json.loads(Path("run/metrics.json").read_text())["warnings"]
    assert line.startswith("client-001: theta refused 2 times; federate round 1: it has an absurd value of")
    assert "client-001: theta refused 2 times" in Path("run/report.html").read_text()


def test_a_simulation_without_limits_names_who_spoilt_it_and_says_so_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = [part for s in (*SMOKE, "method.rounds=1") for part in ("--set", s)]
    monkeypatch.setattr("sys.argv", ["visard", "run", "fedavg", "--out", "run", *sets])
    monkeypatch.setenv("COLUMNS", "500")
    with hostile("client-001", during("federate", times(1e4))), pytest.raises(SystemExit) as ended:
        main()
    output = "".join(capfd.readouterr())
    assert not ended.value.code, output
    text = " ".join(output.split())
    said = "client-001: an update of theta far from the others' in 1 round; federate round 1: it is"
    assert text.count(said) == 1, "in the closing lines"
    assert text.index("federate round 1: client-001: the update of theta is") < text.index(said)
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    (event, *_) = [e for e in events if e["event"] == "far" and e["field"] == "theta"]
    assert (event["client"], event["stage"], event["round"]) == ("client-001", "federate", 0)
    assert event["norm"] > 1e3
    page = Path("run/report.html").read_text()
    assert "client-001: an update of theta far from the others" in page
    assert "Refused, missing and far replies" in page


def test_a_client_is_named_on_the_screen_once_and_in_the_events_every_round() -> None:
    heard = Heard()
    with hostile("client-001", times(50.0)):
        visard.run("fedavg", out="run", overrides=[*SMOKE, *LIMITS, "evaluation.every=0"], watcher=heard)
    assert len([text for text in heard.problems if "client-001" in text]) == 1
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert {e["round"] for e in events if e["event"] == "far"} == {0, 1}


def reply(**changes: Any) -> Up:
    theta = {"a": torch.ones(2), "bn.running_var": torch.ones(2), "bn.num_batches_tracked": torch.tensor(3)}
    return replace(Up(theta, None, 5, 0.5, 1, 1), **changes)


SENT = Down(reply().theta, {}, None, 0.1)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", None, "is missing"),
        ("theta", None, "is missing"),
        ("loss", None, "is missing"),
        ("n", True, "is declared as count but is a bool"),
        ("n", 0, "is 0, but the client has 9 pictures"),
        ("n", -3, "holds an integer that is negative or too large"),
        ("n", 10, "is 10, but the client has 9 pictures"),
        ("n", {}, "is {}, but the client has 9 pictures"),
        ("n", 5.0, "is declared as count but is a float"),
        ("samples", 2**60, "holds an integer that is negative or too large"),
        ("gradients", -1, "holds an integer that is negative or too large"),
        ("W", torch.full((3, 4), 1e7), "has an absurd value of 1e+07"),
        ("W", torch.zeros(21, 4), "has 21 rows, but the client has 20 identities"),
    ],
)
def test_fields_that_no_honest_client_sends(field: str, value: Any, says: str) -> None:
    wrong = refusal(FedAvg().local, SENT, reply(**{field: value}), 9, 4, rows=20)
    assert wrong is not None
    name, reason = wrong
    assert name == field
    assert says in reason


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("a", [1.0, math.nan], "has values that are not finite in a"),
        ("a", [1.0, -math.inf], "has values that are not finite in a"),
        ("a", [1.0, -1e30], "has an absurd value of 1e+30 in a"),
        ("a", [1e6 + 1, 0.0], "has an absurd value of 1e+06 in a"),
        ("a", [1e-42, 5e-45], None),  # denormals are numbers
        ("a", [3.4e38, 3.4e38], "has an absurd value of 3.4e+38 in a"),  # whose sum is not finite
        ("bn.running_var", [1.0, -1e-3], "has a negative variance in bn.running_var"),
        ("bn.running_var", [0.0, 1e5], None),
        ("bn.num_batches_tracked", 2**62, "has an integer that is too large in bn.num_batches_tracked"),
    ],
)
def test_entries_that_no_training_leaves(entry: str, value: Any, says: str | None) -> None:
    theta = reply().theta | {entry: torch.tensor(value, dtype=reply().theta[entry].dtype)}
    wrong = refusal(FedAvg().local, SENT, reply(theta=theta), 9, 4)
    assert wrong == (None if says is None else ("theta", says))


def test_what_was_sent_large_may_come_back_large() -> None:
    sent = replace(SENT, theta=reply().theta | {"a": torch.tensor([2e6, 0.0])})
    theta = reply().theta | {"a": torch.tensor([3e6, 0.0])}
    assert refusal(FedAvg().local, sent, reply(theta=theta), 9, 4) is None


def test_absurd_class_vectors_are_refused_where_they_are_not_averaged_either() -> None:
    for sent in (None, torch.ones(2, 4)):
        up = FaceUp({}, torch.full((2, 4), 1e30), 2, 0.5)
        assert refusal(FedFace().local, FaceDown({}, sent, 0.1), up, 2, 4) == ("w", "has an absurd value of 1e+30")


# -- parties that say what they have ---------------------------------------------------------------------------------


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    for seed, name in enumerate((*HOUSES, "house-3", "public")):
        noise_faces(tmp_path / "homes" / name, 12, 8, seed)
    return tmp_path / "homes"


Go = Callable[..., tuple[Path, Heard]]


@pytest.fixture
def go(homes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    """Runs fedavg over three houses that say what `claims` has instead of the truth."""
    mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine."))]
    mine += ["partition.kind=parties", "partition.clients=3", "partition.test_identities=0", "engine.kind=flower"]
    mine += ["engine.server=x", f"data.source={homes / 'public'}", "evaluation.every=0", "evaluation.clients=false"]

    def run(*more: str, claims: dict[str, dict[str, int]], forge: Any = None) -> tuple[Path, Heard]:
        class Claiming(OwnLink):
            def parties(self, count: int) -> dict[str, dict[str, int]]:  # type: ignore[override]
                return super().parties(count) | claims

        at = living((*HOUSES, "house-3"), homes, tmp_path)
        monkeypatch.setattr("visard.runs.run.connect", lambda *_: Claiming(at, forge))
        heard = Heard()
        visard.run("fedavg", out=tmp_path / "run", overrides=[*mine, *more], watcher=heard)
        return tmp_path / "run", heard

    return run


def forged(change: Callable[[Up], Up], role: str = "house-1") -> Any:
    from visard.engines.codec import decode, encode
    from visard.engines.request import Request

    def forge(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if (request.client, request.step) != (role, "local"):
            return header, payload
        return header, encode(change(decode(payload, Up)))

    return forge


LIAR = {"house-1": {"identities": 12, "pictures": 10**9}}


def test_a_claim_of_a_billion_pictures_is_at_most_half_of_an_average(go: Go, tmp_path: Path) -> None:
    out, _ = go("method.rounds=1", claims=LIAR, forge=forged(lambda up: replace(up, n=10**9)))
    settings = load(out / "config.toml")
    assert (settings.aggregation.bound, settings.aggregation.max_weight) == (3.0, 0.5), "the run's own file says so"
    honest = sum(float(v.double().sum()) for v in _theta(out).values())
    (tmp_path / "run").rename(tmp_path / "first")
    # the same with the honest weights 2, 1, 1: half of the average is house-1's
    sizes = {"house-1": 40, "house-2": 20, "house-3": 20}

    class Even:
        def __call__(self, request: Any, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
            n = sizes.get(request.client, 0)
            return forged(lambda up: replace(up, n=n), request.client)(request, header, payload)  # type: ignore[no-any-return]

    out, _ = go("method.rounds=1", claims={}, forge=Even())
    assert sum(float(v.double().sum()) for v in _theta(out).values()) == pytest.approx(honest, abs=1e-4)


def _theta(run: Path) -> dict[str, Tensor]:
    model = visard.load_model(run / "model.safetensors").network.state_dict()
    return {k: v for k, v in model.items() if v.is_floating_point()}


def test_a_claim_above_what_the_operator_states_counts_for_no_more(go: Go) -> None:
    out, heard = go(
        "method.rounds=1", "parties.house-1.pictures=50", "aggregation.max_weight=1.0",
        claims=LIAR, forge=forged(lambda up: replace(up, n=10**9)),
    )  # fmt: skip
    assert heard.problems == ["house-1 says that it has 1,000,000,000 pictures: it counts for 50, as the run states"]
    stated = _theta(out)
    out.rename(out.with_name("first"))
    out, _ = go("method.rounds=1", "aggregation.max_weight=1.0", claims={}, forge=forged(lambda up: replace(up, n=50)))
    assert all(torch.equal(v, stated[k]) for k, v in _theta(out).items())


@pytest.mark.parametrize("head", ["method.share_head=true", "method.share_head=false"])
def test_a_claim_of_a_billion_identities_ends_in_one_line_before_anything_is_allocated(go: Go, head: str) -> None:
    liar = {"house-1": {"identities": 10**9, "pictures": 10**9}}
    build = patch("visard.learning.heads.HeadSettings.build", side_effect=AssertionError("a head was made"))
    with build, pytest.raises(VisardError) as raised:
        go(head, claims=liar)
    assert str(raised.value) == (
        "the parties say that they have 1,000,000,024 identities together (house-1: 1,000,000,000), more than "
        "engine.max_identities = 100,000: state what house-1 has with --set parties.house-1.identities=N"
    )


def test_identities_that_are_stated_make_room_for_no_more(go: Go) -> None:
    liar = {"house-1": {"identities": 10**9, "pictures": 10**9}}
    out, heard = go("method.share_head=true", "parties.house-1.identities=12", "method.rounds=1", claims=liar)
    assert "house-1 says that it has 1,000,000,000 identities: it counts for 12, as the run states" in heard.problems
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert events[0]["classes"] == 36


def test_a_statement_of_a_party_that_is_not_there_is_refused(go: Go) -> None:
    with pytest.raises(
        UsageError, match=r"parties.house-4: the run has no client of this name .did you mean 'house-3'"
    ):
        go("parties.house-4.pictures=5", claims={})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("parties.a.pictures=0", "parties.a.pictures = 0"),
        ("parties.a.picture=3", "parties.a.picture"),
        ("parties.a=3", "parties.a = 3"),
        ("aggregation.max_weight=0", "aggregation.max_weight = 0"),
        ("aggregation.max_weight=1.5", "aggregation.max_weight = 1.5"),
        ("aggregation.bound=-1", "aggregation.bound = -1"),
        ("aggregation.bound=nan", "aggregation.bound = nan"),
        ("engine.max_identities=0", "engine.max_identities = 0"),
    ],
)
def test_settings_out_of_bounds_get_one_line(wrong: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load("fedavg", [wrong])


def test_parties_do_not_learn_what_is_stated_of_the_others() -> None:
    from visard.deployment.join import run_spec

    settings = load("fedavg", ["partition.kind=parties", "partition.clients=2", "parties.a.pictures=7"])
    assert settings.to_dict()["parties"] == {"a": {"pictures": 7}}

    class Hash:
        hash = "x"

    world = SimpleNamespace(spec={"model": "tiny", "embedding": 16, "size": 32}, trunk=None)
    assert "parties" not in run_spec(settings, Hash(), 32, world)["settings"]  # type: ignore[arg-type]


def test_limits_are_settings_of_a_run_between_parties_and_of_no_simulation() -> None:
    alone = load("fedavg")
    assert alone.aggregation == Mean()
    assert "aggregation" not in alone.to_dict()
    there = load("fedavg", ["engine.kind=flower", "engine.server=x"])
    assert there.to_dict()["aggregation"] == {"rule": "mean", "bound": 3.0, "max_weight": 0.5}
    here = parse({k: v for k, v in there.to_dict().items() if k != "engine"})
    assert here.aggregation == there.aggregation
    assert here.fingerprint() == there.fingerprint()
    off = ["aggregation.bound=0", "aggregation.max_weight=1"]
    assert not load("fedavg", ["partition.kind=parties", "partition.clients=2", *off]).aggregation.limited


def test_the_config_of_a_deployed_run_gives_the_same_bits_on_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [s for s in SMOKE if not s.startswith(("engine.", "partition."))]
    sets += ["partition.kind=lognormal", "partition.clients=5", "partition.sigma=1.5", "partition.test_identities=6"]
    sets += ["evaluation.every=0"]
    roles = [f"client-{i:03d}" for i in range(5)]

    at = {
        role: Party(
            partial(world_of_party, data="synthetic", file=None, clients=[role]),
            OwnStates(tmp_path / role),
            Guard(tmp_path / role, ANYTHING),
        )
        for role in roles
    }
    monkeypatch.setattr(
        "visard.runs.run.connect", lambda settings, _: OwnLink(at, None) if settings.engine.server else None
    )
    visard.run("fedavg", out=tmp_path / "far", overrides=[*sets, "engine.kind=flower", "engine.server=x"])
    tree = load(tmp_path / "far" / "config.toml").to_dict()
    tree["engine"] = {"kind": "local"}
    visard.run(tree, out=tmp_path / "near")
    far, near = tmp_path / "far", tmp_path / "near"
    for file in ("model.safetensors", "metrics.json"):
        assert (far / file).read_bytes() == (near / file).read_bytes(), file
    assert json.loads((near / "metrics.json").read_text())["warnings"], "a limit was met, or this shows nothing"
    tree.pop("aggregation")
    visard.run(tree, out=tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() != (near / "model.safetensors").read_bytes()


def test_a_party_that_sends_other_shapes_where_nothing_was_sent_is_left_out(tmp_path: Path) -> None:
    with patch.object(plugins, "_added", {kind: {} for kind in plugins.KINDS}):
        from examples.scaffold import Scaffold
    world = toy_world(tmp_path, aggregation=Mean(bound=3.0))
    net, method = toy_engine(tmp_path, world), Scaffold()
    s = method.start(world.setup())

    def other(message: Any, reply: Any) -> Any:
        return replace(reply, dy={"x": torch.ones(3)})

    net.begin("federate", 0)
    with hostile("client-000", other):  # the first to answer
        means, ups = net.reduce(method.local, dict.fromkeys(net.clients, s), mean=("dy", "dc"), by=None)
    assert list(ups) == ["client-001", "client-002"]
    assert "other entries or shapes than most replies" in ups.missing["client-000"]
    assert means["dy"].keys() == s.x.keys()
    assert [(p["event"], p["client"], p["field"]) for p in net.traffic.problems] == [("refused", "client-000", "dy")]


def test_replies_left_out_count_as_missing(tmp_path: Path) -> None:
    world = toy_world(tmp_path, aggregation=Mean(bound=3.0), min_replies=1.0)
    with patch.object(plugins, "_added", {kind: {} for kind in plugins.KINDS}):
        from examples.scaffold import Scaffold
    net, method = toy_engine(tmp_path, world), Scaffold()
    s = method.start(world.setup())
    says = r"2 good replies of 3, 3 needed; client-000: reply refused: Up.dy has other entries"
    empty = hostile("client-000", lambda message, reply: replace(reply, dy={}))
    with empty, pytest.raises(VisardError, match=says):
        net.reduce(method.local, dict.fromkeys(net.clients, s), mean=("dy", "dc"), by=None)
