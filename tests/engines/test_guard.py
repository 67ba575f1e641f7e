"""A party's policy at every request: what a server that lies, changes its mind or asks too much gets."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toys import noise_faces

from visard.config import load, parse
from visard.core import Disclosure, client_step
from visard.deployment import last_weights
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.last_weights import Distance, LastWeights, any_nonzero
from visard.deployment.party import Basis, OwnStates, Party
from visard.deployment.policy import Between, Bounds, Policy, Protect, Retention, Start, digest_of
from visard.deployment.state_folder import StateFolder
from visard.engines.codec import decode, encode
from visard.engines.frame import ALIGNED, largest_at
from visard.engines.local import perform
from visard.engines.request import Reply, Request, StateFile, pack, unpack
from visard.errors import PublicError, VisardError
from visard.learning.train import Training, batches
from visard.methods import METHODS, fedavg, fedface, scoring, supervised
from visard.methods.hf_maml import HFMaml, MetaTraining
from visard.methods.negatives import NoisyVectors, Show
from visard.methods.scoring import steps_of
from visard.processes import Data, Filed, Outbox

HOUSE, RUN = "house-1", "ab" * 16
SAFE = ("weights", "metric", "count")
WITH_NORM = (*SAFE, "statistic")


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_faces(tmp_path_factory.mktemp("faces") / "set", 6, 8).path


class Server:
    """Asks one party, as a run would or as it should not."""

    def __init__(self, home: Path, faces: Path, policy: Policy | None, *changes: str, method: str = "fedavg") -> None:
        own = ["partition.kind=parties", "partition.clients=2", "model.embedding=16"]
        small = ["method.training.batch_size=8"] if method == "fedavg" else []
        settings = load(method, [*own, *small, *changes]).to_dict()
        told = {k: v for k, v in settings.items() if k not in ("name", "engine", "data")} | {"data": {}}
        told["model"] = {k: v for k, v in told["model"].items() if k not in ("weights", "class_vectors")}
        spec = {"model": told["model"]["name"], "embedding": 16, "size": 32}
        self.spec: dict[str, Any] = {"settings": told, "partition": "", "own": True, "spec": spec, "pictures": 32}
        self.home, self.faces = home, faces
        self.restart(policy)
        self.theta = self.network(0)

    def restart(self, policy: Policy | None) -> None:
        make = partial(world_of_party, data=str(self.faces), file=None, clients=[HOUSE])
        guard = Guard(self.home, policy, "the CA")
        self.party = Party(make, OwnStates(self.home / "states"), guard, models=self.home / "models")

    def network(self, seed: int) -> dict[str, torch.Tensor]:
        from visard import models

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = models.build(self.spec["spec"]["model"], embedding=16, size=32)
        return {k: v.clone() for k, v in built.state_dict().items()}

    def join(self) -> Reply:
        return unpack(self.party.do(pack(Request(RUN, self.spec)), b"")[0], Reply)

    def ask(
        self, message: Any, round: int = 0, run: str = RUN, step: str = "local", **changes: Any
    ) -> tuple[str, bytes]:
        name = f"clients/{HOUSE}-{round + 1:06d}-1.bin"
        request = Request(run, self.spec, HOUSE, step, "federate", round, 1, new_state=name)
        header, payload = self.party.do(pack(replace(request, **changes)), encode(message))
        return unpack(header, Reply).failure or "", payload

    def train(self, theta: Any = None, lr: float = 0.1, fixed: Any = None, W: Any = None, **changes: Any) -> str:
        return self.ask(fedavg.Down(self.theta if theta is None else theta, fixed or {}, W, lr), **changes)[0]


Make = Callable[..., Server]


@pytest.fixture
def server(tmp_path: Path, faces: Path) -> Make:
    def make(*changes: str, kinds: tuple[str, ...] = WITH_NORM, method: str = "fedavg", **parts: Any) -> Server:
        policy = Policy(methods=(method,), kinds=kinds, **parts)
        return Server(tmp_path / "home", faces, policy, *changes, method=method)

    return make


def test_an_honest_request_passes(server: Make) -> None:
    one = server()
    assert one.join().roles == {HOUSE: {"identities": 6, "pictures": 48}}
    assert one.train() == ""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"lr": 0.0}, "local has lr = 0, this party allows 1e-06 to 1 (bounds.lr)"),
        ({"lr": 5.0}, "local has lr = 5, this party allows 1e-06 to 1 (bounds.lr)"),
        ({"lr": float("nan")}, "local has lr = nan"),
        ({"lr": -0.1}, "local has lr = -0.1"),
    ],
)
def test_the_learning_rate_of_every_message(server: Make, message: dict[str, Any], says: str) -> None:
    one = server()
    assert one.train() == ""
    assert says in one.train(round=1, **message)


@pytest.mark.parametrize(
    ("changes", "bounds", "says"),
    [
        (["method.training.amount=3"], Bounds(steps=Between(at_least=1, at_most=10)), "has steps = 15, this party"),
        ([], Bounds(steps=Between(at_least=9, at_most=100)), "local has steps = 5, this party allows 9 to 100"),
        (["method.training.batch_size=2"], Bounds(), "local has batches of fewer than 4 pictures (bounds.batch)"),
        (["method.rounds=30"], Bounds(rounds=20), "the run has 30 rounds, this party allows 20"),
        ([], Bounds(pictures=200), "fewer training pictures than its policy asks for"),
        ([], Bounds(parties=3), "this party wants 3 parties in an average"),
        (["method.participation=0.5"], Bounds(parties=2), "this party wants 2 parties in an average"),
        (["method.in_turn=2"], Bounds(), "this party wants 2 parties in an average"),
    ],
)
def test_bounds_of_what_a_request_makes_a_party_do(server: Make, changes: list[str], bounds: Bounds, says: str) -> None:
    one = server(*changes, bounds=bounds)
    assert says in one.train()
    assert not list((one.home / "states").glob("*/clients/*"))


def test_a_round_beyond_those_of_the_run(server: Make) -> None:
    one = server(bounds=Bounds(rounds=20))
    assert "the run has 99 rounds, this party allows 20" in one.train(round=99)


def test_class_vectors_do_not_leave_under_an_allowed_method(server: Make) -> None:
    """A policy by method does not stop `share_head`; the rule by kind does, before anything is said of the data."""
    one = server("method.share_head=true")
    says = "would send class_vectors, a kind that this party does not allow to leave"
    assert says in (one.join().failure or "")
    assert says in one.train(W=torch.randn(12, 16))


def test_a_kind_that_a_method_did_not_announce_is_caught_in_the_reply(
    server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedavg.Averaging, "leaving", lambda self, moving: frozenset({Disclosure.weights}))
    one = server("method.share_head=true")
    assert "the reply holds class_vectors, a kind that" in one.train(W=torch.randn(12, 16))
    assert not list((one.home / "states").glob("*/clients/*")), "no state of a refused step"
    assert "the reply holds statistic, a kind that" in server(kinds=SAFE).train(run="cd" * 16)


def test_running_statistics_need_consent_or_given_weights_or_a_network_without_them(server: Make) -> None:
    says = server(kinds=SAFE).join().failure or ""
    assert "fedavg would send statistic, a kind that this party does not allow to leave: allow it there, start" in says
    assert "without batch norm (tiny_nobn, spherenet20)" in says
    assert server("model.name=tiny_nobn", kinds=SAFE).train(run="cd" * 16) == ""
    assert server("method.batch_norm=local", kinds=SAFE).join().failure is None, "they stay at the clients"


def test_frozen_statistics_are_no_news(server: Make) -> None:
    one = server("model.frozen_norm=true", kinds=SAFE)
    assert one.train() == ""
    name = next(k for k in one.theta if k.endswith("running_mean"))
    crafted = one.theta | {name: one.theta[name] + 1e-3}
    assert f"{name} does not train in this run, and has changed" in one.train(crafted, round=1)
    one.restart(Policy(methods=("fedavg",), kinds=SAFE))
    assert "has changed" in one.train(crafted, round=1), "a restart forgets nothing"


def test_a_frozen_part_is_checked_at_every_request(server: Make) -> None:
    first = next(iter(server("model.name=tiny_nobn").theta))
    one = server("model.name=tiny_nobn", weights=Start(frozen=(first,)))
    assert one.train(run="cd" * 16) == ""
    changed = one.theta | {first: one.theta[first] * 1.001}
    assert f"{first} does not train in this run" in one.train(changed, run="cd" * 16, round=1)


def test_weights_must_stay_near_those_before(server: Make) -> None:
    one = server(bounds=Bounds(distance=0.2))
    other = one.network(1)
    near = {k: v + 0.05 * (other[k] - v) if v.is_floating_point() else v for k, v in one.theta.items()}
    assert one.train() == ""
    assert one.train(near, round=1) == ""
    says = "times their norm away from those before, this party allows 0.2 (bounds.distance)"
    assert says in one.train(other, round=2)
    one.restart(Policy(methods=("fedavg",), kinds=WITH_NORM, bounds=Bounds(distance=0.2)))
    assert says in one.train(other, round=2), "a restart forgets nothing"
    assert says in one.ask(Basis(other), step="", keep="ours", round=2)[0], "nor is keep a way round"
    zeros = {k: torch.zeros_like(v) for k, v in near.items()}
    loose = Policy(methods=("fedavg",), kinds=WITH_NORM, bounds=Bounds(distance=100.0))
    one.restart(loose)
    assert "times their norm away" in one.train(zeros, round=2), "from zeros everything would be near"


def test_a_request_with_a_part_of_the_weights_is_no_way_round(server: Make) -> None:
    """The step refuses it, but it was seen: the entries that it left out would be free in the next request."""
    one = server(bounds=Bounds(distance=0.2))
    first, *rest = one.theta
    other = one.network(1)
    assert one.train() == ""
    for factor in (1.0, 1.001):
        part = {first: factor * one.theta[first]}
        assert "entry" in one.train(part, round=1)
        assert "times their norm away" in one.train(part | {k: other[k] for k in rest}, round=1)
    assert one.train(round=1) == ""


def test_an_entry_that_the_network_does_not_have_hides_no_weights(server: Make) -> None:
    one = server(bounds=Bounds(distance=0.2))
    assert one.train() == ""
    more = {"more": torch.ones(1)}
    assert "times their norm away" in one.train(one.network(1) | more, round=1)
    assert "'more' is unknown" in one.train(one.theta | more, round=1)


def test_a_run_that_begins_with_zeros_is_refused(server: Make) -> None:
    """Nothing could be measured by them, so that all later weights would be free."""
    one = server(bounds=Bounds(distance=0.2))
    zeros = {k: torch.zeros_like(v) for k, v in one.theta.items()}
    assert "theta of the request is or was all zeros" in one.train(zeros)
    fixed = {k: v for k, v in one.theta.items() if "running" in k}
    assert "theta of the request is or was all zeros" in one.train(zeros, fixed=fixed)
    assert one.train() == "", "nothing of it was remembered"


def test_zeros_beside_the_weights_may_become_anything(server: Make) -> None:
    """Such as control variates: they are no network, and have no norm."""
    one = server(bounds=Bounds(distance=0.2))

    def look(variates: dict[str, torch.Tensor]) -> None:
        request = Request(RUN, one.spec, HOUSE)
        policy = one.party.guard.policy  # type: ignore[union-attr]
        world, method = one.party.world(one.spec, policy)  # type: ignore[arg-type]
        watch = one.party.guard.admit(request, policy, world, method)  # type: ignore[union-attr,arg-type]
        watch.look({"theta": one.theta, "variates": variates})

    look({k: torch.zeros_like(v) for k, v in one.theta.items()})
    look({k: torch.ones_like(v) for k, v in one.theta.items()})
    one.theta = one.network(1)
    with pytest.raises(PublicError, match="times their norm"):
        look({})


def test_weights_in_two_fields_are_both_held(server: Make) -> None:
    """`fixed` goes over `theta` in the network: crafted entries there are no way round."""
    one = server(bounds=Bounds(distance=0.2))
    other = one.network(1)
    assert one.train() == ""
    assert "times their norm away" in one.train(fixed=other, round=1)
    assert "two networks in one request" in server().train(fixed=other, run="cd" * 16)


def test_the_first_weights_are_those_that_are_pinned(server: Make) -> None:
    pin = digest_of(server().theta)
    one = server(weights=Start(start=(pin,)))
    other = one.network(1)
    assert f"begins with weights of digest {digest_of(other)}, which this party has not pinned" in one.train(other)
    assert one.train() == ""
    part = dict(list(one.theta.items())[:-1])
    assert "which this party has not pinned" in one.train(part, run="cd" * 16), "a part of them is not the same"
    assert one.train(other, run="ef" * 16) != "", "nor in another run beside it"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(server: Make, bad: float) -> None:
    one = server()
    name = next(iter(one.theta))
    assert "not finite" in one.train(one.theta | {name: torch.full_like(one.theta[name], bad)})


def test_rows_of_heads(server: Make) -> None:
    one = server("method.share_head=true", kinds=(*WITH_NORM, "class_vectors"), bounds=Bounds(rows=20))
    assert "W has 21 rows, this party allows 20" in one.train(W=torch.randn(21, 16))


def test_batch_norm_at_home(server: Make) -> None:
    at_home = Protect(batch_norm_at_home=True)
    assert "batch norm, which this party keeps at home" in server(protect=at_home).train()
    one = server("method.batch_norm=local", protect=at_home, kinds=SAFE)
    stays = fedavg.kept_local(one.theta, "local")
    theta = {k: v for k, v in one.theta.items() if k not in stays}
    assert one.train(theta, fixed={k: one.theta[k] for k in stays}, run="cd" * 16) == ""


def test_a_run_does_not_change_its_settings(server: Make) -> None:
    """Not from request to request, and not under an id that was used before; more rounds are the one exception."""
    one = server()
    assert one.train() == ""
    method = one.spec["settings"]["method"]
    one.spec["settings"]["method"] = method | {"regularisation": 1.0}
    assert "other settings than at its first request" in one.train(round=1)
    one.spec["settings"]["method"] = method | {"rounds": method["rounds"] + 5}
    assert one.train(round=1, state=None, new_state="") != "the run has other settings than at its first request"


def test_requests_and_runs_are_counted(server: Make) -> None:
    one = server(bounds=Bounds(requests=2))
    assert [one.train(), one.train()] == ["", ""]
    assert "has asked 2 times, this party's bound (bounds.requests)" in one.train()
    two = server(bounds=Bounds(runs=2))
    assert two.train(run="cd" * 16) == ""
    assert "remembers 2 runs, its bound (bounds.runs" in two.train(run="ef" * 16)


def test_the_join_says_nothing_where_counts_may_not_leave(server: Make) -> None:
    one = server(kinds=("weights", "metric", "statistic"))
    reply = one.join()
    assert "count" in (reply.failure or "")
    assert not reply.roles


def test_policies_for_some_runs_and_servers_alone(server: Make) -> None:
    assert "does not name the run" in server(runs=("cd" * 16,)).train()
    assert "does not name the server" in server(servers=("other",)).train()
    assert server(runs=(RUN,), servers=("the CA",)).train() == ""


def test_forgotten_runs_do_not_come_back(server: Make) -> None:
    one = server()
    assert one.train() == ""
    memory = StateFolder(one.home)
    assert memory.find("abab") == RUN
    assert memory.forget(RUN) == {"states": 1, "weights": 1, "agreements": 0, "models": 0}
    assert not memory.runs()
    assert [p.name for p in (one.home / "states" / RUN).iterdir()] == ["run.json"]
    assert "has forgotten the run" in one.train()


def test_states_of_quiet_runs_go_after_the_time_that_the_party_sets(
    server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server(retention=Retention(days=2.0))
    assert one.train() == ""
    path = one.home / "states" / RUN / "run.json"
    record = json.loads(path.read_text())
    for days, left in ((1.9, True), (2.1, False)):
        path.write_text(json.dumps(record | {"used": record["used"] - days * 86400}))
        one.restart(one.party.guard.policy if one.party.guard else None)
        assert (one.home / "states" / RUN / "clients").exists() is left
    assert "has forgotten the run" in one.train()


def test_a_step_that_does_not_say_what_it_trains_is_not_done(server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = client_step(fedavg.Averaging.__dict__["local"].function)
    monkeypatch.setattr(fedavg.Averaging, "local", plain)
    assert "the step local does not say what it trains: no party does it" in server().train()


@pytest.mark.parametrize("name", METHODS.built_in)
def test_every_step_of_every_method_says_what_it_trains(name: str) -> None:
    assert [step.name for step in steps_of(METHODS[name]).values() if step.trains is None] == []


@pytest.mark.parametrize("partial_batches", [True, False])
@pytest.mark.parametrize("unit", ["epochs", "iterations"])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 18])
def test_the_work_that_a_policy_sees_is_the_work_that_is_done(n: int, unit: Any, partial_batches: bool) -> None:
    training = Training(unit=unit, amount=3, batch_size=8, partial=partial_batches)
    rows = list(batches(n, training, torch.Generator().manual_seed(0)))
    work = training.work(0.1, n)
    assert (work.steps, work.batch) == (len(rows), max(map(len, rows)))


def test_the_work_of_meta_steps(faces: Path, server: Make) -> None:
    settings = parse(server().spec["settings"] | {"method": {"name": "hf-maml"}})
    world, _ = world_of_party(server().spec, Policy(methods=("fedavg",)), data=str(faces), file=None, clients=[HOUSE])
    method = HFMaml(training=MetaTraining(steps=3, batch_size=64))
    assert settings.method.name == "hf-maml"
    n = len(world.clients[HOUSE].train)
    message = fedavg.Down(server().theta, {}, None, 0.1)
    seen: list[Any] = []

    class Look:
        def before(self, step: Any, client: Any, message: Any) -> None:
            seen.append(step.trains(step.owner, client, message))

        def after(self, message: Any, reply: Any) -> None:
            seen.append(reply)

    request = Request(
        RUN, {}, HOUSE, "local", "federate", 0, 1, new_state=f"clients/{HOUSE}-000001-1.bin", message=message
    )
    perform(world, method.local, request, OwnStates(faces.parent / "meta"), check=Look())
    work, reply = seen
    assert work == (0.1, 3, n // 3)
    assert reply.gradients == 3 * method.training.gradients


def test_fedface_needs_the_kind_of_templates(server: Make) -> None:
    given = ["model.frozen_norm=true", "method.pretrain_rounds=0", "partition.public_identities=0"]
    one = server(*given, method="fedface", kinds=SAFE)
    assert "fedface would send class_vectors" in (one.join().failure or "")
    two = server(*given, method="fedface", kinds=(*SAFE, "class_vectors"))
    down = fedface.Down(two.theta, None, 0.0)
    assert "local has lr = 0" in two.ask(down, run="cd" * 16)[0], "to enrol alone is to ask for mean features"
    failure, payload = two.ask(replace(down, lr=0.001), run="cd" * 16)
    assert failure == ""
    assert decode(payload, fedface.Up).w.shape == (6, 16)


def test_bounds_in_words() -> None:
    with pytest.raises(PublicError, match="would send labels, a kind"):
        Policy(methods=("x",)).check_kinds(frozenset({Disclosure.labels}), "it would send")


def test_class_vectors_of_public_people_are_not_those_of_a_partys_own(server: Make) -> None:
    """Class vectors that `fedfr-joint` sends are of public people; two of its steps could be asked for others."""
    changes = ["partition.public_identities=0", "method.public.use=none", "method.pretrain_rounds=1"]
    one = server(*changes, method="fedfr-joint", kinds=(*WITH_NORM, "class_vectors"))
    fit, measure = supervised.Fit(one.theta, 0.01, class_vectors=True), supervised.Measure(one.theta)
    assert one.ask(fit, step="fit")[0] == "this step is for public alone"
    assert one.ask(measure, step="measure")[0] == "this step is for public alone"


def test_a_party_counts_what_it_spends_and_stops_at_its_budget(server: Make) -> None:
    """Over kills, forgotten runs and other runs; the same request again costs nothing."""
    noisy, plain = ("model.name=tiny_nobn", "aggregation.dp.noise=2"), Protect(dp_epsilon=2.5, dp_delta=1e-3)
    one = server(*noisy, protect=plain)
    assert "sends nothing into sums without noise" in one.train()
    assert "sends nothing into sums without noise" in one.train(noise=float("inf"))
    assert one.train(noise=2.0) == ""
    assert [one.train(noise=2.0), one.train(noise=2.0)] == ["", ""]
    total, _ = StateFolder(one.home).spent()[HOUSE]
    assert total == 0.25
    assert one.train(noise=2.0, lr=0.2) == "", "another request for the same place is another reply"
    assert StateFolder(one.home).spent()[HOUSE][0] == 0.5
    one.restart(one.party.guard.policy)  # type: ignore[union-attr]
    StateFolder(one.home).forget(RUN)
    refused = one.train(run="cd" * 16, noise=1.0)
    assert "this round would make epsilon 4" in refused
    assert "this party's budget is 2.5 (protect.dp_epsilon)" in refused
    assert StateFolder(one.home).spent()[HOUSE][0] == 0.5, "what was refused was not spent"
    assert one.train(run="cd" * 16, noise=8.0) == ""
    assert not one.ask(scoring.ScoreRequest(one.theta), step="score", run="cd" * 16)[0], "tests are no sums"


def test_the_same_message_to_another_state_costs_again(server: Make) -> None:
    one = server("model.name=tiny_nobn", "aggregation.dp.noise=2", protect=Protect(dp_epsilon=2.5, dp_delta=1e-3))
    assert [one.train(noise=2.0), one.train(noise=2.0)] == ["", ""]
    assert StateFolder(one.home).spent()[HOUSE][0] == 0.25
    assert isinstance(one.party.states, OwnStates)
    name = f"clients/{HOUSE}-000001-1.bin"
    other = StateFile(name, one.party.states.digest((one.home / "states" / RUN / name).read_bytes()))
    assert one.train(noise=2.0, state=other, new_state=f"clients/{HOUSE}-000001-2.bin") == ""
    assert StateFolder(one.home).spent()[HOUSE][0] == 0.5, "its reply is another one"


def test_class_vectors_with_noise_are_shown_once_in_a_run(server: Make) -> None:
    """A server that drops the state after each answer would get many versions, whose mean has little noise."""
    one = server("method.negatives=noisy", "method.batch_norm=local", kinds=(*WITH_NORM, "noisy_vectors"))
    moved = {k: 1.001 * v if k.endswith("weight") else v for k, v in one.theta.items()}

    def show(theta: Any, ask: int) -> tuple[str, bytes]:
        return one.ask(Show(theta), step="show_noisy", ask=ask)

    refused, first = show(one.theta, 1)
    assert (refused, len(decode(first, NoisyVectors).vectors)) == ("", 6)
    assert show(one.theta, 2) == ("", first), "asked again for the same, it says the same"
    assert "shown its class vectors with noise in this run, and does so once" in show(moved, 3)[0]
    one.restart(one.party.guard.policy)  # type: ignore[union-attr]
    assert "does so once" in show(moved, 4)[0], "after a restart too"


def test_what_a_reply_depends_on_beside_its_message() -> None:
    asked = Request(RUN, client=HOUSE, step="local")
    others = [replace(asked, step="fit"), replace(asked, people="{}"), replace(asked, state=StateFile("a", "d"))]
    assert len({str(request.beside) for request in (asked, *others)}) == 4


def test_a_budget_that_cannot_be_read_is_no_budget(server: Make) -> None:
    one = server("model.name=tiny_nobn", "aggregation.dp.noise=2", protect=Protect(dp_epsilon=5))
    one.home.mkdir(parents=True, exist_ok=True)
    (one.home / "spent.json").write_text('{"house-1": "nothing"}')
    assert "record of what it has spent is damaged" in one.train(noise=2.0)


# What is kept of large networks


def test_the_same_networks_of_several_clients_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.deployment.last_weights.LARGE", 0)
    last = LastWeights(StateFolder(tmp_path))
    one, other = (Request(run=RUN, client=name) for name in ("one", "other"))
    networks = {"theta": {"a": torch.randn(5), "b": torch.arange(3)}}
    last.remember(one, networks)
    last.remember(other, networks)
    last.wait()
    assert last._path(one).samefile(last._path(other))
    moved = {"theta": {"a": networks["theta"]["a"] + 1}}
    last.remember(other, moved)
    last.wait()
    assert not last._path(one).samefile(last._path(other)), "one of them goes its own way"
    assert last._seen is None, "nothing large is kept in memory"
    assert torch.equal(last.seen(one)["theta"]["a"], networks["theta"]["a"])
    assert torch.equal(last.seen(other)["theta"]["a"], moved["theta"]["a"])
    assert torch.equal(last.seen(other)["theta"]["b"], networks["theta"]["b"]), "what a request leaves out stays known"


def test_one_message_to_several_clients_is_written_and_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visard.deployment.last_weights.LARGE", 0)
    monkeypatch.setattr("visard.deployment.last_weights.digest_of", lambda _: pytest.fail("hashed for nothing"))
    last = LastWeights(StateFolder(tmp_path))
    one, other = (Request(run=RUN, client=name) for name in ("one", "other"))
    first, second = ({"theta": {"a": torch.randn(5)}} for _ in range(2))
    for request in (one, other):
        last.remember(request, first, serial=1)
    last.wait()
    assert last._path(one).samefile(last._path(other))
    assert (last.measured(one, 0), last.measured(Request(run=RUN, client="a third"), 2)) == ({}, {}), "nothing known"
    last.measured(one, 2)["theta"] = found = Distance.of(second["theta"], first["theta"])
    assert last.measured(other, 2) == {"theta": found}, "the same file, the same message"
    assert last.measured(other, 3) == {}, "another message"
    last.measured(other, 2)["theta"] = found
    last.remember(other, second, serial=2)
    assert last.measured(other, 2) == {}, "another file"
    assert not last._path(one).samefile(last._path(other))
    last.remember(one, second, serial=2)
    last.wait()
    assert last._path(one).samefile(last._path(other))
    assert torch.equal(last.seen(one)["theta"]["a"], second["theta"]["a"])


def test_no_reply_leaves_before_the_weights_of_its_request_are_on_disk(
    server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, put = server("model.name=tiny_nobn"), last_weights._put

    def full(path: Path, pieces: Sequence[Data]) -> None:
        raise VisardError(f"cannot write {path}: No space left on device")

    def slow(path: Path, pieces: Sequence[Data]) -> None:
        time.sleep(0.5)
        put(path, pieces)

    monkeypatch.setattr(last_weights, "LARGE", 0)
    monkeypatch.setattr(last_weights, "_put", full)
    assert one.train() == "VisardError: the party's log says more"
    assert not list(one.home.rglob("seen-*"))
    monkeypatch.setattr(last_weights, "_put", slow)
    assert one.train() == ""
    assert [path.stat().st_size > 10**5 for path in one.home.rglob("seen-*.bin")] == [True]


def test_the_weights_of_a_step_that_fails_are_not_those_of_the_next_request(
    server: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party writes a request over the file of the last one, which must be read by then."""
    one, put = server("model.name=tiny_nobn"), last_weights._put
    near, far = (encode(fedavg.Down({k: v + d for k, v in one.theta.items()}, {}, None, 0.1)) for d in (0, 100))
    file, start = os.open(tmp_path / "message", os.O_RDWR | os.O_CREAT), -largest_at(near) % ALIGNED

    def slow(path: Path, pieces: Sequence[Data]) -> None:
        time.sleep(0.5)
        put(path, pieces)

    def ask(data: bytes) -> str:
        os.pwrite(file, data, start)
        request = Request(RUN, one.spec, HOUSE, "local", "federate", 0, 1, new_state=f"clients/{HOUSE}-000001-1.bin")
        header, _ = one.party.do(pack(request), Filed(os.dup(file), len(data), start))
        return unpack(header, Reply).failure or ""

    monkeypatch.setattr(last_weights, "LARGE", 0)
    monkeypatch.setattr(last_weights, "_put", slow)
    with monkeypatch.context() as broken:
        broken.setattr("visard.engines.local._done", lambda *_: 1 / 0)
        assert "ZeroDivisionError" in ask(near)
    assert "bounds.distance" in ask(far)
    os.close(file)


def test_what_a_killed_process_has_written_by_half_does_not_stay(tmp_path: Path) -> None:
    """A server may let a step be late as often as it asks, and the process is killed then."""
    last, request = LastWeights(StateFolder(tmp_path)), Request(run=RUN, client="one")
    path = last._path(request)
    path.parent.mkdir(parents=True)
    (left := path.with_name(f".{path.name}.999999999.tmp")).write_bytes(b"half")
    last.remember(request, {"theta": {"a": torch.randn(5)}})
    assert list(path.parent.iterdir()) == [path]
    left.write_bytes(b"half")
    last.folder.forget(RUN)
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_weights_whose_first_numbers_are_zeros_are_not_taken_for_zeros() -> None:
    late = torch.zeros(1000)
    assert not any_nonzero({"a": late})
    late[-1] = 1.0
    assert any_nonzero({"a": late})


def test_the_numbers_of_one_message_to_several_clients_are_looked_at_once(tmp_path: Path) -> None:
    last, good, bad = LastWeights(StateFolder(tmp_path)), {"a": torch.ones(3)}, {"a": torch.tensor([1.0, math.inf])}
    assert last.not_finite({"theta": good}, 5) is None
    assert last.not_finite({"theta": bad}, 5) is None, "the same serial: the same bytes"
    assert last.not_finite({"theta": bad}, 6) == "theta.a"
    assert last.not_finite({"theta": bad}, 6) == "theta.a", "not only once"
    assert last.not_finite({"theta": good}, 0) is None
    assert last.not_finite({"theta": bad}, 0) == "theta.a", "a message without a serial is always looked at"
    assert last.not_finite({"theta": {"a": torch.tensor([3e38, 3e38])}}, 7) is None, "only their sum is not finite"


def test_a_distance_is_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.deployment.last_weights.PIECE", 7)
    new, old = ({"a": torch.randn(5, 5), "b": torch.randn(()), "c": torch.randn(0)} for _ in range(2))
    joined = [torch.cat([v.reshape(-1) for v in part.values()]).double() for part in (new, old)]
    expected = [float((joined[0] - joined[1]).norm()), float(joined[1].norm())]
    assert list(Distance.of(new, old)[:2]) == pytest.approx(expected)
    assert Distance.of({k: torch.zeros_like(v) for k, v in new.items()}, old).vanished
    assert not Distance.of(new, old).vanished


def test_a_message_in_a_file_gives_the_same_and_is_not_written_on(faces: Path, tmp_path: Path) -> None:
    policy = Policy(methods=("fedavg",), kinds=WITH_NORM)
    plain, filed = (Server(tmp_path / name, faces, policy) for name in ("plain", "filed"))
    filed.party.outbox = Outbox(tmp_path)
    for round in range(2):  # the second is measured by the first
        down = fedavg.Down(plain.theta, {}, None, 0.1)
        data = encode(down)
        (path := tmp_path / "message").write_bytes(data)
        name = f"clients/{HOUSE}-{round + 1:06d}-1.bin"
        header = pack(Request(RUN, plain.spec, HOUSE, "local", "federate", round, 1, new_state=name))
        expected, value = plain.party.do(header, data)
        answer, found = filed.party.do(header, Filed(os.open(path, os.O_RDONLY), len(data)))
        assert unpack(answer, Reply).failure is None is unpack(expected, Reply).failure
        assert bytes(found.map() if isinstance(found, Filed) else found) == bytes(value)
        assert path.read_bytes() == data
    far = encode(fedavg.Down({k: v + 100 for k, v in plain.theta.items()}, {}, None, 0.1))
    path.write_bytes(far)
    answer, _ = filed.party.do(header, Filed(os.open(path, os.O_RDONLY), len(far)))
    assert "bounds.distance" in (unpack(answer, Reply).failure or "")


def test_long_replies_go_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party(lambda *_: pytest.fail("not needed"), OwnStates(tmp_path / "states"), None)
    monkeypatch.setattr("visard.deployment.party.SHORT", 3)
    assert party._written([b"ab", b"cd"]) == b"abcd", "there is none"
    party.outbox = Outbox(tmp_path)
    assert party._written([b"ab", b"c"]) == b"abc"
    found = party._written([b"ab", b"cd"])
    assert isinstance(found, Filed)
    assert found.read(0, 4) == b"abcd"
