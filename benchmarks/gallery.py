"""One million enrolled templates: how long a query takes, exactly and through a sketch, next to the machine's limit.

    python benchmarks/gallery.py              1,000,000 templates of 512 (5 GB), or of 128 with --dim 128
    python benchmarks/gallery.py --people 50000

The limit of an exact single query is one matrix-vector product (BLAS), which reads every template once; that of many
queries together is one matrix product. Queries are noisy pictures of enrolled people with the given cosine. Exits with
1 if an exact search is slower than twice its limit, or the sketch not five times as fast as the limit of an exact
query, or if the sketch loses more than 1 of 100. On a busy machine look at the CPU time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from visard.inference.search import Exact, Sketch

BATCH = 64


def median(work: Callable[[], object], times: int) -> float:
    """Milliseconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return 1000 * float(np.median(found))


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--cosine", type=float, default=0.4, help="of a query with its own template")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    templates = np.empty((options.people, options.dim), np.float32)
    for start in range(0, options.people, 65536):
        part = rng.standard_normal((min(65536, options.people - start), options.dim), dtype=np.float32)
        templates[start : start + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)
    mine = rng.choice(options.people, 500, replace=False)
    noise = rng.standard_normal((500, options.dim), dtype=np.float32)
    noise -= (noise * templates[mine]).sum(1, keepdims=True) * templates[mine]
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    queries = options.cosine * templates[mine] + np.sqrt(1 - options.cosine**2, dtype=np.float32) * noise
    queries = queries.astype(np.float32)
    one, many = queries[:1], queries[:BATCH]

    table, exact = torch.from_numpy(templates), Exact(templates)
    start = time.perf_counter()
    sketch = Sketch(templates)
    print(f"{options.people} templates of {options.dim}; sketch built in {time.perf_counter() - start:.1f} s")
    single = median(lambda: exact.search(one, 5), options.times)
    single_limit = median(lambda: table @ torch.from_numpy(one[0]), options.times)
    batch = median(lambda: exact.search(many, 5), 3) / BATCH
    batch_limit = median(lambda: _product(table, torch.from_numpy(many)), 3) / BATCH
    used = time.process_time()
    fast = median(lambda: sketch.search(one, 5), 5 * options.times)
    used = 1000 * (time.process_time() - used) / (5 * options.times)
    found = sketch.search(queries, 5)
    truth = exact.search(queries, 5)
    lost = float((found[1][:, 0] != truth[1][:, 0]).mean())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    right = [f"{(rows[:, 0] == mine).mean():.2%}" for _, rows in (truth, found)]
    for what, took, limit in (("one query", single, single_limit), (f"{BATCH} queries, each", batch, batch_limit)):
        print(f"exact, {what:18} {took:8.2f} ms   BLAS {limit:8.2f} ms   {took / limit:.2f} x")
    gain = f"{single / fast:.0f} x faster than exact"
    print(f"sketch, one query         {fast:8.2f} ms   CPU  {used:8.2f} ms   {gain}; best person lost: {lost:.2%}")
    print(f"right person first: exact {right[0]}, sketch {right[1]}; {memory:.1f} GB")
    good = single <= 2 * single_limit and batch <= 2 * batch_limit and fast <= single_limit / 5 and lost <= 0.01
    print("within" if good else "MISSED", "the bounds")
    return 0 if good else 1


def _product(table: torch.Tensor, queries: torch.Tensor) -> None:
    """All scores, in pieces that the search would not keep either."""
    for start in range(0, len(table), 65536):
        queries @ table[start : start + 65536].T


if __name__ == "__main__":
    sys.exit(main())
