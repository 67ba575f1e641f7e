"""Named tests of a face set from the features of all its pictures; the arrays' own functions are beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.data.layout import array_path
from visard.data.pairs import ARRAY, Pairs, load_pairs
from visard.data.templates import load_galleries, load_template_pairs, load_templates, splits
from visard.errors import UsageError, VisardError
from visard.evaluation.galleries import Search, search_galleries
from visard.evaluation.ijb import FAR, Pooled, Switches, pool, verify_templates
from visard.evaluation.lfw import lfw
from visard.evaluation.rfw import rfw
from visard.evaluation.scores import Roc
from visard.evaluation.verification import verify_pairs

Features = npt.NDArray[np.float32]
FLIPPED = ("lfw", "rfw", "ijb")  # features are summed with those of the mirrored picture, unless a switch says no


def lfw_figures(features: Features, faces: FaceSet, listed: Path | None, rates: tuple[float, ...]) -> dict[str, Any]:
    """Ten folds over the pairs of the set, or over those that the file `listed` names."""
    pairs = _pairs(faces, listed)
    return lfw(features, pairs.first, pairs.second, pairs.same, pairs.fold, rates=rates).to_dict()


def list_figures(
    features: Features, faces: FaceSet, listed: Path, rates: tuple[float, ...], bootstrap: int, seed: int
) -> dict[str, Any]:
    """1:1 figures with confidence intervals over the pairs that a file names."""
    pairs = _pairs(faces, listed)
    order = np.argsort(pairs.fold, kind="stable")
    rows = np.stack([pairs.first[order], pairs.second[order]], axis=1)
    folds = min(10, len(rows))
    return verify_pairs(
        features, rows, pairs.same[order], far=rates, folds=folds, bootstrap=bootstrap, seed=seed
    ).to_dict()


def rfw_figures(features: Features, faces: FaceSet, listed: Path | None, rates: tuple[float, ...]) -> dict[str, Any]:
    """Each domain of the set (the races of RFW) on its own pairs, and all of them at one threshold."""
    pairs = _pairs(faces, listed)
    group = faces.domain[pairs.first].astype(np.int64)
    mixed = group != faces.domain[pairs.second]
    if mixed.any():
        raise VisardError(f"{faces.path.name}: pair {int(np.argmax(mixed))} is of two domains")
    return rfw(features, pairs.first, pairs.second, pairs.same, group, faces.domains, pairs.fold, fmr=rates).to_dict()


def ijb_figures(
    features: Features, faces: FaceSet, switches: Switches, rates: tuple[float, ...] | None = None
) -> dict[str, Any]:
    """1:1 and 1:N of every split: one of IJB-B and IJB-C, ten of IJB-A with mean and standard deviation over them."""
    one: list[Roc] = []
    many: list[Search] = []
    for split in splits(faces):
        pooled = _pool(features, faces, split, switches)
        if array_path(faces.path, f"template_pairs_{split}").is_file():
            pairs = load_template_pairs(faces, split)
            one.append(verify_templates(pooled, pairs.first, pairs.second, pairs.same, far=rates or FAR))
        if faces.info.get("ijb", {}).get("galleries"):
            found = load_galleries(faces, split)
            galleries = {name: (g.template, g.subject) for name, g in found.galleries.items()}
            many.append(search_galleries(pooled, galleries, (found.probes.template, found.probes.subject)))
    if not one and not many:
        raise UsageError(f"{faces.path.name} has neither pairs of templates nor galleries")
    figures: dict[str, list[float | None]] = {}
    for roc in one:
        for point in roc.tar:
            figures.setdefault(f"tar@far={point.far:g}", []).append(point.tar)
    for search in many:
        for rank, share in search.rank.items():
            figures.setdefault(f"rank{rank}", []).append(share)
        for rate, tpir in search.tpir.items():
            figures.setdefault(f"tpir@fpir={rate:g}", []).append(tpir)
    return {
        "switches": {"N": switches.N, "D": switches.D, "F": switches.F},
        "mean": {name: _mean(values) for name, values in figures.items()},
        "std": {name: _std(values) for name, values in figures.items()},
        "verification": [roc.to_dict() for roc in one],
        "identification": [search.to_dict() for search in many],
    }


def _pool(features: Features, faces: FaceSet, split: int, switches: Switches) -> Pooled:
    t = load_templates(faces, split)
    score = t.score if switches.D else None
    return pool(features, t.template, t.media, row=t.row, score=score, keep_norm=switches.N)


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _std(values: list[float | None]) -> float | None:
    """Standard deviation over splits (ddof 1), where there are several."""
    known = [v for v in values if v is not None]
    return float(np.std(known, ddof=1)) if len(known) == len(values) > 1 else None


def _pairs(faces: FaceSet, listed: Path | None) -> Pairs:
    if listed is None and not array_path(faces.path, ARRAY).is_file():
        raise UsageError(f"{faces.path.name} carries no pairs: import it with some, or name a list of them (--list)")
    return load_pairs(faces, listed)
