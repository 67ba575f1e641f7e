"""Robust rules against slow loops: what `Reduction` makes of replies under each of them."""

from __future__ import annotations

import itertools
import math
import statistics
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.test_aggregation_golden import Numbering
from tests.toys import ToyDown, toy_engine, toy_world
from torch import Tensor

from visard.aggregation import reduction
from visard.aggregation.reduction import Reduction
from visard.aggregation.robust import Bulyan, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean, shares_of
from visard.aggregation.rules import Rule
from visard.config import load
from visard.core import Weights
from visard.errors import UsageError, VisardError

RULES: list[Rule] = [Median(), TrimmedMean(), GeometricMedian(), Krum(), MultiKrum(), Bulyan()]
Point = list[float]


@dataclass(frozen=True)
class Down:
    theta: Weights


@dataclass(frozen=True)
class Up:
    theta: Weights
    W: Tensor | None
    n: int


def replies(count: int, seed: int = 0) -> list[Up]:
    """Updates of two entries, statistics of another size, and a counter."""
    rng = torch.Generator().manual_seed(seed)

    def one(number: int) -> Up:
        theta = {
            "a": torch.randn(3, 2, generator=rng),
            "norm.running_mean": 100 * torch.randn(4, generator=rng),
            "b": torch.randn(5, generator=rng, dtype=torch.float64),
            "count": torch.tensor([number, 7 - number]),
        }
        return Up(theta, torch.randn(2, 2, generator=rng), number + 1)

    return [one(number) for number in range(count)]


def combined(rule: Rule, ups: list[Up], names: list[str] | None = None, sent: Any = None) -> dict[str, Any]:
    with closing(Reduction(rule, ("theta", "W"), "n", sent)) as found:
        for name, up in zip(names or [f"c{i:03d}" for i in range(len(ups))], ups, strict=True):
            found.take(name, sent, up)
        return found.result()


TRAINED, STATISTICS = ("a", "b"), ("norm.running_mean",)


def points(ups: list[Up], keys: tuple[str, ...]) -> list[Point]:
    return [[x for key in keys for x in up.theta[key].flatten().tolist()] for up in ups]


def split(point: Point, ups: list[Up], keys: tuple[str, ...]) -> dict[str, Point]:
    found, at = {}, 0
    for key in keys:
        size = ups[0].theta[key].numel()
        found[key] = point[at : at + size]
        at += size
    return found


def of_parts(ups: list[Up], combine: Any) -> dict[str, Point]:
    """`combine` of the points of each part."""
    found = {}
    for keys in (TRAINED, STATISTICS):
        found |= split(combine(points(ups, keys)), ups, keys)
    return found


def check(found: dict[str, Any], slow: dict[str, Point], tolerance: float = 1e-6) -> None:
    for key, expected in slow.items():
        assert found["theta"][key].flatten().tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance), key
    assert list(found["theta"]) == ["a", "norm.running_mean", "b", "count"]
    assert found["theta"]["a"].shape == (3, 2)
    assert [v.dtype for v in found["theta"].values()] == [torch.float32, torch.float32, torch.float64, torch.int64]


def square(x: Point, y: Point) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def columns(all_points: list[Point]) -> list[tuple[float, ...]]:
    return list(zip(*all_points, strict=True))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_of_each_coordinate(count: int) -> None:
    ups = replies(count)
    check(combined(Median(), ups), of_parts(ups, lambda p: [statistics.median(c) for c in columns(p)]))


@pytest.mark.parametrize(("count", "hostile", "k"), [(5, 0.2, 1), (14, 0.2, 2), (10, 0.2, 2), (3, 0.2, 1), (4, 0.0, 0)])
def test_the_trimmed_mean_leaves_out_as_many_at_each_end(count: int, hostile: float, k: int) -> None:
    ups = replies(count)

    def trimmed(column: tuple[float, ...]) -> float:
        return statistics.fmean(sorted(column)[k : count - k])

    found = combined(TrimmedMean(hostile=hostile), ups)
    check(found, of_parts(ups, lambda p: [trimmed(c) for c in columns(p)]))
    assert TrimmedMean(hostile=0.29).most(100) == 29, "and not 28, as 0.29 times 100 in floats would have it"


def slow_scores(all_points: list[Point], f: int) -> list[float]:
    """Krum's scores, as the paper says them."""
    n = len(all_points)
    found = []
    for i, x in enumerate(all_points):
        others = sorted(square(x, y) for j, y in enumerate(all_points) if j != i)
        found.append(sum(others[: n - f - 2]))
    return found


@pytest.mark.parametrize(("count", "hostile", "f"), [(5, 0.2, 1), (10, 0.3, 3), (9, 0.2, 1)])
@pytest.mark.parametrize("chosen", [1, 0, 3])
def test_krum_and_multi_krum(count: int, hostile: float, f: int, chosen: int) -> None:
    ups = replies(count, seed=count)
    rule = Krum(hostile=hostile) if chosen == 1 else MultiKrum(hostile=hostile, chosen=chosen)
    m = chosen or count - f - 2

    def best(all_points: list[Point]) -> Point:
        order = sorted(range(count), key=lambda i: slow_scores(all_points, f)[i])[:m]
        return [sum(all_points[i][k] for i in order) / m for k in range(len(all_points[0]))]

    found = combined(rule, ups)
    check(found, of_parts(ups, best))
    if chosen == 1:
        assert any(torch.equal(found["theta"]["a"], up.theta["a"]) for up in ups), "one reply, to the last bit"


@pytest.mark.parametrize(("count", "hostile", "f"), [(7, 0.2, 1), (8, 0.2, 1), (12, 0.2, 2), (20, 0.2, 4), (3, 0.0, 0)])
def test_bulyan(count: int, hostile: float, f: int) -> None:
    """As in the paper: choose and put aside by Krum, then the values nearest to the median of each coordinate."""
    ups = replies(count, seed=count)

    def slow(all_points: list[Point]) -> Point:
        left, chosen = list(range(count)), list[int]()
        while len(chosen) < count - 2 * f:
            score = {}
            for i in left:
                others = sorted(square(all_points[i], all_points[j]) for j in left if j != i)
                score[i] = sum(others[: max(len(left) - f - 2, 1)])
            first = min(left, key=lambda i: score[i])
            left.remove(first)
            chosen.append(first)
        found = []
        for column in columns([all_points[i] for i in chosen]):
            middle = sorted(column)[(len(column) - 1) // 2]
            near = sorted(sorted(column), key=lambda x: abs(x - middle))[: count - 4 * f]
            found.append(statistics.fmean(near))
        return found

    check(combined(Bulyan(hostile=hostile), ups), of_parts(ups, slow))


def slow_geometric_median(all_points: list[Point], weights: list[float]) -> Point:
    """Weiszfeld's algorithm on the points themselves, from their mean."""
    z = [sum(w * x for w, x in zip(weights, c, strict=True)) / sum(weights) for c in columns(all_points)]
    for _ in range(20_000):
        pull = [w / max(math.sqrt(square(x, z)), 1e-12) for w, x in zip(weights, all_points, strict=True)]
        after = [sum(b * x for b, x in zip(pull, c, strict=True)) / sum(pull) for c in columns(all_points)]
        if square(after, z) < 1e-24:
            break
        z = after
    return z


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_geometric_median_by_weight(count: int) -> None:
    ups = replies(count, seed=3)
    weights = [float(up.n) for up in ups]
    slow = of_parts(ups, lambda p: slow_geometric_median(p, weights))
    if count == 2:  # twice the weight of the other: it is the median
        slow = of_parts(ups, lambda p: p[1])
    check(combined(GeometricMedian(), ups), slow, 2e-4)


def test_the_geometric_median_of_three_points_is_fermat_s() -> None:
    """Of the corners of a triangle it sees each side under 120 degrees; of four corners it is where diagonals cross."""
    corners = [[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]]
    assert fermat(corners) == pytest.approx([0.5, math.sqrt(3) / 6], abs=1e-6)
    assert fermat([[0.0, 0.0], [4.0, 0.0], [3.0, 3.0], [0.0, 1.0]]) == pytest.approx([0.8, 0.8], abs=1e-5)
    assert fermat([[0.0, 0.0], [2.0, 2.0], [2.0, 0.0], [0.0, 2.0]]) == pytest.approx([1.0, 1.0], abs=1e-6)
    assert fermat([[5.0, 5.0]] * 3 + [[0.0, 1.0], [9.0, 2.0]]) == pytest.approx([5.0, 5.0], abs=1e-4), "most are there"
    assert fermat([[5.0, 5.0]] * 3) == [5.0, 5.0]


def fermat(at: list[Point]) -> Point:
    squared = torch.tensor([[square(x, y) for y in at] for x in at], dtype=torch.float64)
    share = shares_of(squared, torch.ones(len(at), dtype=torch.float64))
    return [float(sum(s * x for s, x in zip(share.tolist(), c, strict=True))) for c in columns(at)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_counters_become_their_lower_median_and_fields_are_taken_by_themselves(rule: Rule) -> None:
    ups = replies(8)
    ups[0] = Up(ups[0].theta, None, 3)
    found = combined(rule, ups)
    assert found["theta"]["count"].tolist() == [3, 3]
    with closing(Reduction(rule, ("W",), "n", None)) as alone:
        for number, up in enumerate(ups[1:]):
            alone.take(f"c{number}", None, Up({}, up.W, up.n))
        assert torch.equal(found["W"], alone.result()["W"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_neither_the_order_nor_the_pieces_show_in_the_bits(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    ups, names = replies(7), [f"c{i}" for i in range(7)]
    sent = Down({k: v.clone() for k, v in replies(1, seed=9)[0].theta.items()})
    first = combined(rule, ups, names, sent)
    for order in itertools.islice(itertools.permutations(range(7)), 0, 5040, 997):
        again = combined(rule, [ups[i] for i in order], [names[i] for i in order], sent)
        assert all(torch.equal(again["theta"][k], v) for k, v in first["theta"].items())
        assert torch.equal(again["W"], first["W"])
    monkeypatch.setattr(reduction, "PIECE", 2 * 4 * 7)
    monkeypatch.setattr(reduction, "IN_MEMORY", 64)
    small = combined(rule, ups, names, sent)
    for key, value in first["theta"].items():
        torch.testing.assert_close(small["theta"][key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("sent", [True, False])
def test_two_hostile_replies_of_eleven_do_not_move_the_result_far(rule: Rule, sent: bool) -> None:
    """Alike and enormous, in the trained entries of one run and in the statistics alone of another."""
    ups = replies(11, seed=5)
    down = Down({k: torch.zeros_like(v) for k, v in ups[0].theta.items()}) if sent else None
    honest = combined(rule, ups, None, down)["theta"]
    for key, size in (("a", 1.0), ("norm.running_mean", 100.0)):
        hostile = [Up(up.theta | {key: up.theta[key] * 0 + 1e5 * size}, up.W, 1) for up in ups[:2]]
        found = combined(rule, [*hostile, *ups[2:]], None, down)["theta"]
        assert float((found[key] - honest[key]).abs().max()) < 3 * size
    assert float(combined(load("fedavg").aggregation, [*hostile, *ups[2:]])["theta"][key].abs().max()) > 1e5


def test_limits_hold_before_the_rule() -> None:
    """One of five is 100 times as long as the median: the mean of the middle three sees its shortened form."""
    ups = [Up({"a": torch.tensor([x])}, None, 1) for x in (1.0, -1.0, 2.0, -2.0, 100.0)]
    sent = Down({"a": torch.tensor([0.0])})
    rule = TrimmedMean(hostile=0.0, bound=3.0)
    assert combined(rule, ups, None, sent)["theta"]["a"].item() == pytest.approx((1 - 1 + 2 - 2 + 6) / 5)
    heavy = [
        Up({"a": torch.tensor([x, y])}, None, n) for x, y, n in ((0.0, 0.0, 98), (1.0, 0.0, 1), (0.5, 3**0.5 / 2, 1))
    ]
    at_heavy = combined(GeometricMedian(), heavy)["theta"]["a"].tolist()
    assert at_heavy == pytest.approx([0.0, 0.0], abs=1e-4)
    capped = combined(GeometricMedian(max_weight=1 / 3), heavy)["theta"]["a"].tolist()
    assert capped == pytest.approx([0.5, 3**0.5 / 6], abs=1e-5)


@pytest.mark.parametrize(
    ("rule", "count", "says"),
    [
        (
            TrimmedMean(),
            2,
            "trimmed-mean with aggregation.hostile = 0.2 needs 3 replies to withstand 1, and there are 2",
        ),
        (Krum(), 4, "krum with aggregation.hostile = 0.2 needs 5 replies to withstand 1, and there are 4"),
        (Krum(hostile=0.45), 20, "needs 21 replies to withstand 9, and there are 20"),
        (Bulyan(), 6, "bulyan with aggregation.hostile = 0.2 needs 7 replies to withstand 1, and there are 6"),
        (MultiKrum(chosen=8), 7, "chosen = 8 is to average more than the 7 replies"),
    ],
)
def test_too_few_replies_are_one_clear_line(rule: Rule, count: int, says: str) -> None:
    with pytest.raises(VisardError, match=says) as error:
        combined(rule, replies(count))
    assert "\n" not in str(error.value)


def test_a_round_with_too_few_clients_for_the_rule_is_not_begun(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path, aggregation=Krum()))
    down = ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})
    with pytest.raises(VisardError, match="start test: krum .* needs 5 replies to withstand 1, and there are 3"):
        net.reduce(Numbering().number, dict.fromkeys(net.clients, down), mean="theta", by="n")
    assert not net.traffic.asked


def test_settings_of_rules() -> None:
    assert load("fedavg", ["aggregation.rule=krum", "aggregation.hostile=0.3"]).aggregation == Krum(hostile=0.3)
    for wrong in ("hostile=0.5", "hostile=-0.1", "chosen=3"):
        with pytest.raises(UsageError, match="aggregation"):
            load("fedavg", ["aggregation.rule=krum", f"aggregation.{wrong}"])
    with pytest.raises(UsageError, match="rule = krum needs single replies, which aggregation.secure hides"):
        load("fedavg", ["aggregation.rule=krum", "aggregation.secure=true"])
