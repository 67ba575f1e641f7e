"""What crosses the wire in encrypted MMD, and what is refused there."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sealed_wire import BITS, Wire, method, start, wire

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.paillier import generate
from visard.crypto.session import Session, introduce
from visard.errors import UsageError, VisardError
from visard.methods.encrypted.messages import Go
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.ops.moments import moments
from visard.ops.noise import epsilon


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


@pytest.mark.parametrize("protocol", ["packed", "both"])
def test_no_feature_gradient_or_moment_crosses_the_wire(protocol: str) -> None:
    how, net = method(protocol=protocol, classes="own"), wire(2, 4)
    features = play(how, net)
    sent = b"".join(data for step, _, data in net.transcript if step not in ("fit", "measure"))
    for batches in features.values():
        for v in batches:
            m = moments(v)
            for tensor in (v, m.B1, m.M2, m.B3, v.sum(0)):
                for row in tensor.reshape(-1, 4):
                    for form in forms(row):
                        assert form not in sent
    kinds = {step for step, _, _ in net.transcript}
    assert kinds <= {"fit", "hello", "introduce", "measure", "advance", "answer", "unveil"}


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


def forms(row: torch.Tensor) -> list[bytes]:
    """The ways in which four numbers could stand in a message."""
    floats = [row.numpy().tobytes(), row.float().numpy().tobytes()]
    fixed = [[round(x * 2**bits) for x in row.tolist()] for bits in (40, 44, 48)]
    orders: tuple[Any, ...] = ("little", "big")
    single = [x.to_bytes(8, order, signed=True) for numbers in fixed for x in numbers for order in orders]
    return floats + single + [struct.pack("<d", x) for x in row.tolist()]


def test_the_forms_would_be_found() -> None:
    row = torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=torch.float64)
    assert any(f in b"xx" + struct.pack("<4f", *row.tolist()) for f in forms(row))
    assert any(f in b"x" + round(-0.2 * 2**40).to_bytes(8, "big", signed=True) for f in forms(row))


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


def test_a_sum_of_the_wrong_exchange_is_refused() -> None:
    def change(message: Go) -> Go:
        return replace(
            message, received={s: d.replace(b'"exchange": 0', b'"exchange": 7') for s, d in message.received.items()}
        )

    with pytest.raises(VisardError, match="answer from sum: its exchange is 7, expected 0"):
        tampered(method(), "advance", change, sources=2)


def test_replaced_keys_are_found_out_by_pins() -> None:
    """A server that puts its own key in the place of a party's is an active attacker; pins stop it."""
    mine, yours, servers = (generate(BITS, insecure=True) for _ in range(3))
    from visard.crypto.keys import key_to_bytes

    hellos = {"a": mine.public.to_bytes() + b"n" * 16, "b": servers.public.to_bytes() + b"m" * 16}
    kept = {"private": key_to_bytes(mine)}
    introduce("a", kept, hellos, BITS, ["b"], {})
    with pytest.raises(VisardError, match="the key of b has the fingerprint"):
        introduce("a", kept, hellos, BITS, ["b"], {"b": yours.public.fingerprint()})
    with pytest.raises(VisardError, match="another key as this party's own"):
        introduce("a", kept, {"a": servers.public.to_bytes() + b"n" * 16}, BITS, [], {})
    with pytest.raises(VisardError, match="same public key"):
        introduce("a", kept, {"a": hellos["a"], "b": hellos["a"]}, BITS, ["b"], {})


def test_only_parties_of_the_session_are_heard() -> None:
    net = wire(2, 4)
    play(method(), net)
    end = Session.from_state(net.parties["s0"].state["session"])
    with pytest.raises(VisardError, match="offer from s1, who is not in this session"):
        end.open("offer", "s1", "s1", b"x" * 100, 1)
    assert end.exchange == 1


def test_the_target_gets_a_sum_and_no_part_of_it() -> None:
    seen: list[set[str]] = []

    def change(message: Go) -> Go:
        if message.received:
            seen.append(set(message.received))
        return message

    tampered(method(), "advance", change, sources=3)
    tampered(method(sums=False), "advance", change, sources=3)
    assert seen == [{"sum"}, {"s0", "s1", "s2"}]


def test_noise_is_accounted_for() -> None:
    net = wire(1, 4)
    play(method(noise=4.0, exchanges=2, batches=2), net)
    assert net.figures["epsilon"] == pytest.approx(epsilon(4, 4.0, 1e-5))


def test_counters_of_the_packed_protocol() -> None:
    """L = 4, n = 8 in one ciphertext a feature: 5 encryptions a party, 5 rows come back."""
    net = wire(1, 4)
    play(method(), net)
    assert net.figures["encryptions"] == 2 * 5
    assert net.figures["decryptions"] == 2 * 5
    assert net.figures["multiplications"] == 2 * 5 * 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key_bits": 1024, "insecure_keys": False}, "can be broken"),
        ({"min_batch": 32}, "below min_batch"),
        ({"monitor": True, "pooled": True}, "no loss of their own"),
        ({"exchanges": 0}, "must be at least 1"),
        ({"weight": -1.0}, "must not be negative"),
        ({"noise": 1.0, "protocol": "both"}, "needs the packed protocol"),
        ({"noise": 1.0, "monitor": True}, "not covered"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        method(**settings)
