"""IJB-C from features at its full size: pooling, 1:1 and 1:N, in under 60 s and 2 GB on two cores.

    python benchmarks/ijbc.py             469,375 features of 512, 23,124 templates, 15,658,489 pairs, 19,593 probes
    python benchmarks/ijbc.py --scale 0.1 a tenth of it

Features are random around 3,531 centres. Next to the scores of all pairs stands the machine's limit, the bare product
of all templates on either side. Memory includes the features (0.96 GB). Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from itertools import pairwise

import numpy as np
import torch

from visard.evaluation.ijb import pool, search_galleries, template_scores, verify_templates

FEATURES, TEMPLATES, MEDIA = 469_375, 23_124, 3
GENUINE, IMPOSTORS = 19_557, 15_638_932
GALLERIES, PROBES = (1_772, 1_759), 19_593
SECONDS, GIGABYTES = 60.0, 2.0


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def scaled(count: int) -> int:
        return max(10, round(count * options.scale))

    rng = np.random.default_rng(0)
    people = sum(scaled(n) for n in GALLERIES)
    templates = max(people + 10, scaled(TEMPLATES))
    # every gallery template first, so that each person has one; the others are probes
    subject = np.concatenate([np.arange(people), rng.integers(0, people, templates - people)])
    n = scaled(FEATURES)
    template = np.concatenate([np.arange(templates), rng.integers(0, templates, n - templates)])
    media = rng.integers(0, MEDIA, n)
    score = rng.random(n, dtype=np.float32)
    centre = rng.standard_normal((people, options.dim), dtype=np.float32)
    features = rng.standard_normal((n, options.dim), dtype=np.float32)
    for start in range(0, n, 8192):
        features[start : start + 8192] *= 8.0
        features[start : start + 8192] += centre[subject[template[start : start + 8192]]]
    first, second, same = _pairs(rng, subject, people, scaled(GENUINE), scaled(IMPOSTORS))
    ends = np.cumsum([0, *(scaled(size) for size in GALLERIES)])
    galleries = {f"G{k + 1}": (np.arange(a, b), subject[a:b]) for k, (a, b) in enumerate(pairwise(ends))}
    searched = np.arange(people, templates)[: scaled(PROBES)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = f"{n} features of {options.dim}, {templates} templates, {len(first)} pairs, {len(searched)} probes"
    print(f"{size}; {before:.2f} GB to make them")

    start = time.perf_counter()
    pooled = pool(features, template, media, score=score)
    pooling = time.perf_counter() - start
    roc = verify_templates(pooled, first, second, same)
    verifying = time.perf_counter() - start - pooling
    search = search_galleries(pooled, galleries, (searched, subject[searched]))
    total = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"pooling {pooling:.1f} s, 1:1 {verifying:.1f} s, 1:N {total - pooling - verifying:.1f} s; "
        f"all {total:.1f} s, {memory:.2f} GB"
    )
    print("  ".join(f"TAR@{p.far:g} {p.tar:.4f}" for p in roc.tar))
    print("  ".join(f"TPIR@{rate:g} {value:.4f}" for rate, value in search.tpir.items() if value is not None))

    start = time.perf_counter()
    template_scores(pooled, first, second)
    scoring = time.perf_counter() - start
    one, two = (torch.from_numpy(pooled.rows[np.unique(side)]) for side in (first, second))
    start = time.perf_counter()
    for part in range(0, len(one), 256):
        one[part : part + 256] @ two.T
    limit = time.perf_counter() - start
    print(f"scores of all pairs {scoring:.1f} s; the bare product of both sides {limit:.1f} s: {scoring / limit:.1f} x")
    good = total <= SECONDS and memory <= GIGABYTES
    print("within" if good else "MISSED", f"{SECONDS:g} s and {GIGABYTES:g} GB")
    return 0 if good else 1


def _pairs(
    rng: np.random.Generator, subject: np.ndarray, people: int, genuine: int, impostors: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probe templates with the gallery template of their person (genuine) or of another one (impostor)."""
    probe = rng.integers(people, len(subject), genuine + impostors, dtype=np.int32)
    mate = subject.astype(np.int32)[probe]
    other = (mate + rng.integers(1, people, len(probe), dtype=np.int32)) % np.int32(people)
    same = np.zeros(len(probe), np.bool_)
    same[:genuine] = True
    return np.where(same, mate, other), probe, same


if __name__ == "__main__":
    sys.exit(main())
