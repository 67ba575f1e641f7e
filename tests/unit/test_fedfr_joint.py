"""FedFR-joint: what leaves and what stays, its switches, its stages, and its parts."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.joint_toys import joint_world
from tests.toys import toy_engine, toy_network, toy_world

from visard.config import load
from visard.core import PUBLIC, Disclosure, declared_kinds
from visard.disclosure import pieces
from visard.engines.codec import size_of
from visard.engines.local import LocalNetwork
from visard.engines.world import World, generator
from visard.errors import UsageError
from visard.learning.features import class_means, features_of, shared_features
from visard.learning.objective import ContrastSettings, Pictures, distillation, untrained
from visard.learning.weights import load_weights, weights_of
from visard.methods.fedfr_joint import FedFRJoint, Server, Up
from visard.methods.fedfr_joint_client import BranchSettings, JointTraining, PersonalSettings, PublicSettings

TRAINING = JointTraining(lr=0.02, batch_size=8, amount=1, schedule="constant")
NO_BRANCH = BranchSettings(weight=0.0)
METHOD = FedFRJoint(rounds=2, training=TRAINING, public=PublicSettings(threshold=0.97))


def play(folder: Path, method: FedFRJoint, world: World | None = None) -> tuple[Server, LocalNetwork, dict[str, Any]]:
    """All stages on the in-process engine, and the figures of every round."""
    net = toy_engine(folder, world or joint_world(folder))
    server, logged = method.start(net.world.setup()), {}
    for stage in method.stages():
        for round in range(stage.rounds):
            net.begin(stage.name, round)
            server = stage.run(server, net)
            logged[f"{stage.name}-{round}"] = dict(net.traffic.figures)
    return server, net, logged


def rows(net: LocalNetwork) -> list[list[Any]]:
    assert net.ledger is not None
    net.ledger.flush()
    return [json.loads(line) for line in net.states.ledger.read_text().splitlines()]


def test_own_class_vectors_transformation_heads_and_bias_never_leave(tmp_path: Path) -> None:
    _, net, _ = play(tmp_path, METHOD)
    assert {f.name for f in fields(Up)} == {"theta", "Phi", "n", "figures"}
    assert declared_kinds(Up)["Phi"] is Disclosure.class_vectors
    parts = pieces(Up(toy_network().state_dict(), None, 0, {}), net.world.statistics)
    sizes = {kind.value: size_of(value) for field, kind, value in parts if field == "theta"}
    for _, _, client, message, field, kind, left, encrypted in rows(net):
        assert not encrypted
        if client == PUBLIC:
            assert (message, field, kind) == ("Proxies", "Phi", "class_vectors")
            continue
        assert message == "Up"
        if field == "theta":
            assert left == sizes[kind], "the backbone and nothing beside it"
        if field == "Phi":
            assert (kind, left) == ("class_vectors", size_of(torch.zeros(4, 8))), (
                "one row for each public person, none for its own"
            )
        assert field in ("theta", "Phi") or left < 300
    for client in net.clients:
        state = net.states.client_state(client)
        assert set(state) == {"theta", "W", "branch"}
        assert len(state["W"]) == net.world.clients[client].n_classes
        assert set(state["branch"]) == {"transform.weight", "transform.bias", "head.weight", "head.bias"}


def test_without_public_people_it_is_federated_averaging(tmp_path: Path) -> None:
    method = replace(METHOD, public=PublicSettings(use="none"), contrast=ContrastSettings(weight=0), branch=NO_BRANCH)
    server, net, logged = play(tmp_path, method, toy_world(tmp_path))
    assert server.Phi is None
    assert set(logged["federate-1"]) == {"cos", "loss", "steps", "public", "lr"}
    assert {r[4] for r in rows(net) if r[6]} == {"theta", "n", "figures"}
    assert set(net.states.client_state(net.clients[0])) == {"theta", "W"}
    assert method.class_vectors(server) is None


def test_the_first_round_has_no_contrast_unless_asked(tmp_path: Path) -> None:
    _, _, logged = play(tmp_path, METHOD)
    assert "con" not in logged["federate-0"]
    assert 0 < logged["federate-1"]["con"] < 5
    (tmp_path / "other").mkdir()
    _, _, logged = play(tmp_path / "other", replace(METHOD, contrast=ContrastSettings(first="random")))
    assert "con" in logged["federate-0"]


def test_an_untrained_teacher_is_not_the_network() -> None:
    network, x = toy_network(), torch.rand(3, 3, 32, 32)
    torch.manual_seed(0)
    before = weights_of(network)
    other = untrained(network)(x)
    assert not torch.allclose(other, network.eval()(x))
    assert all(torch.equal(v, before[k]) for k, v in weights_of(network).items())


@pytest.mark.parametrize("stage", ["finetune", "kd"])
def test_two_stage_personalisation_stays_at_the_client(tmp_path: Path, stage: str) -> None:
    how = PersonalSettings(stage=stage, epochs=2)  # type: ignore[arg-type]
    method = replace(METHOD, rounds=1, branch=NO_BRANCH, personalise=how)
    assert [s.name for s in method.stages()] == ["federate", "personalise"]
    server, net, logged = play(tmp_path, method)
    second = [r for r in rows(net) if r[0] == "personalise"]
    assert {r[5] for r in second} == {"count", "metric"}
    assert ("kd" in logged["personalise-0"]) == (stage == "kd")
    for client in net.clients:
        own = method.personal(net.states.client_state(client), server.theta)
        assert own is not None
        assert set(own) == set(server.theta)
        assert not torch.equal(own["5.weight"], server.theta["5.weight"])


def test_distillation_is_zero_for_equal_logits_and_matches_its_definition() -> None:
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    assert float(distillation(a, a, 2.0)) == pytest.approx(0, abs=1e-12)
    p, q = torch.softmax(b / 2, 1), torch.softmax(a / 2, 1)
    torch.testing.assert_close(distillation(a, b, 2.0), 4 * (p * (p / q).log()).sum(1).mean())


def test_which_model_is_personal(tmp_path: Path) -> None:
    server, net, _ = play(tmp_path, METHOD)
    state = net.states.client_state(net.clients[0])
    own = {m: replace(METHOD, personalise=PersonalSettings(m)).personal(state, server.theta) for m in
           ("transformed", "local", "global")}  # fmt: skip
    assert own["global"] is server.theta
    assert own["local"] == state["theta"]
    assert own["transformed"] is not None
    assert set(own["transformed"]) - set(server.theta) == {"transform.weight", "transform.bias"}
    assert METHOD.alternatives(state, server.theta) == {}
    compared = replace(METHOD, personalise=PersonalSettings(compare=True))
    assert set(compared.alternatives(state, server.theta)) == {"global", "local"}
    assert METHOD.personal({}, server.theta) is server.theta, "a client that never took part"


def test_a_first_stage_gives_network_and_class_vectors(tmp_path: Path) -> None:
    method = replace(METHOD, rounds=1, pretrain_rounds=2, pretrain=TRAINING)
    assert [s.name for s in method.stages()] == ["pretrain", "federate"]
    server, net, logged = play(tmp_path, method)
    assert server.Phi is not None
    assert server.Phi.shape == (4, 8)
    assert logged["pretrain-1"]["loss"] > 0
    assert not any(r[3] == "Proxies" for r in rows(net)), "class vectors are known, none are measured"


def test_weights_of_the_average(tmp_path: Path) -> None:
    ends = []
    for k, weighting in enumerate(("local", "trained", "uniform")):
        (tmp_path / str(k)).mkdir()
        world = joint_world(tmp_path, clients=4)  # eight people over four: equal shares of people, not of pictures
        method = replace(METHOD, rounds=1, weighting=weighting, public=PublicSettings(threshold=0.95))  # type: ignore[arg-type]
        ends.append(play(tmp_path / str(k), method, world)[0].theta["5.weight"])
    assert not torch.equal(ends[0], ends[1])


def test_a_share_of_the_clients(tmp_path: Path) -> None:
    _, net, _ = play(tmp_path, replace(METHOD, rounds=1, participation=0.34))
    assert len({r[2] for r in rows(net)} - {PUBLIC}) == 1


def test_cap_all_and_proxies_choose_public_pictures(tmp_path: Path) -> None:
    world = joint_world(tmp_path)
    assert world.public is not None
    network, theta = world.network(), world.new_weights()
    load_weights(network, theta)

    class Party:
        public, numerics, rng = world.public, world.numerics, generator(0, "x")

    client: Any = Party()
    own = features_of(network, world.clients[world.training[0]].train)
    everything = PublicSettings(use="all").choose(client, network, theta, None, own)
    assert len(everything) == len(world.public) == 28
    assert len(PublicSettings(use="all", cap=5).choose(client, network, theta, None, own)) == 5
    hard = PublicSettings(threshold=0.97).choose(client, network, theta, None, own)
    assert set(hard.index) < set(world.public.index)
    Phi = class_means(features_of(network, world.public), torch.from_numpy(world.public.labels), 4)
    people = PublicSettings(threshold=0.95, mining="proxies").choose(client, network, theta, Phi, own)
    counts = np.bincount(people.labels, minlength=4)
    assert set(counts) == {0, 7}, "all pictures of a person or none"
    assert len(PublicSettings(threshold=1.0).choose(client, network, theta, None, own)) == 0


def test_steps_of_an_epoch_are_logged(tmp_path: Path) -> None:
    few = play(tmp_path, replace(METHOD, rounds=1, public=PublicSettings(threshold=1.0)))[2]["federate-0"]
    (tmp_path / "all").mkdir()
    many = play(tmp_path / "all", replace(METHOD, rounds=1, public=PublicSettings(use="all")), joint_world(tmp_path))
    assert few["public"] == 0
    assert many[2]["federate-0"]["public"] == 28
    assert many[2]["federate-0"]["steps"] == pytest.approx(few["steps"] + 28 / 8, abs=1)


def test_shared_features_are_a_pure_function(tmp_path: Path) -> None:
    world = joint_world(tmp_path)
    network, theta = world.network(), world.new_weights()
    assert world.public is not None
    load_weights(network, theta)
    first = shared_features(network, theta, world.public)
    assert shared_features(network, dict(theta), world.public) is first
    assert torch.equal(first, features_of(network, world.public))
    other = theta | {"5.bias": theta["5.bias"] + 1}
    load_weights(network, other)
    assert not torch.equal(shared_features(network, other, world.public), first)
    half = world.public.take(np.arange(5))
    assert len(shared_features(network, other, half)) == 5


def test_several_views_are_one_list(tmp_path: Path) -> None:
    world = joint_world(tmp_path)
    one, two = (world.clients[c].train for c in world.training[:2])
    both, chosen = Pictures([one, two]), np.array([len(one) + 2, 0, len(one), 3])
    assert len(both) == len(one) + len(two)
    found = both.batch(chosen)
    assert np.array_equal(found[0], two.batch([2])[0])
    assert np.array_equal(found[1:4], np.stack([one.batch([0])[0], two.batch([0])[0], one.batch([3])[0]]))
    assert np.array_equal(both.batch(np.array([1, 2])), one.batch([1, 2])), "a batch from one view alone"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("rounds=-1", "method.rounds"),
        ("participation=0.0", "method.participation"),
        ("personalise.stage=kd", "method.branch.weight=0"),
        ("public.cap=-1", "method.public.cap"),
        ("contrast.tau=0", "method.contrast.tau"),
        ("branch.weight=-1", "method.branch.weight"),
        ("personalise.epochs=0", "method.personalise.epochs"),
        ("head.kind=softmax", "must be cosface or arcface"),
    ],
)
def test_settings_that_make_no_sense(settings: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load("fedfr-joint", [f"method.{settings}"])


def test_data_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="partition.public_identities"):
        METHOD.start(toy_world(tmp_path).setup())
    world = joint_world(tmp_path / "joint")
    world.class_vectors = torch.zeros(5, 8)
    with pytest.raises(UsageError, match="5 rows for 4 public people"):
        METHOD.start(world.setup())
    world.class_vectors, world.biases = torch.zeros(4, 8), torch.zeros(4)
    with pytest.raises(UsageError, match="holds biases, the cosface head has none"):
        METHOD.start(world.setup())
