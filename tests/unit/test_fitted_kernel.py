"""The fitted kernel attracts however far away the other side is, and is the nearest quadratic where that is enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sealed_wire import Wire, method, start, wire
from torch import Tensor

from visard.errors import VisardError
from visard.learning import mmd
from visard.learning.mmd import BEYOND, Compare, Polynomial, between, fit_quadratic, spoken_length, squared_distances

TIMES = (0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # mean squared distance to the other side, over the own


def own_distances(v: Tensor) -> Tensor:
    return squared_distances(v, v)[~torch.eye(len(v), dtype=torch.bool)]


def sides(L: int, times: float, unit: bool = False) -> tuple[Tensor, Tensor]:
    """Two sets inside the ball whose mean distance is so many times the first one's own."""
    rng = torch.Generator().manual_seed(L)
    a, b = (torch.randn(192, L, generator=rng, dtype=torch.float64) for _ in range(2))
    if times < 1:
        b = b * math.sqrt(max(2 * times - 1, 0.01))
    else:
        b[:, 0] += math.sqrt((times - 1) * 2 * L)
    if unit:  # around one point of the sphere: a distance of 5 times the own is a quarter turn
        up = 2.5 * math.sqrt(L)
        a, b = (torch.cat([v, torch.full((len(v), 1), up, dtype=v.dtype)], 1) for v in (a, b))
        return Compare().inside(a), Compare().inside(b)
    compare = Compare(unit=False, radius=6 * math.sqrt(L))
    return compare.inside(a), compare.inside(b)


def pull(a: Tensor, b: Tensor, kernel: mmd.Kernel) -> Tensor:
    x = a.clone().requires_grad_()
    between(x, b, kernel).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()))


def compared(a: Tensor, b: Tensor, kernel: Polynomial) -> tuple[float, float]:
    """Cosines with the gradient of the exact kernel, and of the mean pull with the way to the other side."""
    alpha = mmd.median_alpha(a)
    found = pull(a, b, kernel)
    return cosine(found, pull(a, b, lambda d: torch.exp(-alpha * d))), cosine(-found.mean(0), b.mean(0) - a.mean(0))


def nearest(a: Tensor) -> Polynomial:
    return fit_quadratic(mmd.median_alpha(a), own_distances(a))


@pytest.mark.parametrize(("L", "least"), [(4, 0.6), (16, 0.8), (64, 0.94)])
@pytest.mark.parametrize("unit", [False, True])
def test_it_attracts_at_every_distance(L: int, least: float, unit: bool) -> None:
    for times in TIMES:
        a, b = sides(L, times, unit)
        compare = Compare(unit=unit, radius=6 * math.sqrt(L))
        kernel = compare.polynomial(a, max(map(spoken_length, (a, b))))
        exact, way = compared(a, b, kernel)
        assert exact > least, (times, exact)
        if times > 1:
            assert way > 0.97, (times, way)
        assert kernel.slope(float(squared_distances(a, b).mean())) < 0


@pytest.mark.parametrize("L", [16, 64])
def test_the_nearest_quadratic_alone_would_repel(L: int) -> None:
    """The finding: at 2.5 times the own distance it points away."""
    a, b = sides(L, 2.5)
    exact, way = compared(a, b, nearest(a))
    assert exact < -0.3
    assert way < -0.95
    assert compared(a, b, Compare(unit=False).polynomial(a, spoken_length(b)))[0] > 0.9


@pytest.mark.parametrize("L", [4, 16, 64])
def test_near_by_nothing_is_lost(L: int) -> None:
    for times in (0.5, 0.75, 1.0):
        a, b = sides(L, times)
        kernel = Compare(unit=False).polynomial(a, spoken_length(b))
        assert compared(a, b, kernel)[0] > compared(a, b, nearest(a))[0] - 0.02


def test_where_it_falls_far_enough_it_is_the_nearest() -> None:
    a, _ = sides(16, 1.0)
    d, alpha = own_distances(a), mmd.median_alpha(a)
    plain = fit_quadratic(alpha, d)
    turn = -plain.c[1] / (2 * plain.c[2])
    assert fit_quadratic(alpha, d, 0.99 * turn / BEYOND) == plain
    other = fit_quadratic(alpha, d, 1.01 * turn / BEYOND)
    assert other != plain
    assert other.slope(1.01 * turn) == pytest.approx(0, abs=1e-9)
    falls = float(-alpha * torch.exp(-alpha * d).mean())
    assert other.slope(float(d.mean())) == pytest.approx(falls), "as fast as the exponential in the mean"
    assert other.c[1] == pytest.approx(plain.c[1], rel=0.2), "no jump in how strong it is"


@given(st.integers(0, 500), st.floats(0.01, 4), st.integers(1, 6), st.floats(0.02, 1))
def test_it_never_rises_within_reach(seed: int, reach: float, L: int, size: float) -> None:
    v = size * torch.randn(12, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = v / max(1.0, float(v.norm(dim=1).max()))
    d = own_distances(v)
    reach = max(reach, float(d.mean()))
    kernel = fit_quadratic(1 / float(d.median()), d, reach)
    assert all(kernel.slope(x * reach) < 0 for x in (0.0, 0.3, 0.7, 1.0))


def test_distances_beyond_their_reach_are_refused() -> None:
    with pytest.raises(VisardError, match="larger than their reach"):
        fit_quadratic(1.0, torch.tensor([0.1, 4.0, 4.0] + 50 * [10.0]), 7.5)


def test_a_length_is_said_in_steps() -> None:
    v = torch.eye(4, dtype=torch.float64)
    steps = {2.0 ** (-i / 4) for i in range(60)}
    for size in (1.0, 0.9, 0.83, 0.5, 0.013, 1e-4):
        said = spoken_length(size * v)
        assert any(math.isclose(said, s) for s in steps)
        assert size * 0.9999 <= said < size * 1.19
    for bad in (0 * v, v / 0):
        with pytest.raises(VisardError, match="zero or not finite"):
            spoken_length(bad)


def test_what_a_server_says_of_lengths_cannot_make_it_repel() -> None:
    a, b = sides(16, 1.0)
    for said in (0.0, -3.0, 1e9, math.inf, math.nan):
        kernel = Compare(unit=False).polynomial(a, said)
        assert compared(a, b, kernel)[0] > 0.9
        assert all(math.isfinite(c) for c in kernel.c)


# In the method.


def mean_feature(net: Wire, client: str, theta: Any) -> Tensor:
    model = net.parties[client].network()
    model.load_state_dict(theta)
    with torch.no_grad():
        found: Tensor = model(torch.from_numpy(net.parties[client].data.train.x)).mean(0)  # type: ignore[attr-defined]
    return found


def nearer(how: Any) -> tuple[float, Wire]:
    """How much nearer one small step brings a far target to where the source was."""
    net = wire(1, 4)
    net.parties["t"].data.train.x[:] += 6.0  # type: ignore[attr-defined]
    server = start(how, net)
    theta = server.theta
    source, before = (mean_feature(net, c, theta) for c in ("s0", "t"))
    how.round(server, net)
    after = mean_feature(net, "t", net.parties["t"].state["theta"])
    return float((before - source).norm() - (after - source).norm()), net


def test_a_far_target_comes_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gmpy2", reason="needs the extra crypto")
    how = method(classes="own", weight=1e-3, compare=Compare(unit=False, radius=40.0))
    gained, net = nearer(how)
    assert gained > 0
    assert [step for step, _, _ in net.transcript].count("say_length") == 2
    monkeypatch.setattr(mmd, "fit_quadratic", lambda alpha, d, reach=0.0: fit_quadratic(alpha, d))
    assert nearer(how)[0] < 0, "the nearest quadratic pushes it away"


def test_features_of_length_one_need_no_word_about_it() -> None:
    pytest.importorskip("gmpy2", reason="needs the extra crypto")
    net = wire(1, 4)
    how = method(classes="own", compare=Compare())
    how.round(start(how, net), net)
    assert "say_length" not in {step for step, _, _ in net.transcript}


def test_saying_a_length_changes_no_batch() -> None:
    pytest.importorskip("gmpy2", reason="needs the extra crypto")
    from visard.methods.encrypted_mmd import Fit

    net, how = wire(1, 4), method()
    server = start(how, net)
    client = net.parties["s0"]
    before = client.rng.get_state()
    said = how.say_length(client, Fit(how.plan(server, net)))  # type: ignore[arg-type]
    assert torch.equal(client.rng.get_state(), before)
    assert 0 < said.length <= 1
