"""Face sets on disk, views of some of their pictures, and the federation of clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visard.data.storage import FILES, HEADER, FaceSetWriter, array_path, canonical_json, digest, map_array, read_header
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import LONGEST_NAME

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ClientData", "FaceSet", "FaceSetWriter", "FaceView", "Federation", "Skipped", "describe", "list_sets"]

Rows = npt.NDArray[np.int64]
SAMPLED_PICTURES = 64
SKIPPED = "skipped"  # (S, 3 + A) int32: identity, domain, reason, attributes of each picture that was left out
NO_FACE, LOW_QUALITY, UNREADABLE, TOO_FEW = range(4)  # reasons: TOO_FEW pictures of the person were usable


@dataclass(frozen=True, eq=False)
class Skipped:
    """Pictures of the source that are not in a set. Identities without any picture have numbers beyond its names."""

    identity: npt.NDArray[np.int32]
    domain: npt.NDArray[np.int32]
    reason: npt.NDArray[np.int32]
    attributes: npt.NDArray[np.int32]  # (S, A)


class FaceSet:
    """A folder of pictures with identity, domain, attributes and source file; open it with `FaceSet.open`.

    images (N, size, size, 3) uint8, identity (N,) int32, domain (N,) int16, attributes (N, A) int8 in
    {-1, 0, 1} with 0 = unknown, all mapped read-only from disk: nothing is in memory until it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        header = read_header(self.path)
        n, size = header.count, header.size
        shapes = {"images": (n, size, size, 3), "identity": (n,), "domain": (n,), FILES: (n,)}
        shapes["attributes"] = (n, len(header.attributes))
        arrays = {name: map_array(self.path, name, shape) for name, shape in shapes.items()}
        self.images: npt.NDArray[np.uint8] = arrays["images"]
        # plain views: np.memmap does bookkeeping at every index
        self.identity: npt.NDArray[np.int32] = arrays["identity"].view(np.ndarray)
        self.domain: npt.NDArray[np.int16] = arrays["domain"].view(np.ndarray)
        self.attributes: npt.NDArray[np.int8] = arrays["attributes"].view(np.ndarray)
        self._files: npt.NDArray[np.bytes_] = arrays[FILES].view(np.ndarray)
        self.names, self.domains, self.attribute_names = header.names, header.domains, header.attributes
        self.size, self.info = header.size, header.info
        self._check_names(HEADER)

    def _check_names(self, header: str) -> None:
        for name, numbers, names in (("identity", self.identity, self.names), ("domain", self.domain, self.domains)):
            if not (numbers.min() >= 0 and numbers.max() < len(names)):
                raise VisardError(f"{self.path} is broken: a number in {name}.npy has no name in {header}")

    @classmethod
    def open(cls, path: Path | str) -> "FaceSet":
        """Open the set in folder `path`, checking header, types, shapes and file lengths."""
        return cls(Path(path))

    def __reduce__(self) -> tuple[Callable[[Path], "FaceSet"], tuple[Path]]:
        """Travel to a worker process as a path; the files are mapped again over there."""
        return FaceSet, (self.path,)

    def __len__(self) -> int:
        return len(self.identity)

    def __repr__(self) -> str:
        return f"FaceSet({str(self.path)!r}: {len(self)} pictures of {len(self.names)} identities)"

    @cached_property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """`images` as a plain array (still mapped), which numpy indexes faster."""
        return self.images.view(np.ndarray)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one picture as `read` gives it."""
        return self.pixels.shape[1:]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of the numbers that `read` gives."""
        return self.pixels.dtype

    @cached_property
    def unlabelled(self) -> npt.NDArray[np.bool_]:
        """Which names (identities,) stand for unlabelled pictures."""
        bare = self.info.get("unlabelled")  # of sets that were merged, some without labels
        named = set(bare) if isinstance(bare, list) else set()
        return np.array([self.info.get("labels") is False or name in named for name in self.names], bool)

    @cached_property
    def roles(self) -> npt.NDArray[np.str_]:
        """The role of each identity in a run: clients, public, source or test; see `visard.data.joined`."""
        return np.full(len(self.names), "clients")

    @property
    def synthetic(self) -> bool:
        """Whether the pictures were drawn, so that they may be shown to anyone."""
        return self.info.get("kind") == "synthetic"

    @property
    def align(self) -> str:
        """How its pictures were cut: five (by the five landmarks of the ArcFace template), haar or none."""
        how = str(self.info.get("align", "none"))
        aligned = how == "none" and self.info.get("kind") in ("bin", "recordio")  # such files hold aligned faces
        return "five" if aligned or how in ("five", "landmarks") else "haar" if how == "haar" else "none"

    def file(self, row: int) -> str:
        """The name of the file that picture `row` came from."""
        return bytes(self._files[row]).decode("utf-8", "surrogateescape")

    def attribute(self, name: str) -> npt.NDArray[np.int8]:
        """The column (N,) of one attribute: 1 present, -1 absent, 0 unknown."""
        if name not in self.attribute_names:
            hint = did_you_mean(name, self.attribute_names)
            raise UsageError(f"{self.path.name} has no attribute {name!r}{hint}")
        return self.attributes[:, self.attribute_names.index(name)]

    def extra(self, name: str) -> np.ndarray[Any, Any]:
        """An array that the importer put beside the pictures (mapped, any shape)."""
        named = name.isidentifier() and len(name.encode()) <= LONGEST_NAME  # the name may come from a header
        if not named or not array_path(self.path, name).is_file():
            raise UsageError(f"{self.path.name} has no {name[:LONGEST_NAME]}.npy")
        return map_array(self.path, name, None)

    def quality(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The quality score (n,) of pictures, from 0 to 1; see `visard.data.detection.quality`."""
        table = self.extra("quality")
        if table.ndim != 2 or len(table) != len(self):
            raise UsageError(f"{self.path.name}: quality.npy has no row for each picture")
        return np.asarray(table[rows, 0], np.float32)

    def photographs(self, rows: Rows) -> Rows:
        """Which pictures (n,) were cut out of one photograph: its number, -1 where no other of them is of it.

        Known of sets that were imported with every face of a photograph: their faces have its file in common.
        """
        found = np.full(len(rows), -1, np.int64)
        if self.info.get("every_face") and len(rows):
            files = [self.file(int(row)) for row in rows]
            _, number, counts = np.unique(np.array(files), return_inverse=True, return_counts=True)
            several = counts[number] > 1
            found[several] = np.unique(number[several], return_inverse=True)[1]
        return found

    def skipped(self) -> Skipped | None:
        """The pictures that the importer left out; None where that is not known (sets of older versions)."""
        width = 3 + len(self.attribute_names)
        if not array_path(self.path, SKIPPED).is_file():
            if not self.synthetic and self.info.get("skipped_count") != 0:
                return None
            table = np.zeros((0, width), np.int32)
        else:
            table = np.array(self.extra(SKIPPED))
        fits = table.ndim == 2 and table.shape[1] == width and table.dtype == np.int32
        if not fits or table[:, :3].min(initial=0) < 0 or table[:, 1].max(initial=0) >= len(self.domains):
            raise VisardError(f"{array_path(self.path, SKIPPED)} is no list of skipped pictures of this set")
        return Skipped(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])

    @cached_property
    def _fingerprint(self) -> str:
        rows = np.unique(np.linspace(0, len(self) - 1, SAMPLED_PICTURES).astype(np.int64))
        header = [len(self), self.size, self.names, self.domains, self.attribute_names]
        parts = (self.identity, self.domain, self.attributes[rows], self.pixels[rows])
        return digest(canonical_json(header), *(part.tobytes() for part in parts))[:16]

    def fingerprint(self) -> str:
        """16 hexadecimal digits over names, labels and a sample of the pictures: cheap, the same anywhere."""
        return self._fingerprint

    @property
    def stored(self) -> bool:
        """Whether `read` gives stored activations of the pictures and their mirror images."""
        return False

    def read(self, rows: Rows, mirrored: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        """The input of a network at these rows: pictures, or stored activations, which also know `mirrored` rows."""
        return np.take(self.pixels, rows, axis=0)

    def through(self, x: "Tensor") -> "Tensor":
        """Pictures as floats, or the activations that a trunk computes from them now."""
        return x

    def all(self) -> "FaceView":
        """Every picture, with the identity numbers of the set as labels."""
        identity = self.identity.astype(np.int64)
        return FaceView(self, np.arange(len(self)), identity, np.arange(len(self.names)))


@dataclass(frozen=True, eq=False)
class FaceView:
    """Some pictures of a set, with labels 0 .. n_classes - 1; may be empty.

    index (n,) rows of the set in ascending order, labels (n,), classes (n_classes,): the identity number
    in the set of each label.
    """

    faces: FaceSet
    index: Rows
    labels: Rows
    classes: Rows

    def __post_init__(self) -> None:
        if self.index.shape != self.labels.shape or self.index.ndim != 1:
            raise VisardError(f"view of {self.faces.path.name}: {len(self.index)} rows, {len(self.labels)} labels")
        if len(self.index) and not (self.index[0] >= 0 and self.index[-1] < len(self.faces)):
            raise VisardError(f"view of {self.faces.path.name}: a row is out of range")
        if (np.diff(self.index) < 0).any():
            raise VisardError(f"view of {self.faces.path.name}: rows are not in ascending order")
        if not np.array_equal(self.classes[self.labels], self.identity):
            raise VisardError(f"view of {self.faces.path.name}: labels do not fit the identities")

    @classmethod
    def of(cls, faces: FaceSet, rows: npt.ArrayLike, classes: Rows | None = None) -> "FaceView":
        """The view of `rows`; labels follow `classes` (ascending), by default the identities that occur."""
        index = np.sort(np.asarray(rows, np.int64))
        if len(index) and not (index[0] >= 0 and index[-1] < len(faces)):
            raise VisardError(f"view of {faces.path.name}: a row is out of range")
        identity = faces.identity[index].astype(np.int64)
        classes = np.unique(identity) if classes is None else np.asarray(classes, np.int64)
        if (np.diff(classes) <= 0).any() or not np.isin(identity, classes).all():
            raise VisardError(f"view of {faces.path.name}: classes are not ascending or lack an identity")
        return cls(faces, index, np.searchsorted(classes, identity).astype(np.int64), classes)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def n_classes(self) -> int:
        """How many labels there are, also those without a picture here."""
        return len(self.classes)

    @property
    def labelled(self) -> bool:
        """Whether the pictures have labels."""
        return not self.faces.unlabelled[self.classes].any()

    @property
    def identity(self) -> Rows:
        """The identity number in the set of each picture (n,)."""
        return self.faces.identity[self.index].astype(np.int64)

    @property
    def domain(self) -> npt.NDArray[np.int16]:
        """The domain number of each picture (n,)."""
        return self.faces.domain[self.index]

    @property
    def attributes(self) -> npt.NDArray[np.int8]:
        """The attributes of each picture (n, A)."""
        return self.faces.attributes[self.index]

    def batch(self, rows: npt.ArrayLike, mirrored: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        """Read the pictures at positions `rows` of this view: (len(rows), size, size, 3) uint8.

        A set with stored activations gives these instead, those of mirror images where `mirrored` is true.
        """
        return self.faces.read(self.index[np.asarray(rows, np.int64)], mirrored)

    def take(self, rows: npt.ArrayLike) -> "FaceView":
        """The view of the pictures at positions `rows` (or where a mask is true) with the same labels."""
        chosen = np.asarray(rows)
        chosen = np.flatnonzero(chosen) if chosen.dtype == bool else np.sort(chosen.astype(np.int64))
        return FaceView(self.faces, self.index[chosen], self.labels[chosen], self.classes)


@dataclass(frozen=True, eq=False)
class ClientData:
    """The pictures of one client; label k is the same identity in all three views."""

    train: FaceView
    val: FaceView
    test: FaceView
    parts: Mapping[str, FaceView] = field(default_factory=dict)  # centralised: each client's training pictures

    def __post_init__(self) -> None:
        if not all(np.array_equal(self.train.classes, view.classes) for view in (self.val, self.test)):
            raise VisardError("train, validation and test pictures of a client have different labels")

    @property
    def n_classes(self) -> int:
        """How many identities the client knows."""
        return self.train.n_classes


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients, the test sets of identities that no client has, and the clients that take no part in training."""

    clients: dict[str, ClientData]
    unseen: dict[str, FaceView]
    hold_out: tuple[str, ...]  # clients that take no part in training
    identities: int  # of the whole set
    fingerprint: str
    public: FaceView | None = None  # pictures that every client has

    @property
    def training(self) -> dict[str, ClientData]:
        """The clients that take part in training."""
        return {name: data for name, data in self.clients.items() if name not in self.hold_out}

    def everyone(self) -> FaceView | None:
        """The test pictures of all clients in one view; None if there are none."""
        views = [data.test for data in self.clients.values() if len(data.test)]
        return FaceView.of(views[0].faces, np.concatenate([v.index for v in views])) if views else None


def list_sets(folder: Path) -> list[Path]:
    """The finished face sets directly inside `folder`, sorted by name; half-written ones are left out."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if (path / HEADER).is_file())
    return sorted(path for path in found if ".partial-" not in path.name and ".replaced-" not in path.name)


def describe(faces: FaceSet) -> dict[str, Any]:
    """The description of a set in tables and reports."""
    per_identity = np.bincount(faces.identity, minlength=len(faces.names))
    return {
        "path": str(faces.path),
        "pictures": len(faces),
        "identities": len(faces.names),
        "size": faces.size,
        "domains": faces.domains,
        "attributes": len(faces.attribute_names),
        "pictures_per_identity": [int(per_identity.min()), float(np.median(per_identity)), int(per_identity.max())],
        "kind": faces.info.get("kind", "unknown"),
        "fingerprint": faces.fingerprint(),
    }
