"""Speed and memory of the streaming ROC, next to scikit-learn and to the bare matrix product.

    python benchmarks/evaluation.py            20,000 pictures with each other, ours and scikit-learn alternated
    python benchmarks/evaluation.py --large    280,000 pictures with each other, ours and the bare product

Every measurement runs in its own process, so that its peak memory is its own. Memory is counted beyond the
features (as float32) and the imported libraries. Exits with 1 if a figure differs or a bound is missed.
scikit-learn was seen to need 37 bytes a pair: 7.4 GB for the 200 million pairs of 20,000 pictures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import torch

from visard.evaluation.arrays import unit_rows
from visard.evaluation.grid import one_thread_each
from visard.evaluation.scores import Limits, stream_roc

FAR = (1e-1, 1e-2, 1e-3, 1e-4)
PICTURES = 20  # of each person


Data = tuple[np.ndarray, np.ndarray]


def features(n: int, dim: int) -> Data:
    """Features and identities: centre plus noise, an EER near one per cent at 128."""
    rng = np.random.default_rng(0)
    people = max(2, n // PICTURES)
    identity = np.arange(n) % people
    centre = rng.standard_normal((people, dim), dtype=np.float32)
    x = rng.standard_normal((n, dim), dtype=np.float32)
    x *= np.float32(1.2)
    for start in range(0, n, 8192):
        x[start : start + 8192] += centre[identity[start : start + 8192]]
    return x, identity


def ours(data: Data, exact: int) -> dict[str, Any]:
    """All figures by `stream_roc`; `exact`: comparisons up to which the area is exact."""
    roc = stream_roc(*data, far=FAR, limits=Limits(exact_auc_pairs=exact))
    return {
        "pairs": roc.genuine + roc.impostors,
        "tar": [p.tar for p in roc.tar],
        "eer": roc.eer,
        "auc": roc.auc,
        "auc_error": roc.auc_error,
        "passes": roc.passes,
    }


def scikit(data: Data, _: int) -> dict[str, Any]:
    """The same figures from all scores at once by scikit-learn."""
    from sklearn.metrics import auc, roc_curve

    a, identity = data
    rows, n = torch.from_numpy(unit_rows(a)), len(a)
    scores, same = np.empty(n * (n - 1) // 2, np.float32), np.empty(n * (n - 1) // 2, np.bool_)
    filled = 0
    for start in range(0, n, 512):
        block = rows[start : start + 512]
        upper = np.arange(start, start + len(block))[:, None] < np.arange(start, n)[None, :]
        count = int(upper.sum())
        scores[filled : filled + count] = (block @ rows[start:].T).numpy()[upper]
        same[filled : filled + count] = (identity[start : start + 512, None] == identity[None, start:])[upper]
        filled += count
    began = time.perf_counter()
    fpr, tpr, _ = roc_curve(same, scores, drop_intermediate=False)
    curve_seconds = time.perf_counter() - began
    i = int(np.searchsorted(fpr + tpr - 1, 0, side="right")) - 1
    d0, d1 = (fpr[k] + tpr[k] - 1 for k in (i, i + 1))
    return {
        "tar": [float(tpr[np.searchsorted(fpr, f, side="right") - 1]) for f in FAR],
        "eer": float(fpr[i] + (fpr[i + 1] - fpr[i]) * -d0 / (d1 - d0)),
        "auc": float(auc(fpr, tpr)),
        "roc_curve_seconds": curve_seconds,
    }


def bare(data: Data, share: int) -> dict[str, Any]:
    """Nothing but the matrix products, in the same tiles on the same threads; only every `share`-th row of tiles."""
    x, tile = torch.from_numpy(unit_rows(data[0])), Limits().tile
    every = [(i, j) for i in range(0, len(x), tile) for j in range(i, len(x), tile)]
    corners = [corner for corner in every if corner[0] // tile % share == 0]
    tickets = itertools.count()

    def work() -> None:
        buffer = torch.empty(tile * tile)
        while (number := next(tickets)) < len(corners):
            i, j = corners[number]
            p, q = x[i : i + tile], x[j : j + tile]
            torch.mm(p, q.T, out=buffer[: len(p) * len(q)].view(len(p), len(q)))

    began = time.perf_counter()
    with one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(work) for _ in range(threads)]:
            job.result()
    return {"whole_seconds": (time.perf_counter() - began) * len(every) / len(corners)}


TASKS = {"ours": ours, "scikit": scikit, "bare": bare}


def measure(task: str, n: int, dim: int, extra: int) -> None:
    """Run one task in this process and print its seconds, peak memory and figures as JSON."""
    TASKS[task](features(1500, dim), extra)  # first calls load kernels and tables
    data = features(n, dim)
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    found = TASKS[task](data, extra)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({"seconds": seconds, "peak": peak, **found}))


def run(task: str, n: int, dim: int, threads: int, extra: int = 1) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--n", str(n), "--dim", str(dim), "--extra", str(extra)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    shown = found.get("whole_seconds", found["seconds"])
    print(f"  {task:7s} {shown:8.2f} s   peak {found['peak'] / 1e6:8.0f} MB", flush=True)
    return found


def check(name: str, good: bool) -> bool:
    """Print whether a promise was kept."""
    print(f"  {'ok  ' if good else 'FAIL'} {name}")
    return good


def against_scikit(n: int, dim: int, threads: int) -> bool:
    """Ours and scikit-learn, alternated twice, with the bare product around them."""
    print(f"{n:,} pictures, {n * (n - 1) // 2:,} pairs, {dim} dimensions, {threads} threads", flush=True)
    if psutil.virtual_memory().available < 50 * n * (n - 1) // 2:
        return check("enough memory for scikit-learn (50 bytes a pair)", False)
    products = [run("bare", n, dim, threads)]
    pairs = []
    for _ in range(2):
        pairs.append((run("ours", n, dim, threads, 1 << 40), run("scikit", n, dim, threads)))
        products.append(run("bare", n, dim, threads))
    quick = run("ours", n, dim, threads, 0)
    mine, theirs = pairs[0]
    limit = min(p["whole_seconds"] for p in products)
    ratios = [t["seconds"] / o["seconds"] for o, t in pairs]
    print(f"  scikit-learn / ours: {', '.join(f'{r:.1f}' for r in ratios)} (roc_curve alone / all of ours:", end=" ")
    print(", ".join(f"{t['roc_curve_seconds'] / o['seconds']:.1f}" for o, t in pairs) + ")")
    print(f"  ours / bare product: {min(o['seconds'] for o, _ in pairs) / limit:.2f} with the exact area,", end=" ")
    print(f"{quick['seconds'] / limit:.2f} with a bound ({quick['auc_error']:.1e}) on it")
    print(f"  TAR {mine['tar']}  EER {mine['eer']:.6f}  AUC {mine['auc']:.9f}")
    return all(
        [
            check("same TAR at every FAR", mine["tar"] == theirs["tar"] == quick["tar"]),
            check("same EER (1e-12)", abs(mine["eer"] - theirs["eer"]) < 1e-12),
            check("same AUC (1e-9)", abs(mine["auc"] - theirs["auc"]) < 1e-9 and mine["auc_error"] == 0),
            check("bound on the area holds", abs(quick["auc"] - mine["auc"]) <= quick["auc_error"]),
            check("at least 10 times faster", min(ratios) >= 10),
            check("less than 300 MB", max(o["peak"] for o, _ in pairs) < 300e6),
        ]
    )


def large(n: int, dim: int, threads: int) -> bool:
    """One full run next to the bare product, of which every eighth row of tiles is measured before and after."""
    print(f"{n:,} pictures, {n * (n - 1) // 2:,} pairs, {dim} dimensions, {threads} threads", flush=True)
    before = run("bare", n, dim, threads, 8)["whole_seconds"]
    found = run("ours", n, dim, threads, 1 << 31)
    after = run("bare", n, dim, threads, 8)["whole_seconds"]
    print(f"  ours / bare product: {2 * found['seconds'] / (before + after):.2f}, passes: {found['passes']}")
    print(f"  TAR {found['tar']}  EER {found['eer']:.6f}  AUC {found['auc']:.9f} ± {found['auc_error']:.1e}")
    return check("less than 1 GB beyond the features", found["peak"] < 1e9)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="280,000 pictures; takes minutes")
    parser.add_argument("--n", type=int, help="pictures")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--extra", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        measure(options.task, options.n, options.dim, options.extra)
        return 0
    if options.large:
        return 0 if large(options.n or 280_000, options.dim, options.threads) else 1
    return 0 if against_scikit(options.n or 20_000, options.dim, options.threads) else 1


if __name__ == "__main__":
    raise SystemExit(main())
