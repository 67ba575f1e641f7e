"""Compressed replies: formats and error feedback against slow loops, true sizes, and what a server refuses."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from tests.toys import Toy, ToyDown, toy_engine, toy_world

from visard.aggregation.compression import Compress, levels, opened
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
        load("fedavg", ['outgoing=["compress"]', "aggregation.secure=true"])
