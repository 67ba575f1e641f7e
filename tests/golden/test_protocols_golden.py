"""Protocols against slow implementations written from their definitions, on random and on adversarial scores."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy.interpolate import BSpline

from visard.evaluation import scores as scores_module
from visard.evaluation.benchmarks import by_group, lfw, squared_distances, ten_folds
from visard.evaluation.ijb import pool, search_galleries, search_legacy, template_scores, verify_templates
from visard.evaluation.scores import roc_of

# ---------------------------------------------------------------- ten folds


def slow_ten_folds(distance, same, fold, far_target):
    """Accuracy, TAR and FAR on each fold with thresholds from the others, pair by pair."""
    folds = sorted(set(fold))
    accuracy, chosen, tar, far = [], [], [], []
    for k in folds:
        train = [p for p in range(len(same)) if fold[p] != k]
        test = [p for p in range(len(same)) if fold[p] == k]
        best, at = -1, 0.0
        for t in np.arange(0, 4, 0.01).tolist():
            right = sum((distance[p] < t) == same[p] for p in train)
            if right > best:
                best, at = right, t
        accuracy.append(sum((distance[p] < at) == same[p] for p in test) / len(test))
        chosen.append(at)
        impostors = sorted(distance[p] for p in train if not same[p])
        threshold, before, rate_before = 0.0, None, 0.0
        for t in np.arange(0, 4, 0.001).tolist():
            rate = bisect.bisect_left(impostors, t) / len(impostors) if impostors else 0.0  # those below t
            if rate == far_target:  # of distances with the same rate the last
                threshold = t
            if rate > far_target:
                if rate_before == far_target:
                    break
                threshold = (t - before) / (rate - rate_before) * (far_target - rate_before) + before
                break
            before, rate_before = t, rate
        for kind, rates in ((True, tar), (False, far)):
            mine = [p for p in test if same[p] == kind]
            rates.append(sum(distance[p] < threshold for p in mine) / len(mine) if mine else math.nan)
    return accuracy, chosen, tar, far


def pair_cases():
    rng = np.random.default_rng(0)
    same = rng.random(60) < 0.5
    yield "random", np.clip(1.4 - 0.7 * same + 0.4 * rng.standard_normal(60), 0, 4), same
    yield "ties on the grid", rng.integers(0, 20, 60) / 10, same
    yield "all equal", np.full(60, 1.0), same
    yield "perfect", np.where(same, 0.2, 2.0), same
    yield "upside down", np.where(same, 3.99999, 0.0), same
    one = np.zeros(60, bool)
    one[17] = True
    yield "one genuine pair", rng.random(60) * 4, one
    yield "one impostor pair", rng.random(60) * 4, ~one


CASES = {name: (distance, same) for name, distance, same in pair_cases()}


@pytest.mark.parametrize("far", [0.3, 0.05, 1e-3])  # the last is below 1 / impostors
@pytest.mark.parametrize("case", CASES)
def test_ten_folds(case: str, far: float) -> None:
    distance, same = CASES[case]
    fold = np.repeat(np.arange(10), 6)
    found = ten_folds(distance, same, far=far)
    accuracy, chosen, tar, reached = slow_ten_folds(distance.tolist(), same.tolist(), fold.tolist(), far)
    assert found.fold_accuracy == pytest.approx(accuracy, abs=1e-15)
    assert found.fold_distance == pytest.approx(chosen, abs=1e-15)
    assert found.fold_tar == pytest.approx(tar, abs=1e-15, nan_ok=True)
    assert found.fold_far == pytest.approx(reached, abs=1e-15, nan_ok=True)
    assert found.accuracy == pytest.approx(sum(accuracy) / 10)
    assert found.accuracy_std == pytest.approx(np.std(accuracy))
    assert found.tar == pytest.approx(np.nanmean(tar))
    assert found.far == pytest.approx(np.nanmean(reached))


def test_a_rate_that_is_hit_exactly_is_that_of_the_released_code() -> None:
    """It draws a line through distances over rates with scipy, as a spline of degree 1 with a knot at every rate.

    Where many distances have the target rate the spline has its last. (Newer versions of scipy refuse equal rates.)
    """
    rng = np.random.default_rng(1)
    same = np.tile(np.repeat([True, False], 30), 10)
    distance = np.where(same, 0.9, 1.6) + 0.35 * rng.standard_normal(600)
    fold = np.repeat(np.arange(10), 60)
    grid = np.arange(0, 4, 0.001)
    for far in (10 / 270, 27 / 270, 0.05):  # two that are hit exactly, one between
        expected = []
        for k in range(10):
            others = distance[(fold != k) & ~same]
            rates = np.array([(others < t).mean() for t in grid])
            at = float(BSpline(np.r_[rates[0], rates, rates[-1]], grid, 1)(far))
            expected.append((distance[(fold == k) & same] < at).mean())
        assert ten_folds(distance, same, far=far).fold_tar == pytest.approx(expected, abs=1e-12)


def test_ten_folds_of_uneven_sizes_and_of_given_folds() -> None:
    rng = np.random.default_rng(1)
    distance, same = rng.random(47) * 4, rng.random(47) < 0.5
    blocks = [k for k in range(10) for _ in range(5 if k < 7 else 4)]
    given = rng.integers(3, 6, 47)
    for fold, passed in ((blocks, None), (given.tolist(), given)):
        found = ten_folds(distance, same, passed, far=0.1)
        slow = slow_ten_folds(distance.tolist(), same.tolist(), fold, 0.1)
        assert found.fold_accuracy == pytest.approx(slow[0], abs=1e-15)
        assert found.fold_tar == pytest.approx(slow[2], abs=1e-15, nan_ok=True)


def test_distances_of_pairs() -> None:
    rng = np.random.default_rng(2)
    features = rng.standard_normal((30, 5)).astype(np.float32) * 100
    first, second = rng.integers(0, 30, 50), rng.integers(0, 30, 50)
    expected = []
    for i, j in zip(first, second, strict=True):
        a, b = ([float(v) for v in features[row]] for row in (i, j))
        a, b = ([v / math.sqrt(sum(w * w for w in row)) for v in row] for row in (a, b))
        expected.append(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    assert squared_distances(features, first, second) == pytest.approx(expected, abs=1e-14)
    same = rng.random(50) < 0.5
    whole = lfw(features, first, second, same).to_dict()
    assert whole == ten_folds(squared_distances(features, first, second), same).to_dict()


# ---------------------------------------------------------------- templates


def slow_templates(features, template, media, score, keep_norm):
    """normalise(sum over media of mean over pictures), with plain dictionaries."""
    found = defaultdict(lambda: defaultdict(list))
    for i, (t, m) in enumerate(zip(template, media, strict=True)):
        x = [float(v) for v in features[i]]
        if not keep_norm:
            length = math.sqrt(sum(v * v for v in x))
            x = [v / length for v in x]
        found[t][m].append([v * score[i] for v in x])
    result = {}
    for t, groups in found.items():
        means = [[sum(column) / len(group) for column in zip(*group, strict=True)] for group in groups.values()]
        total = [sum(column) for column in zip(*means, strict=True)]
        length = math.sqrt(sum(v * v for v in total))
        result[t] = [v / length for v in total]
    return result


def slow_tar(genuine, impostor, far):
    """Largest share of genuine scores accepted by a threshold (any score, or above all) with FAR <= far."""
    best = 0.0
    for t in {*genuine, *impostor}:
        if sum(s >= t for s in impostor) / len(impostor) <= far:
            best = max(best, sum(s >= t for s in genuine) / len(genuine))
    return best


def templates(seed: int, ties: bool):
    rng = np.random.default_rng(seed)
    count, people = 240, 20
    template = rng.integers(0, 60, count) * 7 + 3  # numbers with gaps
    features = rng.standard_normal((people, 8))[template // 7 % people] + 0.9 * rng.standard_normal((count, 8))
    if ties:
        features = np.sign(np.round(features / 2)) + (np.abs(features).sum(1, keepdims=True) > 0) * np.eye(8)[0]
        features = np.where(features == 0, 0.0, features)
        features[np.abs(features).sum(1) == 0] = 1.0
    media = rng.integers(0, 5, count) + 1000
    return features.astype(np.float32), template, media, rng.random(count).astype(np.float32) + 0.1


@pytest.mark.parametrize("keep_norm", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_pooling(keep_norm: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.evaluation.ijb.ROWS", 7)  # several blocks, and templates larger than one
    features, template, media, score = templates(0, False)
    weight = score if weighted else np.ones(len(score))
    found = pool(features, template, media, score=score if weighted else None, keep_norm=keep_norm)
    expected = slow_templates(features, template.tolist(), media.tolist(), weight.tolist(), keep_norm)
    assert found.ids.tolist() == sorted(expected)
    for number, row in zip(found.ids.tolist(), found.rows, strict=True):
        assert row == pytest.approx(expected[number], abs=1e-7)


def test_pooling_by_rows_of_a_face_set() -> None:
    features, template, media, _ = templates(1, False)
    order = np.random.default_rng(0).permutation(len(features))
    direct = pool(features, template, media)
    through = pool(features[order], template, media, row=np.argsort(order))
    assert np.array_equal(direct.rows, through.rows)


@pytest.mark.parametrize("ties", [False, True])
def test_verification_of_templates(ties: bool) -> None:
    features, template, media, _ = templates(2, ties)
    if ties:
        media = np.arange(len(media))
    pooled = pool(features, template, media)
    rng = np.random.default_rng(3)
    first, second = pooled.ids[rng.integers(0, len(pooled.ids), (2, 400))]
    same = first // 7 % 20 == second // 7 % 20
    found = verify_templates(pooled, first, second, same, far=(0.2, 0.01, 1e-5))
    rows = dict(zip(pooled.ids.tolist(), pooled.rows.astype(np.float64), strict=True))
    slow = np.array(
        [float(np.float32(rows[a] @ rows[b])) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    )
    scores = template_scores(pooled, first, second)
    assert scores == pytest.approx(slow, abs=2e-7)
    assert found.genuine == same.sum()
    for point in found.tar:  # from the definition, on the scores that were just compared
        assert point.tar == slow_tar(scores[same].tolist(), scores[~same].tolist(), point.far)
        assert point.far_reached <= point.far
    assert found.tar[-1].unreliable


@pytest.mark.parametrize("dense", [0.0, 1e9])  # all pairs in matrix products, or each gathered
def test_scores_do_not_depend_on_blocks(dense: float, monkeypatch: pytest.MonkeyPatch) -> None:
    features, template, media, _ = templates(4, False)
    pooled = pool(features, template, media)
    first, second = pooled.ids[np.random.default_rng(5).integers(0, len(pooled.ids), (2, 5000))]
    usual = template_scores(pooled, first, second)
    monkeypatch.setattr("visard.evaluation.ijb.DENSE", dense)
    whole = template_scores(pooled, first, second)
    assert whole == pytest.approx(usual, abs=2e-7)
    monkeypatch.setattr("visard.evaluation.ijb.PAIRS", 3)
    monkeypatch.setattr("visard.evaluation.ijb.BLOCK", 5)
    monkeypatch.setattr("visard.evaluation.ijb.CHUNK", 1300)
    assert np.array_equal(whole, template_scores(pooled, first, second))
    assert np.array_equal(whole[::7], template_scores(pooled, first[::7], second[::7])) or dense == 0.0


# ---------------------------------------------------------------- many scores at hand


@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "one genuine"])
def test_many_scores_give_the_same_figures(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    genuine, impostor = rng.normal(0.5, 0.2, 300), rng.normal(0.0, 0.2, 5000)
    if kind == "ties":
        genuine, impostor = np.round(genuine, 1), np.round(impostor, 1)
    if kind == "all equal":
        genuine, impostor = np.full(300, 0.25), np.full(5000, 0.25)
    if kind == "one genuine":
        genuine = genuine[:1]
    genuine, impostor = (np.clip(s, -1, 1).astype(np.float32) for s in (genuine, impostor))
    far = (0.1, 1e-2, 1e-3, 1e-6)
    plain = roc_of(genuine, impostor, far=far)
    monkeypatch.setattr(scores_module, "MANY", 10)
    binned = roc_of(genuine, impostor, far=far)
    assert binned.tar == plain.tar
    assert (binned.eer, binned.eer_threshold) == (plain.eer, plain.eer_threshold)
    assert binned.auc == pytest.approx(plain.auc, abs=1e-15)
    assert binned.auc_error == 0.0
    assert binned.histogram == plain.histogram


# ---------------------------------------------------------------- 1:N


def slow_search(gallery, probes, fpir):
    """Rank shares and TPIR at FPIR: every threshold that is a non-mated probe's best score, or just above all."""
    subjects = [s for _, s in gallery]
    mated, strangers = [], []
    for x, subject in probes:
        scores = [float(np.float32(x @ g)) for g, _ in gallery]
        if subject in subjects:
            mine = scores[subjects.index(subject)]
            mated.append((mine, sum(s >= mine for s in scores)))
        else:
            strangers.append(max(scores))
    ranks = {k: sum(rank <= k for _, rank in mated) / len(mated) for k in (1, 5, 10)}
    tpir = {}
    for rate in fpir:
        best = 0.0
        for t in {*strangers, *(mine for mine, _ in mated)}:
            if sum(s >= t for s in strangers) / len(strangers) <= rate:
                best = max(best, sum(rank == 1 and mine >= t for mine, rank in mated) / len(mated))
        tpir[rate] = best
    return ranks, tpir


def slow_legacy(gallery, probes, fpir):
    """All impostor scores of all probes in one heap; the ceil(probes x rate)-th largest is the threshold."""
    subjects = [s for _, s in gallery]
    mates, others = [], []
    for x, subject in probes:
        for g, owner in gallery:
            (mates if owner == subject else others).append(float(np.float32(x @ g)))
    assert len(set(subjects)) == len(subjects)
    found = {}
    for rate in fpir:
        threshold = heapq.nlargest(math.ceil(len(probes) * rate), others)[-1]
        found[rate] = sum(s > threshold for s in mates) / len(mates)
    return found


def search_data(ties: bool):
    rng = np.random.default_rng(7)
    people, dim = 24, 6
    centre = rng.standard_normal((people, dim))
    template = np.arange(120)
    subject = rng.integers(0, people, 120)
    subject[:people] = np.arange(people)
    rows = centre[subject] + 0.7 * rng.standard_normal((120, dim))
    if ties:
        rows = np.eye(dim)[np.abs(rows).argmax(1)]
    pooled = pool(rows.astype(np.float32), template, template)
    galleries = {"G1": (template[:8], subject[:8]), "G2": (template[8:18], subject[8:18])}
    return pooled, galleries, (template[people:], subject[people:])


@pytest.mark.parametrize("ties", [False, True])
def test_search_in_each_gallery(ties: bool) -> None:
    pooled, galleries, probes = search_data(ties)
    fpir = (0.05, 0.3)
    found = search_galleries(pooled, galleries, probes, fpir=fpir)
    rows = pooled.rows.astype(np.float64)
    wanted = list(zip(rows[probes[0]], probes[1].tolist(), strict=True))
    slow = {}
    for name, (template, subject) in galleries.items():
        slow[name] = slow_search(list(zip(rows[template], subject.tolist(), strict=True)), wanted, fpir)
        assert found.galleries[name].rank == pytest.approx(slow[name][0])
        for point in found.galleries[name].tpir:
            assert point.tpir == pytest.approx(slow[name][1][point.fpir])
    assert found.rank == pytest.approx({k: (slow["G1"][0][k] + slow["G2"][0][k]) / 2 for k in (1, 5, 10)})
    assert found.tpir == pytest.approx({r: (slow["G1"][1][r] + slow["G2"][1][r]) / 2 for r in fpir})


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("cells", [1 << 22, 40])  # at once, and two probes at a time
def test_legacy_rule(ties: bool, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.evaluation.ijb.CELLS", cells)
    pooled, galleries, probes = search_data(ties)
    fpir = (0.01, 0.05, 0.3)
    found = search_legacy(pooled, galleries, probes, fpir=fpir)
    rows = pooled.rows.astype(np.float64)
    merged = [
        (rows[t], int(s)) for template, subject in galleries.values() for t, s in zip(template, subject, strict=True)
    ]
    slow = slow_legacy(merged, list(zip(rows[probes[0]], probes[1].tolist(), strict=True)), fpir)
    assert {p.fpir: p.tpir for p in found.tpir} == pytest.approx(slow)
    assert (found.rule, found.gallery, found.probes) == ("legacy_insightface", 18, 96)


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("ties", [False, True])
def test_groups(ties: bool) -> None:
    rng = np.random.default_rng(8)
    group, same = np.repeat([0, 1, 2, 3], 40), rng.random(160) < 0.5
    distance = np.clip(1.4 - 0.5 * same + (0.2 + 0.15 * group) * rng.standard_normal(160), 0, 4)
    if ties:
        distance = np.round(distance, 1)
    names = ["African", "Asian", "Caucasian", "Indian"]
    found = by_group(distance, same, group, names, fmr=(0.2, 0.02, 1e-3))
    accuracy = []
    for k, name in enumerate(names):
        mine = group == k
        slow = slow_ten_folds(distance[mine].tolist(), same[mine].tolist(), np.repeat(np.arange(10), 4).tolist(), 1e-3)
        accuracy.append(sum(slow[0]) / 10)
        assert found.groups[name].accuracy == pytest.approx(accuracy[-1])
    mean = sum(accuracy) / 4
    assert found.mean == pytest.approx(mean)
    assert found.std == pytest.approx(math.sqrt(sum((a - mean) ** 2 for a in accuracy) / 3))
    assert found.skewed_error_ratio == pytest.approx((1 - min(accuracy)) / (1 - max(accuracy)))
    score = 1 - distance / 2
    for point in found.shared:
        genuine, impostor = score[same].tolist(), score[~same].tolist()
        assert 1 - point.fnmr_all == pytest.approx(slow_tar(genuine, impostor, point.fmr_target))
        for k, name in enumerate(names):
            mine = group == k
            false = [s >= point.threshold for s in score[mine & ~same]]
            missed = [s < point.threshold for s in score[mine & same]]
            assert point.fmr[name] == pytest.approx(sum(false) / len(false))
            assert point.fnmr[name] == pytest.approx(sum(missed) / len(missed))


def test_groups_without_errors() -> None:
    same = np.tile([True, False], 40)
    distance = np.where(same, 0.1, 2.0)
    group = np.repeat([0, 1], 40)
    assert math.isnan(by_group(distance, same, group, ["a", "b"]).skewed_error_ratio)
    distance[0] = 3.0
    found = by_group(distance, same, group, ["a", "b"])
    assert math.isinf(found.skewed_error_ratio)
    assert found.to_dict()["skewed_error_ratio"] is None
