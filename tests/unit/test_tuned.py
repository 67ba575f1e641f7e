"""The test of a client before and after tuning: its pairs, its head, and that nothing of it stays."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.e2e.smoke import smoke
from tests.toys import noise_faces, toy_engine, toy_world

import visard
from visard.config import load
from visard.core import Client, Method, Weights
from visard.data.augment import Augment, augment, to_float
from visard.data.faces import FaceSet, FaceView
from visard.engines.local import enter
from visard.engines.request import Request
from visard.errors import UsageError
from visard.learning.features import embed
from visard.learning.heads import HeadSettings
from visard.learning.train import Training
from visard.learning.weights import load_weights, weights_of
from visard.methods.fedavg import FedAvg
from visard.methods.hf_maml import HFMaml, MetaTraining
from visard.methods.scoring import (
    ScoreRequest,
    Tuning,
    _training,
    draw_pairs,
    pair_metrics,
    score_tuned,
    settle,
    steps_of,
    tune,
)
from visard.runs.evaluation import _clients, _last

TUNING = Tuning(batches=3, batch_size=4, lr=0.05, pairs=40, draws=2)


@pytest.fixture
def faces(tmp_path: Path) -> FaceSet:
    return noise_faces(tmp_path / "faces")


def test_half_the_pairs_are_of_one_person(faces: FaceSet) -> None:
    own, others = FaceView.of(faces, [0, 1, 2, 6, 12, 13]), FaceView.of(faces, np.arange(72))
    drawn = draw_pairs(own, others, 301, np.random.default_rng(0))
    assert drawn is not None
    assert drawn.genuine.shape == drawn.impostor.shape == (150, 2)
    a, b = own.identity[drawn.genuine].T
    assert (a == b).all()
    assert (drawn.genuine[:, 0] != drawn.genuine[:, 1]).all()
    assert set(drawn.genuine[:, 0].tolist()) == {0, 1, 2, 4, 5}, "the one picture of person 1 has no partner"
    assert (own.identity[drawn.impostor[:, 0]] != others.identity[drawn.impostor[:, 1]]).all()
    assert set(drawn.impostor[:, 0].tolist()) == set(range(6))
    assert len(set(others.identity[drawn.impostor[:, 1]].tolist())) == 12, "impostors come from everybody"


def test_no_pairs_without_two_pictures_or_two_people(faces: FaceSet) -> None:
    single, one = FaceView.of(faces, [0, 6, 12]), FaceView.of(faces, [0, 1, 2])
    rng = np.random.default_rng(0)
    assert draw_pairs(single, FaceView.of(faces, np.arange(72)), 20, rng) is None
    assert draw_pairs(one, one, 20, rng) is None
    assert draw_pairs(one, single, 20, rng) is not None


def client_and_weights(folder: Path, state: dict[str, object] | None = None) -> tuple[Client, Weights]:
    world = toy_world(folder)
    theta = world.new_weights()
    client = enter(world, Request(client=world.training[0], stage="final", ask=1), dict(state or {}))
    return client, theta


def test_figures_are_those_of_the_drawn_pairs(tmp_path: Path) -> None:
    client, theta = client_and_weights(tmp_path)
    test, model = client.data.test, client.network()
    load_weights(model, theta)
    drawn = draw_pairs(test, test, 200, np.random.default_rng(1))
    assert drawn is not None
    f = embed(model, test).astype(np.float64)
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    genuine = [float(f[i] @ f[j]) for i, j in drawn.genuine]
    impostor = sorted((float(f[i] @ f[j]) for i, j in drawn.impostor), reverse=True)
    threshold = impostor[10]  # ten of a hundred lie above it
    tar = np.mean([g > threshold + 1e-6 for g in genuine])
    assert pair_metrics(model, test, test, drawn)["tar@far=0.1"] == pytest.approx(tar, abs=0.021)


def test_tuning_moves_the_network_and_leaves_nothing_behind(tmp_path: Path) -> None:
    client, theta = client_and_weights(tmp_path)
    before = copy.deepcopy(theta)
    method = HFMaml(head=HeadSettings("cosface", 8.0, 0.1))
    figures = score_tuned(client, theta, TUNING, method, None)
    assert {k.partition("/")[0] for k in figures} == {"untuned", "statistics", "tuned", "gain", "learnt"}
    assert figures["gain/tar@far=0.1"] == pytest.approx(figures["tuned/tar@far=0.1"] - figures["untuned/tar@far=0.1"])
    learnt = figures["tuned/tar@far=0.1"] - figures["statistics/tar@far=0.1"]
    assert figures["learnt/tar@far=0.1"] == pytest.approx(learnt)
    assert not torch.equal(weights_of(client.network())["0.weight"], theta["0.weight"])
    assert client.state == {}
    assert all(torch.equal(theta[k], before[k]) for k in theta)
    again = score_tuned(client_and_weights(tmp_path)[0], theta, TUNING, method, None)
    assert again == figures


def test_all_batches_of_tuning_are_full(tmp_path: Path) -> None:
    """Three or four left-over pictures would spoil the statistics of batch norm, which a client cannot repair."""
    client, theta = client_and_weights(tmp_path)
    model, seen = client.network(), []
    load_weights(model, theta)
    pictures = len(client.data.train)
    size = next(s for s in range(4, pictures) if pictures % s > 1)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])) if model.training else None)
    tune(client, model, replace(TUNING, batches=7, batch_size=size), HeadSettings("cosface", 8.0, 0.1), None)
    assert seen == [size] * 7


@pytest.mark.parametrize("kind", ["own", "global", "means", "random"])
def test_which_head_tuning_starts_from(tmp_path: Path, kind: str) -> None:
    """One step on all pictures goes down the gradient of the loss with that head."""
    settings = HeadSettings("cosface", 8.0, 0.1)
    client, theta = client_and_weights(tmp_path)
    train, model = client.data.train, client.network()
    load_weights(model, theta)
    torch.manual_seed(4)
    W, head = torch.randn(12, 8), settings.build(train.n_classes, 8)
    if kind == "own":
        client = replace(client, state={"head": weights_of(head)})
    elif kind == "global":
        head.weight.data.copy_(W[torch.from_numpy(train.classes)])
    elif kind == "means":
        f = torch.nn.functional.normalize(torch.from_numpy(embed(model, train)), dim=1)
        head.weight.data.copy_(torch.stack([f[train.labels == k].mean(dim=0) for k in range(train.n_classes)]))
    rows = torch.randperm(len(train), generator=client.rng.manual_seed(5)).numpy()
    x = augment(to_float(train.batch(rows), True), client.rng, Augment())
    model.train()
    loss = head.loss(model(x), torch.from_numpy(train.labels[rows]))
    slope = torch.autograd.grad(loss, model.get_parameter("0.weight"))[0]
    load_weights(model, theta)
    client.rng.manual_seed(5)
    torch.manual_seed(4)
    torch.randn(12, 8)  # so that a random head is the one above
    tuning = replace(TUNING, batches=1, batch_size=len(train), head="random" if kind == "random" else "means")
    tune(client, model, tuning, settings, W if kind == "global" else None)
    expected = theta["0.weight"] - TUNING.lr * slope
    torch.testing.assert_close(weights_of(model)["0.weight"], expected, rtol=1e-5, atol=1e-7)
    assert slope.abs().max() * TUNING.lr > 1e-4, "a step that shows"


def test_impostors_of_all_clients_and_of_the_own_people(tmp_path: Path) -> None:
    """Both are in the figures where the client has the pictures of all."""
    client, theta = client_and_weights(tmp_path)
    method = HFMaml(head=HeadSettings("cosface", 8.0, 0.1))
    assert not any("/own/" in name for name in score_tuned(client, theta, TUNING, method, None))
    client = replace(client, others=client.data.test)
    figures = score_tuned(client, theta, replace(TUNING, pairs=4000, draws=1), method, None)
    for state in ("untuned", "tuned"):
        assert figures[f"{state}/own/tar@far=0.1"] == pytest.approx(figures[f"{state}/tar@far=0.1"], abs=0.1)
    gain = figures["tuned/own/tar@far=0.1"] - figures["untuned/own/tar@far=0.1"]
    assert figures["gain/own/tar@far=0.1"] == pytest.approx(gain)
    test = client.data.test
    pairs = draw_pairs(test, test, 40, np.random.default_rng(2))
    assert pairs is not None
    same = replace(pairs, impostor=pairs.genuine, within=pairs.impostor)
    found = pair_metrics(client.network(), test, test, same)
    assert found["auc"] == pytest.approx(0.5), "here the impostors are the genuine pairs, within has the real ones"
    assert found["own/tar@far=0.1"] == pair_metrics(client.network(), test, test, pairs)["tar@far=0.1"]


@pytest.mark.parametrize("norm", ["update", "frozen"])
def test_tuning_with_frozen_norm_leaves_the_statistics_alone(tmp_path: Path, norm: Literal["update", "frozen"]) -> None:
    client, theta = client_and_weights(tmp_path)
    model = client.network()
    load_weights(model, theta)
    tune(client, model, replace(TUNING, norm=norm), HeadSettings("cosface", 8.0, 0.1), None)
    moved = {k for k, v in weights_of(model).items() if not torch.equal(v, theta[k])}
    assert any("running_mean" in k for k in moved) == (norm == "update")
    assert {"0.weight", "1.weight"} <= moved, "what is learnt still is, the norm's own scale too"


def test_statistics_alone_are_tuning_without_a_gradient(tmp_path: Path) -> None:
    """The same batches: at a rate of next to nothing tuning gives the same network, and its figures too."""
    (client, theta), method = client_and_weights(tmp_path), HFMaml(head=HeadSettings("cosface", 8.0, 0.1))
    model, found = client.network(), []
    for lr in (1e-30, 0.0):
        load_weights(model, theta)
        client.rng.manual_seed(4)
        if lr:
            tune(client, model, replace(TUNING, lr=lr), method.head, None)
        else:
            settle(client, model, TUNING)
        found.append(weights_of(model))
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], rtol=0, atol=1e-20)
    moved = {k for k in theta if not torch.equal(found[1][k], theta[k])}
    assert moved == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    still = replace(TUNING, lr=1e-30)
    assert score_tuned(client, theta, still, method, None)["learnt/tar@far=0.1"] == 0.0
    frozen = score_tuned(client, theta, replace(still, norm="frozen"), method, None)
    assert not any(k.startswith(("learnt/", "statistics/")) for k in frozen)


@pytest.mark.parametrize("alone", [False, True])
def test_tuning_alone_is_the_only_test(tmp_path: Path, alone: bool) -> None:
    client, theta = client_and_weights(tmp_path)
    scores = steps_of(HFMaml())["score"](client, ScoreRequest(theta, tuning=replace(TUNING, alone=alone)))
    assert scores.pictures == len(client.data.test)
    assert "tuned/tar@far=0.1" in scores.figures
    assert ("rank1" in scores.figures) == (not alone)


@pytest.mark.parametrize("share_head", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "hf-maml"])
def test_trained_and_held_out_clients_of_both_methods(tmp_path: Path, name: str, share_head: bool) -> None:
    from visard.config import EvaluationSettings

    world = toy_world(tmp_path)
    world.training, world.held_out = world.training[:2], world.training[2:]
    net = toy_engine(tmp_path, world)
    method: Method[Any] = (
        FedAvg(rounds=1, training=Training(lr=0.01, batch_size=4), share_head=share_head)
        if name == "fedavg"
        else HFMaml(rounds=1, training=MetaTraining(steps=2, batch_size=4), share_head=share_head)
    )
    net.begin("federate", 0)
    server = method.stages()[0].run(method.start(world.setup()), net)
    net.begin("final", 0)
    found = _clients(EvaluationSettings(tuning=TUNING), method, world, server, net)
    assert list(found["clients"]["figures"]) == list(world.training)
    assert list(found["held_out"]["figures"]) == list(world.held_out)
    for group in found.values():
        assert {"untuned/tar@far=0.1", "tuned/tar@far=0.1", "gain/tar@far=0.1"} <= set(group["summary"])
        assert group["summary"]["tuned/tar@far=0.1"]["std"] >= 0
    assert not net.traffic.problems


@pytest.mark.parametrize("wrong", [{"batches": -1}, {"lr": 0.0}, {"draws": 0}, {"pairs": 1}, {"momentum": 1.0}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"evaluation\.tuning"):
        load("hf-maml", [f"evaluation.tuning.{name}={value}" for name, value in wrong.items()])


@pytest.mark.parametrize("head", ["means", "refreshed"])
@pytest.mark.parametrize("kind", ["fedavg", "hf-maml"])
def test_a_head_that_starts_from_class_means(tmp_path: Path, kind: str, head: str) -> None:
    """With no training to speak of, a client's head is the mean direction of its people's features.

    With `refresh_head` under the weights of that round, whatever the head was before.
    """
    world = toy_world(tmp_path)
    named: dict[str, Any] = {"head_start": "means"} if head == "means" else {"refresh_head": True}
    method: Method[Any] = (
        FedAvg(training=Training(lr=1e-12), **named)
        if kind == "fedavg"
        else HFMaml(training=MetaTraining(beta=1e-12, alpha=0.0, steps=1), **named)
    )
    net = toy_engine(tmp_path, world)
    net.begin("federate", 0)
    server = method.start(world.setup())
    name = world.training[0]
    if head == "refreshed":
        method.stages()[0].run(server, net)
        first = net.states.client_state(name)["head"]["weight"]
        net.begin("federate", 1)
        server = replace(server, theta={k: v + 0.1 if v.dtype == torch.float32 else v for k, v in server.theta.items()})
    method.stages()[0].run(server, net)
    assert head == "means" or not torch.allclose(first, net.states.client_state(name)["head"]["weight"], atol=0.1)
    train = world.clients[name].train
    model = world.network()
    load_weights(model, server.theta)
    f = embed(model, train).astype(np.float64)
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    slow = np.stack([f[train.labels == k].mean(axis=0) for k in range(train.n_classes)])
    slow /= np.linalg.norm(slow, axis=1, keepdims=True)
    got = net.states.client_state(name)["head"]["weight"].numpy()
    np.testing.assert_allclose(got, slow, atol=1e-5)


def test_a_common_head_is_not_refreshed() -> None:
    with pytest.raises(UsageError, match=r"method\.refresh_head is for heads that stay at home"):
        FedAvg(share_head=True, refresh_head=True)


def test_tests_between_rounds_can_be_of_validation_pictures(tmp_path: Path) -> None:
    """Figures 1 and 2 of the paper choose nothing on test pictures: curves are of the validation part."""
    client, theta = client_and_weights(tmp_path)
    data = client.data
    client.data = replace(data, val=data.test, test=data.test.take([]))
    method = HFMaml(head=HeadSettings("cosface", 8.0, 0.1))
    assert score_tuned(client, theta, TUNING, method, None) == {}, "no test pictures"
    curve = score_tuned(client, theta, replace(TUNING, between="val"), method, None)
    same, _ = client_and_weights(tmp_path)
    assert curve == score_tuned(same, theta, TUNING, method, None)
    client.others = data.train  # the test pictures of everybody: not for a curve
    assert not any(name.startswith("untuned/own/") for name in curve)
    client.rng.manual_seed(1)
    first = score_tuned(client, theta, replace(TUNING, between="val"), method, None)
    client.others = None
    client.rng.manual_seed(1)
    assert score_tuned(client, theta, replace(TUNING, between="val"), method, None) == first


def test_the_last_test_is_of_test_pictures() -> None:
    settings = load("hf-maml", ["evaluation.tuning.batches=3", "evaluation.tuning.between=val"])
    assert settings.evaluation.tuning.between == "val"
    assert _last(settings.evaluation).tuning == replace(settings.evaluation.tuning, between="test")
    plain = load("hf-maml", ["evaluation.tuning.batches=3"])
    assert plain.fingerprint() != settings.fingerprint()


def test_tuning_without_mirror_images(tmp_path: Path) -> None:
    """A client then tunes on its pictures as they are; a setting that came later leaves earlier runs what they were."""
    assert _training(TUNING).augment == Augment()
    assert _training(replace(TUNING, flip=False)).augment == Augment(flip=False)
    plain = load("hf-maml", ["evaluation.tuning.batches=3"])
    said = load("hf-maml", ["evaluation.tuning.batches=3", "evaluation.tuning.flip=true"])
    assert plain.fingerprint() == said.fingerprint()
    other = load("hf-maml", ["evaluation.tuning.batches=3", "evaluation.tuning.flip=false"])
    assert plain.fingerprint() != other.fingerprint()
    client, theta = client_and_weights(tmp_path)
    assert score_tuned(client, theta, replace(TUNING, flip=False), FedAvg(), None)


@pytest.mark.parametrize("method", ["fedavg", "hf-maml", "ditto", "fedrep", "fedbabu"])
def test_every_client_of_a_personal_method_can_tune(tmp_path: Path, method: str) -> None:
    """Also where the head that a client keeps was a common one."""
    tuning = ("alone=true", "batches=2", "batch_size=4", "pairs=20", "draws=1")
    made = visard.run(method, out=tmp_path, overrides=[*smoke(method), *(f"evaluation.tuning.{t}" for t in tuning)])
    assert {"untuned/eer", "tuned/eer"} <= set(made.metrics["clients"]["summary"])
    assert '"event":"missing"' not in (tmp_path / "events.jsonl").read_text()
