"""The personal protocols against all pairs written out, and against the counts that the paper gives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from visard.errors import VisardError
from visard.evaluation.grid import Grid
from visard.evaluation.identification import identify
from visard.evaluation.protocols import personal_metrics, personal_roc, personal_search_legacy
from visard.evaluation.scores import Limits

STREAM = Limits(keep_all=0, exact_auc_pairs=0, tile=64)


def everybody(people: int = 30, pictures: int = 6, dim: int = 16, noise: float = 0.7, seed: int = 0):
    rng = np.random.default_rng(seed)
    identity = rng.permutation(np.repeat(np.arange(people) * 3 + 7, pictures))
    centre = rng.standard_normal((1000, dim))
    return (centre[identity] + noise * rng.standard_normal((len(identity), dim))).astype(np.float32), identity


def all_pairs(features, identity, local):
    """Genuine and impostor scores of every pair with at least one local picture."""
    rows = features / np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    genuine, impostor = [], []
    for i, j in itertools.combinations(range(len(rows)), 2):
        if identity[i] in local or identity[j] in local:
            (genuine if identity[i] == identity[j] else impostor).append(float(rows[i] @ rows[j]))
    return np.array(genuine), np.array(impostor)


@pytest.mark.parametrize("limits", [STREAM, Limits()])
def test_1_to_1_is_every_pair_with_a_local_picture(limits: Limits) -> None:
    features, identity = everybody()
    local = [7, 40, 67, 94]  # scattered among the others
    genuine, impostor = all_pairs(features, identity, set(local))
    roc = personal_roc(features, identity, local, far=(0.1, 0.01, 1e-3), limits=limits)
    assert (roc.genuine, roc.impostors) == (len(genuine), len(impostor))
    for point in roc.tar:
        accepted = math.floor(point.far * len(impostor))
        threshold = np.sort(impostor)[::-1][accepted]  # the first impostor that may not be accepted
        assert point.tar == pytest.approx(np.mean(genuine > threshold))
    assert roc.tar[0].tar < 1
    below = np.mean(genuine[:, None] > impostor[None, :]) + 0.5 * np.mean(genuine[:, None] == impostor[None, :])
    assert abs(roc.auc - below) <= roc.auc_error + 1e-6


def test_the_paper_s_numbers_of_pairs() -> None:
    """40 clients x 100 people x 40 pictures: 78,000 genuine (the paper's 7.8k is a slip), about 630 million others."""
    identity = np.repeat(np.arange(4000), 40)
    rows = np.ones((len(identity), 1), np.float32)
    assert Grid.build(rows, identity, below=100).counts == (78_000, 631_920_000)


def test_counts_are_right_with_some_first_rows() -> None:
    features, identity = everybody(8, 5)
    identity = np.unique(identity, return_inverse=True)[1]
    grid = Grid.build(features, identity, tile=64, below=3)
    order = np.argsort(identity, kind="stable")
    pairs = [
        (identity[a] == identity[b]) for a, b in itertools.combinations(order, 2) if min(identity[a], identity[b]) < 3
    ]
    assert grid.counts == (sum(pairs), len(pairs) - sum(pairs))


def test_1_to_n_finds_local_people_among_strangers() -> None:
    features, identity = everybody(noise=0.9)
    local = [7, 40, 67]
    gallery, people = features[np.isin(identity, local)], identity[np.isin(identity, local)]
    rng = np.random.default_rng(3)
    probes = (features + 0.8 * rng.standard_normal(features.shape)).astype(np.float32)
    found = identify(gallery, people, probes, identity, ranks=(1,), fpir=(0.1, 0.01))
    old = personal_search_legacy(gallery, people, probes, identity, fpir=(0.1, 0.01))
    names = np.unique(people)
    unit = gallery / np.linalg.norm(gallery, axis=1, keepdims=True)
    means = np.stack([unit[people == n].mean(0) for n in names])
    rows = probes / np.linalg.norm(probes, axis=1, keepdims=True)
    standard = rows @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    strangers = ~np.isin(identity, names)
    assert (found.mated, found.unmated) == ((~strangers).sum(), strangers.sum())
    for point in found.tpir:
        top = np.sort(standard[strangers].max(1))[::-1]
        threshold = top[math.floor(point.fpir * len(top))]
        hits = [
            standard[i].argmax() == np.searchsorted(names, identity[i]) and standard[i].max() > threshold
            for i in np.flatnonzero(~strangers)
        ]
        assert point.tpir == pytest.approx(np.mean(hits))
    legacy = rows @ means.T  # means of unit rows, not scaled again
    mate = identity[:, None] == names[None, :]
    impostors = np.sort(legacy[~mate])[::-1]
    for old_point in old.tpir:
        threshold = impostors[math.ceil(len(probes) * old_point.fpir) - 1]
        assert old_point.tpir == pytest.approx(np.mean(legacy[mate] > threshold))


def test_figures_leave_out_what_the_pictures_cannot_give() -> None:
    features, identity = everybody()
    local = np.array([7, 40])
    mine = np.isin(identity, local)
    figures = personal_metrics(features[mine], identity[mine], features, identity, local)
    pairs = 12 * 168 + 36  # local with others, and the two people with each other
    assert pairs * 1e-3 >= 1 > pairs * 1e-4
    assert {k for k in figures if "tar@" in k} == {"personal/tar@far=0.01", "personal/tar@far=0.001"}
    assert {k for k in figures if "/tpir@" in k} == {"personal/tpir@fpir=0.1", "personal/tpir@fpir=0.01"}
    assert "personal/legacy_tpir@fpir=0.01" in figures
    alone = personal_metrics(features[mine], identity[mine], features[mine], identity[mine], local)
    assert not any("/tpir@" in k for k in alone), "no strangers, no false alarms"


def test_a_client_without_test_pictures_is_told() -> None:
    features, identity = everybody(4, 2)
    with pytest.raises(VisardError, match="no test picture shows an identity of the client"):
        personal_roc(features, identity, [999])
