"""What must hold for any scores and any features."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sklearn.metrics import roc_auc_score, roc_curve

from visard.evaluation.identification import identify
from visard.evaluation.metrics import summarise
from visard.evaluation.protocols import make_pairs
from visard.evaluation.scores import Limits, roc_of, stream_roc

SCORES = st.lists(st.one_of(st.integers(-4, 4).map(lambda k: k / 4), st.floats(-1, 1, width=32)), min_size=1)
FAR = (1.0, 0.5, 0.2, 0.1, 0.01)
STREAM = Limits(keep_all=0, chunk=5_000, tile=64)


@settings(deadline=None)
@given(SCORES, SCORES)
def test_rates_agree_with_scikit_learn(genuine: list[float], impostor: list[float]) -> None:
    gen, imp = np.array(genuine, np.float32), np.array(impostor, np.float32)
    truth, scores = np.r_[np.ones(len(gen)), np.zeros(len(imp))], np.r_[gen, imp]
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    roc = roc_of(gen, imp, far=FAR)
    assert np.isclose(roc.auc, roc_auc_score(truth, scores), atol=1e-12, rtol=0)
    for point in roc.tar:
        assert point.tar == tpr[fpr <= point.far].max()
        assert point.far_reached == np.mean(imp >= np.float32(point.threshold))
        assert point.tar == np.mean(gen >= np.float32(point.threshold))


@settings(deadline=None)
@given(SCORES, SCORES)
def test_figures_are_ordered_and_bounded(genuine: list[float], impostor: list[float]) -> None:
    roc = roc_of(np.array(genuine), np.array(impostor), far=FAR)
    tars = [point.tar for point in roc.tar]
    assert tars == sorted(tars, reverse=True)  # FAR falls, so does TAR
    assert 0.0 <= roc.eer <= 1.0
    assert 0.0 <= roc.auc <= 1.0
    swapped = roc_of(-np.array(impostor), -np.array(genuine), far=FAR)
    assert np.isclose(swapped.auc, roc.auc, atol=1e-12, rtol=0)
    assert np.isclose(swapped.eer, roc.eer, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(3, 150), st.integers(1, 40))
def test_order_of_rows_and_settings_change_nothing(seed: int, n: int, dim: int) -> None:
    rng = np.random.default_rng(seed)
    identity = np.r_[0, 0, 1, rng.integers(0, max(2, n // 4), size=n - 3)]
    features = rng.standard_normal((n, dim)).astype(np.float32)
    features += rng.standard_normal((int(identity.max()) + 1, dim)).astype(np.float32)[identity]
    features[rng.random(n) < 0.2] = features[0]  # repeated pictures: tied scores
    expected = stream_roc(features, identity, far=FAR)
    order = rng.permutation(n)
    for limits in (Limits(), STREAM, dataclasses.replace(STREAM, keep_guessed=0, threads=2)):
        assert stream_roc(features[order], identity[order], far=FAR, limits=limits).tar == expected.tar
        got = stream_roc(features[order], identity[order], far=FAR, limits=limits)
        assert (got.eer, got.eer_threshold, got.auc, got.histogram) == (
            expected.eer,
            expected.eer_threshold,
            expected.auc,
            expected.histogram,
        )


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3))
def test_length_and_names_do_not_matter(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    identity = rng.permutation(np.arange(40) % 8)
    features = rng.standard_normal((40, 6))
    gallery, probe = np.arange(20), np.arange(20, 40)
    names = rng.permutation(100)[:8]
    ours = identify(features[gallery], identity[gallery], features[probe], identity[probe])
    theirs = identify(features[gallery] * scale, names[identity[gallery]], features[probe], names[identity[probe]])
    assert ours.rank == theirs.rank
    assert [p.tpir for p in ours.tpir] == [p.tpir for p in theirs.tpir]


@settings(deadline=None)
@given(
    npst.arrays(np.int64, st.integers(4, 60), elements=st.integers(0, 6)),
    st.integers(0, 1000),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_pair_lists_hold_no_pair_twice(identity: np.ndarray, seed: int, folds: int, fraction: float) -> None:
    i, j = np.triu_indices(len(identity), 1)
    genuine = int((identity[i] == identity[j]).sum())
    count = 4 + seed % 30
    same = round(count * fraction)
    if same > genuine or count - same > len(i) - genuine:
        return
    chosen = make_pairs(identity, count, seed, fraction, folds)
    assert len(np.unique(np.sort(chosen.pairs, axis=1), axis=0)) == count
    assert np.array_equal(identity[chosen.pairs[:, 0]] == identity[chosen.pairs[:, 1]], chosen.same)
    assert chosen.same.sum() == same
    if chosen.disjoint:
        owners = [set(identity[chosen.pairs[chosen.fold == k]].ravel()) for k in range(folds)]
        assert sum(map(len, owners)) == len(set.union(*owners))


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), min_size=1))
def test_summary_bounds(values: dict[str, float]) -> None:
    found = summarise({client: {"tar": value} for client, value in values.items()})["tar"]
    assert found.worst - 1e-12 <= found.mean <= found.best + 1e-12
    assert values[found.worst_client] == found.worst == min(values.values())
    assert found.jain is not None
    assert 1 / len(values) - 1e-12 <= found.jain <= 1 + 1e-12
