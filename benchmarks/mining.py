"""Speed and memory of hard-negative mining, next to the bare matrix product.

    python benchmarks/mining.py        60,000 public against 6,000 local features of 512

Ours normalises, multiplies in blocks and keeps the largest cosine of every public picture; the bare product is the same
multiplication in the same blocks and nothing else. Both run in processes of their own, alternated, and are compared by
processor time, which other work on the machine changes little. Exits with 1 if ours takes more than 1.5 times the
product or more than 64 MB beyond the features and their unit rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import psutil
import torch
from torch import Tensor

from visard.methods.fedfr_joint_client import COLUMNS, ROWS, closest

SLACK = 64e6  # bytes for one block and what a maximum needs


def bare(public: Tensor, local: Tensor) -> Tensor:
    """The matrix product alone, in the same blocks."""
    right = local.t().contiguous()
    block = torch.empty(ROWS * COLUMNS)
    for i in range(0, len(public), ROWS):
        left = public[i : i + ROWS]
        for j in range(0, len(local), COLUMNS):
            part = right[:, j : j + COLUMNS]
            torch.mm(left, part, out=block[: len(left) * part.shape[1]].view(len(left), -1))
    return block


TASKS = {"ours": closest, "bare": bare}


def measure(task: str, n: int, m: int, dim: int) -> None:
    """Run one task in this process and print its seconds, its peak memory and a check sum as JSON."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rng = torch.Generator().manual_seed(0)
    public, local = torch.randn(n, dim, generator=rng), torch.randn(m, dim, generator=rng)
    TASKS[task](public[:ROWS], local[:COLUMNS])  # first calls load kernels
    before = psutil.Process().memory_info().rss
    began, begun = time.perf_counter(), time.process_time()
    found = TASKS[task](public, local)
    seconds, worked = time.perf_counter() - began, time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({"seconds": seconds, "worked": worked, "peak": peak, "sum": float(found.double().sum())}))


def run(task: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of its own."""
    numbers = ["--n", str(options.n), "--m", str(options.m), "--dim", str(options.dim)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, __file__, "--task", task, *numbers]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    worked, peak = found["worked"], found["peak"] / 1e6
    print(f"  {task:5s} {found['seconds']:7.2f} s, of the processor {worked:7.2f} s   peak {peak:6.0f} MB", flush=True)
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=60_000, help="public pictures")
    parser.add_argument("--m", type=int, default=6_000, help="local pictures")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        measure(options.task, options.n, options.m, options.dim)
        return 0
    print(f"{options.n:,} x {options.m:,} features of {options.dim}, {options.threads} threads", flush=True)
    pairs = [(run("bare", options), run("ours", options)) for _ in range(options.repeat)]
    ratios = sorted(o["worked"] / b["worked"] for b, o in pairs)
    middle, peak = ratios[len(ratios) // 2], max(o["peak"] for _, o in pairs)
    allowed = (options.m * options.dim * 4 * 2) + SLACK  # unit rows of the local pictures, and their transpose
    print(f"  ours / bare product: {', '.join(f'{r:.2f}' for r in ratios)}")
    fast, small = middle <= 1.5, peak <= allowed
    print(f"  {'ok  ' if fast else 'FAIL'} within 1.5 times the product (median {middle:.2f})")
    print(f"  {'ok  ' if small else 'FAIL'} at most {allowed / 1e6:.0f} MB beyond the features ({peak / 1e6:.0f})")
    return 0 if fast and small else 1


if __name__ == "__main__":
    raise SystemExit(main())
