"""What crosses the wire in encrypted MMD, and what is refused there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sealed_wire import BITS, Wire, method, start, wire

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.config import load
from visard.crypto.modulus import certify
from visard.crypto.moments import moments
from visard.crypto.packed import FRACTION, HEADROOM, FixedPoint, Packed, Slots
from visard.crypto.paillier import PrivateKey, PublicKey, generate, key_to_bytes
from visard.crypto.session import Session, introduce
from visard.errors import UsageError, VisardError
from visard.learning.mmd import taylor
from visard.methods.encrypted_mmd import Advance, EncryptedMMD


def play(how: EncryptedMMD, net: Wire, before: Any = None) -> dict[str, torch.Tensor]:
    """One round; the features of every party's batch, which nobody else may see."""
    features = {}

    def watch(step: str, client: str, message: Any) -> Any:
        if step == "answer":
            features[client] = net.parties[client].state["features"].clone()
        return before(step, client, message) if before else message

    server = start(how, net)
    net.before = watch
    how.round(server, net)
    return features


def found(how: EncryptedMMD, net: Wire) -> set[str]:
    """Which private numbers of a round could be read off what was sent, in any form that is used here."""
    features = play(how, net)
    sent = b"".join(data for step, _, data in net.transcript if step not in ("fit", "measure"))
    keys = [Session.from_state(p.state["session"]).private.public for p in net.parties.values()]
    hits = set()
    for client, batches in features.items():
        for v in batches:
            m = moments(v)
            private = {"feature": v, "column": Packed(taylor(0.5, 2), 4).columns(v), "sum": v.sum(0)[None],
                       "mean": m.B1[None], "second": m.M2, "third": m.B3[None]}  # fmt: skip
            for name, rows in private.items():
                hits |= {f"{name} of {client}" for row in rows if any(f in sent for f in forms(row, keys))}
    return hits


@pytest.mark.parametrize("protocol", ["packed", "both"])
def test_no_feature_gradient_or_moment_crosses_the_wire(protocol: str) -> None:
    net = wire(2, 4)
    assert not found(method(protocol=protocol, classes="own"), net)
    kinds = {step for step, _, _ in net.transcript}
    assert kinds <= {"fit", "hello", "introduce", "say_length", "measure", "advance", "answer", "unveil"}


@pytest.mark.parametrize(("protocol", "what"), [("packed", "column"), ("both", "mean")])
def test_encryption_that_hides_nothing_would_be_found(
    protocol: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enc(m) = 1 + n m: everything works, and every offer can be read."""
    monkeypatch.setattr(PublicKey, "_noise", lambda _: 1)
    monkeypatch.setattr(PublicKey, "check", lambda *_: None)
    hits = found(method(protocol=protocol, classes="own"), wire(2, 4))
    assert {f"{what} of {c}" for c in ("s0", "s1", "t")} <= hits


def test_ciphertexts_are_new_every_time_and_results_are_not() -> None:
    runs = []
    for _ in range(2):
        net = wire(1, 4)
        play(method(), net)
        letters = [data for step, _, data in net.transcript if step in ("advance", "answer")]
        runs.append((net.parties["t"].state["theta"], letters))
    (first, one), (second, two) = runs
    assert all(torch.equal(first[k], second[k]) for k in first), "decryption is exact"
    for a, b in zip(one, two, strict=True):
        assert len(a) == len(b), "lengths tell nothing"
        if len(a) > 2000:
            same = sum(x == y for x, y in zip(a[600:-200], b[600:-200], strict=True)) / len(a[600:-200])
            assert same < 0.2


def forms(row: torch.Tensor, keys: Sequence[PublicKey]) -> list[bytes]:
    """The ways in which some numbers could stand in a message: as floats, of fixed point, packed, as 1 + n m."""
    fixed = {bits: FixedPoint(bits).encode(row) for bits in (20, 24, 40, 44, 48)}
    whole = {m for numbers in fixed.values() for m in numbers if abs(m) >> 12}  # smaller ones stand anywhere
    for key in keys:
        whole |= {m for bits in (20, 40) for m in Slots(2 * FRACTION + HEADROOM, key.bits).pack(fixed[bits])}
    said = [row.numpy().tobytes(), row.float().numpy().tobytes(), *(struct.pack("<d", x) for x in row.tolist())]
    orders: tuple[Any, ...] = ("little", "big")
    said += [m.to_bytes(8, order, signed=True) for m in whole if m.bit_length() < 63 for order in orders]
    for n, n2, length in ((int(k.n), int(k.n2), k.cipher_bytes) for k in keys):
        for m in whole:
            said += [(m % n).to_bytes(length // 2, "big"), ((1 + n * m) % n2).to_bytes(length, "big")]
    return said


def test_the_forms_would_be_found() -> None:
    row, key = torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=torch.float64), generate(BITS, insecure=True).public
    packed = Packed(taylor(0.5, 2), 4, BITS).slots.pack(FixedPoint(20).encode(row))[0]
    shown = [struct.pack("<4f", *row.tolist()), round(-0.2 * 2**40).to_bytes(8, "big", signed=True)]
    shown += [
        m.to_bytes(BITS // 4, "big")
        for m in (round(0.3 * 2**24), int(packed % key.n), int(1 + packed * key.n) % key.n2)
    ]
    for data in shown:
        assert any(f in b"x" + data for f in forms(row, [key]))
    assert not any(f in b"".join(shown) for f in forms(row + 0.01, [key]))


def tampered(how: EncryptedMMD, at: str, change: Any, sources: int = 1) -> None:
    def before(step: str, client: str, message: Any) -> Any:
        return change(message) if step == at and client == "t" else message

    play(how, wire(sources, 4), before)


def flip(position: int) -> Any:
    def change(message: Any) -> Any:
        received = {
            s: d[:position] + bytes([d[position] ^ 1]) + d[position + 1 :] if position >= 0
            else d[:position] + bytes([d[position] ^ 1]) + (d[position + 1 :] if position != -1 else b"")
            for s, d in message.received.items()
        }  # fmt: skip
        return replace(message, received=received)

    return change


@pytest.mark.parametrize("protocol", ["packed", "both"])
@pytest.mark.parametrize("position", [10, 400, -1])
def test_a_relay_that_alters_a_message_is_found_out(protocol: str, position: int) -> None:
    with pytest.raises(VisardError, match="offer from s0: its seal is broken"):
        tampered(method(protocol=protocol), "answer", flip(position))


def test_a_lost_message_is_found_out() -> None:
    with pytest.raises(VisardError, match="offer from s0: its seal is broken"):
        tampered(method(), "answer", lambda m: replace(m, received={}))


def test_a_message_of_an_earlier_exchange_is_refused() -> None:
    kept: list[dict[str, bytes]] = []

    def change(message: Any) -> Any:
        kept.append(message.received)
        return replace(message, received=kept[0])

    with pytest.raises(VisardError, match="offer from s0: its exchange is 0, expected 1"):
        tampered(method(exchanges=2), "answer", change)


def test_a_message_of_the_other_direction_is_refused() -> None:
    """The target's own offer comes back to it as the source's: both share the secret, the sender is bound."""
    net, how = wire(1, 4), method()
    own: list[bytes] = []

    def before(step: str, client: str, message: Any) -> Any:
        if step == "answer" and client == "s0":
            own.append(message.received["t"])
        if step == "answer" and client == "t":
            return replace(message, received={"s0": own[0]})
        return message

    with pytest.raises(VisardError, match="offer from s0: its .* is"):
        play(how, net, before)


def test_another_plan_is_refused() -> None:
    with pytest.raises(VisardError, match="plan differs"):
        tampered(method(), "answer", lambda m: replace(m, plan=replace(m.plan, loss=True)))


def test_an_answer_of_the_wrong_exchange_is_refused() -> None:
    def change(message: Advance) -> Advance:
        return replace(
            message, received={s: d.replace(b'"exchange": 0', b'"exchange": 7') for s, d in message.received.items()}
        )

    for sources in (1, 2):
        with pytest.raises(VisardError, match="answer from s0: its seal is broken"):
            tampered(method(), "advance", change, sources=sources)


def test_replaced_keys_are_found_out_by_pins() -> None:
    """A server that puts its own key in the place of a party's is an active attacker; pins stop it."""
    mine, yours, servers = (generate(BITS, insecure=True) for _ in range(3))

    def said(key: PrivateKey) -> bytes:
        return key.public.to_bytes() + certify(key) + b"n" * 16

    hellos = {"a": said(mine), "b": said(servers)}
    kept = {"private": key_to_bytes(mine)}
    introduce("a", kept, hellos, BITS, ["b"], {})
    with pytest.raises(VisardError, match="the key of b has the fingerprint"):
        introduce("a", kept, hellos, BITS, ["b"], {"b": yours.public.fingerprint()})
    with pytest.raises(VisardError, match="another key as this client's own"):
        introduce("a", kept, {"a": said(servers)}, BITS, [], {})
    with pytest.raises(VisardError, match="same public key"):
        introduce("a", kept, {"a": hellos["a"], "b": hellos["a"]}, BITS, ["b"], {})


def test_only_parties_of_the_session_are_heard() -> None:
    net = wire(2, 4)
    play(method(sums=False), net)
    end = Session.from_state(net.parties["s0"].state["session"])
    with pytest.raises(VisardError, match="offer from s1, who is not in this session"):
        end.open("offer", "s1", "s1", b"x" * 100, 1, 1)
    assert end.exchange == 1


def test_counters_of_the_packed_protocol() -> None:
    """L = 4, n = 8 in one ciphertext a feature: 5 encryptions a party, 5 rows come back."""
    net = wire(1, 4)
    play(method(), net)
    assert net.figures["encryptions"] == 2 * 5
    assert net.figures["decryptions"] == 2 * 5
    assert net.figures["multiplications"] == 2 * 5 * 5
    alone = {"encryptions": 5, "decryptions": 5, "multiplications": 25, "refreshes": 5}
    assert net.by_party == {"s0": alone, "t": alone}


def test_counters_are_those_of_each_party() -> None:
    """Three sources: the target answers each of them, and decrypts one sum."""
    net = wire(3, 4)
    play(method(), net)
    of = net.by_party
    assert of["t"] == {"encryptions": 5, "decryptions": 5, "multiplications": 75, "refreshes": 15}
    assert of["s0"] == of["s1"] == of["s2"] == {
        "encryptions": 5, "decryptions": 5, "multiplications": 25, "refreshes": 5,
    }  # fmt: skip
    assert net.figures["multiplications"] == 150


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key_bits": 1024, "insecure_keys": False}, "can be broken"),
        ({"min_batch": 32}, "below min_batch"),
        ({"monitor": True, "pooled": True}, "no loss of their own"),
        ({"noise": 1.0, "protocol": "both"}, "needs the packed protocol"),
        ({"noise": 1.0, "monitor": True}, "not covered"),
        ({"key_bits": 2056}, "method.key_bits = 2056: must be a multiple of 16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method(**settings)


@pytest.mark.parametrize(
    "setting",
    ["exchanges=0", "batches=0", "rounds=-1", "weight=-1.0", "noise=nan", "noise=-1.0", "compare.radius=0"],
)
def test_settings_out_of_bounds_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match=f"method.{setting.partition('=')[0]}"):
        load("encrypted-mmd", [f"method.{setting}"])
