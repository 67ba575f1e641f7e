"""Clustering: quality against all pairs and scikit-learn, settings, the four methods, files and the command."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toys import noise_faces

from visard.cli import main
from visard.clustering import finch
from visard.clustering.cluster import CLUSTERINGS, Clustering, Clusters, cluster, drop_small, prepare
from visard.clustering.finch import Metric, nearest
from visard.clustering.quality import bcubed, counts, nmi, overlap, pairwise, quality
from visard.config import load
from visard.errors import UsageError, VisardError
from visard.inference.features import Vectors, label, read_vectors
from visard.inference.model import embed, load_model
from visard.models import build
from visard.models.files import save_model

LABELS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=40)


def people(n: int = 12, pictures: int = 8, noise: float = 0.25, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of well-separated people, shuffled."""
    rng = np.random.default_rng(seed)
    identity = rng.permutation(np.repeat(np.arange(n), pictures))
    centres = rng.standard_normal((n, 32))
    x = centres[identity] / np.linalg.norm(centres[identity], axis=1, keepdims=True)
    return (x + noise * rng.standard_normal(x.shape) / 32**0.5).astype(np.float32), identity


@settings(max_examples=200, deadline=None)
@given(LABELS)
def test_pairwise_counts_pairs(rows: list[tuple[int, int]]) -> None:
    pairs = list(itertools.combinations(rows, 2))
    both = sum(a[0] == b[0] and a[1] == b[1] for a, b in pairs)
    claimed, true = (sum(a[i] == b[i] for a, b in pairs) for i in (0, 1))
    labels, truth = (np.array(column) for column in zip(*rows, strict=True))
    found = pairwise(overlap(labels, truth))
    assert found.precision == pytest.approx(both / claimed if claimed else 1)
    assert found.recall == pytest.approx(both / true if true else 1)


@settings(max_examples=200, deadline=None)
@given(LABELS)
def test_bcubed_goes_picture_by_picture(rows: list[tuple[int, int]]) -> None:
    precision = recall = 0.0
    for c, k in rows:
        cluster_of, people_of = [r for r in rows if r[0] == c], [r for r in rows if r[1] == k]
        same = len([r for r in cluster_of if r[1] == k])
        precision += same / len(cluster_of) / len(rows)
        recall += same / len(people_of) / len(rows)
    labels, truth = (np.array(column) for column in zip(*rows, strict=True))
    found = bcubed(overlap(labels, truth))
    assert (found.precision, found.recall) == (pytest.approx(precision), pytest.approx(recall))


@settings(max_examples=100, deadline=None)
@given(LABELS)
def test_nmi_is_that_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, truth = (np.array(column) for column in zip(*rows, strict=True))
    if len(set(labels)) > 1 or len(set(truth)) > 1:
        expected = metrics.normalized_mutual_info_score(truth, labels)
        assert nmi(overlap(labels, truth)) == pytest.approx(expected, abs=1e-9)


def test_pictures_without_a_label_are_alone() -> None:
    truth = np.array([0, 0, 0, 1, 1])
    dropped, alone = np.array([0, 0, -1, 1, -1]), np.array([0, 0, 7, 1, 8])
    assert quality(dropped, truth) == quality(alone, truth)
    found = counts(dropped)
    assert (found.pictures, found.clusters, found.singletons, found.largest, found.dropped) == (5, 2, 1, 2, 2)
    with pytest.raises(VisardError, match="compare"):
        quality(np.zeros(3, np.int64), np.zeros(4, np.int64))


@pytest.mark.parametrize("how", [
    Clustering(), Clustering(d=0.8), Clustering(metric="cosine"), Clustering(centre=False),
    Clustering(metric="euclidean", centre=False, d=0.8), Clustering(search="faiss"), Clustering(method="dbscan"),
    Clustering(method="kmeans"), Clustering(method="kmeans", clusters=12),
    Clustering(method="dbscan", d=0.6), Clustering(method="finch", metric="cosine", partition=1),
], ids=str)  # fmt: skip
def test_clear_people_are_found(how: Clustering) -> None:
    x, identity = people(noise=0.15)
    found = cluster(x, how, identities=12)
    assert quality(found.labels, identity).pairwise_f > (0.75 if how.method == "finch" else 0.9)
    assert found.clusters == found.labels.max() + 1
    assert bool(how.oracle) == (how.method == "kmeans" and not how.clusters)
    again = cluster(x, how, identities=12)
    assert np.array_equal(again.labels, found.labels)


def test_small_clusters_lose_their_label() -> None:
    assert drop_small(np.array([5, 3, 5, -1, 3, 9]), 2).tolist() == [0, 1, 0, -1, 1, -1]
    assert drop_small(np.array([5, 3, 5, -1, 3, 9]), 3).tolist() == [-1] * 6
    assert drop_small(np.array([5, 3]), 1).tolist() == [0, 1]


def test_centring_takes_a_common_offset_away() -> None:
    x, identity = people(noise=0.3)
    shifted = x + 4 * np.ones(32, np.float32) / 32**0.5
    kept, lost = (
        quality(cluster(shifted, Clustering(d=0.9, centre=c)).labels, identity).pairwise_f for c in (True, False)
    )
    assert kept > 0.9 > 0.5 > lost
    assert np.allclose(np.linalg.norm(prepare(shifted, centre=True), axis=1), 1)


@pytest.mark.parametrize(("settings", "text"), [
    ({"d": 0.0}, "positive"), ({"min_size": 0}, "min_size"), ({"clusters": -1}, "clusters"),
])  # fmt: skip
def test_bad_settings(settings: dict[str, float], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load("fedfr-da", [f"method.clustering.{name}={value}" for name, value in settings.items()])


def test_bad_vectors() -> None:
    with pytest.raises(VisardError, match="not finite"):
        nearest(np.full((3, 2), np.nan, np.float32))
    with pytest.raises(VisardError, match="two"):
        nearest(np.zeros((1, 2), np.float32))
    bad = people()[0]
    bad[3, 2] = np.nan
    for how in (Clustering(method="kmeans", clusters=3), Clustering(method="dbscan", d=0.5), Clustering(d=0.5)):
        with pytest.raises(VisardError, match="not finite"):
            cluster(bad, how)
        for shape in ((5, 0), (0, 5)):
            with pytest.raises(VisardError, match="shape"):
                cluster(np.zeros(shape, np.float32), how)
    with pytest.raises(UsageError, match="number of clusters"):
        cluster(people()[0], Clustering(method="kmeans"))


def test_one_vector_is_one_cluster() -> None:
    assert cluster(np.ones((1, 4), np.float32), Clustering(d=1.0, min_size=1)).labels.tolist() == [0]


def test_faiss_finds_nearly_all_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    x, _ = people(200, 10)
    exact, _ = nearest(x, "chord", "exact")
    fast, distance = nearest(x, "chord", "faiss")
    assert (fast == exact).mean() > 0.95
    assert np.array_equal(nearest(x, "chord", "faiss")[0], fast)
    assert (distance > 0).all()
    monkeypatch.setattr(finch, "EXACT", 100)
    assert np.array_equal(nearest(x, "chord")[0], fast)


@pytest.mark.parametrize("metric", ["euclidean", "chord"])
def test_looking_into_all_lists_is_exact(metric: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(finch, "PROBES", 10**6)
    x = np.concatenate([people(60, 10)[0], np.ones((3, people(1, 1)[0].shape[1]), np.float32)])  # a tie
    assert np.array_equal(nearest(x, metric, "faiss")[0], nearest(x, metric, "exact")[0])


def test_neighbours_far_from_the_origin_are_exact() -> None:
    x = np.random.default_rng(0).standard_normal((1500, 16)).astype(np.float32) + np.float32(100)
    wide = x.astype(np.float64)
    for i, found in enumerate(nearest(x)[0].tolist()):
        distance = ((wide - wide[i]) ** 2).sum(1)
        distance[i] = np.inf
        assert found == int(np.argmin(distance))


@pytest.mark.parametrize("metric", ["chord", "cosine", "euclidean"])
def test_rows_without_a_direction_are_at_the_origin(metric: Metric) -> None:
    """Two of them are each other's neighbours, and half a unit of cosine beats the way through the origin."""
    x = np.array([[1, 0, 0], [0, 0, 0], [0.8, 0.6, 0], [0, 0, 0], [0, -0.6, 0.8]], np.float32)
    row, distance = nearest(x, metric)
    assert row.tolist() == [2, 3, 0, 1, 1]
    assert distance[[1, 3]].tolist() == [0, 0]
    assert distance[4] == pytest.approx(0.5 if metric == "cosine" else 1.0)


def test_two_pictures_of_one_person_stay_together() -> None:
    """Centred they would be opposite, and could never be merged."""
    one = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    assert cluster(np.stack([one, 1.1 * one + 0.1]), Clustering()).labels.tolist() == [0, 0]
    assert cluster(np.stack([one, -one]), Clustering()).labels.tolist() == [-1, -1]


def test_a_set_with_fewer_partitions_takes_its_coarsest() -> None:
    x, _ = people(6, 4)
    found = [cluster(x, Clustering(method="finch", partition=p)) for p in (-1, 99, 0, -99)]
    assert np.array_equal(found[0].labels, found[1].labels)
    assert np.array_equal(found[2].labels, found[3].labels)
    assert found[0].clusters < found[2].clusters == found[2].levels[0]
    assert cluster(x[:3], Clustering(method="finch", partition=1)).clusters == 1


def test_features_with_and_without_a_manifest(tmp_path: Path) -> None:
    x, identity = people()
    np.save(tmp_path / "f.npy", x)
    assert read_vectors(tmp_path / "f.npy").identity is None
    found, report = label(Vectors(x), Clustering())
    assert report["quality"] is None
    (tmp_path / "f.json").write_text(json.dumps({"identity": identity.tolist()}))
    assert read_vectors(tmp_path / "f.npy").identity is not None
    (tmp_path / "f.json").write_text(json.dumps({"identity": [1]}))
    with pytest.raises(VisardError, match="rows"):
        read_vectors(tmp_path / "f.npy")
    for odd in ([1, 2], {"identity": ["a"] * len(x)}, {"identity": [0.5] * len(x)}, {"identity": 3}):
        (tmp_path / "f.json").write_text(json.dumps(odd))
        with pytest.raises(VisardError, match="no manifest of features"):
            read_vectors(tmp_path / "f.npy")
    (tmp_path / "f.json").write_text("{}")
    assert read_vectors(tmp_path / "f.npy").identity is None
    (tmp_path / "g.npy").write_bytes(b"no array")
    with pytest.raises(VisardError, match="damaged or cut short, or no .npy file"):
        read_vectors(tmp_path / "g.npy")
    with pytest.raises(UsageError, match="no features"):
        read_vectors(tmp_path / "h.npy")
    assert found.clusters == report["counts"]["clusters"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    x, identity = people()
    np.save(tmp_path / "f.npy", x)
    (tmp_path / "f.json").write_text(json.dumps({"identity": identity.tolist()}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["visard", "cluster", "f.npy", "--out", "l.csv", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["quality"]["pairwise_f"] > 0.9
    rows = list(csv.DictReader((tmp_path / "l.csv").read_text().splitlines()))
    assert len(rows) == len(x)
    assert len({r["label"] for r in rows}) == report["counts"]["clusters"]
    (tmp_path / "labels.csv").unlink(missing_ok=True)
    for bad in (["--d", "far"], ["--d", "-1"], ["--method", "finch", "--min-size", "0"],
                ["--out", "l.txt"], ["--out", "nowhere/l.csv"], ["--out", "f.csv"], ["--out", "./f.csv"]):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["visard", "cluster", "f.npy", *bad])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert json.loads((tmp_path / "f.json").read_text()) == {"identity": identity.tolist()}
    monkeypatch.setattr("visard.inference.features.cluster", None)  # a place that cannot be is refused before the work
    monkeypatch.setattr(sys, "argv", ["visard", "cluster", "f.npy", "--out", "f.csv"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["visard", "cluster", "f.npy", "--d", "inf"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def test_embedding_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faces = noise_faces(tmp_path / "faces", identities=5, images=2)
    save_model(tmp_path / "m.safetensors", build("tiny", embedding=8, size=faces.size).state_dict(),
               {"model": "tiny", "embedding": "8", "size": str(faces.size)})  # fmt: skip
    model = load_model(tmp_path / "m.safetensors")
    monkeypatch.setattr("visard.inference.model.AT_ONCE", 4)
    heard: list[tuple[int, int]] = []
    found = model.embed(faces, progress=lambda done, total: heard.append((done, total))).features
    assert heard == [(4, 10), (8, 10), (10, 10)]
    np.testing.assert_allclose(found, embed(model, faces), rtol=1e-4, atol=1e-5)


def test_a_new_clustering_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: finch.Floats, settings: Clustering, identities: int | None) -> Clusters:
        return Clusters((x[:, 0] > 0).astype(np.int64), d=0.5)

    monkeypatch.setitem(CLUSTERINGS.built_in, "halves", halves)
    found = cluster(np.eye(4, dtype=np.float32), Clustering(method="halves", centre=False, min_size=1))
    assert found.labels.tolist() == [0, 1, 1, 1]
    assert found.d == 0.5
    with pytest.raises(UsageError, match="unknown clustering .halve. .did you mean .halves"):
        Clustering(method="halve")
