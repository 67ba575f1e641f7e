"""Streaming ROC: equal to slow definitions and to scikit-learn, whatever the settings, in bounded memory."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import auc as sk_auc
from sklearn.metrics import roc_curve

from visard.errors import VisardError
from visard.evaluation.grid import Grid, Tally, every_score
from visard.evaluation.roc import BINS, Steps, allowed, area, bin_of, edges
from visard.evaluation.scores import Limits, Roc, roc_of, stream_roc

FAR = (0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6)
STREAM = Limits(keep_all=0, chunk=60_000, tile=256)


def faces(n: int, people: int, dim: int = 32, noise: float = 1.5, seed: int = 0):
    rng = np.random.default_rng(seed)
    identity = rng.integers(people, size=n)
    centre = rng.standard_normal((people, dim))
    return (centre[identity] + noise * rng.standard_normal((n, dim))).astype(np.float32), identity


def split_scores(features, identity):
    every, genuine = every_score(Grid.build(features, identity))
    value, count = np.unique(every, return_counts=True)
    gen = np.searchsorted(genuine, value, side="right") - np.searchsorted(genuine, value)
    return genuine, np.repeat(value, count - gen)


def figures(roc: Roc) -> dict[str, object]:
    """Everything that may not depend on the settings."""
    record = roc.to_dict()
    del record["passes"], record["curve"], record["histogram"]
    return record


def slow_tar(genuine, impostor, target: float) -> float:
    """Largest TAR over every threshold with FAR <= target, by trying all of them."""
    best = 0.0
    for t in [*genuine, *impostor, math.inf]:
        if sum(s >= t for s in impostor) / len(impostor) <= target:
            best = max(best, sum(s >= t for s in genuine) / len(genuine))
    return best


def slow_auc(genuine, impostor) -> float:
    return sum((g > i) + 0.5 * (g == i) for g in genuine for i in impostor) / (len(genuine) * len(impostor))


def slow_eer(genuine, impostor) -> float:
    thresholds = [math.inf, *sorted({*genuine, *impostor}, reverse=True)]
    points = [(np.mean(impostor >= t), np.mean(genuine >= t)) for t in thresholds]
    for (f0, t0), (f1, t1) in pairwise(points):
        d0, d1 = f0 + t0 - 1, f1 + t1 - 1
        if d0 <= 0 < d1:
            return f0 + (f1 - f0) * -d0 / (d1 - d0)
    raise AssertionError


A32 = np.float32(0.3)
ADVERSARIAL = {
    "ties": ([0.5, 0.5, 0.25, 0.75], [0.5, 0.25, 0.25, 0.0, 0.75, -0.5]),
    "all equal": ([0.5, 0.5], [0.5, 0.5, 0.5]),
    "one genuine, on top": ([0.9], [0.1, 0.2, 0.3]),
    "one genuine, at the bottom": ([0.05], [0.1, 0.2, 0.3]),
    "one genuine, inside": ([0.25], [0.1, 0.2, 0.3, 0.4]),
    "one of each, tied": ([0.5], [0.5]),
    "separated": ([0.8, 0.9, 0.95], [0.1, 0.2, 0.3, 0.3]),
    "reversed": ([0.1, 0.2], [0.8, 0.9, 0.95]),
    "next floats": ([A32, np.nextafter(A32, np.float32(1))], [np.nextafter(A32, np.float32(0)), A32]),
    "long runs": ([0.5, 0.9], [0.1, 0.2, 0.3, 0.4, 0.6, 0.61, 0.62, 0.63, 0.7, 0.7, 0.7, 0.8]),
    "equal tied steps": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_scores_at_hand_match_the_definitions(name: str) -> None:
    genuine, impostor = (np.array(s, np.float32) for s in ADVERSARIAL[name])
    targets = (1.0, 0.75, 0.6, 0.5, 1 / 3, 0.3, 0.25, 0.1, 0.01)
    roc = roc_of(genuine, impostor, far=targets)
    for point in roc.tar:
        assert point.tar == slow_tar(genuine, impostor, point.far)
        assert point.far_reached == np.mean(impostor >= point.threshold) <= point.far
        assert point.tar == np.mean(genuine >= point.threshold)
    assert roc.auc == pytest.approx(slow_auc(genuine, impostor), abs=1e-15)
    assert roc.eer == pytest.approx(slow_eer(genuine, impostor), abs=1e-15)


def test_below_one_impostor_the_threshold_is_above_the_largest_impostor() -> None:
    roc = roc_of(np.array([0.2, 0.4], np.float32), np.array([0.3, 0.5], np.float32), far=(0.1,))
    assert roc.tar[0].tar == 0.0
    assert roc.tar[0].threshold == np.nextafter(np.float32(0.5), np.float32(1))
    roc = roc_of(np.array([0.2, 0.6], np.float32), np.array([0.3, 0.5], np.float32), far=(0.1,))
    assert (roc.tar[0].tar, roc.tar[0].far_reached) == (0.5, 0.0)
    assert roc.tar[0].threshold > 0.5


def test_a_rate_of_fewer_than_ten_impostors_is_unreliable() -> None:
    rng = np.random.default_rng(0)
    roc = roc_of(rng.random(50), rng.random(1000), far=(0.1, 0.01, 0.0099))
    assert [p.unreliable for p in roc.tar] == [False, False, True]


@pytest.mark.parametrize("noise", [0.3, 1.5, 4.0])
def test_streaming_equals_scikit_learn(noise: float) -> None:
    features, identity = faces(900, 60, noise=noise)
    genuine, impostor = split_scores(features, identity)
    roc = stream_roc(features, identity, far=FAR, limits=STREAM)
    truth = np.r_[np.ones(len(genuine)), np.zeros(len(impostor))]
    fpr, tpr, _ = roc_curve(truth, np.r_[genuine, impostor], drop_intermediate=False)
    assert (roc.genuine, roc.impostors) == (len(genuine), len(impostor))
    assert roc.auc_error == 0.0
    assert roc.auc == pytest.approx(sk_auc(fpr, tpr), abs=1e-13)
    crossing = np.flatnonzero(fpr + tpr - 1 <= 0)[-1]
    d0, d1 = fpr[crossing] + tpr[crossing] - 1, fpr[crossing + 1] + tpr[crossing + 1] - 1
    assert roc.eer == pytest.approx(fpr[crossing] + (fpr[crossing + 1] - fpr[crossing]) * -d0 / (d1 - d0), abs=1e-13)
    for point in roc.tar:
        assert point.tar == tpr[fpr <= point.far].max()
        assert point.far_reached == np.mean(impostor >= point.threshold)
        assert point.tar == np.mean(genuine >= point.threshold)


SETTINGS = {
    "small chunks": {"chunk": 9_999},
    "large tiles": {"tile": 1024},
    "small tiles, two threads": {"tile": 64, "threads": 2},
    "no guesses": {"keep_guessed": 0},
    "guesses overflow": {"keep_guessed": 10},
    "genuine not kept": {"keep_genuine": 0},
    "area from bins": {"exact_auc_pairs": 0},
    "everything kept": {"keep_all": 1 << 40},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_no_figure(name: str) -> None:
    features, identity = faces(700, 40)
    expected = stream_roc(features, identity, far=FAR, limits=STREAM)
    limits = dataclasses.replace(STREAM, **SETTINGS[name])
    got = stream_roc(features, identity, far=FAR, limits=limits)
    if got.auc_error:
        assert abs(got.auc - expected.auc) <= got.auc_error < 1e-3
        got = dataclasses.replace(got, auc=expected.auc, auc_error=0.0)
    assert figures(got) == figures(expected)
    assert got.histogram == expected.histogram


def test_wrong_guesses_cost_a_pass_and_nothing_else() -> None:
    features, identity = faces(600, 30)
    guessed = stream_roc(features, identity, limits=STREAM)
    blind = stream_roc(features, identity, limits=dataclasses.replace(STREAM, keep_guessed=0))
    assert (guessed.passes, blind.passes) == (1, 2)


@pytest.mark.parametrize("kind", ["two points", "few values", "opposite", "orthogonal"])
def test_streaming_with_heavy_ties(kind: str) -> None:
    rng = np.random.default_rng(3)
    n = 300
    features = {
        "two points": np.eye(2, 8, dtype=np.float32)[rng.integers(2, size=n)],
        "few values": rng.integers(-1, 2, size=(n, 3)).astype(np.float32) + np.float32(0.5),
        "opposite": rng.choice([-1.0, 1.0], size=(n, 1)).astype(np.float32),
        "orthogonal": np.eye(16, dtype=np.float32)[np.arange(n) % 16],
    }[kind]
    identity = rng.integers(20, size=n) if kind != "orthogonal" else np.arange(n) % 16
    genuine, impostor = split_scores(features, identity)
    for limits in (STREAM, dataclasses.replace(STREAM, exact_auc_pairs=0, keep_guessed=0), Limits()):
        roc = stream_roc(features, identity, far=(0.5, 0.1, 0.01), limits=limits)
        expected = roc_of(genuine, impostor, far=(0.5, 0.1, 0.01))
        assert figures(roc) | {"auc": 0, "auc_error": 0} == figures(expected) | {"auc": 0, "auc_error": 0}
        assert abs(roc.auc - roc_of(genuine, impostor).auc) <= roc.auc_error + 1e-15


def test_the_score_of_a_pair_does_not_depend_on_tiles_or_threads() -> None:
    features, identity = faces(333, 333, dim=130)
    threads = torch.get_num_threads()
    reference = every_score(Grid.build(features, identity, tile=64))[0]
    for tile in (128, 192, 1024):
        assert np.array_equal(every_score(Grid.build(features, identity, tile=tile))[0], reference)
    stream_roc(*faces(100, 10), limits=dataclasses.replace(STREAM, threads=2))
    assert torch.get_num_threads() == threads


def test_curve_points_are_corners_of_the_curve() -> None:
    features, identity = faces(700, 50)
    genuine, impostor = split_scores(features, identity)
    for limits in (STREAM, dataclasses.replace(STREAM, exact_auc_pairs=0), Limits()):
        curve = stream_roc(features, identity, limits=limits).curve
        assert 100 < len(curve.far) <= 202
        assert curve.far[0] == 0.0
        assert (curve.far[-1], curve.tar[-1]) == (1.0, 1.0)
        for far, tar, threshold in zip(curve.far, curve.tar, curve.threshold, strict=True):
            assert far == np.mean(impostor >= threshold)
            assert tar == np.mean(genuine >= threshold)


def test_histogram_counts_every_score_once() -> None:
    features, identity = faces(400, 20)
    roc = stream_roc(features, identity, limits=STREAM)
    assert len(roc.histogram.genuine) == len(roc.histogram.impostor) == 200
    assert sum(roc.histogram.genuine) == roc.genuine
    assert sum(roc.histogram.impostor) == roc.impostors


def test_results_are_plain_json() -> None:
    text = json.dumps(stream_roc(*faces(60, 6)).to_dict(), allow_nan=False)
    assert json.loads(text)["tar"][0]["rule"] == "conservative"


def test_bins_agree_with_their_edges() -> None:
    rng = np.random.default_rng(0)
    start = edges()
    assert (np.diff(start) > 0).all()
    assert np.array_equal(bin_of(start[1:]), np.arange(1, BINS))
    below = np.nextafter(start[1:], np.float32(-2))
    assert np.array_equal(bin_of(below), np.arange(BINS - 1))
    scores = np.concatenate([rng.uniform(-1, 1, 10000), 1e-9 * rng.standard_normal(100)]).astype(np.float32)
    assert np.array_equal(bin_of(scores), np.searchsorted(start, scores, side="right") - 1)


def test_tally_is_a_multiset_of_the_ranges() -> None:
    rng = np.random.default_rng(0)
    tally, ordered = (Tally([(-0.5, -0.25), (0.25, math.inf)], fold=50) for _ in range(2))
    every = []
    for _ in range(20):
        scores = (rng.integers(-8, 9, size=40) / 8).astype(np.float32)
        tally.add(scores)
        ordered.add_sorted(np.sort(scores))
        every.append(scores)
    scores = np.concatenate(every)
    kept = scores[((scores >= -0.5) & (scores < -0.25)) | (scores >= 0.25)]
    value, count = np.unique(kept, return_counts=True)
    for one in (tally, ordered):
        one.fold()
        assert np.array_equal(one.value, value)
        assert np.array_equal(one.count, count)
    tally.join(ordered)
    assert np.array_equal(tally.count, 2 * count)


def test_area_beyond_64_bit_products() -> None:
    counts = np.array([3, 1, 4, 1, 5], np.int64)
    small = area(Steps.build(np.arange(5.0), counts, counts[::-1].copy()))
    large = area(Steps.build(np.arange(5.0), counts * 10**9, counts[::-1] * 10**9))
    assert large == pytest.approx(small, abs=1e-15)


@pytest.mark.parametrize(("target", "total"), [(0.29, 100), (0.07, 100), (1e-3, 45_000), (1 / 3, 3), (1.0, 7)])
def test_allowed_agrees_with_division(target: float, total: int) -> None:
    k = allowed(target, total)
    assert k / total <= target < (k + 1) / total


GOOD = np.eye(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("features", "identity", "message"),
    [
        (np.where(np.arange(4)[:, None] == 2, 0, GOOD), [0, 0, 1, 1], "row 2 is all zeros"),
        (np.where(np.arange(4)[:, None] == 1, np.nan, GOOD), [0, 0, 1, 1], "row 1 is not finite"),
        (np.where(np.arange(4)[:, None] == 3, np.inf, GOOD), [0, 0, 1, 1], "row 3 is not finite"),
        (GOOD, [0, 0, 1], "expected 4 labels"),
        (GOOD, [0.0, 0.0, 1.0, 1.0], "expected integers"),
        (GOOD[0], [0], "expected a non-empty matrix"),
        (GOOD[:0], [], "expected a non-empty matrix"),
        (GOOD.astype(str), [0, 0, 1, 1], "expected real numbers"),
        (GOOD, [0, 1, 2, 3], "no genuine pairs"),
        (GOOD, [5, 5, 5, 5], "no impostor pairs"),
    ],
)
def test_bad_input_is_one_line(features, identity, message: str) -> None:
    with pytest.raises(VisardError, match=message) as caught:
        stream_roc(features, np.array(identity))
    assert "\n" not in str(caught.value)


def test_wrong_settings_are_one_line() -> None:
    for far in (0.0, 1.5, math.nan):
        with pytest.raises(VisardError, match=r"not in \(0, 1\]"):
            stream_roc(GOOD, np.array([0, 0, 1, 1]), far=(far,))
    with pytest.raises(VisardError, match="not finite"):
        roc_of([0.5, math.nan], [0.1])
    with pytest.raises(VisardError, match="multiple of 64"):
        stream_roc(GOOD, np.array([0, 0, 1, 1]), limits=Limits(tile=100))


def test_extreme_lengths_are_normalised() -> None:
    features, identity = faces(80, 8)
    scale = np.float32(10.0) ** np.linspace(-35, 35, 80, dtype=np.float32)[:, None]
    assert stream_roc(features * scale, identity).auc == pytest.approx(stream_roc(features, identity).auc, abs=1e-4)


MEMORY = """
import numpy as np, resource, torch
from visard.evaluation.scores import Limits, stream_roc
torch.set_num_threads(2)
rng = np.random.default_rng(0)
ids = np.arange(9000) // 10
x = rng.standard_normal((9000, 16), dtype=np.float32) + 2 * rng.standard_normal((900, 16), dtype=np.float32)[ids]
stream_roc(x[:200], ids[:200], limits=Limits(keep_all=0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for exact in (0, 1 << 40):
    roc = stream_roc(x, ids, limits=Limits(exact_auc_pairs=exact))
print(roc.impostors, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_stays_far_below_the_scores() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    impostors, extra = (int(word) for word in done.stdout.split())
    assert impostors > 4e7
    assert extra < 100e6 < impostors * 4 * 2 / 3  # all scores as float32 would be 162 MB
