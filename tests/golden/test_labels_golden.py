"""Better pseudo labels, each against slow loops: quality, unsure pictures, faces of one photograph, a stable d."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.golden.test_fedfr_da_golden import domain_world, method
from tests.property.test_finch_property import literal_distances, random_set, same
from tests.toys import noise_faces, toy_engine
from tests.unit.test_clusters import people
from tests.unit.test_threshold import slow_separation

from visard.clustering import finch
from visard.clustering.cluster import Clustering, Known, cluster, drop_small, prepare
from visard.clustering.finch import Apart, Metric, cfinch, silhouettes, stable_d
from visard.config import load
from visard.data.detection import Face
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.joined import Joined, Member
from visard.data.sources import importing
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError


def slow_apart(x: np.ndarray, d: float, metric: str, photograph: list[int], w: float) -> list[int]:
    """All pairs at every level: the penalised nearest, then edges in order, each asked what it would bring together."""
    groups = [[i] for i in range(len(x))]

    def shared(a: list[int], b: list[int]) -> int:
        return len({photograph[i] for i in a} & {photograph[j] for j in b} - {-1})

    while len(groups) > 1:
        n = len(groups)
        dist = literal_distances(np.stack([x[g].astype(np.float64).mean(0) for g in groups]), metric)
        more = [[w * shared(a, b) / min(len(a), len(b)) for b in groups] for a in groups]
        kappa = [min((dist[i][j] + more[i][j], j) for j in range(n) if j != i)[1] for i in range(n)]
        edges = sorted((dist[i][kappa[i]] + more[i][kappa[i]], i) for i in range(n))
        together = [[i] for i in range(n)]
        for far, i in edges:
            a = next(t for t in together if i in t)
            b = next(t for t in together if kappa[i] in t)
            of_a, of_b = ([p for g in t for p in groups[g]] for t in (a, b))
            cost = w * shared(of_a, of_b) / min(len(of_a), len(of_b))
            if a is not b and far < d and dist[i][kappa[i]] + cost < d:
                together = [t for t in together if t is not a and t is not b] + [a + b]
        if len(together) == n:
            break
        groups = [[p for g in t for p in groups[g]] for t in together]
    labels = [0] * len(x)
    for k, group in enumerate(groups):
        for i in group:
            labels[i] = k
    return labels


@pytest.mark.parametrize("metric", ["euclidean", "chord", "cosine"])
@pytest.mark.parametrize("w", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_faces_of_one_photograph_by_loops(seed: int, w: float, metric: Metric) -> None:
    rng = np.random.default_rng(seed)
    x = random_set(seed, 40, 5)
    photograph = rng.integers(-1, 14, 40)
    d = {"euclidean": 2.0, "chord": 0.8, "cosine": 0.35}[metric]
    found = cfinch(x, d, metric, apart=Apart(photograph, w))[-1].labels
    assert same(found, slow_apart(x, d, metric, photograph.tolist(), w))
    plain = cfinch(x, d, metric)[-1].labels
    if w != 0.3:  # without weight nothing changes; with a large one all of these sets do
        assert np.array_equal(found, plain) == (w == 0)


def test_a_chain_does_not_unite_two_faces_of_a_photograph() -> None:
    """0 and 1.1 are of one photograph and both nearest to 0.5: the closer one merges with it, the other does not.

    With a weight of 0.1 it does: 0.6 and 0.1 are less than d = 1.
    """
    x = np.array([[0.0, 0], [0.5, 0], [1.1, 0], [9, 0], [9.1, 0]], np.float32)
    photograph = np.array([4, -1, 4, -1, -1])
    assert cfinch(x, 1.0)[-1].labels.tolist() == [0, 0, 0, 1, 1]
    assert cfinch(x, 1.0, apart=Apart(photograph, 1.0))[-1].labels.tolist() == [0, 0, 1, 2, 2]
    assert cfinch(x, 1.0, apart=Apart(photograph, 0.1))[-1].labels.tolist() == [0, 0, 0, 1, 1]


def test_who_is_refused_by_a_face_of_its_photograph_looks_elsewhere() -> None:
    """1.0 is nearest to 0.4, a face of its own photograph: it goes to 1.8, which is nearest to 2.0 itself."""
    x = np.array([[0.4, 0], [1.0, 0], [1.8, 0], [2.0, 0]], np.float32)
    found = cfinch(x, 0.9, apart=Apart(np.array([7, 7, -1, -1]), 5.0))[0].labels
    assert found.tolist() == [0, 1, 1, 1]


def test_photographs_count_once_and_for_less_in_large_clusters() -> None:
    """One photograph with a face in each of two clusters of 3, 0.72 apart: w / 3 = 0.2 leaves them below d = 1.

    With w / 3 = 0.4 they stay apart. Several faces of a photograph in one cluster do not count twice."""
    x = np.array([[0, 0], [0.02, 0], [0.04, 0], [0.72, 0], [0.74, 0], [0.76, 0]], np.float32)
    photograph = np.array([3, -1, -1, 3, -1, -1])
    assert cfinch(x, 1.0, apart=Apart(photograph, 0.6))[-1].clusters == 1
    assert cfinch(x, 1.0, apart=Apart(photograph, 1.2))[-1].clusters == 2
    both = Apart(np.array([3, -1, -1, 3, 3, -1]), 1.0)._shared(np.array([0, 0, 0, 1, 1, 1]), 2)
    assert both.toarray().tolist() == [[1, 1], [1, 1]]


def slow_silhouette(u: np.ndarray, labels: np.ndarray) -> list[float]:
    """Picture by picture, from the mean over all of them: leaving one out of the mean changes it by its own value."""
    values = []
    for i in range(len(u)):
        own = [j for j in range(len(u)) if labels[j] == labels[i] and j != i]
        others = [np.flatnonzero(labels == c) for c in set(labels.tolist()) - {labels[i]}]
        if not own:
            values.append(0.0)
            continue
        a, *b = (1 - u[i] @ m / np.linalg.norm(m) for m in (u[rows].mean(0) for rows in (own, *others)))
        values.append((min(b) - a) / max(a, min(b)))
    return values


@pytest.mark.parametrize("least", [0.0, 0.3, 0.5])
def test_unsure_pictures_lose_their_label_by_loops(least: float) -> None:
    """Measured among the clusters that are large enough; then a cluster that has become too small goes too."""
    x, _ = people(10, 8, noise=1.4, seed=2)
    u = prepare(x, centre=True)
    plain = drop_small(cfinch(u, 1.1, "chord")[-1].labels, 3)
    kept = np.flatnonzero(plain >= 0)
    values = slow_silhouette(u[kept].astype(np.float64), plain[kept])
    assert np.mean(values) == pytest.approx(slow_separation(u[kept].astype(np.float64), plain[kept]))
    np.testing.assert_allclose(silhouettes(u[kept], plain[kept], plain.max() + 1), values, atol=1e-5)
    expected = np.full(len(x), -1)
    for i, value in zip(kept, values, strict=True):
        if value >= least:
            expected[i] = plain[i]
    for c in set(expected.tolist()) - {-1}:
        if (expected == c).sum() < 3:
            expected[expected == c] = -1
    found = cluster(x, Clustering(d=1.1, min_size=3, min_separation=least)).labels
    assert np.array_equal(found >= 0, expected >= 0)
    assert same(found[found >= 0], expected[expected >= 0].tolist())
    assert 0 < (found >= 0).sum() < (plain >= 0).sum()
    assert np.array_equal(cluster(x, Clustering(d=1.1, min_size=3)).labels, plain)  # off by default


def test_the_only_cluster_is_sure() -> None:
    x = people(1, 6, noise=0.1)[0]
    assert cluster(x, Clustering(d=0.9, centre=False, min_separation=0.5)).labels.tolist() == [0] * 6


def test_pictures_of_little_quality_are_not_clustered() -> None:
    """As if they were not there: they have no label, and no part in the mean that is subtracted."""
    x, _ = people(8, 6, noise=1.0, seed=4)
    score = np.random.default_rng(0).uniform(0, 1, len(x)).astype(np.float32)
    score[0], score[1] = 0.5, np.nextafter(np.float32(0.5), np.float32(0))
    found = cluster(x, Clustering(d=0.9, min_quality=0.5), known=Known(quality=score))
    good = [i for i in range(len(x)) if score[i] >= 0.5]
    assert 0 in good
    assert 1 not in good
    alone = cluster(x[good], Clustering(d=0.9))
    assert np.array_equal(found.labels[good], alone.labels)
    assert set(np.delete(found.labels, good)) == {-1}
    assert cluster(x, Clustering(min_quality=1.0), known=Known(quality=score)).clusters == 0
    with pytest.raises(UsageError, match="face set"):
        cluster(x, Clustering(min_quality=0.5))


def slow_stable(u: np.ndarray, steps: int, width: int) -> float:
    """F over all pairs between neighbouring partitions, pair by pair; the flattest stretch of `width` steps."""
    first = np.sort(literal_distances(u, "chord"), axis=1)[:, 0]
    grid = np.linspace(*np.quantile(first, [0.05, 0.99]), steps + 1)
    found = [cfinch(u, float(d) + 1e-6, "chord")[-1].labels.tolist() for d in grid]

    def together(labels: list[int]) -> set[tuple[int, int]]:
        return {(i, j) for i, j in itertools.combinations(range(len(labels)), 2) if labels[i] == labels[j]}

    def telling(labels: list[int]) -> bool:
        return len(set(labels)) > 1 and sum(labels.count(c) == 1 for c in labels) <= len(labels) / 2

    scores = []
    for k in range(steps - width + 1):
        pairs = [together(labels) for labels in found[k : k + width + 1]]
        flat = sum(2 * len(a & b) / max(1, len(a) + len(b)) for a, b in itertools.pairwise(pairs))
        scores.append(flat if all(telling(labels) for labels in found[k : k + width + 1]) else -1.0)
    best = next(k for k, score in enumerate(scores) if score > max(scores) - 1e-12)
    return float(grid[best : best + width + 1].mean())


@pytest.mark.parametrize("seed", range(4))
def test_the_stable_distance_by_loops(seed: int) -> None:
    u = prepare(people(8, 6, noise=1.2 + 0.2 * seed, seed=seed)[0], centre=True)
    assert stable_d(u) == pytest.approx(slow_stable(u, finch.SPREAD, finch.PLATEAU), abs=1e-5)
    found = cluster(people(8, 6, noise=1.2 + 0.2 * seed, seed=seed)[0], Clustering(d="stable"))
    assert found.d == stable_d(u)


def test_where_nearly_all_are_alone_or_together_nothing_is_stable() -> None:
    """Below 0.35 nothing changes but says nothing, above 0.65 too; between, a border moves with every step."""
    gaps = np.arange(1, 21) / 20
    x = np.array([[10.0 * k + side * gap, 0] for k, gap in enumerate(gaps) for side in (0, 1)], np.float32)
    seen = []

    def labels_at(d: float) -> np.ndarray:
        seen.append(d)
        labels = np.zeros(40, np.int64) if d > 0.65 else (np.arange(40) >= round(40 * d)).astype(np.int64)
        return np.array([0, 0, *range(1, 39)]) if d < 0.35 else labels

    found = stable_d(x, "euclidean", labels_at=labels_at)
    assert len(seen) == finch.SPREAD + 1
    assert 0.35 < found < 0.65


def test_a_stable_distance_of_few_or_equal_vectors() -> None:
    assert stable_d(np.eye(2, dtype=np.float32)) == 1.0
    same_ones = np.tile(np.array([[1.0, 0.0]], np.float32), (5, 1))
    assert cluster(same_ones, Clustering(d="stable", centre=False)).clusters == 1


def test_the_distance_is_chosen_with_photographs_kept_apart() -> None:
    x, identity = people(10, 6, noise=1.5, seed=1)
    photograph = np.argsort(np.argsort(identity, kind="stable")) % 6  # six photographs of all ten
    u = prepare(x, centre=True)
    at = finch.choose_d(u, "chord", "auto", lambda d: cfinch(u, d, "chord", apart=Apart(photograph, 2.0))[-1].labels)
    assert cluster(x, Clustering(apart=2.0), known=Known(photograph=photograph)).d == at
    assert at != finch.choose_d(u)


def photographs(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (200, 300, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


class Two:
    """A detector that finds one face in the smallest file name's picture and two in the others."""

    name = "two"

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, picture: np.ndarray) -> list[Face]:
        self.asked += 1
        points = np.array([[10, 20], [20, 20], [15, 26], [11, 32], [19, 32]], np.float64)
        faces = [Face((5.0 + x, 10.0, 20.0, 30.0), points + np.array([x, 0]), 0.9) for x in (0, 50)]
        return faces[: 1 if self.asked == 1 else 2]


def test_a_set_knows_which_faces_are_of_one_photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "open_detector", lambda name, say: Two())
    source = photographs(tmp_path / "photos")
    for every in (True, False):
        import_faces("folder", source, tmp_path / f"set-{every}", align="five", every_face=every, unlabelled=True,
                     workers=1, size=32)  # fmt: skip
    faces = FaceSet.open(tmp_path / "set-True")
    rows = np.arange(len(faces))
    assert [faces.file(int(i)) for i in rows] == ["a.png", "b.png", "b.png", "c.png", "c.png"]
    assert faces.photographs(rows).tolist() == [-1, 0, 0, 1, 1]
    assert faces.photographs(np.array([0, 2, 3, 4])).tolist() == [-1, -1, 0, 0]
    asked = Known.of(faces.all(), Clustering(apart=0.5, min_quality=0.1))
    assert asked.photograph is not None
    assert asked.photograph.tolist() == [-1, 0, 0, 1, 1]
    np.testing.assert_array_equal(asked.quality, faces.extra("quality")[:, 0])
    assert not np.array_equal(faces.extra("quality")[:, 0], faces.extra("quality")[:, 2])
    single = FaceSet.open(tmp_path / "set-False")
    assert single.photographs(np.arange(len(single))).tolist() == [-1] * 3
    joined = Joined([Member("one", faces), Member("other", single)])
    assert joined.photographs(np.arange(8)).tolist() == [-1, 0, 0, 1, 1, -1, -1, -1]
    np.testing.assert_array_equal(joined.quality(np.array([1, 6])), [faces.quality([1])[0], single.quality([1])[0]])


def scored(folder: Path, score: np.ndarray) -> FaceSet:
    """The faces of the golden tests of FedFR-DA with a quality score each."""
    plain = noise_faces(folder / "plain", identities=16, images=8)
    with FaceSetWriter(
        folder / "scored", count=len(plain), size=plain.size, names=plain.names, domains=plain.domains,
        attributes=plain.attribute_names, info={},
    ) as writer:  # fmt: skip
        rows = np.arange(len(plain))
        files = [plain.file(int(i)) for i in rows]
        writer.write(0, plain.read(rows), plain.identity, plain.domain, plain.attributes, files)
        writer.attach("quality", np.stack([score, 1 - score], 1).astype(np.float32))
        writer.close(len(plain), plain.names)
    return FaceSet.open(folder / "scored")


def test_targets_leave_out_pictures_of_little_quality(tmp_path: Path) -> None:
    score = np.random.default_rng(1).uniform(0, 1, 16 * 8)
    faces = scored(tmp_path, score)
    world = domain_world(tmp_path)
    for data in world.clients.values():
        for view in (data.train, data.val, data.test):
            object.__setattr__(view, "faces", faces)
    how = method(clustering=Clustering(d=0.5, min_quality=0.4))
    net = toy_engine(tmp_path, world)
    server = how.start(net.world.setup())
    net.begin("label", 0)
    server = how.label_all(server, net)
    for client in server.labelled:
        labels = net.states.client_state(client)["labels"].numpy()
        below = score[world.clients[client].train.index].astype(np.float32) < 0.4
        assert below.any()
        assert (labels[below] == -1).all()
        assert (labels[~below] >= 0).any()


def test_a_set_without_scores_is_refused_in_a_line(tmp_path: Path) -> None:
    view = noise_faces(tmp_path / "plain", identities=2, images=2).all()
    with pytest.raises(VisardError, match="no quality scores: import them with --align five"):
        Known.of(view, Clustering(min_quality=0.5))
    assert Known.of(view, Clustering()).quality is None


@pytest.mark.parametrize(("settings", "text"), [
    (["min_quality=1.5"], "from 0 to 1"), (["min_separation=1"], "below 1"), (["min_separation=-2"], "from -1"),
    (["apart=0.5", "method=dbscan"], "dbscan does not"), (["apart=-1"], "apart"), (["d=sometimes"], "clustering.d"),
])  # fmt: skip
def test_bad_settings_of_labels(settings: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load("fedfr-da", [f"method.clustering.{each}" for each in settings])


def test_the_fingerprint_is_that_of_before_unless_they_are_used() -> None:
    """A literal: runs that were made before these settings existed go on."""
    plain = load("fedfr-da").fingerprint()
    used = ["min_quality=0.1", "min_separation=0", "apart=0.1", "d=stable"]
    changed = [load("fedfr-da", [f"method.clustering.{each}"]).fingerprint() for each in used]
    assert len({plain, *changed}) == 5
    assert plain == BEFORE


BEFORE = "8a6e0f469e8d6079"
