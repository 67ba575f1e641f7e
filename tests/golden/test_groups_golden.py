"""Errors by group against loops over all pairs of pictures, written from the definitions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from visard.evaluation import groups as module
from visard.evaluation.groups import apart, errors_by_group
from visard.evaluation.verification import draws

NAMES = ("north", "south", "nobody", "east")


def people(seed: int = 0, mixed: bool = False):
    """Features, person and group of pictures; group 2 stays empty. `mixed`: people have pictures in two groups."""
    rng = np.random.default_rng(seed)
    person = np.repeat([7, 3, 11, 5, 2, 20, 21, 22], [3, 2, 4, 1, 3, 2, 2, 3])
    group = np.array([{7: 0, 3: 1, 11: 0, 5: 1, 2: 3, 20: 0, 21: 1, 22: 3}[p] for p in person])
    if mixed:
        group = np.where(rng.random(len(group)) < 0.3, 1, group)
    shuffle = rng.permutation(len(person))
    person, group = person[shuffle], group[shuffle]
    centres = {p: rng.standard_normal(6) for p in np.unique(person)}
    features = np.array([centres[p] + 0.8 * rng.standard_normal(6) for p in person], np.float32)
    return features, person, group


def slow(features, person, group, threshold, weight):
    """{(group, group): [false matches, impostors, false non-matches, genuine]} with pairs weighted by their people."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    found = {}
    for i, j in combinations(range(len(person)), 2):
        cell = found.setdefault(tuple(sorted((int(group[i]), int(group[j])))), [0.0, 0.0, 0.0, 0.0])
        reached = float(unit[i] @ unit[j]) >= threshold - 1e-7
        if person[i] == person[j]:
            cell[2] += weight[person[i]] * (not reached)
            cell[3] += weight[person[i]]
        else:
            cell[0] += weight[person[i]] * weight[person[j]] * reached
            cell[1] += weight[person[i]] * weight[person[j]]
    return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("tile", [64, 1024])
def test_rates_of_each_group_and_of_each_two_groups(mixed: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features, person, group = people(mixed=mixed)
    if tile == 64:  # several tiles: the same set many times over would be needed otherwise
        features, person, group = (np.concatenate([a] * 8) for a in (features, person, group))
        features = features + np.random.default_rng(1).standard_normal(features.shape).astype(np.float32) * 0.3
    build = module.Grid.build
    monkeypatch.setattr(module.Grid, "build", lambda f, i, *rest: build(f, i, *(rest or (tile,))))
    found = errors_by_group(features, person, group, NAMES, fmr=0.1, bootstrap=0)
    truth = slow(features, person, group, found.threshold, dict.fromkeys(person.tolist(), 1))
    total = np.sum(list(truth.values()), axis=0)
    assert found.everyone.fmr.errors / found.everyone.fmr.trials <= 0.1
    assert [found.everyone.fmr.errors, found.everyone.fmr.trials] == total[:2].tolist()
    assert [found.everyone.fnmr.errors, found.everyone.fnmr.trials] == total[2:].tolist()
    assert [g.name for g in found.groups] == ["north", "south", "east"]
    for g in found.groups:
        k = NAMES.index(g.name)
        assert (g.people, g.pictures) == (len(np.unique(person[group == k])), (group == k).sum())
        assert [g.fmr.errors, g.fmr.trials, g.fnmr.errors, g.fnmr.trials] == truth[k, k]
        assert g.fnmr.rate == truth[k, k][2] / truth[k, k][3]
    assert len(found.between) == 3
    for two in found.between:
        cell = truth[tuple(sorted((NAMES.index(two.first), NAMES.index(two.second))))]
        assert [two.fmr.errors, two.fmr.trials, two.fnmr.errors, two.fnmr.trials] == cell
    assert any(two.fnmr.trials for two in found.between) == mixed


@pytest.mark.parametrize("mixed", [False, True])
def test_intervals_draw_people(mixed: bool) -> None:
    features, person, group = people(3, mixed)
    found = errors_by_group(features, person, group, NAMES, fmr=0.2, bootstrap=50, seed=5)
    names = np.unique(person)
    rates: dict[tuple[int, int], list[tuple[float, float]]] = {}
    differences: dict[tuple[int, int], list[float]] = {}
    for drawn in draws(np.random.default_rng(5), len(names), 50):
        truth = slow(features, person, group, found.threshold, dict(zip(names.tolist(), drawn.tolist(), strict=True)))
        total = np.sum(list(truth.values()), axis=0)
        for cell, (false, impostors, missed, genuine) in truth.items():
            fmr = false / impostors if impostors else np.nan
            rates.setdefault(cell, []).append((fmr, missed / genuine if genuine else np.nan))
            differences.setdefault(cell, []).append(fmr - total[0] / total[1])
    checked = 0
    for g in found.groups:
        k = NAMES.index(g.name)
        for rate, column in ((g.fmr, 0), (g.fnmr, 1)):
            values = np.array(rates[k, k])[:, column]
            low, high = np.nanquantile(values, [0.025, 0.975])
            if 0 < rate.errors < rate.trials:
                assert (rate.interval.low, rate.interval.high) == pytest.approx((low, high))
                checked += 1
        if 0 < g.fmr.errors < g.fmr.trials:
            low, high = np.nanquantile(differences[k, k], [0.025, 0.975])
            assert (g.fmr.difference.low, g.fmr.difference.high) == pytest.approx((low, high))
    assert checked >= 3


def test_no_error_is_not_a_rate_of_zero_for_sure() -> None:
    """Twelve people far apart in two groups: no false match, and at most 3 of 3 disjoint pairs by the rule of three."""
    person = np.repeat(np.arange(12), 2)
    features = np.eye(12, dtype=np.float32)[person]
    features[:2] = -features[:2]  # any two people still have cosine 0
    found = errors_by_group(features, person, person % 2, ("even", "odd"), fmr=0.001, bootstrap=20)
    for g in found.groups:
        assert (g.fmr.rate, g.fnmr.rate) == (0.0, 0.0)
        assert (g.fmr.interval.low, g.fmr.interval.high) == (0.0, 1.0)  # 3 / 3
        assert g.fnmr.interval.high == 0.5  # 3 / 6
        assert apart(g.fmr.to_dict()) == ""
    assert (found.fmr_ratio, found.fnmr_ratio) == (None, None)
    assert found.warnings[0].startswith("FMR 0.001 stands for fewer than 10 of all impostor pairs")
    assert found.warnings[1] == "even and odd: 6 people are too few for a figure, read the intervals."


def test_a_group_without_errors_is_not_better_for_sure() -> None:
    """Two groups of six people; both pictures of two people of the second point apart: FNMR 0 and 1/3, 1/6 in all.

    Draws of the first see no error, so that its difference to all is at most 0 in each; but its rate may be 3 / 6.
    """
    person = np.repeat(np.arange(12), 2)
    features = np.eye(12, dtype=np.float32)[person]
    features[[2, 6]] *= -1  # of persons 1 and 3
    found = errors_by_group(features, person, person % 2, ("even", "odd"), fmr=0.001, bootstrap=200)
    even, odd = found.groups
    assert (even.fnmr.rate, odd.fnmr.rate, found.everyone.fnmr.rate) == pytest.approx((0, 1 / 3, 1 / 6))
    assert even.fnmr.interval.high == 0.5
    assert even.fnmr.difference.high == pytest.approx(0.5 - 1 / 6)
    assert even.fnmr.difference.low < -1 / 6
    assert apart(even.fnmr.to_dict()) == ""


def test_a_group_that_fares_worse_is_seen() -> None:
    """Sixty people; the pictures of every second one have thrice the noise."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(60), 5)
    noise = np.where(person % 2 == 1, 0.9, 0.3)[:, None]
    features = rng.standard_normal((60, 16))[person] + noise * rng.standard_normal((300, 16))
    found = errors_by_group(features, person, person % 2, ("clear", "noisy"), fmr=0.01, bootstrap=100)
    clear, noisy = found.groups
    assert tuple(apart(g.fnmr.to_dict()) for g in (clear, noisy)) == ("below", "above")
    assert noisy.doubt == ""
    assert clear.doubt == "" or clear.doubt.startswith("its FNMR rests on")
