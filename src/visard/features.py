"""Features of a face set on disk: a `.npy` matrix, and a JSON manifest that says of what and by which model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.api import FaceModel, embed
from visard.data.faces import FaceView
from visard.errors import UsageError, VisardError
from visard.evaluation.inputs import unit_rows
from visard.files import read_json, write_json
from visard.models.export import written

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
    with written(path) as beside:
        with beside.open("wb") as file:
            for number, found in enumerate(pieces(model, view, flip=flip, progress=progress)):
                found = unit_rows(found) if unit else np.ascontiguousarray(found, np.float32)
                if not number:
                    shape = (len(view), found.shape[1])
                    kind = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, kind)
                file.write(found.astype("<f4", copy=False).tobytes())
        manifest_path(path).unlink(missing_ok=True)  # never an old description of a new file
        manifest = _describe(model, view, beside, shape, flip, unit)
    write_json(manifest_path(path), manifest)
    return manifest


def _describe(
    model: FaceModel, view: FaceView, file: Path, shape: tuple[int, int], flip: bool, unit: bool
) -> dict[str, Any]:
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return {
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
    try:
        features: npt.NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise VisardError(f"{path} is damaged or cut short: {' '.join(str(error).split())[:120]}") from None
    if features.shape != rows or features.dtype != np.float32 or len(features) != len(view):
        raise VisardError(f"{path} does not fit its manifest: {features.dtype} {features.shape}")
    return features
