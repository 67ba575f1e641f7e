"""Limits of one reply in an average: shares, lengths of updates and who is named, against slow loops and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visard.aggregation import limits, reduction
from visard.aggregation.limits import capped, far, longest, norms, shortened
from visard.aggregation.reduction import Reduction
from visard.aggregation.rules import Mean, Rule
from visard.core import Weights
from visard.errors import VisardError


def slow_shares(weights: list[float], most: float) -> list[Fraction]:
    """Cap the largest share and give the rest to the others in proportion, again and again."""
    limit = Fraction(most)
    if limit * len(weights) <= 1:
        return [Fraction(1, len(weights))] * len(weights)
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(weights)) if i not in full]
        room, total = 1 - limit * len(full), sum(Fraction(weights[i]) for i in rest)
        shares = [limit if i in full else Fraction(weights[i]) * room / total for i in range(len(weights))]
        over = {i for i in rest if shares[i] > limit}
        if not over:
            return shares
        full |= over


@pytest.mark.parametrize(
    ("weights", "most", "shares"),
    [
        ([1e9, 100, 300], 0.5, [0.5, 0.125, 0.375]),
        ([1e9, 1e9, 1, 3], 0.4, [0.4, 0.4, 0.05, 0.15]),
        ([10**9, 20], 0.5, [0.5, 0.5]),
        ([8, 1, 1], 0.3, [1 / 3, 1 / 3, 1 / 3]),  # below 1/n: all alike
        ([6, 3, 1], 0.5, [0.5, 0.375, 0.125]),
        ([90, 9, 1], 0.6, [0.6, 0.36, 0.04]),
        ([1e308, 1e308, 1e308, 1], 0.3, [0.3, 0.3, 0.3, 0.1]),  # a sum beyond floats
        ([5e-324, 1.0], 0.5, [0.5, 0.5]),
    ],
)
def test_no_share_is_above_the_limit_and_the_rest_keeps_its_proportions(
    weights: list[float], most: float, shares: list[float]
) -> None:
    found = capped(weights, most)
    assert [w / math.fsum(found) for w in found] == pytest.approx(shares, rel=1e-12)


def test_weights_that_are_within_the_limit_come_back_as_they_are() -> None:
    assert capped([3, 2, 1], 0.5) == [3, 2, 1]
    assert capped([3.5, 2.5, 1.0], 1.0) == [3.5, 2.5, 1.0]
    assert capped([7], 1.0) == [7]
    assert capped([7], 0.5) == [1.0], "one reply alone is the average whatever the limit"


@given(
    st.lists(st.one_of(st.integers(1, 10**12), st.floats(1e-6, 1e300)), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
)
def test_shares_are_those_of_the_slow_loop(weights: list[float], most: float) -> None:
    found = capped(weights, most)
    total = sum(Fraction(w) for w in found)
    shares = [Fraction(w) / total for w in found]
    for share, slow in zip(shares, slow_shares(weights, most), strict=True):
        assert float(share) == pytest.approx(float(slow), rel=1e-9, abs=1e-300)
    assert max(shares) <= max(Fraction(most), Fraction(1, len(weights))) * Fraction(1 + 10**-12)
    assert sorted(map(float, capped(weights[::-1], most))) == sorted(map(float, found)), "the order does not matter"


VALUE = {
    "a": torch.tensor([4.0, 3.0]),
    "bn.running_mean": torch.tensor([12.0]),
    "bn.running_var": torch.tensor([6.0]),
    "count": torch.tensor(9),
}
SENT = {
    "a": torch.tensor([1.0, -1.0]),
    "bn.running_mean": torch.tensor([0.0]),
    "bn.running_var": torch.tensor([1.0]),
    "count": torch.tensor(4),
}


def test_norms_are_of_the_update_and_of_running_statistics_apart() -> None:
    assert norms(VALUE, SENT) == {"": 5.0, "running statistics": 13.0}
    assert norms(VALUE) == {"": 5.0, "running statistics": pytest.approx(math.sqrt(180))}
    huge = {"a": torch.tensor([3e200, 4e200], dtype=torch.float64)}
    assert norms(huge)[""] in (math.inf, pytest.approx(5e200))
    assert norms({}) == {}


@pytest.mark.parametrize("size", [0, 6, 7, 8, 30])
def test_norms_in_pieces_are_those_of_the_slow_loop(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK", 7)
    value, sent = ({"a": torch.randn(2, size), "b": torch.randn(3)} for _ in range(2))
    pairs = [pair for k in value for pair in zip(value[k].view(-1), sent[k].view(-1), strict=True)]
    slow = sum(float(x - y) ** 2 for x, y in pairs)
    assert norms(value, sent)[""] == pytest.approx(math.sqrt(slow), rel=1e-12)
    turned = [{k: v.mT if v.ndim == 2 else v for k, v in part.items()} for part in (value, sent)]
    assert norms(*turned)[""] == pytest.approx(math.sqrt(slow), rel=1e-12), "however they lie in memory"


def test_a_long_update_is_shortened_in_its_own_direction_and_its_own_part() -> None:
    lengths = norms(VALUE, SENT)
    found = shortened(VALUE, SENT, {"": 2.5, "running statistics": 100.0}, lengths)
    assert found["a"].tolist() == [2.5, 1.0]
    assert all(found[k] is VALUE[k] for k in VALUE if k != "a"), "what is not too long stays as it is"
    found = shortened(VALUE, SENT, {"": 9.0, "running statistics": 6.5}, lengths)
    assert found["a"] is VALUE["a"]
    assert [found["bn.running_mean"].item(), found["bn.running_var"].item()] == [6.0, 3.5]
    assert shortened({"w": torch.tensor([3.0])}, None, {"": 1.0}, {"": 3.0})["w"].tolist() == [1.0]
    for length in (math.inf, 1e30):  # longer than float64 can say, or with nothing allowed: no update at all
        allowed = 2.5 if length == math.inf else 0.0
        assert shortened({"a": VALUE["a"]}, SENT, {"": allowed}, {"": length})["a"].tolist() == [1.0, -1.0]
    there, back = (torch.tensor([x], dtype=torch.float64) for x in (1.7e308, -1.7e308))
    found = shortened({"a": there}, {"a": back}, {"": 1.0}, norms({"a": there}, {"a": back}))
    assert found["a"].tolist() == [-1.7e308], "their difference is infinite, and nothing times infinity is no number"


@pytest.mark.parametrize(
    ("found", "sent", "allowed"),
    [
        ([1.0, 2.0, 1e30], 10.0, 6.0),  # 3 times the median
        ([1.0, 2.0, 1e30, 1e30], 10.0, 6.0),  # of an even number the lower of the middle two: half cannot raise it
        ([0.0, 1.0, 2.0, 1.5], 10.0, 3.0),
        ([1.0, 1e30], 10.0, 3.0),  # two: the shorter one is the measure
        ([0.0, 1.0], 10.0, 0.1),  # but a small update is always allowed: one of two cannot stop the other
        ([0.0, 0.0, 1.0], 10.0, 0.1),
        ([5.0], 10.0, 10.0),  # one alone: as long as what was sent
        ([5.0], 0.0, math.inf),
    ],
)
def test_the_longest_update_that_a_round_allows(found: list[float], sent: float, allowed: float) -> None:
    assert longest(found, 3.0, sent) == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("found", "sent", "named"),
    [
        ([1.0, 1.1, 0.9, 1.05, 6.0], 10.0, [4]),
        ([1.0, 1.1, 0.9, 1.05, 4.9], 10.0, []),  # less than 5 times the median
        ([0.001, 0.0011, 0.0009, 0.9], 10.0, []),  # less than a tenth of what was sent
        ([0.1, 1.0, 5.0, 30.0, 200.0], 1e3, []),  # all of them are far from each other
        ([1.0, 1.1, 0.9, 1e30, 1e30], 10.0, [3, 4]),
        ([1e30, 1e30, 1e30], 10.0, [0, 1, 2]),  # all alike, but absurd by what was sent
        ([1.0, 11.0], 10.0, [1]),  # two: longer than what was sent
        ([1.0, 9.0], 10.0, []),
        ([11.0], 10.0, [0]),
        ([0.0, 0.0, 5.0], 10.0, [2]),
        ([1.0, 1.0, math.inf], 10.0, [2]),
        ([1.0, 1.1, 6.0], 0.0, [2]),  # nothing was sent
        ([0.0, 0.0, 0.0], 0.0, []),
        ([], 0.0, []),
    ],
)
def test_who_is_far_from_the_others(found: list[float], sent: float, named: list[int]) -> None:
    told = far(found, [sent] * len(found))
    assert [i for i, reason in enumerate(told) if reason] == named


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Weights
    W: Tensor | None
    n: float


def ups(*, hostile: float = 1e30, claim: float = 1e9) -> list[Up]:
    g = torch.Generator().manual_seed(3)

    def theta(scale: float) -> Weights:
        moved = {k: SENT[k] + scale * torch.randn(SENT[k].shape, generator=g) for k in SENT if k != "count"}
        return moved | {"count": torch.tensor(int(5 + scale % 3))}

    honest = [
        Up(theta(0.1 * (i + 1)), torch.randn(2, 3, generator=g) if i % 2 else None, 10 * (i + 1)) for i in range(4)
    ]
    return [*honest, Up(theta(hostile), hostile * torch.randn(2, 3, generator=g), claim)]


def reduced(rule: Rule, replies: list[Up], sent: Weights = SENT) -> tuple[dict[str, Any], Reduction]:
    found = Reduction(rule, ("theta", "W"), "n", Down(sent))
    for i, up in enumerate(replies):
        found.take(f"c{i}", Down(sent), up)
    try:
        return found.result(), found
    finally:
        found.close()


def slow_mean(values: list[Weights], sent: Weights | None, n: list[float], bound: float, most: float) -> Weights:
    """Every step of the definition, number by number."""
    shares = slow_shares(n, most) if max(n) > most * sum(n) else [Fraction(w) / Fraction(sum(n)) for w in n]
    changed = [{k: v.double().clone() for k, v in value.items()} for value in values]
    for statistics in (False, True):
        keys = [k for k in values[0] if values[0][k].is_floating_point() and ("running" in k) == statistics]
        before = {k: sent[k].double() if sent else torch.zeros_like(changed[0][k]) for k in keys}
        lengths = [math.sqrt(sum(float(x) ** 2 for k in keys for x in (c[k] - before[k]).flatten())) for c in changed]
        reference = sorted(lengths)[(len(lengths) - 1) // 2]
        size = math.sqrt(sum(float(x) ** 2 for k in keys for x in before[k].flatten()))
        allowed = max(bound * reference, 0.01 * size)
        for c, length in zip(changed, lengths, strict=True):
            for k in keys if length > allowed else ():
                c[k] = before[k] + (c[k] - before[k]) * allowed / length
    total = {k: sum(float(s) * c[k] for s, c in zip(shares, changed, strict=True)) for k in values[0]}
    return {k: max(v[k] for v in values) if k == "count" else total[k].to(values[0][k].dtype) for k in total}  # type: ignore[union-attr,type-var]


def test_the_limited_mean_is_that_of_the_slow_loop() -> None:
    replies = ups()
    found, held = reduced(Mean(bound=3.0, max_weight=0.4), replies)
    slow = slow_mean([up.theta for up in replies], SENT, [up.n for up in replies], 3.0, 0.4)
    torch.testing.assert_close(found["theta"], slow)
    with_W = [up for up in replies if up.W is not None]
    slow_W = slow_mean([{"W": up.W} for up in with_W], None, [up.n for up in with_W], 3.0, 0.4)  # type: ignore[dict-item]
    torch.testing.assert_close(found["W"], slow_W["W"])
    assert {(r.client, r.field) for r in held.remarks} == {
        ("c4", "theta"), ("c4", "theta (running statistics)"), ("c4", "W"),
    }  # fmt: skip
    assert not held.left_out


@given(
    st.lists(st.floats(0.01, 2.0), min_size=2, max_size=5),
    st.lists(st.tuples(st.floats(0, 1e38), st.floats(1e-3, 1e15)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_a_minority_moves_the_mean_no_further_than_the_bound_whatever_it_sends(
    honest: list[float], cheats: list[tuple[float, float]], seed: int
) -> None:
    cheats = cheats[: len(honest) - 1]
    g = torch.Generator().manual_seed(seed)

    def moved(by: float) -> Weights:
        step = torch.randn(6, generator=g)
        return {"a": sent["a"] + by * step / step.norm()}

    sent = {"a": torch.randn(6, generator=g)}
    replies = [Up(moved(by), None, 100) for by in honest] + [Up(moved(by), None, n) for by, n in cheats]
    found, held = reduced(Mean(bound=3.0, max_weight=0.5), replies, sent)
    lengths = [norms(up.theta, sent)[""] for up in replies[: len(honest)]]
    reach = max(3 * max(lengths), 0.01 * norms(sent)[""]) * (1 + 1e-5) + 1e-6
    assert norms(found["theta"], sent)[""] <= reach
    named = {r.client for r in held.remarks}
    for i, (by, _) in enumerate(cheats, len(honest)):
        assert by <= reach or f"c{i}" in named, "what is longer than the bound is named"


def test_limits_that_nothing_meets_change_no_bit() -> None:
    replies = ups(hostile=0.2, claim=30)
    plain, _ = reduced(Mean(), replies)
    limited, held = reduced(Mean(bound=50.0, max_weight=0.9), replies)
    for name, value in plain["theta"].items():
        assert torch.equal(value, limited["theta"][name])
    assert torch.equal(plain["W"], limited["W"])
    assert held.remarks == []


def test_without_limits_a_far_reply_counts_in_full_and_is_named() -> None:
    found, held = reduced(Mean(), ups(hostile=1e5, claim=30))
    assert float(found["theta"]["a"].abs().max()) > 1e4
    assert {r.client for r in held.remarks} == {"c4"}


def test_held_replies_that_go_to_a_file_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rule = Mean(bound=3.0, max_weight=0.4)
    kept, _ = reduced(rule, ups())
    monkeypatch.setattr(reduction, "IN_MEMORY", 1)
    replies, held = ups(), Reduction(rule, ("theta", "W"), "n", Down(SENT), tmp_path)
    for i, up in enumerate(replies):
        held.take(f"c{i}", Down(SENT), up)
    assert held._store is not None
    assert held._store._file._rolled  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == [], "the file has no name: a killed run leaves none behind"
    spilled = held.result()
    held.close()
    assert torch.equal(spilled["W"], kept["W"])
    assert all(torch.equal(spilled["theta"][k], kept["theta"][k]) for k in SENT)


@pytest.mark.parametrize("rule", [Mean(), Mean(bound=3.0, max_weight=0.5)])
@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, None, "7"])
def test_a_weight_that_is_none_is_left_out_and_named(rule: Rule, weight: Any) -> None:
    replies = ups(hostile=0.1, claim=30)
    replies[1] = replace(replies[1], n=weight)
    found, held = reduced(rule, replies)
    assert list(held.left_out) == ["c1"]
    others, _ = reduced(rule, [replies[0], *replies[2:]])
    assert torch.equal(found["theta"]["a"], others["theta"]["a"])
    with pytest.raises(VisardError, match=r"no reply can count .*c0: .* has a weight of"):
        reduced(rule, [replies[1]])


def test_where_nothing_was_sent_a_value_must_look_as_most_do() -> None:
    replies = [replace(up, W=torch.ones(2, 3)) for up in ups(hostile=0.1, claim=30)]
    replies[0] = replace(replies[0], W=torch.full((5, 3), 1e3))  # the first one to come does not decide
    found, held = reduced(Mean(bound=3.0), replies)
    assert list(held.left_out) == ["c0"]
    assert torch.equal(found["W"], torch.ones(2, 3))
    others, _ = reduced(Mean(bound=3.0), replies[1:])
    assert torch.equal(found["theta"]["a"], others["theta"]["a"]), "it counts in no field"


def test_without_limits_a_value_must_look_as_the_first_does() -> None:
    replies = [replace(up, W=torch.ones(2, 3)) for up in ups(hostile=0.1, claim=30)]
    replies[2] = replace(replies[2], W=torch.full((5, 3), 1e3))
    found, held = reduced(Mean(), replies)
    assert held.left_out == {"c2": ("W", "has other entries or shapes than that of c0")}
    assert torch.equal(found["W"], torch.ones(2, 3))


def test_an_average_that_overflows_ends_with_a_line_that_says_whose() -> None:
    sent = {"a": torch.zeros(1, dtype=torch.float64)}
    replies = [Up({"a": torch.tensor([x], dtype=torch.float64)}, None, 100) for x in (1.0, 1.7e308, 2.0)]
    with pytest.raises(VisardError, match=r"the average of theta over 3 replies is not finite; .* came from c1"):
        reduced(Mean(), replies, sent)
    found, held = reduced(Mean(bound=3.0), replies, sent)
    assert math.isfinite(found["theta"]["a"])
    assert [r.client for r in held.remarks] == ["c1"]


def test_limits_have_the_values_that_the_pages_name() -> None:
    chosen = Mean().between_parties()
    assert (chosen.bound, chosen.max_weight, limits.SMALL) == (3.0, 0.5, 0.01)
    assert Mean(bound=0.0, max_weight=1.0).between_parties() == Mean(bound=0.0, max_weight=1.0)
    assert not Mean(bound=0.0, max_weight=1.0).limited
    assert Mean(max_weight=0.9).limited
