"""Averages do not depend on the order of clients and stay within their hull."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given
from tests.toys import weighted_mean

part = st.tuples(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), st.integers(1, 50))
parts = st.lists(part, min_size=1, max_size=6)


@given(parts, st.randoms(use_true_random=False))
def test_permutation_invariance(parts: list[tuple[list[float], int]], random: object) -> None:
    clients = [({"w": torch.tensor(w)}, n) for w, n in parts]
    shuffled = list(clients)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert torch.allclose(weighted_mean(clients)["w"], weighted_mean(shuffled)["w"], rtol=1e-6, atol=1e-6)


@given(parts)
def test_stays_in_the_hull(parts: list[tuple[list[float], int]]) -> None:
    stack = torch.tensor([w for w, _ in parts])
    mean = weighted_mean(({"w": torch.tensor(w)}, n) for w, n in parts)["w"]
    assert bool((mean >= stack.min(0).values - 1e-4).all())
    assert bool((mean <= stack.max(0).values + 1e-4).all())


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), st.integers(1, 9), st.integers(1, 9))
def test_equal_clients_give_themselves(w: list[float], n: int, m: int) -> None:
    assert torch.equal(weighted_mean([({"w": torch.tensor(w)}, n), ({"w": torch.tensor(w)}, m)])["w"], torch.tensor(w))
