"""CelebA: how much of the way from local to central training FedAvg and its improvements close, and what is missing.

    python -m benchmarks.way_to_central WORK [--seeds 1 2 3] [--rows fedavgm fedadam] [--set KEY=VALUE ...]

The settings of docs/results/fedavg.md: 4,000 people over 20 clients, 24 rounds, tested on 1,000 others. For local
training four clients of 200 people stand for all twenty, tested on the same others. Learning rates were tried on seed
100 with half of the people, TAR at FAR 0.01: FedAvg 0.242 at 0.1 and 0.220 at 0.4; clients in turn 0.310 at 0.1 and
0.301 at 0.2, with class vectors that are refreshed (method.refresh_head) 0.361 at 0.1 and 0.369 at 0.2, FedAvg with
these 0.261 at 0.1; FedAdam's server 0.204 at 0.01 and 0.240 at 0.03; FedAvgM 0.237 at 1. Central training has 0.353,
0.391 and 0.401 at 0.1, 0.2 and 0.4 there; with all people 0.511 at 0.1 and 0.525 at 0.2 (seed 101), 0.455, 0.474 and
0.438 at 0.1, 0.2 and 0.4 (seed 1), so it has 0.2.
Import the pictures first: visard data import celeba FOLDER_WITH_CELEBA --size 64. WORK holds a run folder for each
row and seed; the same command goes on with the runs that are not finished.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import visard
from visard.report.run_folder import read_run
from visard.studies.baselines import unseen
from visard.studies.results import look_up

CONTROL = "benchmarks.own_group"
FASTER = "method.training.lr=0.2"
# preset and changes of each row
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "local": ("celeba-local", ("partition.clients=4", "partition.identities=800")),
    "fedavg": ("celeba-fedavg", ()),
    "fedavgm": ("celeba-fedavg", ("aggregation.optimiser=sgd",)),
    "fedadam": ("celeba-fedavg", ("aggregation.optimiser.name=adam", "aggregation.optimiser.lr=0.03")),
    "fedavg refreshed": ("celeba-fedavg", ("method.refresh_head=true",)),
    "in turn": ("celeba-fedavg", ("method.in_turn=20",)),
    "in turn refreshed": ("celeba-fedavg", ("method.in_turn=20", "method.refresh_head=true", FASTER)),
    "class vectors": ("celeba-fedavg", ("method.negatives=class_vectors",)),
    "corrected": ("celeba-fedavg", ("method.negatives=corrected",)),
    "own negatives": ("celeba-central", (f"method.head.kind={CONTROL}:OwnGroup",)),
    "central": ("celeba-central", (FASTER,)),
}
METRICS = {
    "TAR at FAR 0.01": unseen("tar.0.01", "tar@far=0.01"),
    "TAR at FAR 0.1": unseen("tar.0.1", "tar@far=0.1"),
    "AUC": unseen("auc", "auc"),
}


def measured(row: str, seed: int, work: Path, more: Sequence[str] = ()) -> dict[str, float]:
    """The metrics of a run, which is begun, continued or read."""
    preset, changes = ROWS[row]
    folder = work / f"{row.replace(' ', '-')}-{seed}"
    if (folder / "metrics.json").exists():
        run = read_run(folder)
    elif (folder / "config.toml").exists():
        run = visard.resume(folder, plugins=[CONTROL] if any(CONTROL in text for text in changes) else ())
    else:
        run = visard.run(preset, out=folder, overrides=[*changes, f"seed={seed}", *more])
    return {name: float(look_up(run.metrics, path) or 0.0) for name, path in METRICS.items()}


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Each metric, and the share of the way from local to central, seed by seed and as a mean."""
    print(f"| row | {' | '.join(f'{name} | of the way' for name in METRICS)} |\n|---|{'---|---|' * len(METRICS)}")
    for row, runs in found.items():
        cells = []
        for name in METRICS:
            cells.append(" ".join(f"{run[name]:.3f}" for run in runs))
            ends = zip(runs, found["local"], found["central"], strict=True)
            way = [(run[name] - low[name]) / (high[name] - low[name]) for run, low, high in ends]
            cells.append(" ".join(f"{100 * w:.0f} %" for w in way) + f", mean {100 * statistics.mean(way):.0f} %")
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="local and central always")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of all runs")
    given = parser.parse_args()
    rows = [row for row in ROWS if row in given.rows or row in ("local", "central")]
    table({row: [measured(row, seed, given.work, given.set) for seed in given.seeds] for row in rows})


if __name__ == "__main__":
    main()
