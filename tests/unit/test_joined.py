"""Several face sets as one: rows, people, domains, roles and sizes; and the clients that sites become."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visard.data.activations import JoinedStore, Store, store_of
from visard.data.faces import FaceSet, FaceSetWriter, Skipped
from visard.data.joined import Joined, Member, merge
from visard.data.partition import partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sources.catalog import DataSettings, members, open_faces
from visard.data.sources.importing import import_faces
from visard.errors import UsageError


def make(
    out: Path, people: int = 4, pictures: int = 5, size: int = 8, domains: tuple[str, ...] = ("only",),
    attributes: tuple[str, ...] = (), labels: bool = True, seed: int = 0, align: str = "none",
) -> FaceSet:  # fmt: skip
    """`pictures` of each of `people`; person i is in domain i mod len(domains) and has every attribute."""
    identity = np.repeat(np.arange(people), pictures)
    n = len(identity)
    rng = np.random.default_rng(seed)
    info = {"align": align} | ({} if labels else {"labels": False})
    with FaceSetWriter(
        out, count=n, size=size, names=[f"p{i}" for i in range(people)], domains=list(domains),
        attributes=list(attributes), info=info,
    ) as w:  # fmt: skip
        drawn = rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
        w.write(
            0, drawn, identity, identity % len(domains), np.ones((n, len(attributes))), [f"{i}.png" for i in identity]
        )
    return FaceSet.open(out)


@pytest.fixture
def two(tmp_path: Path) -> list[Member]:
    a = make(tmp_path / "a", attributes=("Male",), seed=1)
    return [Member("a", a), Member("b", make(tmp_path / "b", 3, 6, attributes=("Young",), seed=2))]


def test_rows_are_counted_through_and_nothing_is_copied(two: list[Member]) -> None:
    joined = Joined(two)
    rows = np.array([37, 0, 19, 20, 5, 20])
    expected = np.concatenate([two[0].faces.pixels, two[1].faces.pixels])[rows]
    assert np.array_equal(joined.read(rows), expected)
    assert len(joined) == 38
    assert joined.shape == (8, 8, 3)
    assert joined.dtype == np.uint8
    assert joined.file(20) == "b/0.png"
    again = pickle.loads(pickle.dumps(joined))  # noqa: S301
    assert again.fingerprint() == joined.fingerprint()
    assert np.array_equal(again.read(rows), expected)


def test_equal_names_are_other_people_unless_they_are_the_same(two: list[Member]) -> None:
    apart, one = Joined(two), Joined(two, same_names=True)
    assert apart.names == ["a/p0", "a/p1", "a/p2", "a/p3", "b/p0", "b/p1", "b/p2"]
    assert apart.identity[20] == 4
    assert one.names == ["p0", "p1", "p2", "p3"]
    assert one.identity[20] == 0
    assert apart.fingerprint() != one.fingerprint()


def test_domains_are_the_sets_or_theirs_and_unknown_attributes_are_unknown(two: list[Member], tmp_path: Path) -> None:
    third = Member("c", make(tmp_path / "c", domains=("north", "south"), seed=3))
    joined = Joined([*two, third])
    assert joined.domains == ["a", "b", "c/north", "c/south"]
    assert joined.attribute_names == ["Male", "Young"]
    assert joined.attributes[0].tolist() == [1, 0]
    assert joined.attributes[20].tolist() == [0, 1]
    assert joined.attributes[38].tolist() == [0, 0]


def test_pictures_are_brought_to_the_largest_size(tmp_path: Path) -> None:
    small, large = make(tmp_path / "s", size=8, seed=1), make(tmp_path / "l", size=16, seed=2)
    joined = Joined([Member("s", small), Member("l", large)])
    found = joined.read(np.array([3, 25]))
    by_hand = Image.fromarray(small.pixels[3]).resize((16, 16), Image.Resampling.BICUBIC)
    assert joined.size == 16
    assert found.shape == (2, 16, 16, 3)
    assert np.array_equal(found[0], np.asarray(by_hand))
    assert np.array_equal(found[1], large.pixels[5])


def test_what_cannot_be_joined_is_one_line(two: list[Member], tmp_path: Path) -> None:
    bare = make(tmp_path / "bare", 1, labels=False, seed=5)
    wrong = {
        "are the same face set": [*two, Member("again", two[0].faces)],
        "the face set .*/a is given twice": [two[0], two[0]],
        "two face sets are called a": [two[0], Member("a", two[1].faces)],
        "cannot be called source": [Member("source", two[0].faces)],
        "has no labels, which a set with the role test needs": [two[0], Member("bare", bare, "test")],
        "no face set is given": [],
    }
    for text, sets in wrong.items():
        with pytest.raises(UsageError, match=text):
            Joined(sets)
    with pytest.raises(UsageError, match="p0 is in a set with the role clients and in b with the role test"):
        Joined([two[0], Member("b", two[1].faces, "test")], same_names=True)


def test_settings_name_sets_by_folder_and_tell_twins_apart(tmp_path: Path) -> None:
    make(tmp_path / "x" / "faces", seed=1)
    make(tmp_path / "y" / "faces", seed=2)
    make(tmp_path / "t", seed=3)
    sets = [{"path": str(tmp_path / "x" / "faces")}, {"path": str(tmp_path / "y" / "faces")}]
    sets += [{"path": str(tmp_path / "t"), "role": "test", "name": "visitors"}]
    data = DataSettings.model_validate({"sets": sets})
    assert [m.name for m in members(data.sets)] == ["x-faces", "y-faces", "visitors"]
    assert open_faces(data).roles.tolist() == ["clients"] * 8 + ["test"] * 4
    assert set(data.to_dict()) == {"sets", "same_names"}
    assert "sets" not in DataSettings().to_dict()
    with pytest.raises(ValueError, match="give one of them"):
        DataSettings.model_validate({"sets": sets, "source": "celeba"})


def test_roles_say_who_is_who(tmp_path: Path) -> None:
    roles = {"a": "clients", "b": "clients", "p": "public", "s": "source", "t": "test"}
    faces = Joined([Member(n, make(tmp_path / n, seed=k), r) for k, (n, r) in enumerate(roles.items())])  # type: ignore[arg-type]
    settings = PartitionSettings(kind="sites", test_identities=1, public_identities=1)
    federation = partition(faces, settings, 0).federation(faces)
    assert list(federation.clients) == ["source", "a", "b"]
    assert set(federation.unseen) == {"a", "b", "t"}
    assert len(federation.unseen["t"]) == 20
    assert len(federation.unseen["a"]) == 5
    assert federation.public is not None
    assert federation.public.n_classes == 4 + 1
    for client in ("a", "b", "source"):
        data = federation.clients[client]
        names = {faces.names[k].split("/")[0] for k in data.train.classes}
        assert names == {"s" if client == "source" else client}
    # the same roles with other kinds: the clients' people alone are given out
    shared = partition(faces, PartitionSettings(kind="equal", clients=3), 0).federation(faces)
    given = {faces.names[k].split("/")[0] for c in ("client-000", "client-001", "client-002")
             for k in shared.clients[c].train.classes}  # fmt: skip
    assert given == {"a", "b"}
    assert "source" in shared.clients


def test_domains_of_a_single_set_are_its_sites(tmp_path: Path) -> None:
    faces = make(tmp_path / "one", 6, domains=("north", "south", "west"))
    federation = partition(faces, PartitionSettings(kind="sites"), 0).federation(faces)
    assert list(federation.clients) == ["north", "south", "west"]
    assert [d.n_classes for d in federation.clients.values()] == [2, 2, 2]


def test_a_set_for_tests_alone_serves_parties(tmp_path: Path) -> None:
    faces = Joined([Member("t", make(tmp_path / "t"), "test")])
    federation = partition(faces, PartitionSettings(kind="parties", clients=2), 0).federation(faces)
    assert not federation.clients
    assert {k: len(v) for k, v in federation.unseen.items()} == {"t": 20}


def test_pictures_without_labels_are_trained_on_and_never_tested_on(tmp_path: Path) -> None:
    bare, labelled = make(tmp_path / "bare", 1, 20, labels=False, seed=1), make(tmp_path / "l", seed=2)
    faces = Joined([Member("bare", bare), Member("l", labelled)])
    settings = PartitionSettings(kind="sites", test_identities=1, public_identities=1)
    federation = partition(faces, settings, 0).federation(faces)
    data = federation.clients["bare"]
    assert (len(data.train), len(data.val), len(data.test)) == (20, 0, 0)
    assert not data.train.labelled
    assert federation.clients["l"].train.labelled
    assert set(federation.unseen) == {"l"}


def test_names_of_people_to_test_on_that_others_have(two: list[Member], tmp_path: Path) -> None:
    assert Joined(two).namesakes() == []
    assert Joined([two[0], Member("b", two[1].faces, "test")]).namesakes() == ["p0", "p1", "p2"]


def test_each_set_keeps_its_own_activations(two: list[Member], tmp_path: Path) -> None:
    import torch

    def trunk(x: torch.Tensor) -> torch.Tensor:
        return x[:, :2, :4, :4] * 2

    large = Member("large", make(tmp_path / "large", size=16, seed=7))
    joined = Joined([*two, large])
    store = store_of(joined, "t" * 64, (2, 4, 4), "fp32", tmp_path / "cache")
    alone = store_of(large.faces, "t" * 64, (2, 4, 4), "fp32", tmp_path / "cache")
    small = store_of(two[0].faces, "t" * 64, (2, 4, 4), "fp32", tmp_path / "cache")
    assert isinstance(store, JoinedStore)
    assert isinstance(alone, Store)
    assert isinstance(small, Store)
    assert store.stores[2].folder == alone.folder, "a run with other sets shares it"
    assert store.stores[0].folder != small.folder, "of pictures that were resized there is another one"
    rows, said = np.array([2, 25, 40, 57]), []
    store.fill(joined, {"plain": rows, "mirror": rows[:1]}, trunk, lambda done, total: said.append((done, total)))
    assert not store.missing(rows, "plain")
    assert not store.missing(rows[:1], "mirror")
    assert said[-1][0] == said[-1][1] == max(said)[0]
    found = store.read(rows[[3, 0, 1]], np.array([False, True, False]))
    x = torch.from_numpy(joined.read(rows[[3, 0, 1]]).transpose(0, 3, 1, 2).astype(np.float32)) / 127.5 - 1
    x[1] = x[1].flip(2)
    assert np.allclose(found, trunk(x).numpy(), atol=1e-5)
    assert found.strides[1] == 4, "channels last, as the store of one set gives them"


def test_loose_pictures_are_a_set_without_labels(tmp_path: Path) -> None:
    loose, nested = tmp_path / "loose", tmp_path / "nested"
    for k in range(6):
        picture = Image.fromarray(np.full((40, 40, 3), 40 * k, np.uint8))
        for path in (loose / f"{k}.png", nested / f"camera{k % 2}" / f"{k}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    bare = FaceSet.open(import_faces("folder", loose, tmp_path / "one", align="none").path)
    assert len(bare) == 6
    assert bare.unlabelled.tolist() == [True]
    people = FaceSet.open(import_faces("folder", nested, tmp_path / "two", align="none").path)
    assert people.names == ["camera0", "camera1"]
    assert not people.unlabelled.any()
    cameras = import_faces("folder", nested, tmp_path / "three", align="none", unlabelled=True, domains=True).path
    assert FaceSet.open(cameras).domains == ["camera0", "camera1"]
    assert FaceSet.open(cameras).unlabelled.all()


def test_folds_test_every_person_once(tmp_path: Path) -> None:
    """Of three folds each tests a third of every site's people and of the source's; the others train."""
    joined = Joined([
        Member("a", make(tmp_path / "a", 6, seed=1)), Member("b", make(tmp_path / "b", 9, seed=2)),
        Member("s", make(tmp_path / "s", 7, seed=3), "source"),
    ])  # fmt: skip
    seen: dict[str, list[int]] = {"sites": [], "source": []}
    for k in range(3):
        settings = PartitionSettings(kind="sites", fold=(k, 3), split=(1.0, 0.0, 0.0), seed=0)
        content = partition(joined, settings, 5).content
        people = {name: np.unique(joined.identity[rows]).tolist() for name, rows in content.unseen.items()}
        owned = {name: np.unique(joined.identity[rows.train]).tolist() for name, rows in content.clients.items()}
        for name, tested in people.items():
            seen[name] += tested
        home = [joined.names[i][0] for i in people["sites"]]
        assert (home.count("a"), home.count("b")) == (2, 3)
        assert sorted(owned["a"] + owned["b"] + people["sites"]) == list(range(15))
        assert sorted(owned["source"] + people["source"]) == list(range(15, 22))
    assert sorted(seen["sites"]) == list(range(15))
    assert sorted(seen["source"]) == list(range(15, 22))
    tested = Member("t", make(tmp_path / "t", 3, seed=4), "test")
    content = partition(Joined([*joined.members, tested]), settings, 5).content
    assert sorted(content.unseen) == ["source", "t"]
    with pytest.raises(UsageError, match="fold = 1 of 9: source has 7 people"):
        partition(joined, PartitionSettings(kind="sites", fold=(0, 9)), 0)
    with pytest.raises(ValueError, match="parts are counted from 0"):
        PartitionSettings(kind="sites", fold=(3, 3))


def test_merged_sets_are_one_set_of_their_own(two: list[Member], tmp_path: Path) -> None:
    bare = Member("bare", make(tmp_path / "bare", 1, 4, domains=("x", "y"), labels=False, size=16, seed=9))
    joined, said = Joined([*two, bare]), []
    merged = FaceSet.open(merge(joined, tmp_path / "all", progress=lambda done, total: said.append((done, total))))
    rows = np.arange(len(joined))
    assert np.array_equal(merged.pixels, joined.read(rows))
    for name in ("identity", "domain", "attributes"):
        assert np.array_equal(getattr(merged, name), getattr(joined, name)), name
    assert (merged.names, merged.domains) == (joined.names, ["a", "b", "bare/x", "bare/y"])
    assert merged.unlabelled.tolist() == [False] * 7 + [True]
    assert merged.file(20) == "b/0.png"
    assert said[-1] == (len(joined), len(joined))
    federation = partition(merged, PartitionSettings(kind="sites"), 0).federation(merged)
    assert list(federation.clients) == ["a", "b", "bare/x"]
    assert len(FaceSet.open(merge(Joined(two, same_names=True), tmp_path / "one")).names) == 4
    with pytest.raises(UsageError, match="exists already"):
        merge(joined, tmp_path / "all")


def test_merged_sets_keep_landmarks_quality_and_what_was_skipped(tmp_path: Path) -> None:
    members, arrays = [], []
    for k, name in enumerate(("a", "b")):
        about = {"landmarks": np.full((3, 5, 2), k, np.float32), "quality": np.full((3, 5), 0.5 + k, np.float32)}
        with FaceSetWriter(
            tmp_path / name, count=3, size=8, names=["p"], domains=["d"], attributes=[], info={"skipped_count": 1}
        ) as w:
            w.write(0, np.full((3, 8, 8, 3), k, np.uint8), [0] * 3, [0] * 3, np.zeros((3, 0)), ["x.png"] * 3)
            for key, values in about.items():
                w.attach(key, values)
            w.attach("skipped", np.array([[0, 0, k]], np.int32))
        members.append(Member(name, FaceSet.open(tmp_path / name)))
        arrays.append(about)
    merged = FaceSet.open(merge(Joined(members), tmp_path / "both"))
    for key in ("landmarks", "quality"):
        assert np.array_equal(merged.extra(key), np.concatenate([about[key] for about in arrays])), key
    left = merged.skipped()
    assert left is not None
    assert (left.identity.tolist(), left.domain.tolist(), left.reason.tolist()) == ([0, 1], [0, 1], [0, 1])
    bare = Member("bare", make(tmp_path / "bare", 1, 3))
    some = FaceSet.open(merge(Joined([members[0], bare]), tmp_path / "some"))
    with pytest.raises(UsageError, match=r"no landmarks\.npy"):
        some.extra("landmarks")
    assert some.skipped() is None, "of one of them it is not known"


def test_sets_that_were_cut_differently_are_said_to_be(tmp_path: Path) -> None:
    one, two, other = (
        Member(name, make(tmp_path / name, seed=k, align=align))
        for k, (name, align) in enumerate((("a", "five"), ("b", "five"), ("c", "haar")))
    )
    alike, mixed = Joined([one, two]), Joined([one, two, other])
    assert (alike.align, alike.cut_differently()) == ("five", "")
    assert (mixed.align, mixed.info["align"]) == ("none", "none")
    assert mixed.cut_differently().startswith("faces are cut differently (a five, b five, c haar)")


def test_a_merge_that_is_stopped_leaves_nothing(two: list[Member], tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(Joined(two), tmp_path / "out", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_what_importers_left_out_is_known_of_joined_sets(two: list[Member], tmp_path: Path) -> None:
    class Known(FaceSet):
        """A set of which two pictures were left out: of its first person, and of somebody who is not in it."""

        def skipped(self) -> Skipped:
            one = np.array([0, len(self.names)], np.int32)
            marks = np.ones((2, len(self.attribute_names)), np.int32)
            return Skipped(one, np.zeros(2, np.int32), np.zeros(2, np.int32), marks)

    assert Joined(two).skipped() is None, "of these it is not known"
    joined = Joined([Member(m.name, Known(m.faces.path)) for m in two])
    found = joined.skipped()
    assert found is not None
    assert found.identity.tolist() == [0, 7, 4, 8]
    assert found.domain.tolist() == [0, 0, 1, 1]
    assert found.attributes.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
