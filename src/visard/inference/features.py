"""Features of a face set on disk: a `.npy` matrix, and a JSON manifest that says of what and by which model."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.clustering.cluster import Clustering, Clusters, cluster
from visard.clustering.quality import counts, quality
from visard.data.faces import FaceView
from visard.data.storage import map_npy
from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import unit_rows
from visard.files import read_json, replacing, write_atomically, write_json
from visard.inference.model import FaceModel, embed

VERSION = 1
ROWS = 2048  # pictures embedded between two writes


def manifest_path(path: Path) -> Path:
    """features.npy -> features.json."""
    return path.with_suffix(".json")


def pieces(
    model: FaceModel, view: FaceView, *, flip: bool = False, progress: Callable[[int], None] | None = None
) -> Iterator[npt.NDArray[np.float32]]:
    """The features of a view, some rows at a time; `progress` hears how many there are so far."""
    for start in range(0, len(view), ROWS):
        end = min(start + ROWS, len(view))
        yield embed(model, view.take(np.arange(start, end)), flip=flip)
        if progress is not None:
            progress(end)


def write_features(
    model: FaceModel,
    view: FaceView,
    path: Path,
    *,
    flip: bool = False,
    unit: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Embed a view into `path` and describe it; both files appear when all is done. Returns the manifest.

    `flip` adds the features of the mirrored picture, `unit` scales the sum to length one.
    """
    if path.suffix != ".npy":
        raise UsageError(f"{path}: features are written as .npy")
    with replacing(path) as beside:
        with beside.open("wb") as file:
            for number, found in enumerate(pieces(model, view, flip=flip, progress=progress)):
                found = unit_rows(found) if unit else np.ascontiguousarray(found, np.float32)
                if not number:
                    shape = (len(view), found.shape[1])
                    head = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, head)
                file.write(found.astype("<f4", copy=False).tobytes())
        manifest_path(path).unlink(missing_ok=True)  # never an old description of a new file
        with beside.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    manifest = {
        "version": VERSION,
        "rows": shape[0],
        "dimensions": shape[1],
        "normalisation": "unit" if unit else "none",
        "flip": flip,
        "sha256": sha256,
        "model": {
            "file": model.path.name if model.path else None,
            "fingerprint": model.fingerprint,
            **{k: model.spec.get(k) for k in ("model", "embedding", "size", "order", "mean", "std")},
        },
        "data": {"name": view.faces.path.name, "fingerprint": view.faces.fingerprint(), "pictures": len(view.faces)},
        "identity": view.identity.tolist(),
        "names": list(view.faces.names),
    }
    write_json(manifest_path(path), manifest)
    return manifest


def read_features(path: Path, view: FaceView) -> npt.NDArray[np.float32]:
    """The features of a view, mapped from disk; the manifest must say that they are of this set."""
    if not path.is_file():
        raise UsageError(f"no features at {path}")
    manifest = read_json(manifest_path(path))
    try:
        made_of, rows = manifest["data"]["fingerprint"], (manifest["rows"], manifest["dimensions"])
    except (KeyError, TypeError):
        raise VisardError(f"{manifest_path(path)} is no manifest of features") from None
    if made_of != view.faces.fingerprint():
        raise UsageError(f"{path} holds features of {manifest['data'].get('name')}, not of {view.faces.path.name}")
    features = map_npy(path)
    if features.shape != rows or features.dtype != np.float32 or len(features) != len(view):
        raise VisardError(f"{path} does not fit its manifest: {features.dtype} {features.shape}")
    return features


PAPER_D = {"FedFR-S": 1.2, "FedFR-L": 0.9}  # of C-FINCH in Zhuang et al. 2021, on other features


@dataclass(frozen=True)
class Vectors:
    """What is clustered: features (n, D), and of each row its identity and its file where they are known."""

    features: npt.NDArray[np.float32]
    identity: npt.NDArray[np.int64] | None = None
    files: tuple[str, ...] = ()


def read_vectors(path: Path) -> Vectors:
    """Features from a `.npy` file; identities from the manifest that `visard embed` put beside it, if there is one."""
    if not path.is_file():
        raise UsageError(f"no features at {path}")
    features = map_npy(path)
    if features.ndim != 2 or features.dtype.kind != "f" or len(features) < 2:
        raise UsageError(f"{path} holds {features.dtype} {features.shape}: needs two rows of numbers or more")
    return Vectors(np.asarray(features, np.float32), _identities(manifest_path(path), len(features)))


def _identities(path: Path, rows: int) -> npt.NDArray[np.int64] | None:
    """What a manifest says of each row's identity, if there is one and it says something."""
    if not path.is_file():
        return None
    manifest = read_json(path)
    known = manifest.get("identity", []) if isinstance(manifest, dict) else None
    if not isinstance(known, list) or any(type(number) is not int or abs(number) >= 2**62 for number in known):
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
    return found, {
        "settings": asdict(settings) | {"d": str(settings.d)},
        "d": found.d if found.d is not None and math.isfinite(found.d) else None,
        "d_of_the_paper": PAPER_D,
        "oracle": settings.oracle or None,
        "levels": list(found.levels),
        "seconds": time.perf_counter() - begun,
        "counts": asdict(counts(found.labels)),
        "quality": None if vectors.identity is None else asdict(quality(found.labels, vectors.identity)),
    }


def check_out(path: Path, source: str) -> None:
    """Refuse a place for labels that cannot be written, before anything is computed."""
    if path.suffix != ".csv":
        raise UsageError(f"{path}: labels are written as .csv")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    report = path.with_suffix(".json")
    if source.endswith(".npy") and manifest_path(Path(source)).resolve() == report.resolve():
        raise UsageError(f"--out {path}: its report would be {report.name}, which is where {source} is described")


def write_labels(path: Path, found: Clusters, vectors: Vectors, report: dict[str, Any]) -> Path:
    """`labels.csv` with row, label and, where known, the file; returns the path of the JSON report beside it."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row", "label", *(["file"] if vectors.files else [])])
    for row, number in enumerate(found.labels.tolist()):
        table.writerow([row, number if number >= 0 else "", *vectors.files[row : row + 1]])
    write_atomically(path, text.getvalue())
    write_json(path.with_suffix(".json"), report)
    return path.with_suffix(".json")
