"""Which pictures to reject: what the false non-match rate becomes without those of least quality.

    python -m benchmarks.quality [--photos ../shared/data/photos] [--population ../shared/data/population] [--json FILE]

Photographs are imported with YuNet and embedded with a public MobileFaceNet. The threshold is that of FMR 1 % over
all pictures and stays; then the 10 % of pictures with the least score are left out, and FNMR is the share of genuine
pairs among the others that do not reach it. Scores: the length of the feature, the quality that an import stores, its
parts alone, and all of them multiplied. Scores were chosen on one half of the people, figures are of the other half.
Intervals are of people drawn with replacement: 95 % of FNMR, and of its difference to rejecting nothing in the same
draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import visard
from visard.data.detection import QUALITY
from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.evaluation.grid import Grid
from visard.evaluation.scores import stream_roc
from visard.evaluation.verification import draws, genuine_hits, interval

FMR, REJECTED, DRAWS = 0.01, 0.1, 2000
HALVES = 5  # seed that parts the people
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """FNMR after rejecting by a score, and its difference to rejecting nothing, each with an interval."""

    name: str
    fnmr: float
    low: float
    high: float
    difference: tuple[float, float] | None


def scores_of(norm: Doubles, quality: Doubles) -> dict[str, Doubles]:
    """What pictures may be rejected by, larger is better; the last as earlier versions computed it."""
    column = dict(zip(QUALITY, quality.T.astype(np.float64), strict=True))
    parts = np.minimum(1, column["eyes"] / 30) * np.minimum(1, column["sharpness"] / 100) * column["frontal"]
    return {
        "length of the feature": norm,
        "quality of the picture": column["score"],
        "confidence alone": column["confidence"],
        "confidence, eyes, sharpness and pose": column["confidence"] * np.cbrt(parts),
    }


def rejecting(
    features: npt.NDArray[np.float32], identity: npt.NDArray[np.int64], scores: dict[str, Doubles],
    rejected: float = REJECTED, fmr: float = FMR, bootstrap: int = DRAWS, seed: int = 0,
) -> list[Line]:  # fmt: skip
    """A line for rejecting nothing and one for each score; draws are the same for all."""
    (point,) = stream_roc(features, identity, far=(fmr,)).tar
    people = np.unique(identity)
    weights = np.vstack([np.ones((1, len(people))), draws(np.random.default_rng(seed), len(people), bootstrap)])

    def rates(kept: npt.NDArray[np.bool_]) -> Doubles:
        missed, pairs = np.zeros((2, len(people)))
        for place, person in enumerate(people):
            own = features[kept & (identity == person)]
            if len(own) > 1:
                hits, totals = genuine_hits(Grid.build(own, np.zeros(len(own), np.int64)), np.array([point.threshold]))
                missed[place], pairs[place] = totals[0] - hits[0, 0], totals[0]
        below = weights @ pairs
        return np.divide(weights @ missed, below, out=np.full(len(weights), np.nan), where=below > 0)

    every = rates(np.ones(len(identity), bool))
    lines = []
    for name, score in {"nothing": None, **scores}.items():
        found = every
        if score is not None:
            kept = np.ones(len(score), bool)
            kept[np.argsort(score, kind="stable")[: round(rejected * len(score))]] = False
            found = rates(kept)
        spread, apart = interval(found[1:], "identity"), interval(found[1:] - every[1:], "identity")
        difference = None if score is None else (apart.low, apart.high)
        lines.append(Line(name, float(found[0]), spread.low, spread.high, difference))
    return lines


def measured(faces: FaceSet, model: visard.FaceModel) -> tuple[str, list[Line]]:
    """What was tested on, in words, and the lines."""
    view = faces.all()
    people = np.random.default_rng(HALVES).permutation(len(faces.names))
    view = view.take(np.isin(view.identity, people[len(people) // 2 :]))
    found = model.embed(view)
    scores = scores_of(found.norm.astype(np.float64), faces.extra("quality")[view.index])
    about = f"{len(view)} pictures of {len(np.unique(view.identity))} people"
    return about, rejecting(found.features, view.identity.astype(np.int64), scores)


def main() -> None:
    shared = Path("../shared/data")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, default=shared / "photos")
    parser.add_argument("--population", type=Path, default=shared / "population")
    parser.add_argument("--model", type=Path, default=shared / "models" / "MobileFaceNet.onnx")
    parser.add_argument("--detector", type=Path, default=shared / "models" / "face_detection_yunet_2026may.onnx")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.model.is_file() or not given.detector.is_file():
        print("no model or no detector file: name them with --model and --detector")
        return
    model, everything = visard.load_model(given.model, input="imagenet"), {}
    with tempfile.TemporaryDirectory() as work:
        for name, folder, domains in (("photos", given.photos, True), ("population", given.population, False)):
            if not folder.is_dir():
                print(f"{name}: no such folder {folder}")
                continue
            more = {"domains": True} if domains else {}
            made = import_faces("folder", folder, Path(work) / name, detector=str(given.detector), **more)
            about, lines = measured(FaceSet.open(made.path), model)
            print(f"{name}, {about}: FNMR at FMR {FMR:.0%}, {REJECTED:.0%} rejected by")
            for line in lines:
                text = f"{line.fnmr:7.1%} ({line.low:.1%} to {line.high:.1%})"
                if line.difference is not None:
                    text += f", {100 * line.difference[0]:+.1f} to {100 * line.difference[1]:+.1f} points"
                print(f"  {line.name:40} {text}")
            everything[name] = {"about": about, "lines": [asdict(line) for line in lines]}
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
