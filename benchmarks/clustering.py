"""FINCH on features of 256: time and memory next to the package finch-clust, and next to the bare matrix product.

    python benchmarks/clustering.py                           10,000, 50,000 and 100,000 features (some minutes)
    python benchmarks/clustering.py --sizes 10000
    python benchmarks/clustering.py --sizes --million 1000000  a million through faiss, with its recall

Every measurement is a process of its own, so that peak memory is its own; ours and theirs take turns. The limit of one
exact neighbour pass is the matrix product of all features with all features in blocks of 1024 x 1024 (BLAS), whose
results are thrown away. finch-clust compares all pairs in one matrix up to a size and needs a package for approximate
neighbours beyond (here faiss, its own choice of settings): "exact" and "faiss" say which way it went. Exits with 1 if
one of our passes takes more than 1.5 times the limit, or FINCH is slower than finch-clust.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from statistics import median
from typing import Any

import numpy as np
import torch

SIZE, PICTURES, BLOCK = 256, 20, 1024
DENSE = 20_000  # up to so many finch-clust compares all pairs here: its matrices take 12 n^2 bytes


def features(n: int) -> np.ndarray:
    """People with 20 pictures each, unit length; a genuine pair has a cosine around 0.6."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(1, n // PICTURES), SIZE), dtype=np.float32)
    x = centres[rng.integers(0, len(centres), n)]
    for start in range(0, n, 65536):
        part = x[start : start + 65536]
        part += 0.8 * rng.standard_normal(part.shape, dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return x


def product(x: torch.Tensor) -> None:
    """Every feature with every feature, in blocks, for nothing."""
    buffer = torch.empty(BLOCK * BLOCK)
    for i in range(0, len(x), BLOCK):
        a = x[i : i + BLOCK]
        for j in range(0, len(x), BLOCK):
            b = x[j : j + BLOCK]
            torch.mm(a, b.T, out=buffer[: len(a) * len(b)].view(len(a), len(b)))


def child(what: str, n: int, threads: int) -> dict[str, Any]:
    """One measurement: seconds, peak memory above that of the features, and what was found."""
    torch.set_num_threads(threads)
    from visard.ops.finch import finch
    from visard.ops.neighbours import nearest

    warnings.simplefilter("ignore")
    package = __import__("finch") if what == "theirs" else None
    x = features(n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Any = None
    start = time.perf_counter()
    if what == "limit":
        product(torch.from_numpy(x))
    elif what in ("exact", "faiss"):
        found = nearest(x, "chord", what)[0]  # type: ignore[arg-type]
    elif what == "ours":
        found = [level.clusters for level in finch(x, "cosine")]
    elif package is not None:
        how = {"ann_threshold": n} if n <= DENSE else {"ann_threshold": 1000, "faiss_threshold": 1001}
        found = package.FINCH(x, distance="cosine", ensure_early_exit=False, verbose=False, **how)[1]
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if what == "faiss":
        some = np.random.default_rng(1).choice(n, min(n, 2000), replace=False)
        scores = torch.from_numpy(x[some]) @ torch.from_numpy(x).T
        scores[torch.arange(len(some)), torch.from_numpy(some)] = -1
        found = float((scores.argmax(1).numpy() == found[some]).mean())
    elif what == "exact":
        found = None
    return {"seconds": seconds, "megabytes": peak / 1024, "found": found}


def measure(what: str, n: int, threads: int) -> dict[str, Any]:
    """`child` in a process of its own."""
    command = [sys.executable, __file__, "--child", what, str(n), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"seconds": float("nan"), "megabytes": float("nan"), "found": done.stderr.splitlines()[-1:]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 50_000, 100_000])
    parser.add_argument("--million", type=int, default=0, help="so many features through faiss")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child[0], int(options.child[1]), options.threads)))
        return 0
    good = True
    for n in options.sizes:
        kinds = ("limit", "exact", "ours", "theirs")
        runs = {kind: [] for kind in kinds}  # type: dict[str, list[dict[str, Any]]]
        for _ in range(options.times):
            for kind in kinds:
                runs[kind].append(measure(kind, n, options.threads))
        seconds = {kind: median(r["seconds"] for r in rs) for kind, rs in runs.items()}
        memory = {kind: max(r["megabytes"] for r in rs) for kind, rs in runs.items()}
        ratio, gain = seconds["exact"] / seconds["limit"], seconds["theirs"] / seconds["ours"]
        how = "exact" if n <= DENSE else "faiss"
        print(f"{n} features of {SIZE}")
        print(f"  one exact pass   {seconds['exact']:8.2f} s   product {seconds['limit']:8.2f} s   {ratio:.2f} x")
        print(f"  FINCH            {seconds['ours']:8.2f} s   {memory['ours']:8.0f} MB   {runs['ours'][0]['found']}")
        theirs = f"{memory['theirs']:8.0f} MB   {runs['theirs'][0]['found']}"
        print(f"  finch-clust {how} {seconds['theirs']:8.2f} s   {theirs}   ours is {gain:.1f} x as fast")
        good &= ratio <= 1.5 and not gain < 1
    if options.million:
        found = measure("faiss", options.million, options.threads)
        text = f"{found['seconds']:.0f} s, {found['megabytes']:.0f} MB, {found['found']:.2%} of 2,000 nearest found"
        print(f"{options.million} features of {SIZE} through faiss: {text}")
    print("within" if good else "MISSED", "the bounds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
