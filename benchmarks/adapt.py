"""`visard adapt` with a public recogniser on people of another population: TAR before and after, target and source.

    python -m benchmarks.adapt SHARED WORK [--seeds 0,1,2,3,4] [--folds 3] [--set method.negatives=none]

SHARED holds models/, population/ and celeba/. The people of population/ are four sites (person n at site n mod 4);
their names are used for tests alone. Each of `folds` runs tests on another part of them, so that every person is unseen
once. Finished adaptations in WORK are kept: the same command goes on. Writes WORK/adapt.json and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.sources.importing import import_faces
from visard.evaluation.grid import Grid
from visard.evaluation.scores import Limits, stream_roc
from visard.evaluation.verification import draws, genuine_hits
from visard.runs.before_after import BeforeAndAfter

FAR = (0.01, 0.001)
SITES = 4
SOURCE_PEOPLE = 1200  # of CelebA, with eight pictures or more
SIZE = 112
RESAMPLES = 10_000


def prepared(shared: Path, work: Path, source: bool = True) -> tuple[list[Path], Path]:
    """Four face sets of the population and one of the source, if it is needed, imported once."""
    people = sorted(p for p in (shared / "population").iterdir() if p.is_dir())
    sites = []
    for k in range(SITES):
        folder, site = work / "folders" / f"site-{k}", work / "sets" / f"site-{k}"
        sites.append(site)
        if (site / "faces.json").is_file():
            continue
        for person in people[k::SITES]:
            (folder / person.name).mkdir(parents=True, exist_ok=True)
            for picture in person.iterdir():
                target = folder / person.name / picture.name
                if not target.exists():
                    target.write_bytes(picture.read_bytes())
        detector = shared / "models" / "face_detection_yunet_2026may.onnx"
        import_faces("folder", folder, site, size=SIZE, detector=str(detector))
    known = work / "sets" / "celeba"
    if source and not (known / "faces.json").is_file():
        import_faces("celeba", shared / "celeba", known, size=SIZE, min_images=8, limit_identities=SOURCE_PEOPLE)
    return sites, known


def adapted(shared: Path, work: Path, sites: list[Path], source: Path, fold: str, seed: int, more: list[str]) -> Path:
    """One adaptation, by the command that a user gives."""
    out = work / f"fold-{fold.replace('/', '-of-')}-seed-{seed}"
    command = [
        sys.executable, "-c", "from visard.cli import main; main()", "adapt",
        "--model", str(shared / "models" / "MobileFaceNet.onnx"), "--input", "imagenet",
        "--sites", *map(str, sites), "--source", str(source), "--method", "fedfr-da",
        "--fold", fold, "--seed", str(seed), "--out", str(out), *more,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return out


def hits(out: Path) -> dict[str, dict[str, Any]]:
    """By test: names of the people, genuine pairs of each, and how many were accepted before and after at each FAR."""
    both = BeforeAndAfter.of_run(out / "run", FAR)
    found: dict[str, dict[str, Any]] = {}
    for name, view in both.world.benchmarks.items():
        here: dict[str, Any] = {"names": [view.faces.names[i] for i in np.unique(view.identity)]}
        for when, features in zip(("before", "after"), both.features(view), strict=True):
            roc = stream_roc(features, view.identity, far=FAR)
            grid = Grid.build(features, view.identity, Limits().tile)
            reached, totals = genuine_hits(grid, np.array([point.threshold for point in roc.tar]))
            here[when], here["totals"] = reached.tolist(), totals.tolist()
        found[name] = here
    return found


def pooled(runs: list[dict[str, dict[str, Any]]], test: str) -> list[dict[str, float]]:
    """TAR over the people of all folds, each with the threshold of its fold, mean over seeds; people are resampled."""
    sums: dict[str, list[Any]] = {}
    for one in (run[test] for run in runs):
        for k, name in enumerate(one["names"]):
            sums.setdefault(name, []).append([one["totals"][k], *one["before"][k], *one["after"][k]])
    table = np.array([np.mean(rows, axis=0) for rows in sums.values()])
    drawn = draws(np.random.default_rng(0), len(table), RESAMPLES)
    rows = []
    for k, far in enumerate(FAR):
        before, after = table[:, 1 + k], table[:, 1 + len(FAR) + k]
        changes = (drawn @ (after - before)) / (drawn @ table[:, 0])
        total = table[:, 0].sum()
        low, high = np.quantile(changes, [0.025, 0.975])
        rows.append({"far": far, "people": len(table), "before": before.sum() / total, "after": after.sum() / total,
                     "low": float(low), "high": float(high)})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shared", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting, as of visard adapt (may repeat)")
    given = parser.parse_args()
    more = [part for setting in given.set for part in ("--set", setting)]
    sites, source = prepared(given.shared, given.work)
    runs: dict[int, list[dict[str, dict[str, Any]]]] = {}
    costs = []
    for seed in (int(s) for s in given.seeds.split(",")):
        for fold in range(1, given.folds + 1):
            out = adapted(given.shared, given.work, sites, source, f"{fold}/{given.folds}", seed, more)
            runs.setdefault(seed, []).append(hits(out))
            record = json.loads((out / "adapt.json").read_text())
            costs.append({"seconds": record["seconds"]["all"], **record["cost"], "groups": record["groups"]})
        done = [run for found in runs.values() for run in found]
        results = {test: pooled(done, test) for test in ("sites", "source")}
        seeds = {s: {test: pooled(found, test) for test in ("sites", "source")} for s, found in runs.items()}
        (given.work / "adapt.json").write_text(json.dumps({"all": results, "seeds": seeds, "costs": costs}, indent=1))
        print(f"\nseeds {list(runs)}\n| tested on | FAR | before | after | points | 95 % interval |")
        print("|---|---|---|---|---|---|")
        for test, rows in results.items():
            for row in rows:
                print(
                    f"| {test}, {row['people']} people | {row['far']:g} | {100 * row['before']:.1f} | "
                    f"{100 * row['after']:.1f} | {100 * (row['after'] - row['before']):+.1f} | "
                    f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f} |", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
