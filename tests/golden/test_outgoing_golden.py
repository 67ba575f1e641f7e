"""Postprocessors of replies: clipping against literal numbers, and the same bits on every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch

from visard.aggregation.outgoing import Clip
from visard.config import load, parse
from visard.core import Client, Disclosure, Weights
from visard.errors import UsageError

NOBODY: Any = None


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Annotated[Weights, Disclosure.weights]
    n: Annotated[int, Disclosure.count]


def test_the_update_is_scaled_to_the_norm() -> None:
    """An update of (3, 0), (0, 4) has length 5: clipped to 2.5 it is half as long, in the same direction."""
    before = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0, -2.0]), "count": torch.tensor(7)}
    after = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([0.0, 2.0]), "count": torch.tensor(9)}
    up = Clip(norm=2.5)(NOBODY, Down(before), Up(after, 3))
    assert list(up.theta) == ["a", "b", "count"]
    assert torch.equal(up.theta["a"], torch.tensor([2.5, 1.0]))
    assert torch.equal(up.theta["b"], torch.tensor([0.0, 0.0]))
    assert up.theta["count"] == 9, "a counter is no part of the update"
    assert up.n == 3
    assert torch.equal(after["a"], torch.tensor([4.0, 1.0])), "the reply itself is not changed"


def test_a_short_update_and_other_replies_stay_as_they_are() -> None:
    before, after = {"a": torch.tensor([0.0, 0.0])}, {"a": torch.tensor([3.0, 4.0])}
    up = Up(after, 3)
    assert Clip(norm=5.0)(NOBODY, Down(before), up) is up
    assert Clip(norm=0.1)(NOBODY, object(), up) is up, "the message holds no weights to compare with"
    assert Clip(norm=0.1)(NOBODY, Down({"b": after["a"]}), up) is up


@pytest.mark.parametrize("seed", range(3))
def test_against_a_plain_loop(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 3), "b": (3,), "s": ()}
    before = {k: torch.randn(s, generator=rng) for k, s in shapes.items()}
    after = {k: v + torch.randn(v.shape, generator=rng) for k, v in before.items()}

    def length(theta: Weights) -> float:
        total = 0.0
        for key, value in theta.items():
            for x, y in zip(value.flatten().tolist(), before[key].flatten().tolist(), strict=True):
                total += (x - y) ** 2
        return float(total**0.5)

    clipped = Clip(norm=0.5)(NOBODY, Down(before), Up(after, 1)).theta
    assert length(after) > 0.5
    assert length(clipped) == pytest.approx(0.5, rel=1e-5)
    for key, value in clipped.items():
        expected = before[key] + (after[key] - before[key]) * (0.5 / length(after))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_settings_choose_the_list_and_without_one_nothing_changes() -> None:
    plain = load("fedavg")
    assert plain.outgoing == ()
    assert "outgoing" not in plain.to_dict()
    named = load("fedavg", ['outgoing=["clip"]'])
    assert named.outgoing == (Clip(),)
    clipped = load("fedavg", ['outgoing=[{name="clip", norm=0.5}]'])
    assert clipped.outgoing == (Clip(0.5),)
    assert parse(clipped.to_dict()) == clipped
    assert len({s.fingerprint() for s in (plain, named, clipped)}) == 3
    own = load("fedavg", ['outgoing=["tests.golden.test_outgoing_golden:Own"]'])
    assert parse(own.to_dict()) == own


@dataclass(frozen=True)
class Own(Clip):
    name = "own"

    def __call__(self, client: Client, message: Any, reply: Any) -> Any:
        return reply


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('["clap"]', "unknown postprocessor 'clap' .did you mean 'clip'"),
        ('[{name="clip", nrom=1.0}]', r"unknown setting outgoing\.nrom .did you mean 'norm'"),
        ('[{name="clip", norm=0.0}]', r"outgoing\.norm = 0\.0"),
        ("[{norm=1.0}]", "needs a name"),
        ("[3]", "needs a name"),
        ("clip", "must be a list"),
    ],
)
def test_what_is_wrong_is_one_line(value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        load("fedavg", [f"outgoing={value}"])
    assert "\n" not in str(error.value)
