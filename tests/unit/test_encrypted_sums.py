"""Sums over several peers: the owner reads the sum and no part, and a relay that meddles learns nothing from it."""

from __future__ import annotations

import copy
import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sealed_wire import BITS, method, start, wire
from torch import Tensor

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto import ckks, exchange, packed, session
from visard.crypto.exchange import Plan
from visard.crypto.paillier import PublicKey, generate
from visard.crypto.session import TAG, Lattice, Session
from visard.errors import PublicError, VisardError
from visard.learning import mmd
from visard.learning.mmd import taylor
from visard.methods.encrypted_mmd import Relayed

SOURCES = ("s0", "s1", "s2")
NONE = torch.zeros(1, dtype=torch.float64)


def features(seed: int, n: int = 8, L: int = 4) -> Tensor:
    x = torch.randn(1, n, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2 * seed
    return x / x.norm(dim=2).max()


def sessions(plan: Plan) -> dict[str, Session]:
    """Parties that have met."""
    names = (*plan.sources, plan.target)
    private = {c: generate(BITS, insecure=True) for c in names}
    public = {c: key.public for c, key in private.items()}
    pairs = {frozenset((a, b)): secrets.token_bytes(32) for a in names for b in names if a != b}
    lattices: dict[str, Any] = dict.fromkeys(names)
    if plan.scheme == "ckks":
        pytest.importorskip("tenseal", reason="needs the extra ckks")
        made = {c: ckks.generate(8) for c in names}
        lattices = {c: Lattice(made[c][0], {d: made[d][1] for d in names}) for c in names}
    mine = {c: {o: pairs[frozenset((c, o))] for o in plan.partners(c)} for c in names}
    return {c: Session(c, private[c], public, "session", mine[c], lattice=lattices[c]) for c in names}


def plan_of(scheme: Any = "paillier", degree: int = 2, **changes: Any) -> Plan:
    return Plan("packed", taylor(0.8, degree), 4, 8, 1, BITS, SOURCES, "t", scheme=scheme, **changes)


def answered(plan: Plan, met: dict[str, Session], own: Tensor, others: dict[str, Tensor]) -> dict[str, bytes]:
    """What the target receives."""
    offers = session.deliver({"t": exchange.offer(met["t"], plan, own)})
    post = {s: exchange.answer_packed(met[s], plan, b, offers[s], NONE) for s, b in others.items()}
    return session.deliver(post)["t"]


@pytest.mark.parametrize("scheme", ["paillier", "ckks"])
@pytest.mark.parametrize("degree", [1, 2])
def test_the_owner_reads_the_sum_and_no_part(scheme: str, degree: int) -> None:
    plan = plan_of(scheme, degree)
    met, own, others = sessions(plan), features(0), {s: features(i + 1) for i, s in enumerate(SOURCES)}
    received = answered(plan, met, own, others)
    x = own[0].clone().requires_grad_()
    torch.stack([mmd.between(x, b[0], plan.kernel) for b in others.values()]).mean().backward()
    assert x.grad is not None
    assert torch.allclose(exchange.take_packed(met["t"], plan, own, received)[0][0], x.grad, atol=1e-5)
    for left_out in SOURCES:
        some = replace(plan, sources=tuple(s for s in SOURCES if s != left_out))
        with pytest.raises(VisardError, match="overflows its slots"):
            exchange.take_packed(met["t"], some, own, received)


def test_masks_cancel_and_are_new_for_every_question() -> None:
    pairs = {frozenset(p): secrets.token_bytes(32) for p in (("a", "b"), ("a", "c"), ("b", "c"))}
    n = generate(BITS, insecure=True).public.n

    def of(me: str, about: bytes) -> list[int]:
        mine = {o: pairs[frozenset((me, o))] for o in "abc" if o != me}
        return packed.mask_numbers(packed.mask_seeds(me, mine, about), 3, int(n))

    assert all(sum(m) % n == 0 for m in zip(*(of(c, b"one") for c in "abc"), strict=True))
    assert len({*of("a", b"one"), *of("b", b"one"), *of("a", b"two")}) == 9
    plan = plan_of()
    met = sessions(plan)["s0"]
    seeds = [met.masks("t", ["s1"], b"x"), met.next().masks("t", ["s1"], b"x"), met.masks("s2", ["s1"], b"x")]
    assert len({seed for ((_, seed),) in seeds}) == 3


def test_the_same_answer_to_another_offer_or_plan_has_other_masks() -> None:
    """Else two answers of one party, asked for by an owner and a server together, would differ by what they say."""
    plan = plan_of()
    met, own, b = sessions(plan), features(0), features(1)
    other_kernel = plan.with_kernel(taylor(0.7, 2))
    read = []
    for how in (plan, plan, other_kernel):
        offers = session.deliver({"t": exchange.offer(met["t"], plan, own)})
        letters, _ = exchange.answer_packed(met["s0"], how, b, offers["s0"], NONE)
        ciphers = met["t"].keys["t"].cipher_bytes
        body = letters["t"]
        last = [int.from_bytes(body[i - ciphers : i or None], "big") for i in (0, -ciphers)]
        read.append([met["t"].private.decrypt(c) for c in last])
    assert all((x - y).bit_length() > 400 for i in (0, 1) for x, y in zip(read[i], read[i + 1], strict=True))


def test_a_relay_cannot_use_the_owner_as_an_oracle() -> None:
    """The target's own offer plus a chosen number, as an answer: refused alike whatever the number, unread."""
    lines, net, how = set(), wire(2, 4), method()
    server = start(how, net)
    seen: dict[str, Any] = {}

    def before(step: str, client: str, message: Any) -> Any:
        if step == "answer" and client == "s0":
            seen["offer"] = message.received["t"]
        if step == "advance" and client == "t" and message.received:
            public = Session.from_state(net.parties["t"].state["session"]).keys["t"]
            for shift in (0, 1 << 46, 1 << 400):
                forged = dict(message.received)
                forged["s0"] = lifted(forged["s0"], seen["offer"], public, shift)
                with pytest.raises(VisardError) as caught:
                    how.advance(copy.deepcopy(net.parties["t"]), replace(message, received=forged))
                lines.add(str(caught.value))
        return message

    net.before = before
    how.round(server, net)
    assert lines == {"answer from s0: its seal is broken"}


@pytest.mark.parametrize("number", [5, -5, 1 << 300])
def test_the_first_decryption_is_no_oracle_either(number: int) -> None:
    """A common secret that the server computed, small, negative or too large: refused alike."""

    def before(step: str, client: str, message: Any) -> Any:
        if step == "advance" and client == "t" and message.secrets:
            key = keys["t"]
            honest = int.from_bytes(message.secrets["s0"], "big")
            forged = key.add_plain(honest, number) if number > 5 else key.encrypt(number)
            return replace(message, secrets={"s0": forged.to_bytes(key.cipher_bytes, "big")})
        if step == "introduce":
            keys[client] = PublicKey(int.from_bytes(message.received[client][: BITS // 8], "big"), BITS)
        return message

    keys: dict[str, PublicKey] = {}
    net, how = wire(1, 4), method()
    server = start(how, net)
    net.before = before
    with pytest.raises(VisardError, match="the secret of s0 is not one that it sent"):
        how.round(server, net)


def lifted(answer: bytes, offer: bytes, key: PublicKey, shift: int) -> bytes:
    """The answer with the offer's last ciphertext plus `shift` in the place of its own last one."""
    size = key.cipher_bytes
    c = int.from_bytes(offer[-TAG - size : -TAG], "big")
    forged = key.refresh(key.add_plain(c, shift)).to_bytes(size, "big")
    return answer[: -TAG - size] + forged + answer[-TAG:]


@pytest.mark.parametrize(
    ("step", "said", "words"),
    [
        *((step, {"sources": ("s0",)}, "not for the clients of this session") for step in ("answer", "advance")),
        ("introduce", {"sources": ("s0",)}, "not for the clients of this session"),
        *(
            (step, {"target": "s0", "sources": ("s1", "t")}, "other roles than before")
            for step in ("answer", "advance")
        ),
    ],
)
def test_a_plan_without_masks_is_refused(step: str, said: dict[str, Any], words: str) -> None:
    """A source that is told that it answers alone, or that it is the target, would answer without masks."""

    def before(at: str, client: str, message: Any) -> Any:
        lied_to = at == step and client == "s0"
        return replace(message, plan=replace(message.plan, **said)) if lied_to else message

    net, how = wire(2, 4), method()
    server = start(how, net)
    net.before = before
    with pytest.raises(PublicError, match=words):
        how.round(server, net)


def test_the_target_of_the_settings_is_the_target() -> None:
    net, how = wire(2, 4), method(target="s1")
    plan = method().plan(start(method(), net), net)  # whose target is t
    with pytest.raises(PublicError, match="another target than s1"):
        how.introduce(net.parties["s0"], Relayed(plan, dict.fromkeys(net.parties, b"")))


def test_one_question_in_an_exchange() -> None:
    """Answers about two draws, to one offer, have the same masks: their difference would tell of a single peer."""
    lines, net, how = [], wire(2, 4), method()
    server = start(how, net)
    first: dict[str, Any] = {}

    def before(step: str, client: str, message: Any) -> Any:
        if step == "advance":
            first.setdefault(client, message)
        if step == "answer" and client == "s0":
            party = copy.deepcopy(net.parties["s0"])
            assert len({how.answer(party, message).letters["t"][:20] for _ in range(2)}) == 1  # the same again is fine
            how.advance(party, replace(first["s0"], secrets={}, theta={}, head={}, received={}, more=True))
            with pytest.raises(PublicError) as caught:
                how.answer(party, message)
            lines.append(str(caught.value))
        return message

    net.before = before
    how.round(server, net)
    assert lines == [f"exchange {i}: another question was answered before" for i in range(len(lines))] != []


def test_masks_need_a_secret_with_every_fellow() -> None:
    met = sessions(plan_of())["s0"]
    with pytest.raises(VisardError, match="answer to t: s7 is not in this session"):
        met.masks("t", ["s1", "s7"], b"")
