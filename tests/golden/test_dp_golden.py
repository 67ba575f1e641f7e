"""Differential privacy against slow loops, probability masses and integrals that share nothing with it but the key."""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import dataclass
from typing import Annotated, Any

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import optimize, stats

from visard.aggregation.accounting import Sum, epsilon_amplified, epsilon_plain, noise_for
from visard.aggregation.dp import GRID, Account, Privacy, PrivateReduction, split_noise
from visard.core import Disclosure, Weights
from visard.crypto.discrete_gaussian import Stream, discrete_gaussian

SECRET = b"a secret of 32 bytes, or of more"


@dataclass(frozen=True)
class Sent:
    theta: Weights
    W: torch.Tensor


@dataclass(frozen=True)
class Back:
    theta: Annotated[Weights, Disclosure.weights]
    W: Annotated[torch.Tensor, Disclosure.class_vectors]
    n: Annotated[int, Disclosure.count]
    loss: Annotated[float, Disclosure.metric]


def words(key: bytes) -> Any:
    """The words of AES-256 in counter mode, one by one."""
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    while True:
        yield int.from_bytes(cipher.update(bytes(8)), "little")


def slow_noise(stream: Any, sigma: float) -> int:
    """One integer of a discrete Gaussian: Canonne, Kamath and Steinke, Algorithm 3."""
    t = math.floor(sigma) + 1
    while True:
        first, second = next(stream), next(stream)
        u, v = ((first >> 11) + 0.5) / 2**53, ((second >> 11) + 0.5) / 2**53
        size, minus = math.floor(-t * math.log(u)), first & 1
        if minus and size == 0:
            continue
        if v < math.exp(-((size - sigma * sigma / t) ** 2) / (2 * sigma * sigma)):
            return -size if minus else size


def key_of(secret: bytes, *label: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(8, "big") + part for part in (b"visard noise", *label))
    return hmac.new(secret, text, "sha256").digest()


def replies(count: int) -> tuple[Sent, list[Back]]:
    torch.manual_seed(3)
    sent = Sent({"a": torch.randn(3, 4), "bn.running_mean": torch.ones(2), "steps": torch.tensor(7)}, torch.randn(2, 5))
    backs = [
        Back(
            sent.theta | {"a": sent.theta["a"] + size * torch.randn(3, 4)}, sent.W + size * torch.randn(2, 5), 9, 1.25
        )
        for size in np.linspace(0.01, 3, count)
    ]  # fmt: skip
    return sent, backs


@pytest.mark.parametrize("quantile", [None, 0.6])
def test_clipping_noise_and_mean_are_those_of_a_slow_loop(quantile: float | None) -> None:
    """Both fields count as one vector; the noise is that of the key, the place and the sum."""
    sent, backs = replies(7)
    clip, noise = 0.7, 1.3
    account = Account(Privacy(clip=clip, noise=noise, quantile=quantile), {}, 7, 1)
    reduction = PrivateReduction(
        ("theta", "W"), sent, account, account.sum_of(7, None), 7, (), lambda digest: Stream(SECRET, b"here", digest)
    )
    for number, back in enumerate(backs):
        rest = reduction.take(str(number), sent, back)
        assert (rest.theta, rest.W, rest.n) == ({}, None, 1)
        assert math.isnan(rest.loss), "what a client says of itself is not covered"
    found = reduction.result()

    unit = 2.0 ** (math.floor(math.log2(clip)) - 24)
    total, within = [0] * 22, 0
    for back in backs:
        update = [
            float(b) - float(a) for b, a in zip(back.theta["a"].flatten(), sent.theta["a"].flatten(), strict=True)
        ]
        update += [float(b) - float(a) for b, a in zip(back.W.flatten(), sent.W.flatten(), strict=True)]
        length = math.sqrt(math.fsum(x * x for x in update))
        within += length <= clip
        scale = min(1.0, clip / length)
        cut = [math.trunc(x * scale / unit) for x in update]
        assert math.sqrt(math.fsum(x * x for x in cut)) * unit <= clip
        total = [a + b for a, b in zip(total, cut, strict=True)]
    sigma, counted = noise * clip, 0.0
    if quantile is not None:
        counted = max(7 / 20, noise)
        sigma = clip / math.sqrt(1 / noise**2 - 1 / (2 * counted) ** 2)
    digest = hashlib.sha256(np.array(total).tobytes() + f"{within} 7".encode()).digest()
    stream = words(key_of(SECRET, b"here", digest))
    noisy = [x + slow_noise(stream, sigma / unit) for x in total]
    flat = [float(x) for x in (*sent.theta["a"].flatten(), *sent.W.flatten())]
    slow = [np.float32(x + y * unit / 7) for x, y in zip(flat, noisy, strict=True)]
    assert [float(x) for x in (*found["theta"]["a"].flatten(), *found["W"].flatten())] == pytest.approx(slow, rel=1e-6)
    assert torch.equal(found["theta"]["bn.running_mean"], torch.ones(2)), "statistics stay as they were sent"
    assert found["theta"]["steps"] == 7
    assert 0 < within < 7, "some are shortened, some are not"


def test_the_bound_adapts_as_in_the_paper() -> None:
    """Without noise C moves by the share of the clients within it, and halts at the quantile (Andrew et al. 2021)."""
    sent, backs = replies(9)
    lengths = sorted(
        math.hypot(float((b.theta["a"] - sent.theta["a"]).norm()), float((b.W - sent.W).norm())) for b in backs
    )
    account = Account(Privacy(clip=0.1, noise=0.0, quantile=0.5, clip_rate=0.3), {}, 9, 1)
    seen = [account.clip]
    for _ in range(60):
        reduction = PrivateReduction(("theta", "W"), sent, account, account.sum_of(9, None), 9, (), lambda d: Stream(d))
        for number, back in enumerate(backs):
            reduction.take(str(number), sent, back)
        reduction.result()
        seen.append(account.clip)
    within = sum(x <= 0.1 for x in lengths) / 9
    assert seen[1] == pytest.approx(0.1 * math.exp(-0.3 * (within - 0.5)))
    assert lengths[3] < seen[-1] < lengths[5], "at the median of nine"


def test_the_noise_of_bound_and_count_costs_what_was_asked_for() -> None:
    for noise, expected in ((0.5, 20), (2.0, 100), (1.0, 4000)):
        sigma, counted = split_noise(noise, 3.0, expected, adaptive=True)
        assert (3.0 / sigma) ** 2 + (0.5 / counted) ** 2 == pytest.approx(noise**-2)
        assert split_noise(noise, 3.0, expected, adaptive=False) == (noise * 3.0, 0.0)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7, 40.0])
def test_integers_have_the_probabilities_of_a_discrete_gaussian(sigma: float) -> None:
    drawn = discrete_gaussian(Stream(SECRET, b"%g" % sigma), sigma, 200_000)
    reach = math.ceil(6 * sigma) + 2
    places = np.arange(-reach, reach + 1)
    mass = np.exp(-(places**2) / (2 * sigma**2))
    expected = mass / mass.sum() * len(drawn)
    counts = np.array([(drawn == x).sum() for x in places])
    often = expected > 20
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert stats.chi2.sf(statistic, often.sum() - 1) > 1e-4
    assert abs(drawn.mean()) < 5 * sigma / math.sqrt(len(drawn))


def test_integers_of_a_key_are_the_same_and_of_large_variance_too() -> None:
    first, again = (discrete_gaussian(Stream(SECRET, b"x"), 3e7, 300_000) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, discrete_gaussian(Stream(SECRET, b"y"), 3e7, 300_000))
    assert stats.kstest(first[:50_000] / 3e7, "norm").pvalue > 1e-4
    assert len(np.unique(first % 2)) == 2, "the lowest bits are random too"
    assert abs((first % 2).mean() - 0.5) < 0.005


def test_an_epsilon_of_poisson_sampling_is_that_of_numerical_convolution() -> None:
    """Against the privacy losses of both directions, convolved on a grid of our own."""
    share, noise, rounds, delta = 0.05, 0.8, 40, 5e-4
    found = epsilon_amplified(((Sum("poisson", 0, share, 1000, noise), rounds),), delta)
    step, half = 2e-3, 2**16
    x = np.linspace(-12 * noise, 1 + 12 * noise, 400_001)
    none, one = stats.norm.pdf(x, 0, noise), stats.norm.pdf(x, 1, noise)
    mixed = (1 - share) * none + share * one
    worst = 0.0
    for p, q in ((mixed, none), (none, mixed)):
        loss = np.log(p / q)
        weight = p * (x[1] - x[0])
        masses = np.zeros(2 * half)
        np.add.at(masses, np.round(loss / step).astype(int) % (2 * half), weight)
        many = np.fft.irfft(np.fft.rfft(masses) ** rounds, 2 * half)
        losses = np.where(np.arange(2 * half) < half, np.arange(2 * half), np.arange(2 * half) - 2 * half) * step

        def gap(epsilon: float, many: Any = many, losses: Any = losses) -> float:
            return float((many * np.clip(1 - np.exp(epsilon - losses), 0, None)).sum()) - delta

        worst = max(worst, optimize.brentq(gap, 1e-3, 30))
    assert found == pytest.approx(worst, rel=0.01)


def test_an_epsilon_of_cohorts_of_fixed_size_is_that_of_the_theorem() -> None:
    """Wang et al. 2019, Theorem 27, in 80 digits; one client for another moves a sum by twice the longest update."""
    clients, asked, noise, rounds, delta = 1000, 50, 4.0, 30, 5e-4
    found = epsilon_amplified(((Sum("fixed", asked, asked / clients, clients, noise), rounds),), delta)
    share, z = asked / clients, noise / 2

    def moment(j: int) -> mpmath.mpf:
        """E |P / Q - 1|^j for even j, of two normal densities a sensitivity apart."""
        return mpmath.fsum(
            (-1) ** i * mpmath.binomial(j, i) * mpmath.exp(i * (i - 1) / (2 * z * z)) for i in range(j + 1)
        )

    def rdp(a: int) -> float:
        terms = [mpmath.mpf(1)]
        for j in range(2, a + 1):
            pairs = 4 * mpmath.sqrt(moment(j - j % 2) * moment(j + j % 2))
            terms.append(share**j * mpmath.binomial(a, j) * min(pairs, 2 * mpmath.exp(j * (j - 1) / (2 * z * z))))
        return float(mpmath.log(mpmath.fsum(terms))) / (a - 1)

    with mpmath.workdps(80):
        slow = min(rounds * rdp(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 40))
    assert found == pytest.approx(slow, rel=0.01)


def test_an_epsilon_without_sampling_is_that_of_the_gaussian() -> None:
    """By integrating where one density is above e^epsilon times the other."""
    for noise, rounds, delta in ((1.0, 1, 1e-5), (3.0, 20, 1e-3), (0.6, 4, 1e-6)):
        mu = math.sqrt(rounds) / noise
        found = epsilon_plain(rounds / noise**2, delta)
        edge = found / mu + mu / 2
        slow = stats.norm.sf(edge - mu) - math.exp(found) * stats.norm.sf(edge)
        assert slow == pytest.approx(delta, rel=1e-4)
        assert epsilon_amplified(((Sum("fixed", 9, 1.0, 9, noise), rounds),), delta) == found
    assert epsilon_plain(0.0, 1e-5) == 0
    assert epsilon_amplified(((Sum("fixed", 9, 1.0, 9, 0.0), 1),), 1e-5) == math.inf


def test_a_target_chooses_the_least_noise_for_all_rounds() -> None:
    account = Account(Privacy(epsilon=3.0), {}, 200, 25)
    of = account.sum_of(200, 1.0)
    assert epsilon_plain(25 / of.noise**2, account.delta) == pytest.approx(3.0, rel=0.01)
    assert epsilon_plain(25 / of.noise**2, account.delta) <= 3.0
    assert noise_for(lambda z: 1 / z, 4.0) == pytest.approx(0.25, rel=1e-2)
    assert account.delta == pytest.approx(200**-1.1)
    assert GRID == 24
