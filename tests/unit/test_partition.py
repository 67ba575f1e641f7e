"""Partitions: each kind does what it says, manifests survive the disk, impossible requests are one line."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from visard.data.expressions import evaluate, matching
from visard.data.faces import FaceSet, FaceSetWriter, FaceView
from visard.data.partition import Manifest, check_disjoint, partition
from visard.data.partition_kinds import (
    PARTITIONS,
    Kind,
    PartitionSettings,
    dirichlet_clients,
    lognormal_counts,
    proportional_counts,
)
from visard.errors import UsageError, VisardError

ATTRIBUTES = ["Male", "Young", "Eyeglasses", "5_o_Clock"]


def make_set(
    out: Path,
    counts: list[int],
    domains: list[int] | None = None,
    male: list[int] | None = None,
    tag: str = "p",
) -> FaceSet:
    """counts[i] pictures of identity i, in domain domains[i], with Male = male[i]; other attributes vary."""
    identity = np.repeat(np.arange(len(counts)), counts)
    n = len(identity)
    rng = np.random.default_rng(0)
    marks = rng.choice([-1, 1], (n, len(ATTRIBUTES)))
    if male is not None:
        marks[:, 0] = np.array(male)[identity]
    names = ["north", "south", "east"][: max(domains) + 1] if domains else ["only"]
    with FaceSetWriter(
        out, count=n, size=8, names=[f"{tag}{i}" for i in range(len(counts))], domains=names,
        attributes=ATTRIBUTES, info={},
    ) as w:  # fmt: skip
        pictures = rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
        w.write(0, pictures, identity, np.array(domains or [0] * len(counts))[identity], marks, ["f"] * n)
    return FaceSet.open(out)


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> FaceSet:
    return make_set(tmp_path_factory.mktemp("one") / "set", [10] * 40)


@pytest.fixture(scope="module")
def two_domains(tmp_path_factory: pytest.TempPathFactory) -> FaceSet:
    return make_set(tmp_path_factory.mktemp("two") / "set", [6] * 40, [0] * 20 + [1] * 20, [1, -1] * 20)


def settings(**fields: object) -> PartitionSettings:
    return PartitionSettings(**fields)  # type: ignore[arg-type]


def identities(faces: FaceSet, manifest: Manifest) -> dict[str, set[int]]:
    clients = manifest.content.clients.items()
    return {name: set(faces.identity[r.train + r.val + r.test].tolist()) for name, r in clients}


def test_equal(faces: FaceSet) -> None:
    manifest = partition(faces, settings(kind="equal", clients=4, identities=30, test_identities=5), 0)
    who = identities(faces, manifest)
    assert list(who) == ["client-000", "client-001", "client-002", "client-003"]
    assert sorted(map(len, who.values())) == [7, 7, 8, 8]
    assert len(set.union(*who.values())) == 30
    test = set(faces.identity[manifest.content.unseen["test"]].tolist())
    assert len(test) == 5
    assert not test & set.union(*who.values())
    assert len(manifest.content.unseen["test"]) == 50


def test_federation(faces: FaceSet) -> None:
    manifest = partition(faces, settings(clients=5, test_identities=5, hold_out=2), 3)
    federation = manifest.federation(faces)
    assert federation.hold_out == ("client-003", "client-004")
    assert list(federation.training) == ["client-000", "client-001", "client-002"]
    assert federation.identities == 40
    assert federation.fingerprint == manifest.hash
    data = federation.clients["client-000"]
    assert data.n_classes == 7
    assert (len(data.train), len(data.val), len(data.test)) == pytest.approx((49, 7, 14), abs=7)
    for view in (data.train, data.val, data.test):
        assert np.array_equal(data.train.classes[view.labels], view.identity)
    assert federation.unseen["test"].n_classes == 5


def test_the_test_identities_do_not_depend_on_the_clients(faces: FaceSet) -> None:
    first = partition(faces, settings(clients=4, test_identities=6), 7)
    second = partition(faces, settings(kind="dirichlet", clients=2, identities=9, test_identities=6), 7)
    assert first.content.unseen == second.content.unseen
    other = partition(faces, settings(clients=4, test_identities=6), 8)
    assert other.content.unseen != first.content.unseen


def test_lognormal_counts_follow_the_formula() -> None:
    counts = lognormal_counts(1000, 20, 3.0, 3.0, np.random.default_rng(5))
    s = np.exp(np.random.default_rng(5).normal(3.0, 3.0, 20))
    exact = 1000 * s / s.sum()
    assert counts.sum() == 1000
    assert counts.min() >= 1
    large = exact >= 2
    assert np.abs(counts - exact)[large].max() < 1 + (exact < 1).sum()
    assert lognormal_counts(50, 50, 3.0, 50.0, np.random.default_rng(0)).tolist() == [1] * 50


def test_largest_remainder() -> None:
    assert proportional_counts(10, np.array([3.0, 3.0, 4.0])).tolist() == [3, 3, 4]
    assert proportional_counts(10, np.array([1.0, 1.0, 1.0])).tolist() == [4, 3, 3]
    assert proportional_counts(7, np.array([0.26, 0.16, 0.58])).tolist() == [2, 1, 4]
    assert proportional_counts(5, np.array([100.0, 0.0, 0.0])).tolist() == [3, 1, 1]


def test_lognormal(faces: FaceSet) -> None:
    who = identities(faces, partition(faces, settings(kind="lognormal", clients=6), 1))
    sizes = sorted(map(len, who.values()))
    assert sum(sizes) == 40
    assert sizes[0] >= 1
    assert sizes[-1] > 2 * np.median(sizes)


def test_one_identity(faces: FaceSet) -> None:
    manifest = partition(faces, settings(kind="one_identity", identities=12), 0)
    who = identities(faces, manifest)
    assert [len(ids) for ids in who.values()] == [1] * 12
    assert len(set.union(*who.values())) == 12
    assert len(identities(faces, partition(faces, settings(kind="one_identity"), 0))) == 40
    assert len(identities(faces, partition(faces, settings(kind="one_identity", clients=3), 0))) == 3


def test_attribute(faces: FaceSet) -> None:
    expressions = ["Male & Young", "Male", "Male & !Eyeglasses"]
    manifest = partition(faces, settings(kind="attribute", attributes=expressions, cap=30), 2)
    rows = [r.train + r.val + r.test for r in manifest.content.clients.values()]
    assert [len(r) for r in rows] == [30, 30, 30]
    for expression, own in zip(expressions, rows, strict=True):
        assert matching(faces, expression)[own].all()
    assert len(set(itertools.chain(*rows))) == 90
    who = identities(faces, manifest)
    assert who["client-000"] & who["client-001"], "one identity may live in several clients"


def test_attribute_order_is_who_chooses_first(faces: FaceSet) -> None:
    with pytest.raises(UsageError, match="no picture is left for the attribute expression 'Male & Young'"):
        partition(faces, settings(kind="attribute", attributes=["Male", "Male & Young"]), 0)
    manifest = partition(faces, settings(kind="attribute", attributes=["Male & Young", "Male"]), 0)
    rest = manifest.content.clients["client-001"]
    assert not matching(faces, "Young")[rest.train + rest.val + rest.test].any()


def test_domains_by_name(two_domains: FaceSet) -> None:
    chosen = settings(
        kind="domains", source_domain="north", target_domain="south", clients=3, test_identities=4, hold_out=1
    )
    manifest = partition(two_domains, chosen, 0)
    who = identities(two_domains, manifest)
    assert list(who) == ["source", "target-0", "target-1", "target-2"]
    assert [len(ids) for ids in who.values()] == [16, 6, 5, 5]
    assert all(i < 20 for i in who["source"])
    assert all(i >= 20 for name in who if name != "source" for i in who[name])
    assert list(manifest.content.unseen) == ["north", "south"]
    assert manifest.content.hold_out == ["target-2"]
    for name, low in (("north", 0), ("south", 20)):
        test = set(two_domains.identity[manifest.content.unseen[name]].tolist())
        assert len(test) == 4
        assert all(low <= i < low + 20 for i in test)
    manifest.federation(two_domains)


def test_domains_by_attribute(two_domains: FaceSet) -> None:
    chosen = settings(
        kind="domains", source_domain="Male", target_domain="!Male", clients=2, test_identities=2,
        source_identities=5, identities=8,
    )  # fmt: skip
    manifest = partition(two_domains, chosen, 0)
    who = identities(two_domains, manifest)
    assert [len(ids) for ids in who.values()] == [5, 4, 4]
    assert all(i % 2 == 0 for i in who["source"])
    assert all(i % 2 == 1 for i in who["target-0"] | who["target-1"])
    assert list(manifest.content.unseen) == ["source", "target"]


def test_targets_with_many_pictures(tmp_path: Path) -> None:
    faces = make_set(tmp_path / "set", [5, 5, 5, 9, 5, 12], domains=[0, 1, 0, 1, 0, 1])
    chosen = settings(kind="domains", source_domain="north", target_domain="south", clients=2, client_images=9)
    assert identities(faces, partition(faces, chosen, 0)) in (
        {"source": {0, 2, 4}, "target-0": {3}, "target-1": {5}},
        {"source": {0, 2, 4}, "target-0": {5}, "target-1": {3}},
    )


def test_clients_with_many_pictures_and_the_same_public_people(tmp_path: Path) -> None:
    faces = make_set(tmp_path / "set", [5, 9] * 10)
    plain = partition(faces, settings(clients=2, public_identities=6), 0)
    many = partition(faces, settings(clients=2, public_identities=6, client_images=9), 0)
    assert many.content.public == plain.content.public
    left = set(range(20)) - {int(i) for i in faces.identity[many.content.public]}
    assert set().union(*identities(faces, many).values()) == {i for i in left if i % 2}


def test_domain_of_an_identity_is_that_of_most_pictures(tmp_path: Path) -> None:
    faces = make_set(tmp_path / "set", [5, 5])
    marks = np.array(faces.attributes)
    marks[:, 0] = [1, 1, 1, -1, -1, 1, 1, -1, -1, -1]
    np.save(tmp_path / "set" / "attributes.npy", marks)
    faces = FaceSet.open(tmp_path / "set")
    chosen = settings(kind="domains", source_domain="Male", target_domain="!Male", clients=1)
    who = identities(faces, partition(faces, chosen, 0))
    assert who == {"source": {0}, "target-0": {1}}


def test_several_domains_give_a_test_set_each(two_domains: FaceSet) -> None:
    manifest = partition(two_domains, settings(clients=4, test_identities=3), 0)
    assert {name: len(rows) for name, rows in manifest.content.unseen.items()} == {"north": 18, "south": 18}


def test_dirichlet_small_alpha_is_skewed(faces: FaceSet) -> None:
    def largest_share(alpha: float) -> float:
        identity = np.repeat(np.arange(200), 50)
        client = dirichlet_clients(identity, 5, alpha, np.random.default_rng(0))
        table = np.zeros((200, 5))
        np.add.at(table, (identity, client), 1)
        assert np.abs(table.sum(0) / len(identity) - 0.2).max() < 0.1
        return float((table.max(1) / 50).mean())

    assert largest_share(0.05) > 0.85
    assert largest_share(100.0) < 0.3
    manifest = partition(faces, settings(kind="dirichlet", clients=3, alpha=1.0), 0)
    assert sum(len(r.train + r.val + r.test) for r in manifest.content.clients.values()) == 400


def test_min_images(tmp_path: Path) -> None:
    faces = make_set(tmp_path / "set", [1, 2, 3, 4, 5, 6])
    who = identities(faces, partition(faces, settings(clients=1, min_images=4), 0))
    assert who["client-000"] == {3, 4, 5}
    with pytest.raises(UsageError, match="no identity of set has 7 pictures"):
        partition(faces, settings(clients=1, min_images=7), 0)


def test_excluded_identities_are_nowhere(faces: FaceSet, tmp_path: Path) -> None:
    """For example the 84 people of CASIA-WebFace that LFW has too: a list, or a file with a name in each line."""
    (tmp_path / "names.txt").write_text("p3\n\n p17 \np39\n")
    given = {"kind": "equal", "clients": 3, "test_identities": 8, "public_identities": 8}
    listed = PartitionSettings(**given, exclude=("p3", "p17", "p39"))  # type: ignore[arg-type]
    assert PartitionSettings(**given, exclude=str(tmp_path / "names.txt")) == listed  # type: ignore[arg-type]
    for seed in range(6):  # whoever would be drawn
        content = partition(faces, listed, seed).content
        parts = [rows for c in content.clients.values() for rows in (c.train, c.val, c.test)]
        used = {i for rows in [*parts, *content.unseen.values(), content.public] for i in faces.identity[rows].tolist()}
        assert len(used) == 37
        assert not used & {3, 17, 39}
    before = partition(faces, PartitionSettings(**given), 0).content  # type: ignore[arg-type]
    assert "exclude" not in before.settings, "partitions of earlier versions keep their hash"
    with pytest.raises(UsageError, match="no identity 'q1' and 1 more"):
        partition(faces, PartitionSettings(**given, exclude=("p3", "q1", "q2")), 0)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="cannot read"):
        PartitionSettings(**given, exclude="nowhere.txt")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="exclude has no effect"):
        PartitionSettings(kind="one_domain", target_domain="only", exclude=("p3",))


def test_unseen_identities_have_two_pictures(tmp_path: Path) -> None:
    faces = make_set(tmp_path / "set", [1, 1, 1, 1, 2, 2, 1])
    manifest = partition(faces, settings(clients=1, test_identities=2), 0)
    assert set(faces.identity[manifest.content.unseen["test"]].tolist()) == {4, 5}


def test_same_seed_same_manifest(faces: FaceSet) -> None:
    chosen = settings(kind="lognormal", clients=5, test_identities=3)
    assert partition(faces, chosen, 4) == partition(faces, chosen, 4)
    assert partition(faces, chosen, 4).hash == partition(faces, chosen, 4).hash
    assert partition(faces, chosen, 4).hash != partition(faces, chosen, 5).hash


# manifests on disk ----------------------------------------------------------------------------------


def test_manifest_round_trip(faces: FaceSet, tmp_path: Path) -> None:
    manifest = partition(faces, settings(clients=4, test_identities=4, hold_out=1), 0)
    path = manifest.save(tmp_path / "deep" / "partition.json")
    back = Manifest.load(path)
    assert back == manifest
    assert json.loads(path.read_text())["sha256"] == manifest.hash == back.hash
    assert [p.name for p in path.parent.iterdir()] == ["partition.json"]
    assert PartitionSettings(**back.content.settings).clients == 4


def edit(**changes: object):
    def apply(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def move_row(path: Path) -> None:
    content = json.loads(path.read_text())
    content["clients"]["client-001"]["train"].append(content["clients"]["client-000"]["train"][0])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(seed=1), "was changed after it was made: its hash does not fit"),
        (edit(sha256="0" * 64), "its hash does not fit"),
        (edit(version=2), "is no partition: version"),
        (edit(count=30), "beyond 30 pictures"),
        (edit(hold_out=["nobody"]), "'nobody' is held out but is no client"),
        (edit(unseen={"test": [-1]}), r"unseen\.test\.0"),
        (edit(unseen={"test": [0.5]}), r"unseen\.test\.0"),
        (edit(unseen={"test": [3, 3]}), "test set test has a picture twice|is in"),
        (edit(extra=1), "extra"),
        (move_row, r"picture \d+ is in client-000 \(train\) and in client-001 \(train\)"),
        (lambda path: path.write_text(path.read_text()[:200]), "is no partition"),
        (lambda path: path.write_bytes(b""), "is no partition"),
        (lambda path: path.unlink(), "no partition at"),
    ],
)
def test_manifest_damage_is_one_line(faces: FaceSet, tmp_path: Path, damage, message: str) -> None:
    path = partition(faces, settings(clients=3), 0).save(tmp_path / "p.json")
    damage(path)
    with pytest.raises(VisardError, match=message) as caught:
        Manifest.load(path)
    assert "\n" not in str(caught.value)
    assert "p.json" in str(caught.value)


def test_manifest_of_another_set(faces: FaceSet, two_domains: FaceSet) -> None:
    with pytest.raises(VisardError, match="the partition was made for face set"):
        partition(faces, settings(clients=3), 0).federation(two_domains)


# the guard ------------------------------------------------------------------------------------------


def test_guard_names_the_overlap(faces: FaceSet, tmp_path: Path) -> None:
    train = [FaceView.of(faces, range(60))]
    check_disjoint(train, {"test": FaceView.of(faces, range(60, 80))})
    with pytest.raises(VisardError, match=r"2 identities are in training and in test set 'lfw': p4, p5"):
        check_disjoint(train, {"ok": FaceView.of(faces, [70]), "lfw": FaceView.of(faces, range(45, 90))})
    with pytest.raises(VisardError, match=r"^6 identities .*: p0, p1, p2, p3, p4, \.\.\.$"):
        check_disjoint(train, {"test": faces.all()})
    other = make_set(tmp_path / "other", [2] * 3)
    with pytest.raises(VisardError, match="1 identity is in training and in test set 'x': p2"):
        check_disjoint(train, {"x": FaceView.of(other, [4])})
    check_disjoint(train, {"x": make_set(tmp_path / "third", [2] * 3, tag="q").all()})


def test_federation_refuses_overlap(faces: FaceSet) -> None:
    content = partition(faces, settings(clients=2, identities=4, test_identities=3), 0).content
    row = content.unseen["test"][0]
    client = content.clients["client-000"]
    mixed = content.model_copy(
        update={
            "unseen": {"test": content.unseen["test"][1:]},
            "clients": {
                **content.clients,
                "client-000": client.model_copy(update={"train": [*client.train, row]}),
            },
        }
    )
    with pytest.raises(VisardError, match="1 identity is in training and in test set 'test'"):
        Manifest(mixed).federation(faces)


# wrong use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clients": 41}, "41 clients, but only 40 identities"),
        ({"kind": "lognormal", "clients": 41}, "41 clients, but only 40 identities"),
        ({"kind": "one_identity", "clients": 41}, "clients = 41, but only 40 identities"),
        ({"clients": 2, "identities": 41}, "identities = 41, but only 40 identities"),
        ({"clients": 2, "identities": 30, "test_identities": 11}, "only 29 identities"),
        ({"clients": 2, "test_identities": 41}, "test_identities = 41, but there are 40"),
        ({"clients": 2, "test_identities": 40}, "no identity is left"),
        ({"kind": "one_identity", "test_identities": 40}, "no identity is left"),
        ({"clients": 2, "hold_out": 2}, "leaves none of 2 clients to train"),
        ({"kind": "dirichlet", "clients": 500}, "would have no pictures"),
        ({"kind": "attribute", "attributes": ["Mael"]}, r"unknown attribute 'Mael'.*'Male'.* at position 1"),
        ({"kind": "attribute", "attributes": ["Male & !Male"]}, "no picture is left"),
        (
            {"kind": "domains", "clients": 1, "source_domain": "only", "target_domain": ["nort"]},
            "no domain 'nort'",
        ),
        (
            {"kind": "domains", "clients": 1, "source_domain": "only", "target_domain": "Male"},
            "belong to the source",
        ),
    ],
)
def test_impossible_requests(faces: FaceSet, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        partition(faces, settings(**fields), 0)
    assert "\n" not in str(caught.value)


def test_negative_seed(faces: FaceSet) -> None:
    with pytest.raises(UsageError, match="seed = -1"):
        partition(faces, settings(clients=2), -1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "kind = equal needs clients"),
        ({"clients": 0}, "clients"),
        ({"clients": 2, "split": (0.5, 0.1, 0.1)}, "must sum to 1"),
        ({"clients": 2, "split": (1.2, -0.1, -0.1)}, "split"),
        ({"clients": 2, "surprise": 1}, "surprise"),
        ({"kind": "attribute"}, "needs attributes"),
        ({"kind": "attribute", "attributes": ["Male"], "clients": 2}, "1 attribute expressions"),
        ({"kind": "domains", "clients": 2, "source_domain": "a"}, "needs source_domain and target_domain"),
        ({"kind": "one_identity", "clients": 2, "identities": 3}, "as many clients as identities"),
        ({"kind": "dirichlet", "clients": 2, "alpha": 0}, "alpha"),
        ({"kind": "fancy", "clients": 2}, r"no such kind of partition \(known: attribute, dirichlet"),
        ({"kind": "dirichelt", "clients": 2}, r"no such kind of partition \(did you mean 'dirichlet'\?\)"),
        ({"kind": "lognormal", "clients": 2, "shares": [1.0, 0.0]}, "shares"),
        ({"kind": "lognormal", "clients": 2, "shares": [1.0]}, "1 for 2 clients"),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**fields)


class FirstRows(Kind):
    """A kind of partition that a user might write: the first pictures, one for each client."""

    def rows(self, faces: FaceSet, identities: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.array([k]) for k in range(clients)]


def test_a_new_kind_is_one_entry(faces: FaceSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTITIONS.built_in, "first_rows", FirstRows)
    manifest = partition(faces, settings(kind="first_rows", clients=3, split=(1, 0, 0)), 0)
    assert [rows.train for rows in manifest.content.clients.values()] == [[0], [1], [2]]
    with pytest.raises(ValidationError, match="kind = first_rows needs clients"):
        settings(kind="first_rows")


# expressions ----------------------------------------------------------------------------------------

TABLE = {
    "A": np.array([1, 1, 1, 0, 0, 0, -1, -1, -1], np.int8),
    "B-2": np.array([1, 0, -1, 1, 0, -1, 1, 0, -1], np.int8),
    "5_x": np.array([1, -1, 1, -1, 1, -1, 1, -1, 1], np.int8),
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("A", [0, 1, 2]),
        ("!A", [6, 7, 8]),  # unknown is not absent
        ("!!A", [0, 1, 2]),
        ("A & B-2", [0]),
        ("A | B-2", [0, 1, 2, 3, 6]),
        ("!(A | B-2)", [8]),
        ("  !A&!B-2|5_x  ", [0, 2, 4, 6, 8]),
        ("!A & (B-2 | 5_x)", [6, 8]),
        ("A | !A", [0, 1, 2, 6, 7, 8]),
    ],
)
def test_expressions(text: str, fits: list[int]) -> None:
    assert np.flatnonzero(evaluate(text, list(TABLE), TABLE.__getitem__) == 1).tolist() == fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the name of an attribute at position 1"),
        ("A &", "expected the name of an attribute at position 4"),
        ("A B-2", "expected '&' or '|' before 'B-2' at position 3"),
        ("(A | B-2", r"missing '\)' for the '\(' opened at position 1 at position 9"),
        ("A)", r"before '\)' at position 2"),
        ("A & $", r"unexpected '\$' at position 5"),
        ("A & 5_y", r"unknown attribute '5_y'.*5_x.*at position 5"),
        ("A and B-2", "before 'and' at position 3"),
        ("(" * 5000 + "A" + ")" * 5000, "nested too deeply"),
        ("!" * 5000 + "A", "nested too deeply"),
        ("__import__('os')", r"unknown attribute '__import__'|before|unexpected"),
    ],
)
def test_wrong_expressions_say_where(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(text, list(TABLE), TABLE.__getitem__)
