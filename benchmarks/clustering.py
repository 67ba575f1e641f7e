"""FINCH on features of 256: time and memory next to the package finch-clust, and next to the bare matrix product.

    python benchmarks/clustering.py                           10,000, 50,000 and 100,000 features (some minutes)
    python benchmarks/clustering.py --sizes 10000
    python benchmarks/clustering.py --sizes --million 1000000  a million through faiss, with its recall

Every measurement is a process of its own that reads the features from a file, so that its peak memory is that of the
clustering: features made in the process would raise the peak before it starts. Ours and theirs take turns. The limit
of one exact neighbour pass is the matrix product of all features with all features in blocks of 1024 x 1024 (BLAS),
whose results are thrown away. "auto" is C-FINCH on centred features with its distance chosen from them, as `visard
cluster` does it. finch-clust compares all pairs in one matrix up to a size and needs a package for approximate
neighbours beyond (here faiss, its own choice of settings): "exact" and "faiss" say which way it went. Exits with 1 if
one of our passes takes more than 1.5 times the limit, or FINCH is slower than finch-clust. Peaks come from /proc, so
it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
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


def peak() -> float:
    """The most memory that this process has had, in MB; that of resource.getrusage may be its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def child(what: str, file: str, threads: int) -> dict[str, Any]:
    """One measurement: seconds, peak memory above that of the features, and what was found."""
    torch.set_num_threads(threads)
    from visard.clustering.cluster import Clustering, cluster
    from visard.clustering.finch import finch, nearest

    warnings.simplefilter("ignore")
    package = __import__("finch") if what == "theirs" else None
    x = np.load(file)
    n, before, found = len(x), peak(), None  # type: int, float, Any
    start = time.perf_counter()
    if what == "limit":
        product(torch.from_numpy(x))
    elif what in ("exact", "faiss"):
        found = nearest(x, "chord", what)[0]  # type: ignore[arg-type]
    elif what == "ours":
        found = [level.clusters for level in finch(x, "cosine")]
    elif what == "auto":
        found = list(cluster(x, Clustering()).levels)
    elif package is not None:
        how = {"ann_threshold": n} if n <= DENSE else {"ann_threshold": 1000, "faiss_threshold": 1001}
        found = package.FINCH(x, distance="cosine", ensure_early_exit=False, verbose=False, **how)[1]
    seconds, above = time.perf_counter() - start, peak() - before
    if what == "faiss":
        some = np.random.default_rng(1).choice(n, min(n, 2000), replace=False)
        scores = torch.from_numpy(x[some]) @ torch.from_numpy(x).T
        scores[torch.arange(len(some)), torch.from_numpy(some)] = -1
        found = float((scores.argmax(1).numpy() == found[some]).mean())
    elif what == "exact":
        found = None
    return {"seconds": seconds, "megabytes": above, "found": found}


def measure(what: str, file: Path, threads: int) -> dict[str, Any]:
    """`child` in a process of its own."""
    command = [sys.executable, __file__, "--child", what, str(file), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"seconds": float("nan"), "megabytes": float("nan"), "found": done.stderr.splitlines()[-1:]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def compare(n: int, file: Path, times: int, threads: int) -> bool:
    """Measure and print one size; whether it is within the bounds."""
    kinds = ("limit", "exact", "ours", "auto", "theirs")
    runs = {kind: [] for kind in kinds}  # type: dict[str, list[dict[str, Any]]]
    for _ in range(times):
        for kind in kinds:
            runs[kind].append(measure(kind, file, threads))
    seconds = {kind: median(r["seconds"] for r in rs) for kind, rs in runs.items()}
    ratio, gain = seconds["exact"] / seconds["limit"], seconds["theirs"] / seconds["ours"]
    names = {"exact": "one exact pass", "ours": "FINCH", "auto": "C-FINCH, auto",
             "theirs": f"finch-clust {'exact' if n <= DENSE else 'faiss'}"}  # fmt: skip
    print(f"{n} features of {SIZE}: {n * SIZE * 4 / 2**20:.0f} MB")
    for kind, name in names.items():
        most = max(r["megabytes"] for r in runs[kind])
        print(f"  {name:18} {seconds[kind]:8.2f} s   {most:8.0f} MB   {runs[kind][0]['found'] or ''}")
    print(f"  one pass is {ratio:.2f} x the bare product, {seconds['limit']:.2f} s; FINCH is {gain:.1f} x as fast")
    return ratio <= 1.5 and not gain < 1


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
        print(json.dumps(child(*options.child, options.threads)))
        return 0
    good = True
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.npy"
        for n in options.sizes:
            np.save(file, features(n))
            good &= compare(n, file, options.times, options.threads)
        if options.million:
            np.save(file, features(options.million))
            found = measure("faiss", file, options.threads)
            text = f"{found['seconds']:.0f} s, {found['megabytes']:.0f} MB, {found['found']:.2%} of 2,000 nearest found"
            print(f"{options.million} features of {SIZE} through faiss: {text}")
    print("within" if good else "MISSED", "the bounds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
