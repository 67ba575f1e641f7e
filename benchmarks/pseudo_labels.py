"""Pseudo labels: the paper's recipe next to quality, unsure pictures, faces of one photograph and a stable distance.

    python -m benchmarks.pseudo_labels SHARED WORK [--seeds 0,1,2,3,4] [--choose] [--adapt default,separation --folds 3]

SHARED holds models/ and population/. The people of population/ are embedded with a public MobileFaceNet; each seed
deals them to four clients, with at most 40 pictures of each, and every client clusters alone. Pairs of pictures in one
cluster are right where they show one person; pictures without a label count as clusters of their own.

population/ has one face a picture. For `apart` group photographs are made up: a share of a client's pictures is put
together by two, always of two people, which is all that the recipe is given of them.

--choose tries the values of GRID with seeds 100 to 104 instead, from which CHOSEN was taken: the largest F over pairs.
--adapt runs `visard adapt` with these recipes instead, no source, one run for each fold (fold k with seed k), and
compares TAR on the people who were set aside. Finished parts in WORK are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.adapt import FAR, RESAMPLES, hits, prepared
from visard.clustering.cluster import Clustering, Known, cluster
from visard.clustering.quality import quality
from visard.data.faces import FaceSet
from visard.evaluation.verification import draws
from visard.inference.model import load_model
from visard.studies.results import paired

Ints = npt.NDArray[np.int64]
Data = tuple[npt.NDArray[np.float32], Ints, npt.NDArray[np.float32]]  # features, identities, quality
CLIENTS, PICTURES, GROUPED = 4, 40, 0.3
BASE = Clustering(min_size=4)
CHOSEN = {"min_quality": 0.8, "min_separation": 0.0, "apart": 0.4}
GRID = {
    "min_quality": (0.5, 0.6, 0.7, 0.8), "min_separation": (-0.1, 0.0, 0.1, 0.2), "apart": (0.1, 0.2, 0.4, 0.8),
}  # fmt: skip
AS_WRITTEN = {"d": 0.9, "metric": "euclidean", "centre": False}


def recipes() -> dict[str, Clustering]:
    """What is compared; all but the first two are ours on top of the default."""
    one = {name: replace(BASE, **{name: value}) for name, value in CHOSEN.items()}
    return {
        "as written, d = 0.9": replace(BASE, **AS_WRITTEN),
        "default": BASE,
        "quality": one["min_quality"],
        "separation": one["min_separation"],
        "apart": one["apart"],
        "stable": replace(BASE, d="stable"),
        "quality and separation": replace(one["min_quality"], min_separation=CHOSEN["min_separation"]),
        "all": replace(BASE, d="stable", **CHOSEN),
    }


def features_of(shared: Path, work: Path) -> Data:
    """Features of all faces that were found, who they are, and the quality of the pictures; kept in WORK."""
    sites, _ = prepared(shared, work, source=False)
    file = work / "features.npz"
    sets = [FaceSet.open(site) for site in sites]
    if not file.exists():
        model = load_model(shared / "models" / "MobileFaceNet.onnx", input="imagenet")
        np.savez(file, features=np.concatenate([model.embed(faces).features for faces in sets]))
    names = np.concatenate([np.array(faces.names)[faces.identity] for faces in sets])
    score = np.concatenate([faces.quality(np.arange(len(faces))) for faces in sets])
    return np.load(file)["features"], np.unique(names, return_inverse=True)[1], score


def dealt(identity: Ints, seed: int) -> list[Ints]:
    """The rows of each client: people dealt at random, and of each at most PICTURES pictures."""
    rng = np.random.default_rng(seed)
    people = rng.permutation(identity.max() + 1)
    rows = []
    for k in range(CLIENTS):
        of = [rng.permutation(np.flatnonzero(identity == person))[:PICTURES] for person in people[k::CLIENTS]]
        rows.append(np.sort(np.concatenate(of)))
    return rows


def grouped(identity: Ints, share: float, rng: np.random.Generator) -> Ints:
    """Photographs (n,) of two faces each, of two people; -1 for pictures that are of none."""
    photograph = np.full(len(identity), -1, np.int64)
    left = rng.permutation(len(identity))[: int(share * len(identity)) // 2 * 2]
    for number, (a, b) in enumerate(zip(left[::2].tolist(), left[1::2].tolist(), strict=True)):
        if identity[a] != identity[b]:
            photograph[[a, b]] = number
    return photograph


def measured(how: Clustering, data: Data, seed: int) -> dict[str, float]:
    """Means over the clients of a seed."""
    features, identity, score = data
    found = []
    for k, rows in enumerate(dealt(identity, seed)):
        photograph = grouped(identity[rows], GROUPED, np.random.default_rng([seed, k]))
        done = cluster(features[rows], how, known=Known(score[rows], photograph))
        agreement = quality(done.labels, identity[rows])
        known = done.labels >= 0
        merged = sum(
            int(len(set(done.labels[known & (photograph == p)].tolist())) == 1)
            for p in range(photograph.max() + 1) if (known & (photograph == p)).sum() == 2
        )  # fmt: skip
        found.append({
            "precision": agreement.pairwise_precision, "recall": agreement.pairwise_recall,
            "F": agreement.pairwise_f, "kept": float(known.mean()), "clusters": float(done.clusters),
            "photographs merged": float(merged), "d": done.d or 0.0,
        })  # fmt: skip
    return {name: float(np.mean([f[name] for f in found])) for name in found[0]}


def table(values: dict[str, list[dict[str, float]]], against: str) -> None:
    """Means over seeds, and the difference of F to a recipe, paired by seed, with its interval."""
    columns = list(next(iter(values.values()))[0])
    print(f"| recipe | {' | '.join(columns)} | F less that of {against} |\n|{'---|' * (len(columns) + 2)}")
    for name, seeds in values.items():
        cells = []
        for c in columns:
            mean = float(np.mean([s[c] for s in seeds]))
            cells.append(f"{mean:.2f}" if c in ("clusters", "photographs merged", "d") else f"{100 * mean:.1f}")
        ours, theirs = (dict(enumerate(100 * s["F"] for s in values[n])) for n in (name, against))
        gain = paired(ours, theirs)
        wide = "" if gain.low is None else f" ({gain.low:+.1f} to {gain.high:+.1f})"
        shown = "" if name == against else f"{gain.mean:+.1f}{wide}"
        print(f"| {name} | {' | '.join(cells)} | {shown} |", flush=True)


def adapted(shared: Path, work: Path, sites: list[Path], name: str, how: Clustering, fold: str, seed: int) -> Path:
    """One adaptation, by the command that a user gives, with these labels and no class vectors of other sites."""
    out = work / f"{name.replace(' ', '-')}-fold-{fold.replace('/', '-of-')}-seed-{seed}"
    settings = {k: getattr(how, k) for k in ("d", "min_quality", "min_separation")}
    given = [f"method.clustering.{k}={v}" for k, v in settings.items()]
    command = [
        sys.executable, "-c", "from visard.cli import main; main()", "adapt",
        "--model", str(shared / "models" / "MobileFaceNet.onnx"), "--input", "imagenet", "--sites", *map(str, sites),
        "--method", "fedfr-da", "--fold", fold, "--seed", str(seed), "--out", str(out),
        *(part for s in (*given, "method.negatives=none") for part in ("--set", s)),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return out


def compare_tar(shared: Path, work: Path, names: list[str], folds: int) -> None:
    """TAR before and after for each recipe, and after it less that of the first recipe, over people drawn again."""
    sites, _ = prepared(shared, work, source=False)
    people: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for k in range(1, folds + 1):
        for name in names:
            out = adapted(shared, work, sites, name, recipes()[name], f"{k}/{folds}", k)
            one = hits(out)["sites"]
            for i, person in enumerate(one["names"]):
                people[name][person] = [one["totals"][i], *one["before"][i], *one["after"][i]]
    first = np.array(list(people[names[0]].values()))
    drawn = draws(np.random.default_rng(0), len(first), RESAMPLES)
    print(f"| recipe | FAR | before | after | less {names[0]} | 95 % interval |\n|---|---|---|---|---|---|")
    for name in names:
        rows = np.array([people[name][person] for person in people[names[0]]])
        for k, far in enumerate(FAR):
            before, after, base = rows[:, 1 + k], rows[:, 1 + len(FAR) + k], first[:, 1 + len(FAR) + k]
            total, change = rows[:, 0].sum(), (drawn @ (after - base)) / (drawn @ rows[:, 0])
            low, high = np.quantile(change, [0.025, 0.975])
            less = "" if name == names[0] else f"{100 * (after - base).sum() / total:+.2f}"
            shown = "" if name == names[0] else f"{100 * low:+.2f} to {100 * high:+.2f}"
            tar = f"{100 * before.sum() / total:.1f} | {100 * after.sum() / total:.1f}"
            print(f"| {name} | {far:g} | {tar} | {less} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shared", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--choose", action="store_true", help="the values of GRID, with seeds 100 to 104")
    parser.add_argument("--adapt", default="", help="recipes to adapt with, separated by commas")
    parser.add_argument("--folds", type=int, default=3)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.adapt:
        compare_tar(given.shared, given.work, given.adapt.split(","), given.folds)
        return
    data = features_of(given.shared, given.work)
    tried, seeds = recipes(), [int(s) for s in given.seeds.split(",")]
    if given.choose:
        seeds = list(range(100, 105))
        tried = {"default": BASE, "stable": replace(BASE, d="stable")} | {
            f"{name} = {value:g}": replace(BASE, **{name: value}) for name, values in GRID.items() for value in values
        }
    values = {name: [measured(how, data, seed) for seed in seeds] for name, how in tried.items()}
    table(values, "default")
    file = given.work / ("choose.json" if given.choose else "labels.json")
    file.write_text(json.dumps({"seeds": seeds, "values": values}, indent=1))


if __name__ == "__main__":
    main()
