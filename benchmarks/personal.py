"""Time and memory of one client's personal 1:1 test at the size of Liu et al. 2022.

    python benchmarks/personal.py      100 local people among 4,000, 40 test pictures each: 632 million impostor pairs

Exact TAR at FAR down to 1e-6, no histogram of scores. Memory is what the process needs beyond its libraries, the
features of all test pictures included. Exits with 1 above 60 s or 1 GB, or if the pairs are not those of the protocol.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np
import psutil
import torch

from visard.evaluation.protocols import personal_roc


def features(people: int, pictures: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Centre plus noise, made in place: TAR at FAR 1e-6 between 0.5 and 1 at 512."""
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(people), pictures)
    x = rng.standard_normal((people * pictures, dim), dtype=np.float32)
    x *= np.float32(1.6)
    centre = rng.standard_normal((people, dim), dtype=np.float32)
    for person in range(people):
        x[person * pictures : (person + 1) * pictures] += centre[person]
    return x, identity


def measure(people: int, pictures: int, local: int, dim: int) -> None:
    """Run in this process and print seconds, peak memory and figures as JSON."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    personal_roc(*features(60, 4, dim), np.arange(5))  # first calls load kernels and tables
    before = psutil.Process().memory_info().rss
    x, identity = features(people, pictures, dim)
    began = time.perf_counter()
    roc = personal_roc(x, identity, np.arange(local) * (people // local))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    tar = {f"{p.far:g}": p.tar for p in roc.tar}
    counts = {"genuine": roc.genuine, "impostors": roc.impostors, "passes": roc.passes}
    print(json.dumps({"seconds": seconds, "peak": peak, "tar": tar, **counts}))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=4_000)
    parser.add_argument("--pictures", type=int, default=40, help="test pictures of a person")
    parser.add_argument("--local", type=int, default=100, help="people of the client")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = (options.people, options.pictures, options.local, options.dim)
    if options.inside:
        measure(*size)
        return 0
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, __file__, "--inside", *sys.argv[1:]]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    mine, all_pictures = options.local * options.pictures, options.people * options.pictures
    genuine = options.local * options.pictures * (options.pictures - 1) // 2
    impostors = mine * (all_pictures - mine) + mine * (mine - 1) // 2 - genuine
    print(f"{found['genuine']:,} genuine and {found['impostors']:,} impostor pairs, {options.threads} threads")
    print(f"  TAR at FAR {found['tar']}, passes over the pairs: {found['passes']}")
    checks = {
        "the pairs of the protocol": (found["genuine"], found["impostors"]) == (genuine, impostors),
        f"under 60 s ({found['seconds']:.1f})": found["seconds"] < 60,
        f"under 1 GB with the features ({found['peak'] / 1e6:.0f} MB)": found["peak"] < 1e9,
    }
    for name, good in checks.items():
        print(f"  {'ok  ' if good else 'FAIL'} {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
