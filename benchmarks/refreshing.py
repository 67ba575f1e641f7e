"""What new randomness costs: a packed batch of encrypted MMD with refreshes of three kinds, and certificates of a key.

    python -m benchmarks.refreshing [--bits 3072] [--lengths 4,64] [--repeats 5]

one base    powers of one base hashed from the modulus: how it was, and what a planted modulus reads through
fresh       r^n for a new r: the first answers under a key, if nothing was prepared in the background
ready       r^n that was prepared while the client waited for others
products    of r^n made before: once there are enough of them

All in turn, in one run; CPU seconds of both parties, medians, and ratios to `one base`.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch

from benchmarks.encrypted_mmd import Keys, features, new_keys, packed, prepare
from visard.crypto import paillier
from visard.crypto.modulus import certify, check_certificate
from visard.crypto.paillier import PublicKey
from visard.crypto.powers import Powers, powers_of
from visard.learning.mmd import taylor


def one_base(key: PublicKey, c: int) -> int:
    return int(c * paillier._noise_table(int(key.n)).power(secrets.randbits(key.bits // 2)) % key.n2)


def fresh(key: PublicKey, c: int) -> int:
    return int(c * powers_of(int(key.n))._power() % key.n2)


def products(key: PublicKey, c: int) -> int:
    return int(c * powers_of(int(key.n))._product() % key.n2)


def filled(store: Powers) -> float:
    """CPU seconds until products can be made."""
    begun = time.process_time()
    while len(store._made) < store.size:
        store._power()
    return time.process_time() - begun


def batch(L: int, pair: Sequence[Keys], refresh: Callable[[PublicKey, int], int] | None) -> float:
    """CPU seconds of both directions; `refresh` None: with what is ready."""
    a, b, kernel = features(L, 0), features(L, 1), taylor(0.5, 2)
    if refresh is None:
        for mine in pair:
            store = powers_of(int(mine.public.n))
            store._fresh.extend(store._made[: L + 1])  # any will do to measure; a client hands out each once
        return packed(a, b, kernel, pair[0])[0] + packed(b, a, kernel, pair[1])[0]
    with patch.object(PublicKey, "refresh", refresh):
        return packed(a, b, kernel, pair[0])[0] + packed(b, a, kernel, pair[1])[0]


def timed(what: Callable[[], object]) -> float:
    begun = time.process_time()
    what()
    return time.process_time() - begun


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=3072)
    parser.add_argument("--lengths", default="4,64")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pair = [new_keys("paillier", chosen.bits) for _ in range(2)]
    for mine in pair:
        prepare(mine.public)
    once = [filled(powers_of(int(mine.public.n))) for mine in pair]
    store = powers_of(int(pair[0].public.n))
    print(f"{store.size} powers until products can be made: {statistics.median(once):.1f} CPU s, once for each key")
    ways = {"one base": one_base, "fresh": fresh, "ready": None, "products": products}
    for L in map(int, chosen.lengths.split(",")):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(chosen.repeats):
            for name, refresh in ways.items():
                found[name].append(batch(L, pair, refresh))
        for name, times in found.items():
            ratio = statistics.median(t / base for t, base in zip(times, found["one base"], strict=True))
            print(f"L={L:<4} {name:9} {statistics.median(times):8.3f} CPU s a batch, {ratio:.2f} times one base")
    private = pair[0].private
    data = certify(private)
    made = statistics.median(timed(lambda: certify(private)) for _ in range(chosen.repeats))
    checked = statistics.median(
        timed(lambda: check_certificate(private.public, data, "it")) for _ in range(chosen.repeats)
    )
    print(f"certificate: {made * 1000:.0f} ms to make, {checked * 1000:.0f} ms to check, {len(data)} bytes")


if __name__ == "__main__":
    main()
