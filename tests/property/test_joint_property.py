"""Parts of FedFR-joint whatever the numbers: blocks do not show, scales do not count, pairs are counted once."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visard.evaluation.grid import Grid
from visard.evaluation.protocols import personal_roc
from visard.learning.objective import model_contrastive
from visard.methods.fedfr_joint_client import closest, hard_negatives

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 40)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=sizes, m=sizes, rows=sizes, columns=sizes)
def test_mining_does_not_depend_on_its_blocks(seed: int, n: int, m: int, rows: int, columns: int) -> None:
    public, local = random(seed, n, 5), random(seed + 1, m, 5)
    whole = closest(public, local)
    torch.testing.assert_close(closest(public, local, rows, columns), whole)
    torch.testing.assert_close(closest(3 * public, 0.1 * local), whole)
    assert (whole.abs() <= 1 + 1e-12).all()


@settings(deadline=None, max_examples=40)
@given(seed=seeds, low=st.floats(-1, 1), high=st.floats(-1, 1))
def test_a_higher_threshold_keeps_a_subset(seed: int, low: float, high: float) -> None:
    public, local = random(seed, 30, 4), random(seed + 1, 6, 4)
    low, high = sorted((low, high))
    assert set(hard_negatives(public, local, high).tolist()) <= set(hard_negatives(public, local, low).tolist())


@settings(deadline=None, max_examples=40)
@given(seed=seeds, tau=st.floats(0.05, 5))
def test_contrast_lies_between_its_ends(seed: int, tau: float) -> None:
    f, g, p = (random(seed + k, 6, 4) for k in range(3))
    loss = float(model_contrastive(f, g, p, tau))
    assert math.log1p(math.exp(-2 / tau)) - 1e-9 <= loss <= math.log1p(math.exp(2 / tau)) + 1e-9
    swapped = float(model_contrastive(f, p, g, tau))
    cosines = torch.cosine_similarity(f, p) - torch.cosine_similarity(f, g)
    assert math.isclose(loss - swapped, float(cosines.mean() / tau), rel_tol=1e-6, abs_tol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, people=st.integers(2, 9), pictures=st.integers(2, 5), count=st.integers(1, 8))
def test_every_pair_with_a_local_picture_is_counted_once(seed: int, people: int, pictures: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    identity = rng.permutation(np.repeat(rng.permutation(50)[:people], pictures))
    local = rng.permutation(np.unique(identity))[:count]
    roc = personal_roc(rng.standard_normal((len(identity), 4)).astype(np.float32), identity, local, far=(0.5,))
    mine = int(np.isin(identity, local).sum())
    pairs = mine * (len(identity) - mine) + mine * (mine - 1) // 2
    assert roc.genuine + roc.impostors == pairs
    assert roc.genuine == len(local) * pictures * (pictures - 1) // 2
    everybody = Grid.build(np.ones((len(identity), 1)), identity)
    assert everybody.counts == Grid.build(np.ones((len(identity), 1)), identity, below=99).counts
