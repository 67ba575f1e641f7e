"""How fast and how hard the synthetic faces are.

    python benchmarks/synthetic_faces.py [--people 300] [--pictures 20] [--minutes 4] [--json FILE]
    python benchmarks/synthetic_faces.py --sheet docs/img/synthetic-faces.png

Speed: pictures a second of 64 x 64 with one and with two processes, and for a second of CPU time, drawing alone and
with the start of its processes: on a busy machine only these two say what two free cores would do (twice as much).
Difficulty, on people that were never trained on: accuracy over balanced pairs at the best threshold
(fitted on one half of the people, measured on the other) of raw pixels (cosine after removing the mean
picture), of a linear map of pixels (LDA) and of the `tiny` network with a CosFace head, trained for some
minutes of CPU time on the first domain, tested there and on the second. Also the closed-set accuracy of a
linear classifier on pixels: training people, new pictures.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from visard.data.augment import to_float
from visard.data.faces import FaceSet
from visard.data.synthetic.sets import SyntheticSpec, make, render_rows
from visard.learning.heads import CosFace
from visard.models import build

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def pair_accuracy(features: Floats, identity: Ints, seed: int = 0, pairs: int = 20000) -> float:
    """Accuracy in percent on half genuine, half impostor pairs of the second half of the people."""
    rng = np.random.default_rng(seed)
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    people = rng.permutation(np.unique(identity))
    halves = people[: len(people) // 2], people[len(people) // 2 :]
    scores, same = [], []
    for half in halves:
        rows = np.flatnonzero(np.isin(identity, half))
        a, b = rng.choice(rows, pairs), rng.choice(rows, pairs)
        by_id = {i: rows[identity[rows] == i] for i in half}
        mates = np.array([rng.choice(by_id[i]) for i in identity[a[: pairs // 2]]])
        b[: pairs // 2] = mates
        keep = a != b
        scores.append((unit[a] * unit[b]).sum(axis=1)[keep])
        same.append((identity[a] == identity[b])[keep])
    order = np.sort(scores[0])[:: max(1, len(scores[0]) // 500)]
    balanced = [(scores[0][same[0]] >= t).mean() + (scores[0][~same[0]] < t).mean() for t in order]
    best = order[int(np.argmax(balanced))]
    return float(50 * ((scores[1][same[1]] >= best).mean() + (scores[1][~same[1]] < best).mean()))


def small(images: NDArray[np.uint8]) -> Floats:
    """Pixels at 16 x 16, flat, 0..1: as much detail as a linear map can use here."""
    n, s = images.shape[:2]
    cell = s // 16
    cut = images[:, : 16 * cell, : 16 * cell].reshape(n, 16, cell, 16, cell, 3)
    return np.asarray(cut.mean(axis=(2, 4)).reshape(n, -1) / 255, dtype=np.float32)


def train(images: NDArray[np.uint8], identity: Ints, minutes: float, seed: int) -> tuple[torch.nn.Module, int]:
    """The tiny network after `minutes` of this process's CPU time, and the epochs it took."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = build("tiny", size=images.shape[1])
    head = CosFace(int(identity.max()) + 1, 128, scale=24.0, margin=0.2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    labels, clock, epochs = torch.from_numpy(identity), time.process_time(), 0
    while (used := (time.process_time() - clock) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * used))
        for rows in np.array_split(rng.permutation(len(images)), max(1, len(images) // 128)):
            x = to_float(images[rows])
            x = torch.where((torch.rand(len(rows)) < 0.5)[:, None, None, None], x.flip(3), x)
            optimizer.zero_grad()
            head(model(x), labels[rows]).backward()
            optimizer.step()
        epochs += 1
    return model.eval(), epochs


@torch.no_grad()
def embed(model: torch.nn.Module, images: NDArray[np.uint8]) -> Floats:
    """Features of all pictures, each with its mirror image."""
    parts = (to_float(images[k : k + 256]) for k in range(0, len(images), 256))
    return np.concatenate([(model(x) + model(x.flip(3))).numpy() for x in parts])


def speed(pictures: int) -> dict[str, float]:
    """Pictures a second: wall clock with 1 and 2 processes; per CPU second in this process and in two workers."""
    spec = SyntheticSpec(identities=max(1, pictures // 20))
    render_rows(spec, np.arange(32))
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        render_rows(spec, np.arange(256))
        best = min(best, time.process_time() - start)
    out = {"per_cpu_second": 256 / best}
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, 2):
            start = time.perf_counter()
            make(spec, Path(folder) / str(workers), workers=workers)
            out[f"processes_{workers}"] = spec.count / (time.perf_counter() - start)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        out["per_cpu_second_with_start"] = spec.count / (used.ru_utime + used.ru_stime)
    return out


def difficulty(people: int, pictures: int, minutes: float, seed: int) -> dict[str, float]:
    """Pair accuracies in percent; the last quarter of each domain's people is never trained on."""
    with tempfile.TemporaryDirectory() as folder:
        spec = SyntheticSpec(2 * people, pictures, domains=("north", "south"), seed=seed)
        faces = FaceSet.open(make(spec, Path(folder) / "faces"))
        images, identity = np.array(faces.images), faces.identity.astype(np.int64)
    known = people * 3 // 4
    training = identity < known
    tests = {"north": (identity >= known) & (identity < people), "south": identity >= people + known}
    out: dict[str, float] = {}
    pixels = small(images)
    centred = pixels - pixels[training].mean(axis=0)
    new = training & (np.arange(len(identity)) % pictures >= pictures * 3 // 4)
    linear = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1)
    linear.fit(pixels[training & ~new], identity[training & ~new])
    out["linear_closed_set"] = 100 * float((linear.predict(pixels[new]) == identity[new]).mean())
    project = LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.1, n_components=64)
    project.fit(pixels[training], identity[training])
    model, epochs = train(images[training], identity[training], minutes, seed)
    out["epochs"] = epochs
    for name, rows in tests.items():
        out[f"pixels_{name}"] = pair_accuracy(centred[rows], identity[rows])
        out[f"lda_{name}"] = pair_accuracy(project.transform(pixels[rows]).astype(np.float32), identity[rows])
        out[f"network_{name}"] = pair_accuracy(embed(model, images[rows]), identity[rows])
    return out


def sheet(path: Path, people: int = 5, pictures: int = 10, size: int = 72) -> None:
    """Contact sheet: a row for each person, a column for each picture, the first half north, the second south."""
    spec = SyntheticSpec(2 * people, pictures, size, domains=("north", "south"), seed=296)
    images = render_rows(spec, np.arange(spec.count))[0].reshape(2 * people, pictures, size, size, 3)
    rows = [np.concatenate(row, axis=1) for row in images]
    rows.insert(people, np.full((6, pictures * size, 3), 255, dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).quantize(256).save(path, optimize=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=300, help="per domain")
    parser.add_argument("--pictures", type=int, default=20, help="per person")
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU minutes of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--sheet", type=Path, default=None, help="only draw the contact sheet of the documentation")
    args = parser.parse_args()
    if args.sheet is not None:
        sheet(args.sheet)
        return
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"speed": speed(4000)}
    for name, value in figures["speed"].items():
        print(f"{name:26s} {value:8.0f} pictures a second")
    figures["difficulty"] = difficulty(args.people, args.pictures, args.minutes, args.seed)
    for name, value in figures["difficulty"].items():
        print(f"{name:26s} {value:8.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
