"""C-FINCH on a line and on a circle, where every distance is known, and what FedFR-DA makes of its clusters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.golden.test_fedfr_da_golden import begin, method
from tests.toys import toy_network

from visard.clustering.cluster import Clustering, cluster, prepare
from visard.clustering.finch import cfinch, nearest
from visard.clustering.quality import quality
from visard.data.augment import to_float


def line(*points: float) -> npt.NDArray[np.float32]:
    return np.array([[p, 0.0] for p in points], np.float32)


def circle(*angles: float) -> npt.NDArray[np.float32]:
    return np.array([[np.cos(a), np.sin(a)] for a in angles], np.float32)


def test_neighbours_at_exactly_d_stay_apart() -> None:
    """0 and 1 are at a distance of exactly d, 10 and 10.5 are closer."""
    levels = cfinch(line(0, 1, 10, 10.5), 1.0, "euclidean")
    assert levels[-1].labels.tolist() == [0, 1, 2, 2]
    assert cfinch(line(0, 1, 10, 10.5), 1.001, "euclidean")[-1].labels.tolist() == [0, 0, 1, 1]


def test_centroids_are_means_of_pictures_not_of_centroids() -> None:
    """Four pictures around 0.16 and two around 3.05 merge at the second level, two pairs around 7.05 and 8.35 too.

    The mean of the six is 1.12, that of the two centroids 1.61; the others are around 7.7. At d = 6.3 the first stays
    apart from that (6.58), the second would not (6.1).
    """
    x = line(0, 0.1, 0.21, 0.33, 3.0, 3.1, 7.0, 7.1, 8.3, 8.4)
    levels = cfinch(x, 6.3, "euclidean")
    assert [level.clusters for level in levels] == [4, 2]
    assert levels[-1].labels.tolist() == [0] * 6 + [1] * 4
    assert cfinch(x, 6.6, "euclidean")[-1].clusters == 1


def test_the_labelling_is_the_last_level() -> None:
    """Pairs at 0 and 0.1 merge at the second level."""
    how = Clustering(d=0.3, centre=False, min_size=1)
    found = cluster(circle(0, 0.01, 0.1, 0.112, 2.0, 2.01), how)
    assert found.levels == (3, 2)
    assert found.labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_chords_are_between_directions() -> None:
    """The directions of the rows are at 0, 90 and 45 degrees, whatever their lengths."""
    row, distance = nearest(np.array([[2, 0], [0, 5], [3, 3]], np.float32), "chord")
    assert row.tolist() == [2, 2, 0]
    assert distance.tolist() == pytest.approx([2 * np.sin(np.pi / 8)] * 3, abs=1e-6)


def test_centred_features_have_length_1_again() -> None:
    """Directions (1, 0) and twice (0, 1); less their mean (1/3, 2/3) they are (2, -2)/3 and (-1, 1)/3."""
    h = 0.5**0.5
    found = prepare(np.array([[2, 0], [0, 3], [0, 1]], np.float32), centre=True)
    np.testing.assert_allclose(found, [[h, -h], [-h, h], [-h, h]], atol=1e-6)
    np.testing.assert_allclose(prepare(np.array([[2, 0], [0, 3]], np.float32), centre=True), [[1, 0], [0, 1]])


def test_the_head_of_a_target_starts_at_the_means_of_its_clusters(tmp_path: Path) -> None:
    net, server = begin(tmp_path, method(target_head="means"))
    model = toy_network().eval()
    model.load_state_dict(server.theta)
    for client in server.labelled:
        state, view = net.states.client_state(client), net.world.clients[client].train
        labels = state["labels"].tolist()
        with torch.no_grad():
            features = [model(to_float(view.batch(np.array([i]))))[0].double() for i in range(len(view))]
        assert max(labels) > 0
        for c in range(max(labels) + 1):
            total = sum(f / f.norm() for f, y in zip(features, labels, strict=True) if y == c)
            assert isinstance(total, torch.Tensor)
            torch.testing.assert_close(state["start"]["weight"][c].double(), total / total.norm(), rtol=0, atol=1e-5)


def test_the_f_score_is_the_harmonic_mean() -> None:
    """Clusters {0, 1, 2} and {3}, people {0, 1} and {2, 3}: of 3 pairs together 1 is right, of 2 true ones 1 found."""
    found = quality(np.array([0, 0, 0, 1]), np.array([5, 5, 6, 6]))
    assert found.pairwise_precision == pytest.approx(1 / 3)
    assert found.pairwise_recall == pytest.approx(1 / 2)
    assert found.pairwise_f == pytest.approx(0.4)
    assert found.bcubed_precision == pytest.approx((2 / 3 + 2 / 3 + 1 / 3 + 1) / 4)
    assert found.bcubed_recall == pytest.approx((1 + 1 + 1 / 2 + 1 / 2) / 4)
    assert found.bcubed_f == pytest.approx(2 * 8 / 12 * 9 / 12 / (8 / 12 + 9 / 12))
