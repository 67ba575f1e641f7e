"""A secure sum is the plain sum of fixed-point numbers, whatever members are lost in which phase."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visard.crypto.secure_sum import (
    PRIME,
    Keys,
    Member,
    Sum,
    add_masks,
    combined,
    decoded,
    encoded,
    fraction_bits,
    lagrange,
    neighbours,
    split,
    threshold,
)
from visard.errors import PublicError, VisardError

CONTEXT = b"a run, a round, an ask"


def run(n: int, length: int, degree: int, lost: tuple[set[int], set[int], set[int]], seed: int, tamper: bool = False):
    """All phases with some members lost after keys, after shares and after their vector; (sum, plain sum)."""
    names = [f"m{i:03d}" for i in range(n)]
    gone = [{names[i] for i in part} for part in lost]
    members = {name: Member(name, bytes([i % 256]) * 31 + bytes([i // 256]), CONTEXT) for i, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    vectors = {name: rng.normal(size=length) for name in names}
    keys = {name: members[name].keys for name in names}
    around = neighbours(names, degree, CONTEXT)
    needed = {name: threshold(len(around[name]) + 1, 2 / 3) for name in names}
    boxes = {}
    for name in names:
        if name not in gone[0]:
            boxes[name] = members[name].shares({o: keys[o] for o in around[name]}, needed[name])
    # a member without shares is not there for the others; its holders keep their numbers
    bits = fraction_bits(n, 16.0)
    sharing = {name: {o: keys[o] for o in around[name]} for name in boxes}
    total = Sum(sharing, keys, b"asked")
    for name in boxes:
        if name not in gone[1]:
            there = {o: keys[o] for o in around[name] if o in boxes}
            total.add(name, members[name].masked(encoded(vectors[name], bits, 16.0), there, b"asked"))
    opened = {}
    for name in sorted(total.arrived - gone[2]):
        there = {o: keys[o] for o in around[name] if o in boxes}
        mine = {o: boxes[o][name] for o in (*there, name)}
        opened[name] = members[name].opened(there, mine, total.arrived)
    if tamper:
        one_more = pow(lagrange([1, 2, 3, 4])[1], -1, PRIME)
        changed = (int.from_bytes(opened[names[0]].key[names[5]], "big") + one_more) % PRIME
        opened[names[0]].key[names[5]] = changed.to_bytes(17, "big")
    plain = sum((encoded(vectors[name], bits, 16.0) for name in total.arrived), np.zeros(length, np.uint32))
    return decoded(total.result(opened, needed), bits), decoded(plain, bits), sum(vectors[m] for m in total.arrived)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_secure_sum_is_the_plain_sum(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 30))
    members = list(range(n))
    most = n // 3
    dropped = data.draw(st.lists(st.sampled_from(members), max_size=most, unique=True))
    phase = [data.draw(st.integers(0, 2)) for _ in dropped]
    lost = tuple({m for m, p in zip(dropped, phase, strict=True) if p == at} for at in range(3))
    secure, plain, exact = run(n, data.draw(st.integers(1, 40)), 1000, lost, data.draw(st.integers(0, 99)))  # type: ignore[arg-type]
    assert np.array_equal(secure, plain)
    assert np.abs(secure - exact).max() <= n * 0.5 / 2 ** fraction_bits(n, 16.0)


def test_members_that_were_asked_different_things_have_masks_that_do_not_cancel() -> None:
    names = ["a", "b", "c"]
    members = {name: Member(name, name.encode() * 32, CONTEXT) for name in names}
    keys = {name: m.keys for name, m in members.items()}
    zero = np.zeros(5000, np.uint32)
    total = sum(
        (
            m.masked(zero, {o: keys[o] for o in names if o != name}, b"asked" if name != "c" else b"asked otherwise")
            for name, m in members.items()
        ),
        zero,
    )
    for name, member in members.items():
        add_masks(total, [(member._own_seed, -1)], b"asked" if name != "c" else b"asked otherwise")
    assert total.astype(float).std() == pytest.approx(2**32 / 12**0.5, rel=0.05), "as uniform as can be"


def test_another_context_has_other_keys_and_shares_open_for_their_receiver_alone() -> None:
    a, b, c = (Member(name, name.encode() * 32, CONTEXT) for name in "abc")
    assert Member("a", b"a" * 32, b"another").keys != a.keys
    boxes = a.shares({"b": b.keys, "c": c.keys}, 2)
    around = {"a": a.keys, "c": c.keys}
    mine = {
        "a": boxes["b"],
        "b": b.shares({"a": a.keys, "c": c.keys}, 2)["b"],
        "c": c.shares({"a": a.keys, "b": b.keys}, 2)["b"],
    }
    assert b.opened(around, mine, {"a", "b", "c"}).own.keys() == {"a", "b", "c"}
    lost = b.opened(around, mine, {"b", "c"})
    assert (lost.key.keys(), lost.own.keys()) == ({"a"}, {"b", "c"}), "one of the two secrets, never both"
    for wrong in (boxes["c"], boxes["b"][:-1] + b"x", b"", boxes["b"][:20]):
        with pytest.raises(PublicError, match="share of a in a secure sum"):
            b.opened(around, mine | {"a": wrong}, {"a", "b", "c"})
    tampered = Keys(c.keys.seal, a.keys.mask)
    with pytest.raises(PublicError, match="share of c in a secure sum"):
        b.opened(around | {"c": tampered}, mine, {"a", "b", "c"})


@pytest.mark.parametrize(("holders", "needed"), [(3, 1), (4, 2), (3, 4)])
def test_a_threshold_that_would_open_both_secrets_is_refused(holders: int, needed: int) -> None:
    members = [Member(str(i), bytes([i]) * 32, CONTEXT) for i in range(holders)]
    with pytest.raises(PublicError, match="would open a secret"):
        members[0].shares({m.name: m.keys for m in members[1:]}, needed)


def test_wrong_shares_of_a_key_are_noticed() -> None:
    """A share is changed so that the secret is one more: as good a secret as any, of another key."""
    with pytest.raises(VisardError, match="key of m005 give another key"):
        run(6, 4, 1000, (set(), {5}, set()), 0, tamper=True)


def test_shares_give_the_secret_and_one_too_few_do_not() -> None:
    secret = bytes(range(16))
    shares = split(secret, 5, 3, lambda label: label.encode().rjust(32, b"7"))
    for chosen in itertools.combinations(range(1, 6), 3):
        assert combined({x: shares[x - 1] for x in chosen}, lagrange(chosen)) == secret
    for chosen in itertools.combinations(range(1, 6), 2):
        try:
            found = combined({x: shares[x - 1] for x in chosen}, lagrange(chosen))
        except VisardError:  # most numbers are too large to be a secret
            continue
        assert found != secret


@pytest.mark.parametrize("n", [2, 3, 100, 200])
def test_many_members_and_few_neighbours(n: int) -> None:
    lost = (set(range(n // 10)), set(range(n // 10, n // 5)), set())
    secure, plain, _ = run(n, 7, 40, lost, 1)
    assert np.array_equal(secure, plain)


def test_neighbours_are_mutual_and_as_many_as_asked() -> None:
    names = [f"m{i}" for i in range(50)]
    around = neighbours(names, 10, CONTEXT)
    assert {len(a) for a in around.values()} == {10}
    assert all(name in around[other] for name, others in around.items() for other in others)
    assert around == neighbours(names[::-1], 10, CONTEXT)
    assert around != neighbours(names, 10, b"another")


@pytest.mark.parametrize("values", [[5.0], [float("nan")], [float("inf")], [0.0, -4.1]])
def test_numbers_out_of_range_are_refused(values: list[float]) -> None:
    with pytest.raises(PublicError, match="beyond 4"):
        encoded(np.array(values), 20, 4.0)
    top = encoded(np.full(1, 4.0), fraction_bits(100, 4.0), 4.0)
    assert decoded(100 * top, fraction_bits(100, 4.0))[0] == 400.0, "a hundred of the largest fit"
