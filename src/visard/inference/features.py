"""Features of pictures on disk: a `.npy` matrix, and a JSON manifest that names the pictures and the model."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from visard.clustering.cluster import Clustering, Clusters, Known, cluster
from visard.clustering.quality import counts, quality
from visard.data.faces import FaceView
from visard.data.listing import printable
from visard.data.storage import map_npy
from visard.errors import UsageError, VisardError
from visard.evaluation.arrays import unit_rows
from visard.files import file_digest, mapping, read_json, replacing, write_atomically, write_json
from visard.inference.model import Data, FaceModel, Pictures, Progress, embed, in_parts, open_pictures
from visard.inference.photos import Photos, framing

VERSION = 1


def manifest_path(path: Path) -> Path:
    """features.npy -> features.json."""
    return path.with_suffix(".json")


def write_features(
    model: FaceModel,
    source: Data | Pictures | Sequence[str | Path],
    path: Path,
    *,
    align: str | None = None,
    flip: bool = False,
    unit: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Embed a face set, an array or photographs (see `FaceModel.embed`) into `path` and describe it beside it.

    Both files appear when all is done. `flip` adds the features of the mirrored picture, `unit` scales the sum to
    length one. Returns the manifest, which has the length of each feature before that (`norm`).
    """
    if path.suffix != ".npy":
        raise UsageError(f"{path}: features are written as .npy")
    opened = open_pictures(source)
    if line := model.resizes(opened):
        say(line)
    data: dict[str, Any] = {"fingerprint": None}
    identity, names = [], list[str]()
    if isinstance(opened, FaceView):
        faces = opened.faces
        parts = in_parts(model, opened, flip, progress)
        data = {"name": faces.path.name, "fingerprint": faces.fingerprint(), "pictures": len(faces)}
        identity, names = opened.identity.tolist(), list(faces.names)
    elif isinstance(opened, np.ndarray):
        parts = iter([embed(model, opened, flip=flip)])
        data |= {"name": Path(str(source)).name if isinstance(source, str | Path) else "array"}
    else:
        data |= {"name": opened.name, "align": align or model.align, "files": [], "skipped": []}
        parts = _of_photos(model, opened, data, flip, say, progress)
    norm: list[float] = []
    shape, sha256 = _write(path, parts, unit, norm)
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
        "data": data,
        "identity": identity,
        "names": names,
        "norm": norm,
    }
    write_json(manifest_path(path), manifest)
    return manifest


def _of_photos(
    model: FaceModel,
    photos: Photos,
    data: dict[str, Any],
    flip: bool,
    say: Callable[[str], None],
    progress: Progress | None,
) -> Iterator[npt.NDArray[np.float32]]:
    """The features of photographs, some at a time; `data` gets their files, and those that were skipped."""
    with closing(photos):
        for files, squares, skipped, _ in photos.squares(framing(data["align"], say), model.size, progress):
            data["files"] += map(printable, files)
            data["skipped"] += [[printable(file), reason] for file, reason in skipped]
            yield embed(model, squares, flip=flip)
    if not data["files"]:
        file, reason = data["skipped"][0]
        raise UsageError(f"{photos.name}: not one of {len(data['skipped'])} pictures could be used ({file}: {reason})")


def _write(
    path: Path, parts: Iterator[npt.NDArray[np.float32]], unit: bool, norm: list[float]
) -> tuple[tuple[int, int], str]:
    """Shape and digest of the file that the parts become, lengths go to `norm`; an old description of the file goes."""
    rows = width = 0
    with replacing(path) as beside:
        with beside.open("wb") as file:
            for found in parts:
                if not width:
                    width = found.shape[1]
                    _head(file, 0, width)
                norm += np.linalg.norm(found, axis=1).round(4).tolist()
                found = unit_rows(found) if unit and len(found) else np.ascontiguousarray(found, np.float32)
                file.write(found.astype("<f4", copy=False).tobytes())
                rows += len(found)
            file.seek(0)
            _head(file, rows, width)
        manifest_path(path).unlink(missing_ok=True)  # never an old description of a new file
        sha256 = file_digest(beside)
    return (rows, width), sha256


def _head(file: IO[bytes], rows: int, width: int) -> None:
    """The header of a .npy file, of the same length whatever the number of rows: NumPy leaves room for all digits."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})


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


@dataclass(frozen=True)
class Vectors:
    """The input of clustering: features (n, D), with identity and file of each row where they are known."""

    features: npt.NDArray[np.float32]
    identity: npt.NDArray[np.int64] | None = None
    files: tuple[str, ...] = ()
    view: FaceView | None = None  # of the face set that they are of


def read_vectors(path: Path) -> Vectors:
    """Features from a `.npy` file; identities from the manifest that `visard embed` put beside it, if there is one."""
    if not path.is_file():
        raise UsageError(f"no features at {path}")
    features = map_npy(path)
    if features.ndim != 2 or features.dtype.kind != "f" or len(features) < 2:
        raise UsageError(f"{path} holds {features.dtype} {features.shape}: needs two rows of numbers or more")
    return Vectors(np.asarray(features, np.float32), *_described(manifest_path(path), len(features)))


def _described(path: Path, rows: int) -> tuple[npt.NDArray[np.int64] | None, tuple[str, ...]]:
    """Identity and file of each row from a manifest, if there is one with these entries."""
    if not path.is_file():
        return None, ()
    manifest = read_json(path)
    known = manifest.get("identity", []) if isinstance(manifest, dict) else None
    if not isinstance(known, list) or any(type(number) is not int or abs(number) >= 2**62 for number in known):
        raise VisardError(f"{path} is no manifest of features: its identities are not a list of whole numbers")
    if known and len(known) != rows:
        raise VisardError(f"{path} knows {len(known)} rows, the features have {rows}")
    files = mapping(manifest.get("data")).get("files") if isinstance(manifest, dict) else None
    named = isinstance(files, list) and len(files) == rows and all(isinstance(file, str) for file in files)
    return np.asarray(known, np.int64) if known else None, tuple(files) if named and files else ()


def vectors_of(features: npt.NDArray[np.float32], view: FaceView) -> Vectors:
    """The features of a view of a face set."""
    return Vectors(features, view.identity, tuple(view.faces.file(int(row)) for row in view.index), view)


def label(vectors: Vectors, settings: Clustering) -> tuple[Clusters, dict[str, Any]]:
    """Cluster, and say how: settings, counts, quality where identities are known, seconds; plain values."""
    people = None if vectors.identity is None else len(np.unique(vectors.identity))
    begun = time.perf_counter()
    known = None if vectors.view is None else Known.of(vectors.view, settings)
    found = cluster(vectors.features, settings, people, known)
    return found, {
        "settings": asdict(settings) | {"d": str(settings.d)},
        "d": found.d if found.d is not None and math.isfinite(found.d) else None,
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
