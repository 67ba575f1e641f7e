"""Secure aggregation below `Network.reduce`: the same mean, nothing of one client, noise for a server that cheats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE, smoke
from tests.engines.test_parties import HOUSES, Heard, OwnLink
from tests.policies import ANYTHING
from tests.toys import Toy, ToyDown, noise_faces, toy_engine, toy_world

import visard
from visard.aggregation.rules import Mean
from visard.aggregation.secure import Opening, Plan, digest_of_keys
from visard.config import load
from visard.core import BoundStep
from visard.crypto.secure_sum import Keys
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party, own_secret
from visard.deployment.policy import Policy
from visard.disclosure import MASKED
from visard.engines.codec import decode, encode
from visard.engines.ledger import Ledger
from visard.engines.local import LocalNetwork
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import PublicError, UsageError, VisardError
from visard.methods.fedavg import Down

SECURE = Mean(secure=True)
DOWN = ToyDown(torch.zeros(4), {"a": torch.full((2, 2), 3.0)})


class Watched(LocalNetwork):
    """Keeps every reply as the server sees it."""

    seen: list[Reply]

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        for reply in super().replies(step, requests):
            self.seen.append(reply)
            yield reply

    @property
    def ups(self) -> list[Any]:
        return [reply.value for reply in self.seen if hasattr(reply.value, "loss")]


def watched(folder: Path, **changes: Any) -> Watched:
    engine = toy_engine(folder, toy_world(folder, **changes))
    net = Watched(engine.world, engine.states, Ledger(engine.states.ledger))
    net.seen = []
    return net


def reduced(net: LocalNetwork, toy: Toy) -> tuple[dict[str, Any], Any]:
    return net.reduce(toy.add, dict.fromkeys(net.clients, DOWN), mean=("theta", "w"), by="n")


@pytest.mark.parametrize("lost", [{}, {"client-001": "raise"}])
def test_the_mean_is_the_plain_one_and_lost_clients_do_not_count(tmp_path: Path, lost: dict[str, str]) -> None:
    net, plain = watched(tmp_path, clients=4, aggregation=SECURE), watched(tmp_path, clients=4)
    means, ups = reduced(net, Toy(faults=lost))
    clear, _ = plain.reduce(Toy(faults=lost).add, dict.fromkeys(plain.clients, DOWN), mean=("theta", "w"), by=None)
    assert set(ups) == set(net.clients) - lost.keys()
    assert set(ups.missing) == lost.keys()
    assert torch.equal(means["theta"]["a"], torch.full((2, 2), 4.0)), "every client adds 1 to 3"
    assert means["w"].numpy() == pytest.approx(clear["w"].numpy(), abs=2**-22)
    assert [up.loss for up in ups.values()] == pytest.approx([float(clear["w"].sum())] * len(ups), abs=1e-3)
    assert {up.n for up in ups.values()} == {1}, "what a client says of itself does not leave"


def test_asks_of_the_method_keep_their_numbers(tmp_path: Path) -> None:
    """The random numbers of its steps depend on them."""
    net = watched(tmp_path, aggregation=SECURE)
    reduced(net, Toy())
    assert {reply.ask for reply in net.seen if hasattr(reply.value, "loss")} == {1}
    assert net.asks == 1


def test_weights_are_what_the_operator_states_or_equal(tmp_path: Path) -> None:
    stated = {"client-000": 30, "client-001": 10, "client-002": 10}
    net, plain = watched(tmp_path, aggregation=SECURE, stated=stated), watched(tmp_path)
    reduced(plain, Toy())
    means, _ = reduced(net, Toy())
    weights = [stated[c] / 50 for c in net.clients]
    slow = sum(w * up.w for w, up in zip(weights, plain.ups, strict=True))
    assert means["w"].numpy() == pytest.approx(slow.numpy(), abs=2**-22)  # type: ignore[union-attr]


def test_nothing_of_a_single_client_leaves_in_the_clear(tmp_path: Path) -> None:
    net = watched(tmp_path, clients=4, aggregation=SECURE)
    reduced(net, Toy())
    assert net.ledger is not None
    net.ledger.save(tmp_path / "ledger.json", frozenset())
    left = {k: v["bytes"] for k, v in json.loads((tmp_path / "ledger.json").read_text())["totals"].items()}
    assert left.keys() == {"public_key", "ciphertext", "share", "masked", "count", "metric", "class_vectors"}
    assert left["class_vectors"] < 4 * 100, "four empty tensors"
    assert [(up.loss, up.n, up.w.numel(), list(up.theta)) for up in net.ups] == [(0.0, 1, 0, [MASKED])] * 4


def test_a_masked_vector_looks_like_random_numbers(tmp_path: Path) -> None:
    net = watched(tmp_path, aggregation=SECURE)
    big = ToyDown(torch.zeros(4), {"a": torch.zeros(300, 300)})
    net.reduce(Toy().add, dict.fromkeys(net.clients, big), mean="theta", by=None)
    vectors = [up.theta[MASKED] for up in net.ups]
    for vector in vectors:
        data = np.frombuffer(vector.numpy().tobytes(), np.uint8)
        expected = data.size / 256
        counts = np.bincount(data, minlength=256)
        assert ((counts - expected) ** 2 / expected).sum() < 400, "chi-square with 255 degrees of freedom"
    assert abs(np.corrcoef(vectors[0].double().numpy(), vectors[1].double().numpy())[0, 1]) < 0.02


def test_different_models_for_different_clients_give_noise(tmp_path: Path) -> None:
    """A hostile server that wants one client's update sends the others something else."""
    net = watched(tmp_path, aggregation=SECURE)
    messages = dict.fromkeys(net.clients, DOWN) | {net.clients[0]: replace(DOWN, theta={"a": torch.zeros(2, 2)})}
    with pytest.raises(VisardError, match="do not cancel: its clients were asked different things"):
        net.reduce(Toy().add, messages, mean="theta", by=None)


def test_too_many_lost_clients_end_the_round_with_a_line(tmp_path: Path) -> None:
    net = watched(tmp_path, clients=4, aggregation=SECURE, min_replies=0.1)
    with pytest.raises(VisardError, match="2 of 3 shares of the .* are there: too few"):
        reduced(net, Toy(faults={"client-001": "raise", "client-002": "raise"}))


def test_a_sum_of_fewer_clients_than_the_run_says_is_not_opened(tmp_path: Path) -> None:
    net = watched(tmp_path, aggregation=Mean(secure=True, fewest=4))
    with pytest.raises(VisardError, match="3 clients are in a sum, 4 are needed"):
        reduced(net, Toy())
    assert not [reply for reply in net.seen if hasattr(reply.value, "own")], "nobody was asked to open it"


def test_a_change_beyond_the_range_is_one_line(tmp_path: Path) -> None:
    net = watched(tmp_path, aggregation=Mean(secure=True, range=0.5))
    with pytest.raises(VisardError, match=r"beyond 0\.5, the range of a secure sum"):
        reduced(net, Toy())


class Liar(Watched):
    """A client whose vector has another length."""

    def replies(self, step: BoundStep[Any, Any], requests: Sequence[Request]) -> Iterator[Reply]:
        for reply in super().replies(step, requests):
            if reply.client == "client-002" and hasattr(reply.value, "loss"):
                reply = replace(reply, value=replace(reply.value, theta={MASKED: torch.zeros(3, dtype=torch.int32)}))
            yield reply


def test_a_vector_of_another_length_is_refused_and_named(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path, toy_world(tmp_path, aggregation=SECURE))
    net = Liar(engine.world, engine.states, Ledger(engine.states.ledger))
    net.seen = []
    means, ups = reduced(net, Toy())
    assert "client-002" in ups.missing
    assert torch.equal(means["theta"]["a"], torch.full((2, 2), 4.0)), "the others are the sum"


def plan(**changes: Any) -> Plan:
    keys = Keys(b"s" * 32, b"m" * 32)
    digest = digest_of_keys(keys)
    made = Plan("r add 0 1", {"b": keys}, {"a": digest, "b": digest}, {"a": 1.0, "b": 1.0}, ("theta",), 4.0)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"members": {"a": "x", "b": "y"}}, "contradicts itself"),
        ({"weights": {"a": 1.0}}, "contradicts itself"),
        ({"weights": {"a": 2.0, "b": 1.0}}, "out of bounds"),
        ({"largest": 0.0}, "out of bounds"),
    ],
)
def test_a_plan_that_makes_no_sense_is_one_line(changes: dict[str, Any], line: str) -> None:
    assert Plan.parse(plan().text()) == plan()
    with pytest.raises(PublicError, match=line):
        Plan.parse(plan(**changes).text())


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 5000, plan().text().replace("around", "x")])
def test_a_malformed_plan_is_one_line(text: str) -> None:
    with pytest.raises(PublicError, match="malformed"):
        Plan.parse(text)


@pytest.mark.parametrize("method", ["hf-maml", "fedface", "fedfr-joint"])
def test_every_method_that_averages_can_have_it(tmp_path: Path, method: str) -> None:
    sets = [*smoke(method), "aggregation.secure=true", "evaluation.every=0", "method.rounds=1"]
    local = visard.run(method, out=tmp_path / "local", overrides=sets)
    assert local is not None
    rows = json.loads((tmp_path / "local" / "ledger.json").read_text())["rows"]
    assert not [row for row in rows if row[5] == "weights" and row[0] not in ("pretrain", "source")]
    assert {row[5] for row in rows} >= {"masked", "share"}


def test_a_method_that_needs_single_replies_says_what_stays_visible(tmp_path: Path) -> None:
    """FedFace averages its network securely; the server still has the class vectors, and the run says so in a line."""
    heard = Heard()
    sets = [*smoke("fedface"), "aggregation.secure=true", "evaluation.every=0", "method.rounds=1"]
    visard.run("fedface", out=tmp_path / "run", overrides=sets, watcher=heard)
    assert [
        line for line in heard.problems if "needs the single replies of the clients for their class vectors" in line
    ]
    kinds = {
        row[5] for row in json.loads((tmp_path / "run" / "ledger.json").read_text())["rows"] if row[0] == "federate"
    }
    assert {"masked", "class_vectors"} <= kinds
    assert "weights" not in kinds


@pytest.mark.usefixtures("quick_children")
def test_it_gives_the_same_bits_on_a_pool(tmp_path: Path) -> None:
    sets = [*SMOKE, "aggregation.secure=true", "evaluation.every=0", "method.rounds=1"]
    for engine in ("local", "pool"):
        visard.run("fedavg", out=tmp_path / engine, overrides=[*sets, f"engine.kind={engine}"])
    for file in ("model.safetensors", "ledger.json"):
        assert (tmp_path / "local" / file).read_bytes() == (tmp_path / "pool" / file).read_bytes()


def test_what_cannot_be_combined_is_one_line() -> None:
    with pytest.raises(UsageError, match="bound needs the single replies"):
        load("fedavg", ["aggregation.secure=true", "aggregation.bound=3"])


# ---- parties -------------------------------------------------------------------------------------------------------


class Replayed(OwnLink):
    """Keeps the requests of secure sums, to be asked again by a hostile server."""

    kept: dict[str, tuple[bytes, bytes]]

    def send(self, client: str, header: bytes, payload: bytes, timeout: float) -> str | None:
        request = unpack(header, Request)
        if client == HOUSES[0] and (request.secure or request.step == "secure_open"):
            self.kept[request.step] = header, payload
        return super().send(client, header, payload, timeout)


Go = Callable[..., tuple[Path, Replayed, dict[str, Party]]]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    for seed, name in enumerate((*HOUSES, "public")):
        noise_faces(tmp_path / "homes" / name, 12, 8, seed)

    def run(*more: str, name: str = "run", policy: Policy = ANYTHING) -> tuple[Path, Replayed, dict[str, Party]]:
        at = {role: party(tmp_path, role, policy) for role in HOUSES}
        link = Replayed(at)
        link.kept = {}
        monkeypatch.setattr("visard.runs.run.connect", lambda *_: link)
        own = ("partition.kind=parties", "partition.clients=2", "partition.test_identities=0", "engine.kind=flower")
        mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine."))]
        sets = [*mine, *own, "engine.server=x", f"data.source={tmp_path / 'homes' / 'public'}", "evaluation.every=0"]
        heard = Heard()
        visard.run("fedavg", out=tmp_path / name, overrides=[*sets, "method.rounds=2", *more], watcher=heard)
        assert heard.problems == []
        return tmp_path / name, link, at

    return run


def party(folder: Path, role: str, policy: Policy = ANYTHING) -> Party:
    return Party(
        partial(world_of_party, data=str(folder / "homes" / role), file=None, clients=[role]),
        OwnStates(folder / role / "states"), Guard(folder / role, policy),
        models=folder / role / "models", trunks=folder / role / "trunks",
        secret=own_secret(folder / role / "secret.key"),
    )  # fmt: skip


def test_parties_give_the_plain_mean_and_no_weights(go: Go, tmp_path: Path) -> None:
    secure, _, _ = go("aggregation.secure=true")
    plain, _, _ = go("aggregation.bound=0", "aggregation.max_weight=1", "method.weighting=uniform", name="plain")
    a, b = (load_file(folder / "model.safetensors") for folder in (secure, plain))
    assert all(torch.allclose(a[k].double(), b[k].double(), atol=1e-3) for k in a if a[k].is_floating_point())
    rows = json.loads((secure / "ledger.json").read_text())["rows"]
    assert not [row for row in rows if row[5] in ("weights", "statistic") and row[6] > 100]
    assert {row[5] for row in rows} >= {"masked", "share", "public_key", "ciphertext"}
    secrets = [(tmp_path / role / "secret.key").read_bytes() for role in HOUSES]
    assert len(set(secrets)) == 2


def test_a_party_may_require_it(go: Go) -> None:
    strict = ANYTHING.model_copy(update={"protect": ANYTHING.protect.model_copy(update={"secure_aggregation": True})})
    with pytest.raises(VisardError, match="requires secure aggregation"):
        go(policy=strict)
    go("aggregation.secure=true", name="secure", policy=strict)


def test_a_party_masks_one_reply_and_opens_one_sum_for_good(go: Go, tmp_path: Path) -> None:
    """A hostile server asks again, after the party was restarted, with one thing changed."""
    _, link, _ = go("aggregation.secure=true")
    again = party(tmp_path, HOUSES[0])
    header, payload = link.kept["secure_open"]
    assert unpack(again.do(header, payload)[0], Reply).failure is None, "the same once more is no news"
    opening = decode(payload, Opening)
    for changed, line in (
        (replace(opening, arrived=(HOUSES[0],)), "wants 2 parties in a sum"),
        (replace(opening, arrived=("x", *opening.arrived)), "not those that it began with"),
        (replace(opening, plan=replace(Plan.parse(opening.plan), largest=2.0).text()), "masked nothing"),
    ):
        answer = unpack(again.do(header, encode(changed))[0], Reply)
        assert line in (answer.failure or ""), answer
    header, payload = link.kept["local"]
    request, message = unpack(header, Request), decode(payload, Down)
    later = replace(request, new_state=f"clients/{HOUSES[0]}-000003-9.bin")  # a place for a state that is free
    answer = unpack(again.do(pack(later), encode(replace(message, lr=message.lr / 2)))[0], Reply)
    assert "masked another reply" in (answer.failure or "")
    elsewhere = replace(later, ask=2)
    answer = unpack(again.do(pack(elsewhere), payload)[0], Reply)
    assert "another place of the run" in (answer.failure or "")


def test_a_party_counts_the_parties_of_a_sum(go: Go) -> None:
    """A server cannot have a sum over fewer than the policy says, whatever it said of the run."""
    _, link, at = go("aggregation.secure=true")
    house = at[HOUSES[0]]
    assert house.guard is not None
    bounds = ANYTHING.bounds.model_copy(update={"parties": 2})
    house.guard.policy = ANYTHING.model_copy(update={"bounds": bounds})
    header, payload = link.kept["secure_open"]
    opening = decode(payload, Opening)
    answer = unpack(house.do(header, encode(replace(opening, arrived=(HOUSES[0],))))[0], Reply)
    assert "wants 2 parties in a sum" in (answer.failure or "")
