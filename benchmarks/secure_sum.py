"""What secure aggregation adds to a round, next to the bare cost of making and adding the same number of mask bytes.

    python -m benchmarks.secure_sum [--large]

All clients and the server in one process, one after the other: seconds are the sum over all of them. A tenth of the
clients is lost after sharing, so that masks of lost clients are opened too. `--large` adds 20 clients with 250 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc

import numpy as np

from visard.crypto.secure_sum import Member, Sum, add_mask, decoded, encoded, fraction_bits, neighbours, threshold

CONTEXT, ASKED, LARGEST = b"benchmark", b"asked", 4.0


def protocol(n: int, numbers: int, degree: int) -> tuple[float, int]:
    """Seconds of one sum without making and encoding the vectors, and how many masks were made."""
    names = [f"c{i:04d}" for i in range(n)]
    lost = set(names[::10]) if n >= 10 else set()
    bits = fraction_bits(n, LARGEST)
    vector = encoded(np.random.default_rng(0).normal(0, 0.01, numbers), bits, LARGEST)
    begun = time.perf_counter()
    members = {name: Member(name, name.encode().rjust(32), CONTEXT) for name in names}
    keys = {name: m.keys for name, m in members.items()}
    around = {c: {o: keys[o] for o in others} for c, others in neighbours(names, degree, CONTEXT).items()}
    needed = {name: threshold(len(others) + 1, 2 / 3) for name, others in around.items()}
    boxes = {name: m.shares(around[name], needed[name]) for name, m in members.items()}
    total = Sum(around, keys, ASKED)
    masks = 0
    for name, member in members.items():
        if name not in lost:
            total.add(name, member.masked(vector, around[name], ASKED))
            masks += len(around[name]) + 1
    opened = {}
    for name in total.arrived:
        mine = {o: boxes[o][name] for o in (*around[name], name)}
        opened[name] = members[name].opened(around[name], mine, total.arrived)
    sums = total.result(opened, needed)
    seconds = time.perf_counter() - begun
    masks += len(total.arrived) + sum(len(around[name].keys() & total.arrived) for name in lost)
    expected = (n - len(lost)) * decoded(vector, bits)
    assert np.array_equal(decoded(sums, bits), expected), "the sum is exact"
    return seconds, masks


def bare(masks: int, numbers: int) -> float:
    """Seconds to make and add so many masks."""
    total = np.zeros(numbers, np.uint32)
    begun = time.perf_counter()
    for i in range(masks):
        add_mask(total, i.to_bytes(16, "big"), ASKED, +1)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="20 clients with 250 MB too")
    large = parser.parse_args().large
    row = "{:>8} {:>6} {:>11} {:>7} {:>9} {:>8} {:>6} {:>11}".format
    print(row("clients", "MB", "neighbours", "masks", "secure s", "bare s", "ratio", "s a client"))
    for n, mb, degree, times in [(20, 2.3, 100, 5), (200, 2.3, 100, 1), (20, 250.0, 100, 1)][: 3 if large else 2]:
        numbers = int(mb * 1e6 / 4)
        pairs = []
        for _ in range(times):
            seconds, masks = protocol(n, numbers, degree)
            pairs.append((seconds, bare(masks, numbers)))
        secure, plain = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        ratio = statistics.median(a / b for a, b in pairs)
        figures = (f"{secure:.2f}", f"{plain:.2f}", f"{ratio:.2f}", f"{secure / n:.3f}")
        print(row(n, mb, min(degree, n - 1), masks, *figures), flush=True)
    tracemalloc.start()
    numbers = int(2.3e6 / 4)
    total = Sum({"a": {}, "b": {}}, {}, ASKED)
    for name in ("a", "b"):
        total.add(name, np.zeros(numbers, np.uint32))
    print(f"the server holds {tracemalloc.get_traced_memory()[1] / (4 * numbers):.1f} messages at most while it adds")


if __name__ == "__main__":
    main()
