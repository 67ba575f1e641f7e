"""Training sets as .rec and .idx files (MXNet RecordIO, as InsightFace packs CASIA and MS1M)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from visard.data.containers import check_length
from visard.data.records import RecordFile
from visard.data.sources.listing import Listing, Numbers
from visard.errors import UsageError


def read(source: Path) -> Listing:
    """List the pictures of `source`, a .rec file or a folder with exactly one (train.rec where there are more).

    A first record that has labels and no picture is the header: its first label is the first key after the pictures.
    The identity of a picture is its label, or the first of several. Pictures are read when they are decoded.
    """
    records = RecordFile(_find(source))
    chosen, header = _pictures(records)
    try:
        labels = records.labels()[chosen]
    except ValueError as error:
        raise UsageError(f"{records.path} is damaged: {error}") from None
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(labels) & (labels >= 0) & (labels < 2**31) & (labels == np.floor(labels))
    if not whole.all():
        k = int(np.argmin(whole))
        key = records.keys[chosen[k]]
        raise UsageError(f"{records.path}: record {key} has label {labels[k]}, which is no identity number")
    people, identity = np.unique(labels.astype(np.int64), return_inverse=True)
    return Listing(
        pictures=_Records(records, chosen),
        files=Keys(records.keys[chosen]),
        identity=identity.astype(np.int32),
        names=[str(k) for k in people],
        size=112,
        info={"header": header},
    )


def _find(source: Path) -> Path:
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.rec"))
    chosen = [path for path in found if path.name == "train.rec"] or found
    if len(chosen) != 1:
        raise UsageError(f"{source} has {len(found)} .rec files: name one of them")
    return chosen[0]


def _pictures(records: RecordFile) -> tuple[Numbers, list[float]]:
    """Which records are pictures, in the order of the file, and the labels of the header if there is one."""
    order = np.argsort(records.offsets, kind="stable")
    try:
        first = records.record(int(np.argmin(records.keys)))
    except ValueError as error:
        raise UsageError(f"{records.path} is damaged: {error}") from None
    if first.flag == 0 or first.data:
        return order, []
    keys = records.keys[order]
    end = float(first.label[0])
    chosen = order[(keys > keys.min()) & (keys < end)] if np.isfinite(end) else order[:0]
    if not len(chosen):
        raise UsageError(f"{records.path}: the header announces no pictures")
    return chosen, [float(value) for value in first.label[:8] if np.isfinite(value)]


@dataclass(frozen=True, eq=False)
class Keys(Sequence[str]):
    """Record keys as names, made when they are asked for: millions of strings would fill the memory."""

    keys: Numbers

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, item: int) -> str: ...

    @overload
    def __getitem__(self, item: slice) -> list[str]: ...

    def __getitem__(self, item: int | slice) -> Any:
        return str(self.keys[item]) if not isinstance(item, slice) else [str(key) for key in self.keys[item]]


@dataclass(frozen=True, eq=False)
class _Records:
    records: RecordFile
    chosen: Numbers

    def read(self, item: int) -> bytes:
        data = self.records.record(int(self.chosen[item])).data
        check_length(len(data))
        return data

    def close(self) -> None:
        pass
