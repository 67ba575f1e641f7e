"""How much randomness a Paillier ciphertext has, and that results get their own."""

from __future__ import annotations

import hashlib
import secrets

import pytest
import torch

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.forward import Forward
from visard.crypto.moments import moments
from visard.crypto.packed import Packed
from visard.crypto.paillier import generate
from visard.learning.mmd import taylor


@pytest.mark.parametrize("bits", [256, 512])
def test_the_exponent_of_the_noise_has_half_as_many_bits_as_the_key(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enc(m) = (1 + n m) h^(n x) mod n^2 with x of |n| / 2 bits, of which all count.

    An x of 16 bits, say, would decrypt as well, and everybody could try all of them.
    """
    public = generate(bits, insecure=True).public
    n, n2 = int(public.n), int(public.n) ** 2
    hashed = hashlib.shake_256(b"visard paillier base" + n.to_bytes(bits // 8, "big")).digest(bits // 8 + 16)
    h = -(int.from_bytes(hashed, "big") ** 2) % n
    asked = []
    x = (1 << bits // 2) - 1 - (5 << bits // 4)

    def random(count: int) -> int:
        asked.append(count)
        return x

    monkeypatch.setattr(secrets, "randbits", random)
    noise = pow(h, n * x, n2)
    assert public.encrypt(-3) == (1 - 3 * n) * noise % n2
    assert asked == [bits // 2]


def test_the_noise_is_not_one_of_few() -> None:
    """Of 400 fresh ciphertexts of one number all are different; of 2^16 possible ones two would often be alike."""
    key = generate(256, insecure=True)
    assert len({key.public.encrypt(1) for _ in range(400)}) == 400
    first = key.public.encrypt(1)
    assert len({key.public.refresh(first) for _ in range(400)}) == 400


def test_an_answer_has_randomness_of_its_own() -> None:
    """The same moments on the same offer: other ciphertexts that say the same."""
    private, plan = generate(512, insecure=True), Packed(taylor(0.8, 2), 3, 512)
    a, b = (torch.rand(4, 3, dtype=torch.float64) / 2 for _ in range(2))
    offer = plan.offer(private.public, a)
    one, two = (plan.answer(private.public, offer, 4, moments(b), 1.0) for _ in range(2))
    assert not set(one) & set(two)
    assert [private.decrypt(c) for c in one] == [private.decrypt(c) for c in two]


def test_a_gradient_has_randomness_of_its_own() -> None:
    """Also where nothing is computed: the constant alone would be readable."""
    private, plan = generate(512, insecure=True), Forward(taylor(0.8, 2), 2)
    means = plan.means(private.public, plan.offer(private.public, torch.rand(3, 2, dtype=torch.float64)))
    factors = torch.zeros(2, len(means), dtype=torch.float64)
    factors[0, 0] = 0.5
    known = torch.tensor([0.25, 0.75], dtype=torch.float64)
    one, two = (plan.combine(private.public, means, factors, known) for _ in range(2))
    assert not set(one) & set(two)
    assert [private.decrypt(c) for c in one] == [private.decrypt(c) for c in two]
    assert private.decrypt(one[1]) == 3 << 46  # 0.75 at 48 bits after the point
