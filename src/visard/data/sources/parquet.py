"""Parquet (or Arrow) files with a column of pictures and one of labels, as Hugging Face `datasets` keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.listing import Listing, Names, Stream
from visard.data.sources.parquet_pages import check_pages
from visard.errors import UsageError, did_you_mean

IMAGES, LABELS = ("image", "img", "picture", "jpg"), ("label", "identity", "labels", "id", "person", "class")
BATCH = 64  # rows that are read at a time


def read(source: Path, *, image: str | None = None, label: str | None = None, split: str | None = None) -> Listing:
    """List the rows of a .parquet or .arrow file, or of all in a folder (of `split`, such as train, alone).

    `image` names the column of pictures (bytes, or {bytes, path} as `datasets` has it), `label` the column of
    identities (numbers, whose names the file may hold, or text). Only the labels are read before the import.
    """
    paths, known = _paths(source, split), dict[str, int]()
    columns = [_columns(path, image, label) for path in paths]
    labels = [_labels(path, name, known) for path, (_, name) in zip(paths, columns, strict=True)]
    identity = np.concatenate(labels)
    if not len(identity):
        raise UsageError(f"{source} has no rows")
    counts = [len(part) for part in labels]
    ends = np.cumsum(counts)

    def name_of(item: int) -> str:
        part = int(np.searchsorted(ends, item, side="right"))
        return f"{paths[part].name}:{item - int(ends[part]) + counts[part]}"

    pictures, files = _Rows(paths, [name for name, _ in columns], counts), Names(len(identity), name_of)
    info = {"image": columns[0][0], "label": columns[0][1]}
    return Listing(pictures, files, identity.astype(np.int32), list(known), info=info)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The reader of a file; whatever is wrong with the file becomes one line."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError("reading parquet needs pyarrow: install visard[parquet]") from None
    try:
        if path.suffix == ".arrow":
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
                yield reader
        else:
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as reader:
                yield reader
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:100]
        raise UsageError(f"{path} is damaged or no Parquet or Arrow file: {reason}") from None


def _paths(source: Path, split: str | None) -> list[Path]:
    if not source.exists():
        raise UsageError(f"no such file or folder: {source}")
    if source.is_file():
        return [source]
    found = sorted(path for path in source.rglob("*") if path.suffix in (".parquet", ".arrow") and path.is_file())
    if split is not None:
        inside = [(path, path.relative_to(source)) for path in found]
        found = [path for path, name in inside if name.stem.split("-")[0] == split or split in name.parts[:-1]]
    if not found:
        raise UsageError(f"{source} has no .parquet or .arrow files{f' of split {split!r}' if split else ''}")
    return found


def _batches(path: Path, column: str) -> Iterator[Any]:
    """One column in pieces (pyarrow arrays)."""
    with _opened(path) as file:
        if path.suffix == ".arrow":
            for batch in file:
                array = _valid(batch.column(column))
                yield from (array[at : at + BATCH] for at in range(0, len(array), BATCH))
        else:
            check_pages(path, column)
            for batch in file.iter_batches(BATCH, columns=[column], use_threads=False):
                yield _valid(batch.column(0))


def _valid(array: Any) -> Any:
    """The array itself; without this check an offset that leads outside it ends the process."""
    array.validate(full=True)  # text that is no UTF-8, too
    return array


@contextmanager
def _schema(path: Path) -> Iterator[Any]:
    with _opened(path) as file:
        yield file.schema if path.suffix == ".arrow" else file.schema_arrow


def _columns(path: Path, image: str | None, label: str | None) -> tuple[str, str]:
    with _schema(path) as schema:
        names = schema.names  # decoded only when they are asked for
    chosen = []
    for wanted, usual, what in ((image, IMAGES, "pictures"), (label, LABELS, "labels")):
        if wanted is not None and wanted not in names:
            raise UsageError(f"{path} has no column {wanted!r}{did_you_mean(wanted, names)}")
        name = wanted or next((name for name in usual if name in names), None)
        if name is None:
            raise UsageError(f"{path}: which column has the {what}? ({', '.join(names)[:100]})")
        chosen.append(name)
    return chosen[0], chosen[1]


def _class_names(path: Path, label: str) -> list[str] | None:
    """The names that `datasets` keeps for the numbers of a column, if it does."""
    try:
        with _schema(path) as schema:
            kept = schema.metadata or {}
        about = json.loads(kept[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return about if isinstance(about, list) and all(isinstance(name, str) and name for name in about) else None


def _labels(path: Path, column: str, known: dict[str, int]) -> npt.NDArray[np.int64]:
    names = _class_names(path, column)
    numbers: list[int] = []
    for array in _batches(path, column):
        for value in array.to_pylist():
            if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
                raise UsageError(f"{path}: row {len(numbers)} has no identity in {column!r}: {str(value)[:40]!r}")
            if isinstance(value, int) and names is not None and 0 <= value < len(names):
                value = names[value]
            numbers.append(known.setdefault(str(value), len(known)))
    return np.array(numbers, np.int64)


class _Rows(Stream):
    """The column of pictures, a few rows at a time."""

    def __init__(self, paths: list[Path], columns: list[str], counts: list[int]) -> None:
        self._paths, self._columns, self._counts = paths, columns, counts

    def stream(self, items: Sequence[int]) -> Iterator[bytes]:
        wanted = iter(items)
        item = next(wanted, None)
        start = 0
        for path, column, count in zip(self._paths, self._columns, self._counts, strict=True):
            if item is None or item >= start + count:
                start += count
                continue
            at = start
            for array in _batches(path, column):
                while item is not None and item < at + len(array):
                    yield _encoded(array[item - at].as_py())
                    item = next(wanted, None)
                at += len(array)
            if at != start + count:
                raise UsageError(f"{path}: columns of {count} and {at - start} rows")
            start += count


def _encoded(value: object) -> bytes:
    """The bytes of a picture; those that are only named by a path are not fetched."""
    if isinstance(value, dict):
        value = value.get("bytes")
    return value if isinstance(value, bytes) else b""
