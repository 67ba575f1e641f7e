"""Where face sets are: synthetic ones in a cache, imported ones in the data folder; their export for other tools."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

from visard.data.faces import FaceSet, list_sets
from visard.data.joined import CLIENTS, Joined, Member, Role
from visard.data.pairs import ARRAY, Pairs, load_pairs
from visard.data.sensors import Readings, cached_sensors, is_readings
from visard.data.sources.bin import write_bin
from visard.data.sources.recordio import write_recordio
from visard.data.storage import array_path
from visard.data.synthetic.sets import SyntheticSpec, cached
from visard.errors import UsageError, did_you_mean


class SetSettings(BaseModel):
    """`[[data.sets]]`: one of several face sets of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1)  # the folder of a set, or its name in the data folder
    # clients: what clients train on; public: pictures that every client has; source: of the client with labels, where
    # the others have none; test: people that no client has
    role: Role = CLIENTS
    name: str | None = Field(default=None, max_length=60, pattern=r"^[^/\\]+$")  # None: that of its folder


class DataSettings(BaseModel):
    """`[data]`: the faces of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = "synthetic"  # or sensors, or the folder of a set, or its name in the data folder
    # of the synthetic faces; of sensors: classes, rows of each class and user, numbers in a row, users
    identities: int = Field(default=200, ge=1)
    images_per_identity: int = Field(default=20, ge=1)
    size: int = Field(default=64, ge=32, le=112)
    domains: tuple[str, ...] = ("north",)
    seed: int = 0
    sets: tuple[SetSettings, ...] = ()  # several sets instead of one source
    same_names: bool = False  # people of one name in two of the sets are one person

    @model_validator(mode="after")
    def _one_origin(self) -> DataSettings:
        if self.sets and self.source != "synthetic":
            raise ValueError("source and sets both say where the faces are: give one of them")
        if self.same_names and not self.sets:
            raise ValueError("same_names is about sets, of which there are none")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the sets, or the other settings."""
        found = self.model_dump(mode="json")
        return {k: v for k, v in found.items() if (k in ("sets", "same_names")) == bool(self.sets)}


def data_folder() -> Path:
    """Where imported face sets live: $VISARD_DATA, or visard/data in the user's data folder."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get("VISARD_DATA") or base / "visard" / "data")


def find_set(name: str) -> Path:
    """The folder of a face set, given as a path or as a name in the data folder."""
    for path in (Path(name), data_folder() / name):
        if path.is_dir():
            return path
    known = [p.name for p in list_sets(data_folder())]
    raise UsageError(f"no face set {name!r} here or in {data_folder()}{did_you_mean(name, known)}")


def open_set(path: Path) -> FaceSet:
    """The face set or the readings in a folder."""
    return Readings(path) if is_readings(path) else FaceSet.open(path)


def open_faces(data: DataSettings, progress: Callable[[int, int], None] | None = None) -> FaceSet:
    """The faces that `[data]` asks for, or readings; synthetic ones are made on first use.

    `progress` hears how many of how many pictures are drawn.
    """
    if data.sets:
        return Joined(members(data.sets), data.same_names)
    if data.source == "sensors":
        return Readings(cached_sensors(data.identities, data.images_per_identity, data.size, data.domains, data.seed))
    if data.source != "synthetic":
        return open_set(find_set(data.source))
    spec = SyntheticSpec(data.identities, data.images_per_identity, data.size, data.domains, data.seed)
    total = data.identities * data.images_per_identity
    return FaceSet.open(cached(spec, progress=(lambda done: progress(done, total)) if progress else None))


def members(sets: Sequence[SetSettings]) -> list[Member]:
    """The sets of a run by name; two folders of one name are called after the folders around them too."""
    folders = [find_set(of.path).resolve() for of in sets]
    short = Counter(folder.name for folder in folders)
    names = [folder.name if short[folder.name] == 1 else f"{folder.parent.name}-{folder.name}" for folder in folders]
    opened = [open_set(folder) for folder in folders]
    return [Member(of.name or name, faces, of.role) for of, name, faces in zip(sets, names, opened, strict=True)]


def export(faces: FaceSet, path: Path, *, pairs: int = 6000, seed: int = 0) -> int:
    """Write `faces` as a .bin (verification) or .rec (training) file, by the ending of `path`; how many pictures.

    Pictures are stored as PNG, so nothing is lost. A .bin file holds the set's own pairs in the order of their folds,
    or else `pairs` pairs drawn with `seed`; a .rec file holds all pictures, one identity after the other.
    """
    if path.suffix == ".bin":
        own = array_path(faces.path, ARRAY).is_file()
        chosen = load_pairs(faces) if own else draw_pairs(faces, pairs, seed)
        order = np.argsort(chosen.fold, kind="stable")
        rows = np.stack([chosen.first[order], chosen.second[order]], 1).ravel()
        write_bin(path, encoded(faces, rows.tolist()), chosen.same[order].tolist())
        return len(rows)
    if path.suffix == ".rec":
        rows = np.argsort(faces.identity, kind="stable")
        return write_recordio(path, zip(encoded(faces, rows.tolist()), faces.identity[rows].tolist(), strict=True))
    raise UsageError(f"{path}: the name must end in .bin or .rec")


def encoded(faces: FaceSet, rows: Iterable[int]) -> Iterator[bytes]:
    """Pictures as PNG files, one at a time."""
    for row in rows:
        buffer = io.BytesIO()
        Image.fromarray(faces.pixels[row]).save(buffer, "PNG", compress_level=1)
        yield buffer.getvalue()


def draw_pairs(faces: FaceSet, count: int, seed: int) -> Pairs:
    """`count` pairs, alternately of one identity and of two, each at most once; ten folds in order."""
    rng = np.random.default_rng(seed)
    identity = faces.identity
    order = np.argsort(identity, kind="stable")
    groups = [g for g in np.split(order, np.cumsum(np.bincount(identity))[:-1]) if len(g)]
    several = [g for g in groups if len(g) > 1]
    if count < 2 or not several or len(groups) < 2:
        raise UsageError(f"{faces.path.name}: pairs need two identities, one of them with two pictures, and count >= 2")
    found: dict[tuple[int, int], bool] = {}
    for k in range(count):
        for _ in range(1000):
            if k % 2 == 0:
                a, b = rng.choice(several[rng.integers(len(several))], 2, replace=False)
            else:
                i, j = rng.choice(len(groups), 2, replace=False)
                a, b = rng.choice(groups[i]), rng.choice(groups[j])
            pair = (int(min(a, b)), int(max(a, b)))
            if pair not in found:
                found[pair] = k % 2 == 0
                break
        else:
            raise UsageError(f"{faces.path.name} has not enough pictures for {count} different pairs")
    rows = np.array(list(found), np.int64)
    fold = np.arange(count) * 10 // count
    return Pairs(rows[:, 0], rows[:, 1], np.array(list(found.values())), fold)
