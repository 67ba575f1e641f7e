"""The real CelebA subset through import, partition and federation."""

from pathlib import Path

import numpy as np
import pytest

from visard.data.faces import FaceSet
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sources.importing import import_faces

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def celeba(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> FaceSet:
    if not (shared_data / "celeba").is_dir():
        pytest.skip("no celeba in ../shared/data")
    out = tmp_path_factory.mktemp("celeba") / "set"
    report = import_faces("celeba", shared_data / "celeba", out, size=64, limit_identities=500, workers=2)
    assert report.skipped == []
    return FaceSet.open(out)


def test_labels_agree_with_the_text_files(celeba: FaceSet, shared_data: Path) -> None:
    lines = (shared_data / "celeba" / "identity_CelebA.txt").read_text().split("\n")
    identity = dict(line.split() for line in lines if line)
    rows = np.random.default_rng(0).choice(len(celeba), 200)
    assert all(celeba.names[celeba.identity[r]] == identity[celeba.file(r).split("/")[-1]] for r in rows)
    marks = {}
    with (shared_data / "celeba" / "list_attr_celeba.txt").open() as file:
        file.readline()
        names = file.readline().split()
        for line in file:
            words = line.split()
            marks[words[0]] = [int(word) for word in words[1:]]
    assert celeba.attribute_names == names
    assert all(celeba.attributes[r].tolist() == marks[celeba.file(r).split("/")[-1]] for r in rows)


def test_pictures_are_faces_not_noise(celeba: FaceSet) -> None:
    assert len(celeba.names) == 500
    assert celeba.images.shape[1:] == (64, 64, 3)
    sample = np.asarray(celeba.images[::20]).astype(float)
    assert 60 < sample.mean() < 180
    assert sample.std(axis=(1, 2, 3)).min() > 5
    # the mean aligned face is nearly symmetric; a picture turned or mirrored in its axes would not be
    mean = sample.mean(0)
    assert np.abs(mean - mean[:, ::-1]).mean() < 10
    assert np.abs(mean - mean[::-1]).mean() > np.abs(mean - mean[:, ::-1]).mean()


def test_federations(celeba: FaceSet) -> None:
    chosen = PartitionSettings(clients=10, identities=400, test_identities=80, min_images=2)
    federation = partition(celeba, chosen, 0).federation(celeba)
    assert [data.n_classes for data in federation.clients.values()] == [40] * 10
    assert federation.unseen["test"].n_classes == 80
    adapt = PartitionSettings(
        kind="domains", source_domain="Male", target_domain="!Male", clients=4, test_identities=30
    )
    moved = partition(celeba, adapt, 0).federation(celeba)
    assert list(moved.clients) == ["source", "target-0", "target-1", "target-2", "target-3"]
    male = celeba.attribute("Male")
    assert (male[moved.clients["source"].train.index] == 1).mean() > 0.9
    assert (male[moved.unseen["target"].index] == -1).mean() > 0.9
