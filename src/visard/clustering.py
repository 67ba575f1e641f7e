"""Cluster the features of a face set or of a file: labels as CSV, and how good they are."""

from __future__ import annotations

import csv
import io
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceView
from visard.errors import UsageError, VisardError
from visard.evaluation.clusters import counts, quality
from visard.features import manifest_path
from visard.files import read_json, write_atomically, write_json
from visard.ops.cluster import Clustering, Clusters, cluster

PAPER_D = {"FedFR-S": 1.2, "FedFR-L": 0.9}  # of C-FINCH in Zhuang et al. 2021, on other features


@dataclass(frozen=True)
class Vectors:
    """What is clustered: features (n, D), and of each row its identity and its file where they are known."""

    features: npt.NDArray[np.float32]
    identity: npt.NDArray[np.int64] | None = None
    files: tuple[str, ...] = ()


def read_vectors(path: Path) -> Vectors:
    """Features from a `.npy` file; identities from the manifest that `visard embed` put beside it, if there is one."""
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(f"no features at {path}") from None
    except (ValueError, OSError, EOFError) as error:
        raise VisardError(f"{path} is no readable .npy file: {' '.join(str(error).split())[:120]}") from None
    if features.ndim != 2 or features.dtype.kind != "f" or len(features) < 2:
        raise UsageError(f"{path} holds {features.dtype} {features.shape}: needs two rows of numbers or more")
    return Vectors(np.asarray(features, np.float32), _identities(manifest_path(path), len(features)))


def _identities(path: Path, rows: int) -> npt.NDArray[np.int64] | None:
    """What a manifest says of each row's identity, if there is one and it says something."""
    if not path.is_file():
        return None
    manifest = read_json(path)
    known = manifest.get("identity", []) if isinstance(manifest, dict) else None
    if not isinstance(known, list) or any(type(number) is not int for number in known):
        raise VisardError(f"{path} is no manifest of features: its identities are not a list of whole numbers")
    if known and len(known) != rows:
        raise VisardError(f"{path} knows {len(known)} rows, the features have {rows}")
    return np.asarray(known, np.int64) if known else None


def vectors_of(features: npt.NDArray[np.float32], view: FaceView) -> Vectors:
    """The features of a view of a face set."""
    return Vectors(features, view.identity, tuple(view.faces.file(int(row)) for row in view.index))


def label(vectors: Vectors, settings: Clustering) -> tuple[Clusters, dict[str, Any]]:
    """Cluster, and say how: settings, counts, quality where identities are known, seconds; plain values."""
    people = None if vectors.identity is None else len(np.unique(vectors.identity))
    begun = time.perf_counter()
    found = cluster(vectors.features, settings, people)
    report: dict[str, Any] = {
        "settings": asdict(settings) | {"d": str(settings.d)},
        "d": found.d if found.d is not None and math.isfinite(found.d) else None,
        "d_of_the_paper": PAPER_D,
        "oracle": settings.oracle or None,
        "levels": list(found.levels),
        "seconds": time.perf_counter() - begun,
        "counts": asdict(counts(found.labels)),
        "quality": None if vectors.identity is None else quality(found.labels, vectors.identity).to_dict(),
    }
    return found, report


def check_out(path: Path, source: str) -> None:
    """Refuse a place for labels that cannot be written, before anything is computed."""
    if path.suffix != ".csv":
        raise UsageError(f"{path}: labels are written as .csv")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    taken = manifest_path(Path(source)) if source.endswith(".npy") else None
    if taken is not None and taken.resolve() == path.with_suffix(".json").resolve():
        raise UsageError(
            f"--out {path}: the report beside it would be {taken.name}, which is where {source} is described"
        )


def write_labels(path: Path, found: Clusters, vectors: Vectors, report: dict[str, Any]) -> Path:
    """`labels.csv` with row, label and, where known, the file; returns the path of the JSON report beside it."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row", "label", "file"] if vectors.files else ["row", "label"])
    for row, number in enumerate(found.labels.tolist()):
        name = number if number >= 0 else ""
        table.writerow([row, name, vectors.files[row]] if vectors.files else [row, name])
    write_atomically(path, text.getvalue())
    write_json(path.with_suffix(".json"), report)
    return path.with_suffix(".json")
