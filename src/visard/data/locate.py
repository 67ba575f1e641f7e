"""Where face sets are: the synthetic ones in a cache, imported ones in the data folder or anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from visard.data.faces import FaceSet, list_sets
from visard.data.readings import Readings, is_readings
from visard.data.sensors import cached_sensors
from visard.data.synthetic import SyntheticSpec, cached
from visard.errors import UsageError
from visard.names import did_you_mean

if TYPE_CHECKING:
    from visard.config import DataSettings


def data_folder() -> Path:
    """Where imported face sets live: $VISARD_DATA, or visard/data in the user's data folder."""
    if own := os.environ.get("VISARD_DATA"):
        return Path(own)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "visard" / "data"


class Progress(Protocol):
    """Who wants to hear of rendering: see `engines.loop.Watcher`."""

    def rendering(self, done: int, total: int) -> None: ...


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


def open_faces(data: DataSettings, progress: Progress | None = None) -> FaceSet:
    """The faces that `[data]` asks for, or readings; synthetic ones are made on first use."""
    if data.source == "sensors":
        return Readings(cached_sensors(data.identities, data.images_per_identity, data.size, data.domains, data.seed))
    if data.source != "synthetic":
        return open_set(find_set(data.source))
    spec = SyntheticSpec(data.identities, data.images_per_identity, data.size, data.domains, data.seed)
    total = data.identities * data.images_per_identity
    return FaceSet.open(cached(spec, progress=(lambda done: progress.rendering(done, total)) if progress else None))
