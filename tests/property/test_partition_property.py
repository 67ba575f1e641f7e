"""Whatever is asked: pictures go to one client, identities stay apart where promised, totals hold."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from visard.data.expressions import evaluate
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import (
    PartitionSettings,
    dirichlet_clients,
    lognormal_counts,
    proportional_counts,
    split_by_identity,
)
from visard.errors import UsageError

ROOT = Path(tempfile.mkdtemp(prefix="visard-partition-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
SEEDS = st.integers(0, 2**32)
COUNTS = st.lists(st.integers(1, 9), min_size=3, max_size=25).map(tuple)
KINDS = st.sampled_from(["equal", "lognormal", "one_identity", "dirichlet", "attribute", "domains"])


@cache
def make_set(counts: tuple[int, ...]) -> FaceSet:
    """Pictures in mixed order; the first half of the identities is Male and from the north."""
    rng = np.random.default_rng(len(counts))
    identity = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    north = (identity < len(counts) // 2).astype(int)
    out = ROOT / str(abs(hash(counts)))
    with FaceSetWriter(
        out, count=len(identity), size=4, names=[f"p{i}" for i in range(len(counts))],
        domains=["south", "north"], attributes=["Male"], info={},
    ) as writer:  # fmt: skip
        pictures = rng.integers(0, 256, (len(identity), 4, 4, 3), dtype=np.uint8)
        writer.write(0, pictures, identity, north, 2 * north[:, None] - 1, [""] * len(identity))
    return FaceSet.open(out)


@st.composite
def requests(draw: st.DrawFn) -> PartitionSettings:
    kind = draw(KINDS)
    chosen = {
        "kind": kind,
        "clients": None if kind in ("one_identity", "attribute") else draw(st.integers(1, 4)),
        "test_identities": draw(st.integers(0, 2)),
        "min_images": draw(st.integers(1, 3)),
        "split": draw(st.sampled_from([(0.7, 0.1, 0.2), (1, 0, 0), (0.5, 0, 0.5), (0.34, 0.33, 0.33)])),
        "alpha": draw(st.floats(0.05, 10)),
        "attributes": ("Male", "!Male") if kind == "attribute" else (),
        "source_domain": draw(st.sampled_from(["north", "Male"])) if kind == "domains" else (),
        "target_domain": draw(st.sampled_from(["south", "!Male"])) if kind == "domains" else (),
    }
    return PartitionSettings(**chosen)  # type: ignore[arg-type]


@given(COUNTS, requests(), SEEDS)
@settings(max_examples=120, deadline=None)
def test_any_partition(counts: tuple[int, ...], chosen: PartitionSettings, seed: int) -> None:
    faces = make_set(counts)
    try:
        manifest = partition(faces, chosen, seed)
    except UsageError:
        assume(False)
    content = manifest.content
    rows = {name: [*r.train, *r.val, *r.test] for name, r in content.clients.items()}
    given_out = [row for own in rows.values() for row in own]
    unseen = [row for own in content.unseen.values() for row in own]

    # every picture at most once, and nobody is empty
    assert len(set(given_out + unseen)) == len(given_out + unseen)
    assert all(rows.values())
    # nobody's identity is in a test set
    assert not set(faces.identity[given_out].tolist()) & set(faces.identity[unseen].tolist())
    # all pictures of the identities with enough of them are given out or in a test set
    enough = np.flatnonzero(np.isin(faces.identity, np.flatnonzero(np.array(counts) >= chosen.min_images)))
    assert set(given_out + unseen) == set(enough.tolist())
    # identities are apart where promised
    if chosen.kind not in ("dirichlet", "attribute"):
        owners = [set(faces.identity[own].tolist()) for own in rows.values()]
        assert sum(map(len, owners)) == len(set().union(*owners))
    if chosen.kind == "equal":
        assert max(map(len, owners)) - min(map(len, owners)) <= 1
    # the same again, from disk too, and as a federation
    assert partition(faces, chosen, seed).hash == manifest.hash
    assert Manifest.load(manifest.save(ROOT / "m.json")) == manifest
    federation = manifest.federation(faces)
    assert {n: len(d.train) + len(d.val) + len(d.test) for n, d in federation.clients.items()} == {
        name: len(own) for name, own in rows.items()
    }


@given(COUNTS, SEEDS, st.data())
@settings(max_examples=40, deadline=None)
def test_hash_sees_any_move(counts: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    manifest = partition(make_set(counts), PartitionSettings(clients=2), seed)
    clients = dict(manifest.content.clients)
    name = data.draw(st.sampled_from(sorted(clients)))
    own = clients[name]
    row = data.draw(st.sampled_from(own.train))
    clients[name] = own.model_copy(update={"train": [r for r in own.train if r != row], "test": [*own.test, row]})
    assert Manifest(manifest.content.model_copy(update={"clients": clients})).hash != manifest.hash


@given(st.integers(1, 60), st.integers(0, 3000), st.floats(-5, 5), st.floats(0, 30), SEEDS)
@settings(max_examples=200, deadline=None)
def test_lognormal_keeps_the_total(parts: int, more: int, mu: float, sigma: float, seed: int) -> None:
    counts = lognormal_counts(parts + more, parts, mu, sigma, np.random.default_rng(seed))
    assert counts.sum() == parts + more
    assert counts.min() >= 1


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=20), st.integers(0, 5000))
@settings(max_examples=200, deadline=None)
def test_proportional_counts_are_close(weights: list[float], more: int) -> None:
    w = np.array(weights)
    total = len(w) + more
    counts = proportional_counts(total, w)
    exact = total * w / w.sum()
    assert counts.sum() == total
    if exact.min() >= 1:
        assert np.abs(counts - exact).max() < 1 + 1e-9


FRACTIONS = st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10)).filter(any)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), FRACTIONS, SEEDS)
@settings(max_examples=200, deadline=None)
def test_split_is_stratified(counts: list[int], weights: tuple[int, int, int], seed: int) -> None:
    a, b, c = (w / sum(weights) for w in weights)
    rng = np.random.default_rng(seed)
    identity = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    part = split_by_identity(identity, (a, b, c), rng)
    for number, n in enumerate(counts):
        got = np.bincount(part[identity == number], minlength=3)
        assert got.sum() == n
        for share, fraction in zip(got, (a, b, c), strict=True):
            assert abs(share - n * fraction) < 2 + 1e-9  # 1 for rounding, 1 for the pictures that must be
            assert fraction > 0 or share == 0
        if a > 0:
            assert got[0] >= 1
        if c > 0 and n >= 3:
            assert got[2] >= 1


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_split_fractions_hold_on_average(seed: int) -> None:
    """Small identities alone: rounding each to the nearest would never give validation a picture."""
    identity = np.repeat(np.arange(2000), 5)
    part = split_by_identity(identity, (0.7, 0.1, 0.2), np.random.default_rng(seed))
    np.testing.assert_allclose(np.bincount(part, minlength=3) / len(part), (0.7, 0.1, 0.2), atol=0.02)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 8), st.floats(0.01, 100), SEEDS)
@settings(max_examples=100, deadline=None)
def test_dirichlet_gives_each_picture_once(counts: list[int], clients: int, alpha: float, seed: int) -> None:
    identity = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    client = dirichlet_clients(identity, clients, alpha, np.random.default_rng(seed))
    assert client.shape == identity.shape
    assert client.min() >= 0
    assert client.max() < clients


TREES = st.recursive(
    st.sampled_from(["A", "B", "C"]),
    lambda t: st.one_of(t.map(lambda x: ("!", x)), st.tuples(st.just("&"), t, t), st.tuples(st.just("|"), t, t)),
    max_leaves=12,
)


def shown(tree: object) -> str:
    if isinstance(tree, str):
        return tree
    assert isinstance(tree, tuple)
    return f"!({shown(tree[1])})" if tree[0] == "!" else f"({shown(tree[1])}) {tree[0]} ({shown(tree[2])})"


def truth(tree: object, row: dict[str, int]) -> int:
    if isinstance(tree, str):
        return row[tree]
    assert isinstance(tree, tuple)
    values = [truth(part, row) for part in tree[1:]]
    return {"!": lambda: -values[0], "&": lambda: min(values), "|": lambda: max(values)}[tree[0]]()


@given(TREES, SEEDS)
@settings(max_examples=100, deadline=None)
def test_expressions_are_kleene_logic(tree: object, seed: int) -> None:
    table = dict(zip("ABC", np.random.default_rng(seed).integers(-1, 2, (3, 20)).astype(np.int8), strict=True))
    got = evaluate(shown(tree), ["A", "B", "C"], table.__getitem__)
    assert got.tolist() == [truth(tree, {name: int(table[name][i]) for name in "ABC"}) for i in range(20)]
