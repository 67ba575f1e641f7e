"""Identification against plain loops from the definitions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from visard.errors import UsageError, VisardError
from visard.evaluation import identification
from visard.evaluation.identification import identify, split_gallery


def faces(n: int, people: int, dim: int = 12, noise: float = 0.8, seed: int = 0):
    rng = np.random.default_rng(seed)
    identity = rng.integers(people, size=n) * 3 + 5
    centre = rng.standard_normal((5 + 3 * people, dim))
    return (centre[identity] + noise * rng.standard_normal((n, dim))).astype(np.float32), identity


def slow(gallery, gallery_ids, probes, probe_ids, template: str):
    """Mate score, rank and best score of each probe, one probe and one person at a time."""

    def unit(x):
        return x / np.linalg.norm(x)

    found = []
    for probe, who in zip(probes, probe_ids, strict=True):
        scores = {}
        for person in sorted(set(gallery_ids.tolist())):
            rows = [unit(g) for g, i in zip(gallery, gallery_ids, strict=True) if i == person]
            if template == "mean":
                scores[person] = unit(probe) @ unit(np.mean(rows, axis=0))
            else:
                scores[person] = max(unit(probe) @ row for row in rows)
        mate = scores.get(int(who))
        rank = None if mate is None else 1 + sum(s >= mate for p, s in scores.items() if p != who)
        found.append((mate, rank, max(scores.values())))
    return found


def slow_tpir(found, target: float) -> float:
    mated = [(m, r) for m, r, _ in found if m is not None]
    strangers = [top for m, _, top in found if m is None]
    best = 0.0
    for t in [*strangers, *(m for m, _ in mated), 9.0]:
        if sum(top >= t for top in strangers) / len(strangers) <= target:
            best = max(best, sum(m >= t and r == 1 for m, r in mated) / len(mated))
    return best


@pytest.mark.parametrize("template", ["mean", "max"])
@pytest.mark.parametrize("noise", [0.4, 1.5])
def test_identify_matches_plain_loops(template: str, noise: float) -> None:
    features, identity = faces(240, 30, noise=noise)
    split = split_gallery(identity, seed=1, gallery_images=3, unmated=0.3)
    args = (features[split.gallery], identity[split.gallery], features[split.probe], identity[split.probe])
    result = identify(*args, ranks=(1, 2, 5, 100), fpir=(0.01, 0.1, 0.5), template=template)
    found = slow(*(a.astype(float) if a.dtype.kind == "f" else a for a in args), template)
    ranks = [r for _, r, _ in found if r is not None]
    assert (result.mated, result.unmated) == (len(ranks), len(found) - len(ranks))
    for k in (1, 2, 5, 100):
        assert result.rank[k] == pytest.approx(sum(r <= k for r in ranks) / len(ranks))
    for point in result.tpir:
        assert point.tpir == pytest.approx(slow_tpir(found, point.fpir))
        assert point.fpir_reached <= point.fpir
    assert result.rank[100] == 1.0


def test_ties_count_against_the_method() -> None:
    gallery = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    result = identify(gallery, np.array([1, 2, 3]), gallery, np.array([1, 2, 3]), ranks=(1, 2))
    assert result.rank == {1: pytest.approx(1 / 3), 2: 1.0}


def test_a_stranger_at_the_threshold_is_a_false_alarm() -> None:
    gallery = np.eye(3, dtype=np.float32)
    probes = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    result = identify(gallery, np.array([0, 1, 2]), probes, np.array([0, 1, 9]), fpir=(0.5, 1.0))
    assert [p.tpir for p in result.tpir] == [0.0, 1.0]
    assert result.tpir[0].threshold > 1.0
    assert all(p.unreliable for p in result.tpir)


def test_no_strangers_is_said_not_raised() -> None:
    features, identity = faces(40, 4)
    split = split_gallery(identity, unmated=0.0)
    result = identify(features[split.gallery], identity[split.gallery], features[split.probe], identity[split.probe])
    assert result.unmated == 0
    assert all(p.tpir is None and "outside the gallery" in str(p.reason) for p in result.tpir)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["tpir"][0]["tpir"] is None


def test_blocks_and_order_of_probes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features, identity = faces(500, 50, dim=64)
    split = split_gallery(identity)
    gallery, gallery_ids = features[split.gallery], identity[split.gallery]
    for template in ("mean", "max"):
        expected = identify(gallery, gallery_ids, features[split.probe], identity[split.probe], template=template)
        order = np.random.default_rng(0).permutation(split.probe)
        with monkeypatch.context() as patch:
            patch.setattr(identification, "CELLS", 1)
            got = identify(gallery, gallery_ids, features[order], identity[order], template=template)
        assert got == expected


def test_split_gallery_covers_the_set() -> None:
    identity = np.random.default_rng(0).integers(40, size=300)
    split = split_gallery(identity, seed=3, gallery_images=2, unmated=0.25)
    assert np.array_equal(np.sort(np.concatenate([split.gallery, split.probe])), np.arange(300))
    assert len(split.unmated) == round(0.25 * len(np.unique(identity)))
    assert not set(split.unmated) & set(identity[split.gallery])
    sizes = np.bincount(identity[split.gallery])
    assert set(sizes) <= {0, 1, 2}
    again = split_gallery(identity, seed=3, gallery_images=2, unmated=0.25)
    assert np.array_equal(again.gallery, split.gallery)
    assert not np.array_equal(split_gallery(identity, seed=4, gallery_images=2).gallery, split.gallery)


EYE, IDS = np.eye(4, dtype=np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("call", "message", "kind"),
    [
        (lambda: identify(EYE, IDS, EYE, IDS + 10), "no probe shows an identity of the gallery", VisardError),
        (lambda: identify(EYE, IDS, EYE[:, :3] + 1, IDS), "probe features: 3 dimensions", VisardError),
        (lambda: identify(EYE, IDS, EYE * 0, IDS), "probe features: row 0 is all zeros", VisardError),
        (lambda: identify(EYE * np.nan, IDS, EYE, IDS), "gallery features: row 0 is not finite", VisardError),
        (lambda: identify(EYE, IDS[:3], EYE, IDS), "gallery identity: expected 4", VisardError),
        (
            lambda: identify(np.array([[1.0, 0], [-1, 0]]), np.array([7, 7]), EYE[:, :2] + 1, IDS + 4),
            "identity 7 cancel",
            VisardError,
        ),
        (lambda: identify(EYE, IDS, EYE, IDS, template="median"), "template: 'median'", UsageError),
        (lambda: identify(EYE, IDS, EYE, IDS, ranks=(0,)), "ranks: 0", UsageError),
        (lambda: identify(EYE, IDS, EYE, IDS, fpir=(2.0,)), "fpir: 2.0", VisardError),
        (lambda: split_gallery(IDS), "no enrolled identity has more than 1", VisardError),
        (lambda: split_gallery(IDS, unmated=1.0), "unmated: 1.0", UsageError),
        (lambda: split_gallery(IDS, gallery_images=0), "gallery_images: 0", UsageError),
    ],
)
def test_bad_input_is_one_line(call, message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
