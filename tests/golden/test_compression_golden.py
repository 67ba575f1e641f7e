"""Compressed replies: formats and error feedback against slow loops, true sizes, and what a server refuses."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE
from tests.toys import Toy, ToyDown, ToyUp, toy_engine, toy_world

import visard
from visard.aggregation.compression import Compress, levels, opened
from visard.aggregation.layout import Levels
from visard.aggregation.outgoing import Clip
from visard.config import load
from visard.core import Client, Disclosure, Weights, client_step
from visard.engines.codec import encode
from visard.engines.ledger import parts_of
from visard.errors import UsageError


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]


def client(state: dict[str, Any], seed: int = 0) -> Client:
    rng = torch.Generator().manual_seed(seed)
    return Client("c", None, state, rng, None, 8, None)  # type: ignore[arg-type]


def weights(seed: int = 0, size: float = 1.0) -> Weights:
    rng = torch.Generator().manual_seed(seed)
    return {
        "w": size * torch.randn(20, 3, generator=rng),
        "d": size * torch.randn(40, generator=rng, dtype=torch.float64),
        "small": size * torch.randn(2, generator=rng),
        "norm.running_mean": size * torch.randn(30, generator=rng),
        "count": torch.tensor(7),
    }


def test_int8_says_of_each_number_its_level_and_the_server_reads_them_back() -> None:
    """Byte by byte: two little floats, then a level for each number, next to it above or below."""
    sent, value = weights(), weights(1)
    up = Compress()(client({}), Down(sent), Up(value, 3))
    for key in ("w", "d"):
        raw = bytes(up.theta[key].tolist())
        assert len(raw) == 8 + sent[key].numel()
        low, width = struct.unpack("<ff", raw[:8])
        back = Compress().received(Down(sent), up).theta[key]
        assert back.dtype == sent[key].dtype
        for start, wanted, level, found in zip(
            sent[key].flatten().tolist(), value[key].flatten().tolist(), raw[8:], back.flatten().tolist(), strict=True
        ):
            assert abs(low + width * level - (wanted - start)) <= width * (1 + 1e-6)
            assert found == pytest.approx(start + low + width * level, abs=1e-6)
    assert all(up.theta[k] is value[k] for k in ("small", "norm.running_mean", "count")), "these are sent as they are"
    assert up.n == 3


def test_rounding_is_right_on_average() -> None:
    """A number 0.3 of the way between two levels is rounded up three times of ten."""
    update = torch.full((20_000,), 100.3, dtype=torch.float64)
    update[0], update[1] = 0.0, 255.0
    found = levels(update, torch.Generator().manual_seed(5))[10:]
    assert set(found.tolist()) == {100, 101}
    assert float(found.double().mean()) == pytest.approx(100.3, abs=0.02)


@pytest.mark.parametrize("same", [0.0, 1.1, -3.7e-30, 5e8])
def test_an_update_that_is_the_same_everywhere(same: float) -> None:
    packed = levels(torch.full((9,), same, dtype=torch.float64), torch.Generator())
    back = opened(packed, torch.zeros(9, dtype=torch.float64))
    assert back.tolist() == pytest.approx([same] * 9, rel=1e-6)


def test_fp16_sends_the_update_in_half_precision() -> None:
    sent, value = weights(), weights(1)
    value["w"][0, 0] = 1e6
    up = Compress(to="fp16")(client({}), Down(sent), Up(value, 3))
    expected = (value["w"].double() - sent["w"].double()).clamp(max=65504).half()
    assert torch.equal(up.theta["w"], expected)
    back = Compress(to="fp16").received(Down(sent), up).theta
    assert torch.equal(back["w"], (sent["w"].double() + expected.double()).float())
    assert up.theta["small"].dtype == torch.float16


@pytest.mark.parametrize("to", ["fp16", "int8"])
def test_what_a_round_leaves_unsaid_is_said_by_the_next(to: Any) -> None:
    """Over many rounds the sum of what the server reads is the sum of the updates, up to the last remainder."""
    state: dict[str, Any] = {}
    sent = {"w": torch.zeros(50)}
    wanted, heard = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    forgetful = torch.zeros(50, dtype=torch.float64)
    for number in range(40):
        value = {"w": 1 / 3 + 0.1 * torch.randn(50, generator=torch.Generator().manual_seed(number))}
        up = Compress(to=to)(client(state, number), Down(sent), Up(value, 1))
        wanted += value["w"].double()
        heard += Compress(to=to).received(Down(sent), up).theta["w"].double()
        alone = Compress(to=to, feedback=False)(client({}, number), Down(sent), Up(value, 1))
        forgetful += opened(alone.theta["w"], sent["w"]).double()
    left = state["compress"]["Up.theta"]["w"].double()
    assert float((heard + left - wanted).abs().max()) < 1e-5
    assert float(left.abs().max()) < (1e-3 if to == "fp16" else 0.02)
    assert float((heard - wanted).norm()) < 0.5 * float((forgetful - wanted).norm()), "or feedback does nothing"


def test_sizes_are_those_on_the_wire() -> None:
    sent, value = {"w": torch.zeros(100, 100)}, {"w": torch.rand(100, 100)}
    plain = Up(value, 1)
    for to, share in (("fp16", 2), ("int8", 4)):
        up = Compress(to=to)(client({}), Down(sent), plain)  # type: ignore[arg-type]
        assert len(encode(up)) < len(encode(plain)) / share + 300
        ((_, _, size), *_) = parts_of(up, ())
        assert 40_000 / share <= size <= 40_000 / share + 150


def test_the_state_is_left_alone_without_feedback_and_by_other_replies() -> None:
    sent = weights()
    for postprocessor, message in ((Compress(feedback=False), Down(sent)), (Compress(), object())):
        state: dict[str, Any] = {}
        up = Up(weights(1), 1)
        after = postprocessor(client(state), message, up)
        assert not state
        assert (after is up) == (message is not None and not isinstance(message, Down))


def test_numbers_that_are_not_finite_are_left_to_the_server() -> None:
    value = weights(1)
    value["w"][0] = float("nan")
    up = Compress()(client({}), Down(weights()), Up(value, 1))
    assert up.theta["w"] is value["w"]


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(7, dtype=torch.uint8),
        torch.zeros(8 + 61, dtype=torch.uint8),
        torch.zeros(3, 20, dtype=torch.float16),
        torch.zeros(20, 3, dtype=torch.int8),
        torch.full((68,), 255, dtype=torch.uint8),  # levels that are NaN
        torch.cat([torch.tensor([0, 0, 0, 0, 0, 0, 128, 191], dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)]),
    ],
)
def test_what_is_no_update_is_refused(bad: torch.Tensor) -> None:
    sent = weights()
    with pytest.raises(ValueError, match="has "):
        Compress().received(Down(sent), Up(sent | {"w": bad}, 1))


@dataclass(frozen=True)
class Grown:
    theta: Annotated[Weights, Disclosure.weights]


class Growing(Toy):
    """Adds a number to all weights; one client sends bytes of another length."""

    @client_step
    def grow(self, client: Client, msg: ToyDown) -> Grown:
        return Grown({"a": msg.theta["a"] + 0.5 + torch.rand(30, 30, generator=client.rng)})


@dataclass(frozen=True)
class Short(Compress):
    def __call__(self, client: Client, message: Any, reply: Any) -> Any:
        up = super().__call__(client, message, reply)
        return replace(up, theta={"a": up.theta["a"][:-1]}) if client.id.endswith("1") else up


def test_a_run_averages_what_was_sent_and_counts_its_bytes(tmp_path: Path) -> None:
    found = {}
    for name, outgoing in (("plain", ()), ("int8", (Compress(),)), ("short", (Short(),))):
        net = toy_engine(tmp_path / name, toy_world(tmp_path, outgoing=outgoing))
        down = ToyDown(torch.zeros(4), {"a": torch.zeros(30, 30)})
        means, ups = net.reduce(Growing().grow, dict.fromkeys(net.clients, down), mean="theta", by=None)
        found[name] = means["theta"]["a"], net.traffic.bytes_up, ups
    plain, small, short = found["plain"], found["int8"], found["short"]
    torch.testing.assert_close(small[0], plain[0], atol=1 / 255, rtol=0)
    assert not torch.equal(small[0], plain[0])
    assert small[1] < 0.35 * plain[1]
    (reason,) = short[2].missing.values()
    assert reason == "reply refused: Grown has an entry of torch.uint8 and shape (907,), which is no update of it"


def test_settings() -> None:
    both = load("fedavg", ['outgoing=["clip", {name="compress", to="fp16"}]'])
    assert both.outgoing == (Clip(), Compress(to="fp16"))
    with pytest.raises(UsageError, match="outgoing: compress must be the last"):
        load("fedavg", ['outgoing=["compress", "clip"]'])
    with pytest.raises(UsageError, match="outgoing.to = 'int4'"):
        load("fedavg", ['outgoing=[{name="compress", to="int4"}]'])
    with pytest.raises(UsageError, match="compress sends weights in another form, of which aggregation.secure"):
        load("fedavg", ['outgoing=[{name="compress", to="fp16"}]', "aggregation.secure=true"])
    load("fedavg", ['outgoing=["compress"]', "aggregation.secure=true"])


# ---- behind masks ----------------------------------------------------------------------------------------------------
SENT = ToyDown(torch.zeros(4), {"a": torch.tensor([0.5, -2.0, 0.0, 1.0, 0.1]), "b": torch.zeros(2, 1)})


def secure_levels(feedback: bool = True) -> Levels:
    return Levels.of(("theta",), SENT, ToyUp, (), Compress(reach=0.1, feedback=feedback))


def reply(update: float, rng: torch.Generator) -> ToyUp:
    theta = {k: v + update * torch.randn(v.shape, generator=rng) for k, v in SENT.theta.items()}
    return ToyUp(torch.zeros(4), theta, 1, 0.0)


@pytest.mark.parametrize("members", [2, 4, 5, 20, 257, 258, 300])
def test_levels_of_many_clients_are_summed_exactly(members: int) -> None:
    """Lanes do not run into each other, for as many clients as there are; a third of them is lost on the way."""
    levels, rng = secure_levels(), torch.Generator().manual_seed(members)
    widths = {"a": 0.1 * 2.0 / 127, "b": 0.1 * 0.1 / 127}
    assert levels.widths == {"theta": pytest.approx(widths)}
    arrived = max(1, 2 * members // 3)
    total, slow = (
        np.zeros(levels.size(SENT, members), np.uint32),
        {k: torch.zeros(v.shape) for k, v in SENT.theta.items()},
    )
    for number in range(arrived):
        client: Any = SimpleNamespace(state={}, rng=torch.Generator().manual_seed(number))
        up = reply(5.0 if number < 3 else 0.05, rng)  # some far beyond what one reply can say
        total += levels.packed(client, SENT, up, 0.5, members)
        drawn = torch.Generator().manual_seed(number)
        for key, value in SENT.theta.items():
            for place, r in enumerate(torch.rand(value.shape, generator=drawn).reshape(-1).tolist()):
                u = 0.5 * (float(up.theta[key].reshape(-1)[place]) - float(value.reshape(-1)[place]))
                q = min(127, max(-127, math.floor(u / widths[key] + r)))
                slow[key].reshape(-1)[place] += q
                said = float(client.state["compress"]["ToyUp.theta"][key].reshape(-1)[place])
                assert said == pytest.approx(u - widths[key] * q, abs=1e-6)
    found = levels.updates(total, SENT, members, arrived)["theta"]
    for key in slow:
        assert torch.equal((found[key] / widths[key]).round(), slow[key].double())
    assert levels.lanes(members)[0] == (3 if members <= 4 else 2 if members <= 258 else 1)


def test_what_one_round_leaves_unsaid_comes_with_the_next() -> None:
    """An update that is too long for one message has been said in full after some, and no error is left behind."""
    levels = secure_levels()
    client: Any = SimpleNamespace(state={}, rng=torch.Generator().manual_seed(0))
    said = torch.zeros(2, 1, dtype=torch.float64)
    for number in range(12):
        move = 0.05 if number == 0 else 0.0
        up = ToyUp(torch.zeros(4), {k: v + move for k, v in SENT.theta.items()}, 1, 0.0)
        said += levels.updates(levels.packed(client, SENT, up, 1.0, 2), SENT, 2, 1)["theta"]["b"]
    assert said.numpy() == pytest.approx(0.05 * np.ones((2, 1)), abs=0.1 * 0.1 / 127)


@pytest.mark.usefixtures("quick_children")
def test_a_secure_run_sends_half_the_bytes_and_has_the_same_bits_on_a_pool(tmp_path: Path) -> None:
    sets = [*SMOKE, "aggregation.secure=true", "evaluation.every=0", "method.rounds=2"]
    small = [*sets, 'outgoing=["compress"]']
    for name, overrides in {"plain": sets, "small": small, "pool": [*small, "engine.kind=pool"]}.items():
        visard.run("fedavg", out=tmp_path / name, overrides=overrides)
    sizes = {
        name: json.loads((tmp_path / name / "ledger.json").read_text())["totals"]["masked"]["bytes"]
        for name in ("plain", "small")
    }
    assert sizes["small"] < 0.55 * sizes["plain"], "three clients: two and a half levels in a number"
    for file in ("model.safetensors", "ledger.json"):
        assert (tmp_path / "small" / file).read_bytes() == (tmp_path / "pool" / file).read_bytes()
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "small"))
    moved = max(float((a[k] - b[k]).abs().max()) for k in a if a[k].is_floating_point())
    assert 0 < moved < 0.5
