"""Table II of the HF-MAML paper: the expressions in the package against a filter written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from visard.data.expressions import expressions, matching
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.synthetic.sets import ATTRIBUTES
from visard.errors import UsageError

Hand = dict[str, bool]

# rows of the table as printed: gender, glasses, hat, age (None = both), and the rest
MEN_OLD_BUSHY: Hand = {"Male": True, "Young": False, "Goatee": False, "Bushy_Eyebrows": True}
PLAIN: Hand = {"Eyeglasses": False, "Wearing_Hat": False}
TABLE: list[Hand] = [
    {"Male": True, "Eyeglasses": True, "Wearing_Hat": False, "Young": True},
    {"Male": True, "Eyeglasses": True, "Wearing_Hat": False, "Young": False, "Gray_Hair": True},
    {"Male": True, "Eyeglasses": True, "Wearing_Hat": False, "Young": False, "Chubby": True},
    {"Male": False, "Eyeglasses": True, "Wearing_Hat": False},
    {"Eyeglasses": False, "Wearing_Hat": True},
    PLAIN | {"Male": False, "Blond_Hair": True, "Oval_Face": True, "Rosy_Cheeks": True},
    PLAIN | {"Male": True, "Goatee": True, "Bald": False, "Smiling": True},
    PLAIN | {"Male": True, "Goatee": False, "Bald": True},
    PLAIN | {"Male": True, "Gray_Hair": True, "Goatee": False},
    PLAIN | MEN_OLD_BUSHY,
    PLAIN | MEN_OLD_BUSHY | {"Black_Hair": False},
    PLAIN | MEN_OLD_BUSHY | {"Blond_Hair": False},
    PLAIN | MEN_OLD_BUSHY | {"Young": True, "Brown_Hair": True},
    PLAIN | {"Male": False, "Young": False, "Oval_Face": True, "Wearing_Lipstick": True, "Rosy_Cheeks": False},
    PLAIN | {"Male": False, "Young": True, "Oval_Face": False, "Wearing_Lipstick": True, "Rosy_Cheeks": True},
    PLAIN | {"Male": True, "Bushy_Eyebrows": False, "Mustache": True},
    PLAIN | {"Male": True, "Young": True, "No_Beard": False, "Mustache": False, "Bushy_Eyebrows": True},
    PLAIN | {"Male": True, "Young": True, "No_Beard": False, "Mustache": False, "Bushy_Eyebrows": False},
    PLAIN | {"Male": True, "Young": True, "Black_Hair": True, "Bags_Under_Eyes": True},
    PLAIN | {"Male": False, "Young": False, "Bags_Under_Eyes": True},
]
IDENTITIES, IMAGES = 300, 20


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> FaceSet:
    """Random marks, some unknown; the rare ones made common so that every row of the table finds somebody."""
    rng = np.random.default_rng(0)
    n = IDENTITIES * IMAGES
    out = tmp_path_factory.mktemp("marks") / "set"
    with FaceSetWriter(
        out, count=n, size=32, names=[f"p{i:03d}" for i in range(IDENTITIES)], domains=["d"],
        attributes=list(ATTRIBUTES), info={"kind": "synthetic", "name": "marks"},
    ) as writer:  # fmt: skip
        marks = rng.choice(np.array([-1, 0, 1], np.int8), (n, len(ATTRIBUTES)), p=[0.48, 0.04, 0.48])
        identity = np.repeat(np.arange(IDENTITIES), IMAGES).astype(np.int32)
        pictures = np.zeros((n, 32, 32, 3), np.uint8)
        writer.write(0, pictures, identity, np.zeros(n, np.int16), marks, [str(i) for i in range(n)])
    return FaceSet.open(out)


def by_hand(faces: FaceSet, row: Hand) -> list[int]:
    wanted = [(ATTRIBUTES.index(name), 1 if present else -1) for name, present in row.items()]
    return [i for i in range(len(faces)) if all(faces.attributes[i, column] == sign for column, sign in wanted)]


def test_every_expression_selects_what_the_table_says(faces: FaceSet) -> None:
    given = expressions("table-ii")
    assert len(given) == len(TABLE) == 20
    for expression, row in zip(given, TABLE, strict=True):
        found = np.flatnonzero(matching(faces, expression)).tolist()
        assert found == by_hand(faces, row)
        assert found


def test_clients_choose_in_order_and_up_to_the_cap(faces: FaceSet) -> None:
    settings = PartitionSettings(kind="attribute", attributes="table-ii", cap=40, hold_out=5)
    manifest = partition(faces, settings, 3)
    taken: set[int] = set()
    for (name, rows), row in zip(manifest.content.clients.items(), TABLE, strict=True):
        own = set(rows.train) | set(rows.val) | set(rows.test)
        free = set(by_hand(faces, row)) - taken
        assert own <= free, name
        assert len(own) == min(40, len(free)), name
        taken |= own
    assert manifest.content.hold_out == [f"client-{i:03d}" for i in range(15, 20)]


def test_least_leaves_nobody_with_fewer_pictures(faces: FaceSet) -> None:
    settings = PartitionSettings(kind="attribute", attributes="eight", cap=100, least=3)
    for rows in partition(faces, settings, 0).content.clients.values():
        own = np.array([*rows.train, *rows.val, *rows.test])
        assert 0 < len(own) <= 100
        counts = np.bincount(faces.identity[own])
        assert counts[counts > 0].min() >= 3


def test_unknown_lists_are_named() -> None:
    with pytest.raises(UsageError, match="table-ii"):
        PartitionSettings(kind="attribute", attributes="table-2")


@pytest.mark.parametrize("kind", ["equal", "lognormal"])
def test_the_rules_of_the_other_two_partitions(faces: FaceSet, kind: str) -> None:
    """20 clients, 15 of which train; disjoint people, the total kept, one each at least; 70/10/20 of each person."""
    settings = PartitionSettings(kind=kind, clients=20, hold_out=5)
    clients = partition(faces, settings, 7).federation(faces).clients
    people = [set(data.train.classes.tolist()) for data in clients.values()]
    assert sum(map(len, people)) == len(set().union(*people)) == IDENTITIES
    assert min(map(len, people)) >= 1
    if kind == "equal":
        assert {len(p) for p in people} == {15}
    else:
        assert max(map(len, people)) > IDENTITIES / 4, "LogNormal(3, 3) has a few large clients"
    for data in clients.values():
        for part, share in ((data.train, 0.7), (data.val, 0.1), (data.test, 0.2)):
            assert np.bincount(part.labels, minlength=data.n_classes).tolist() == [share * IMAGES] * data.n_classes


def test_shares_instead_of_a_draw(faces: FaceSet) -> None:
    """300 people as 5 : 3 : 2, and one at least for the smallest."""
    settings = PartitionSettings(kind="lognormal", clients=4, shares=(5000.0, 3000.0, 2000.0, 0.1))
    clients = partition(faces, settings, 0).federation(faces).clients
    assert [data.n_classes for data in clients.values()] == [149, 90, 60, 1]
    with pytest.raises(ValueError, match="shares: 2 for 4 clients"):
        PartitionSettings(kind="lognormal", clients=4, shares=(1.0, 2.0))


def test_a_partition_with_its_own_seed_is_the_same_for_all_runs(faces: FaceSet) -> None:
    def hashed(seed: int, run: int) -> str:
        settings = PartitionSettings(kind="lognormal", clients=20, seed=seed)
        made: Manifest = partition(faces, settings, run)
        return made.hash

    assert hashed(1, 5) == hashed(1, 6) != hashed(2, 5)
