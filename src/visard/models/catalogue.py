"""Recognisers that a user keeps under a name, each with its input, its output and its licence.

`visard models add FILE --name N` copies the file into the cache folder; every place that takes a model file takes N.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import PRIVATE_FOLDER, cache_folder, file_digest, mapping, read_json, replacing, write_json

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
FILE = re.compile(r"model\.\w{1,16}")
SIZE = re.compile(r"[1-9][0-9]{0,4}")  # pixels
CONTRACT = "contract.json"


@dataclass(frozen=True)
class Entry:
    """A model with its contract; everything is text, as in the spec of a model file."""

    name: str
    file: str  # its name in the entry's folder
    sha256: str
    model: str  # the network, or onnx
    embedding: str
    size: str
    order: str
    mean: str
    std: str
    align: str
    licence: str

    @property
    def path(self) -> Path:
        return folder() / self.name / self.file

    @property
    def contract(self) -> dict[str, str]:
        """Settings of the model that its file may lack."""
        found = {key: getattr(self, key) for key in ("order", "mean", "std", "size", "align", "licence")}
        return {key: value for key, value in found.items() if value}


def folder() -> Path:
    """Where the models are."""
    return cache_folder() / "models"


def entries() -> list[Entry]:
    """All models that are kept, by name."""
    return [read(path.parent.name) for path in sorted(folder().glob(f"*/{CONTRACT}"))]


def read(name: str) -> Entry:
    """The entry of a name; one line if it is damaged, or if its file is not the one that was added."""
    path = folder() / name / CONTRACT
    if not NAME.fullmatch(name) or not path.is_file():
        known = [p.parent.name for p in folder().glob(f"*/{CONTRACT}")]
        raise UsageError(f"no model {name[:80]!r} is kept{did_you_mean(name, known)}")
    kept = mapping(read_json(path))
    fields = Entry.__dataclass_fields__.keys()
    if kept.keys() != fields or not all(isinstance(v, str) and len(v) < 1000 for v in kept.values()):
        raise VisardError(f"{path} is damaged: add the model again")
    entry = Entry(**kept)
    if entry.name != name or not FILE.fullmatch(entry.file) or not SIZE.fullmatch(entry.size):
        raise VisardError(f"{path} is damaged: add the model again")
    return entry


def locate(model: str | Path) -> tuple[Path, Entry | None]:
    """The file of a model that is given as a path, or as the name of one that is kept; its digest is checked."""
    text, path = str(model), Path(model)
    if path.exists() or not NAME.fullmatch(text) or not (folder() / text / CONTRACT).is_file():
        return path, None
    entry = read(text)
    if not entry.path.is_file() or file_digest(entry.path) != entry.sha256:
        raise VisardError(f"{entry.path} is not the file that was added as {text}: add it again")
    return entry.path, entry


def is_kept(path: Path) -> bool:
    """Whether a file is one of the catalogue."""
    return path.is_relative_to(folder())


def add(source: Path, entry: Entry) -> None:
    """Copy a model file into the catalogue."""
    home = folder() / entry.name
    home.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    with replacing(home / entry.file) as beside:
        shutil.copyfile(source, beside)
        if file_digest(beside) != entry.sha256:
            raise VisardError(f"{source} changed while it was copied")
    write_json(home / CONTRACT, asdict(entry))
    for old in home.iterdir():
        if old.name not in (CONTRACT, entry.file):
            old.unlink()


def remove(name: str) -> None:
    """Forget a model and remove its file."""
    read(name)
    shutil.rmtree(folder() / name)
