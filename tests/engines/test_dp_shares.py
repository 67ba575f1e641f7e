"""Differential privacy in secure sums: each client adds a share of the noise, and no sum is opened without enough."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import smoke
from tests.engines.test_parties import HOUSES
from tests.engines.test_secure_aggregation import DOWN, Go, Watched, go, reduced, watched  # noqa: F401
from tests.policies import ANYTHING
from tests.toys import Toy, ToyDown, ToyUp

import visard
from visard.aggregation.dp import Privacy
from visard.aggregation.dp_shares import Shared
from visard.aggregation.rules import Mean
from visard.aggregation.secure import Opening
from visard.core import ClientId
from visard.deployment.policy import Protect
from visard.deployment.state_folder import StateFolder
from visard.engines.request import Reply
from visard.errors import PublicError, UsageError, VisardError

ROOT = Path(__file__).parents[2]
BIG = ToyDown(torch.zeros(4), {"a": torch.zeros(100, 100)})


def private(folder: Path, clients: int = 4, threshold: float = 0.75, **dp: Any) -> Watched:
    return watched(folder, clients=clients, aggregation=Mean(secure=True, threshold=threshold, dp=Privacy(**dp)))


def shared(members: int = 9, noise: float = 1.0, colluders: float = 0.0, adaptive: bool = False) -> Shared:
    return Shared.of("run stage 0 1", members, 2 / 3, colluders, 0.5, noise, members, adaptive)


def vectors(how: Shared, clients: int, secret: str = "secret of {}") -> np.ndarray[Any, np.dtype[np.uint32]]:
    back = ToyUp(torch.zeros(4), {"a": torch.full((100, 100), 1.0)}, 5, 1.0)
    found = [how.vector(secret.format(i).encode(), ("theta", "w"), BIG, back, ()) for i in range(clients)]
    return np.array(found)


def clean(how: Shared, clients: int) -> np.ndarray[Any, Any]:
    return vectors(replace(how, noise=0.0), clients).view(np.int32) * replace(how, noise=0.0).unit


def noise_of(vector: np.ndarray[Any, Any], how: Shared, clients: int) -> float:
    """Standard deviation of what is left of a sum without its updates, in units of the bound."""
    total = vector.view(np.int32)[1:].astype(float) * how.unit
    return float((total - clean(how, clients)[:, 1:].sum(axis=0)).std() / how.clip)


def test_the_sum_has_the_updates_and_the_noise_of_all_shares(tmp_path: Path) -> None:
    """Against the vectors of the clients as they were before any mask."""
    net = private(tmp_path, clip=0.5, noise=0.25)
    means, ups = reduced(net, Toy())
    plain = watched(tmp_path, clients=4)
    reduced(plain, Toy())
    how = Shared.of("start 0 1", 4, 0.75, 0.0, 0.5, 0.25, 4.0, False)
    total = np.zeros(9, np.int64)
    for client, up in zip(net.clients, plain.ups, strict=True):
        vector = how.vector(net.world.secret_of(client), ("theta", "w"), DOWN, up, net.world.statistics)
        total += vector.view(np.int32)
    moved = np.concatenate([(means["theta"]["a"] - 3).flatten().numpy(), means["w"].numpy()])
    assert moved == pytest.approx(total[1:] * how.unit / 4, abs=1e-6)
    assert total[0] == 4
    assert (how.least, how.colluders) == (3, 0)
    assert all(math.isnan(up.loss) and up.n == 1 for up in ups.values())
    assert net.traffic.figures["epsilon"] > 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_may_be_lost_leaves_enough_noise(adaptive: bool) -> None:
    how = shared(9, 1.0, adaptive=adaptive)
    assert how.least == 6
    every, fewest = (vectors(how, n).sum(axis=0, dtype=np.uint32) for n in (9, 6))
    least = 1.0 if not adaptive else (1 - 1 / 4) ** -0.5  # a part of it is for the count
    assert noise_of(fewest, how, 6) == pytest.approx(least, rel=0.03)
    assert noise_of(every, how, 9) == pytest.approx(least * math.sqrt(9 / 6), rel=0.03)
    how.check_opening(6)
    with pytest.raises(PublicError, match="5 of 9 vectors are in a secure sum, its noise needs 6"):
        how.check_opening(5)


def test_the_server_cannot_take_the_noise_off_with_all_that_it_knows() -> None:
    """It knows the seed, the plan, every update, every mask, and the secrets of the clients that work with it."""
    how = shared(9, 1.0, colluders=0.2)
    assert (how.least, how.colluders) == (6, 1)
    total = vectors(how, 6).sum(axis=0, dtype=np.uint32)
    guesses = {
        "the seed of a simulation": vectors(how, 6, "simulated {}"),
        "no secret": vectors(how, 6, ""),
        "the noise of another round": vectors(replace(how, label="run stage 1 1"), 6),
    }
    for name, guess in guesses.items():
        noise = guess.view(np.int32).astype(float) * how.unit - clean(how, 6)
        left = (total.view(np.int32) * how.unit - clean(how, 6).sum(axis=0) - noise.sum(axis=0))[1:]
        assert left.std() / how.clip > 1.0, name
    told = vectors(how, 1)[0].view(np.int32).astype(float) * how.unit - clean(how, 1)[0]  # one tells its noise
    left = (total.view(np.int32) * how.unit - clean(how, 6).sum(axis=0) - told)[1:]
    assert left.std() / how.clip == pytest.approx(1.0, rel=0.03), "what is left is what the account counts"
    assert np.array_equal(vectors(how, 1), vectors(how, 1)), "asking again gives nothing new"


def test_a_share_depends_on_the_question_the_answer_and_the_place() -> None:
    how = shared()
    back = ToyUp(torch.zeros(4), {"a": torch.full((100, 100), 1.0)}, 5, 1.0)
    first = how.vector(b"s", ("theta", "w"), BIG, back, ()).astype(np.int64)
    moved = replace(BIG, theta={"a": torch.full((100, 100), 1e-3)})
    answer = replace(back, theta={"a": torch.full((100, 100), 1.0 + 1e-3)})  # the same update of other weights
    asked = how.vector(b"s", ("theta", "w"), moved, answer, ()).astype(np.int64)
    assert (first != asked).mean() > 0.9


def test_too_few_vectors_end_the_round_before_anything_is_opened(tmp_path: Path) -> None:
    net = private(tmp_path, noise=1.0, clip=0.5, threshold=0.75)
    lost = dict.fromkeys(net.clients[:2], "raise")
    with pytest.raises(VisardError, match="2 of 4 vectors are in a secure sum, its noise needs 3"):
        reduced(net, Toy(faults=lost))
    assert not [reply for reply in net.seen if reply.ask > 30_000], "no share was asked for"


def test_a_client_opens_no_sum_with_too_little_noise(tmp_path: Path) -> None:
    """Whatever the server says: the plan that the client masked with decides."""
    net = private(tmp_path, noise=1.0, clip=0.5)
    reduced(net, Toy())
    asked: dict[ClientId, Opening] = {}

    class Less(Watched):
        def _phase(self, name: str, number: int, messages: Any, missing: Any) -> Any:
            if name == "secure_open":
                messages = {c: replace(m, arrived=m.arrived[:2]) for c, m in messages.items()}
                asked.update(messages)
            return super()._phase(name, number, messages, missing)

    hostile = Less(net.world, net.states, net.ledger)
    hostile.seen = []
    with pytest.raises(VisardError, match="shares"):
        reduced(hostile, Toy())
    assert len(asked) == 4
    answers: list[Reply] = [r for r in hostile.seen if r.ask > 30_000]
    assert len(answers) == 4
    assert all("its noise needs 3" in (r.failure or "") for r in answers)


@pytest.mark.parametrize(
    "change",
    [
        {"least": 0},
        {"least": 5},
        {"colluders": 3},
        {"noise": -1.0},
        {"noise": math.inf},
        {"clip": 0.0},
        {"label": None},
    ],
)
def test_a_plan_that_takes_noise_away_is_refused(change: dict[str, Any]) -> None:
    tree = vars(Shared.of("x", 4, 0.75, 0.0, 1.0, 1.0, 4.0, False)) | change
    if change == {"label": None}:
        del tree["label"]
    with pytest.raises(PublicError, match="the noise of a secure sum is"):
        Shared.parse(tree)


def test_nobody_left_to_add_noise_gets_one_line() -> None:
    with pytest.raises(UsageError, match="no client would be left to add noise"):
        Shared.of("x", 1, 0.6, 0.0, 1.0, 1.0, 1.0, False)


def test_the_bound_adapts_in_a_secure_sum_as_without_one(tmp_path: Path) -> None:
    for clip, up in ((0.01, True), (1e3, False)):
        net = private(tmp_path, noise=0.01, clip=clip, quantile=0.5)
        reduced(net, Toy())
        moved = math.log(net.remembered["dp"]["clip"] / clip)
        assert moved == pytest.approx(0.1 if up else -0.1, abs=0.05), "0.2 times a half, and the noise of four clients"


@pytest.mark.usefixtures("quick_children")
def test_secure_sums_with_noise_have_the_same_bits_on_every_engine(tmp_path: Path) -> None:
    how = [*smoke("fedavg"), "model.name=tiny_nobn", "evaluation.every=0", "aggregation.secure=true"]
    how += ["aggregation.dp.noise=0.5", "aggregation.dp.clip=0.5", "aggregation.dp.quantile=0.5"]
    models = []
    for kind in ("local", "pool"):
        visard.run("fedavg", out=tmp_path / kind, overrides=[*how, f"engine.kind={kind}", "engine.workers=2"])
        models.append(load_file(tmp_path / kind / "model.safetensors"))
    assert all(torch.equal(value, models[1][key]) for key, value in models[0].items())


@pytest.mark.flower
def test_flower_gives_the_bits_of_local(tmp_path: Path, ray: dict[str, str]) -> None:
    how = [*smoke("fedavg"), "model.name=tiny_nobn", "evaluation.every=0", "aggregation.secure=true"]
    how += ["aggregation.dp.noise=0.5", "aggregation.dp.clip=0.5", "aggregation.dp.quantile=0.5"]
    there = [*how, "engine.kind=flower", "engine.workers=2"]
    command = [sys.executable, "-m", "tests.engines.simulated", str(tmp_path / "flower"), "fedavg", *there]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | ray)
    assert done.returncode == 0, done.stderr
    visard.run("fedavg", out=tmp_path / "local", overrides=how)
    far, near = (load_file(folder / "model.safetensors") for folder in (tmp_path / "flower/fedavg", tmp_path / "local"))
    assert all(torch.equal(value, near[key]) for key, value in far.items())


@pytest.mark.parametrize("secure", ["true", "false"])
def test_parties_stop_at_their_own_budget(go: Go, tmp_path: Path, secure: str) -> None:  # noqa: F811
    """Two rounds at noise 2 are within it, the third is not, whatever the run would spend."""
    policy = ANYTHING.model_copy(update={"protect": Protect(dp_epsilon=2.3, dp_delta=1e-3)})
    noisy = (
        "aggregation.dp.noise=2",
        "aggregation.dp.clip=0.5",
        "model.name=tiny_nobn",
        f"aggregation.secure={secure}",
    )
    folder, _, _ = go(*noisy, policy=policy)
    figures = json.loads((folder / "metrics.json").read_text())["training"]
    assert figures["noise"] == 2.0
    spent = [StateFolder(tmp_path / role).spent()[role][0] for role in HOUSES]
    assert spent == [0.5, 0.5], "two sums each, on disk"
    with pytest.raises(VisardError, match=r"this party's budget is 2.3 \(protect.dp_epsilon\)"):
        go(*noisy, "method.rounds=4", policy=policy, name="more")
    with pytest.raises(VisardError, match="requires differential privacy, which the run has not"):
        go("model.name=tiny_nobn", policy=policy, name="none")
