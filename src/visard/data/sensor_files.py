"""Importers of sensor readings and feature vectors: Widar3.0, Office-Caltech10, PAMAP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from visard.data.readings import write_readings
from visard.errors import UsageError

GESTURES = ("push-pull", "sweep", "clap", "slide", "circle", "zigzag")  # of Widar3.0, 1 to 6
FRAMES = 16  # to which every gesture is brought
OFFICE = ("amazon", "caltech", "dslr", "webcam")
# of PAMAP2: activity -> how intense it is (Reiss and Stricker 2012, by metabolic equivalents)
INTENSITY = {1: 0, 2: 0, 3: 0, 17: 0, 4: 1, 6: 1, 7: 1, 13: 1, 16: 1, 5: 2, 12: 2, 24: 2}
WINDOW, HOP = 512, 256  # rows of 100 Hz in one reading of PAMAP2, and between two readings


@dataclass(frozen=True)
class Found:
    """What an importer read: values (N, ...), the class and the user of each row, and their names."""

    values: npt.NDArray[Any]
    classes: tuple[str, ...]
    identity: npt.NDArray[np.int64]
    users: tuple[str, ...]
    domain: npt.NDArray[np.int64]


def widar(source: Path) -> Found:
    """Body-coordinate velocity profiles from bvp.npz: frames (sum of lengths, 20, 20), length, room, user, gesture.

    Every gesture becomes FRAMES frames, evenly picked in time, each of sum 1 (the power of a frame depends on the
    distance, not on the gesture), then scaled to values of about 1.
    """
    file = _npz(source / "bvp.npz" if source.is_dir() else source)
    length = _array(file, "length", source).astype(np.int64)
    begin, rows = np.cumsum(length) - length, np.flatnonzero(length > 0)
    steps = np.round(np.linspace(0, 1, FRAMES)[None] * (length[rows, None] - 1)).astype(np.int64)
    values = _array(file, "frames", source)[begin[rows, None] + steps].astype(np.float32)
    values /= values.sum((2, 3), keepdims=True) + 1e-6
    values = values * 100 - 0.25
    room, user = (_array(file, name, source)[rows].tolist() for name in ("room", "user"))
    who = list(zip(room, user, strict=True))
    pairs = sorted(set(who))
    domain = np.array([pairs.index(pair) for pair in who], np.int64)
    names = tuple(f"room-{room}-user-{user}" for room, user in pairs)
    return Found(values, GESTURES, _array(file, "gesture", source)[rows].astype(np.int64) - 1, names, domain)


def office_caltech(source: Path) -> Found:
    """SURF bags of words, `<domain>.npz` with fts (n, 800) and labels 1 to 10.

    Rows have mean 1: how often each word occurs, whatever the size of the picture.
    """
    values, identity, domain = [], [], []
    for number, name in enumerate(OFFICE):
        file = _npz(source / f"{name}.npz")
        counts = _array(file, "fts", source).astype(np.float64)
        values.append(counts / counts.mean(1, keepdims=True).clip(1 / counts.shape[1]))
        identity.append(_array(file, "labels", source).reshape(-1).astype(np.int64) - 1)
        domain.append(np.full(len(counts), number))
    together = np.concatenate(identity)
    classes = tuple(f"class-{k}" for k in range(int(together.max()) + 1))
    return Found(np.concatenate(values), classes, together, OFFICE, np.concatenate(domain))


def pamap2(source: Path) -> Found:
    """`subject1NN.dat` files of the protocol: means and deviations of each sensor over windows of five seconds.

    Columns: time, activity, heart rate, and three inertial units of 17, of which the first 13 (temperature,
    accelerations, rotation, magnetic field) are used. Gaps (nan) take the last value before them.
    """
    files = sorted(source.glob("**/subject1*.dat"))
    if not files:
        raise UsageError(f"{source}: there is no subject1NN.dat of PAMAP2")
    columns = [2, *(3 + 17 * unit + k for unit in range(3) for k in range(13))]
    values, identity, domain = [], [], []
    for number, file in enumerate(files):
        try:
            rows = np.loadtxt(file)
        except (ValueError, OSError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None
        if rows.ndim != 2 or rows.shape[1] != 54:
            raise UsageError(f"{file} has not the 54 columns of PAMAP2")
        signal = _filled(rows[:, columns])
        for start in range(0, len(rows) - WINDOW + 1, HOP):
            activity = np.unique(rows[start : start + WINDOW, 1].astype(np.int64))
            if len(activity) == 1 and int(activity[0]) in INTENSITY:
                part = signal[start : start + WINDOW]
                values.append(np.concatenate([part.mean(0), part.std(0)]))
                identity.append(INTENSITY[int(activity[0])])
                domain.append(number)
    if not values:
        raise UsageError(f"{source}: no window of {WINDOW} rows with one activity")
    x = np.array(values)
    users = tuple(f"user-{file.stem.removeprefix('subject')}" for file in files)
    x = np.clip((x - x.mean(0)) / (x.std(0) + 1e-6), -10, 10)
    return Found(x, ("light", "moderate", "vigorous"), np.array(identity), users, np.array(domain))


READERS: dict[str, Callable[[Path], Found]] = {"widar": widar, "office-caltech": office_caltech, "pamap2": pamap2}


def import_readings(kind: str, source: Path, out: Path, overwrite: bool = False) -> tuple[Path, int]:
    """Read `source` with the importer of that name and write it to `out`; how many rows there are."""
    found = READERS[kind](source)
    info = {"kind": kind, "source": source.name}
    write_readings(out, found.values, found.classes, found.identity, found.users, found.domain, info, overwrite)
    return out, len(found.values)


def _npz(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path} is not there")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _array(file: Any, name: str, source: Path) -> npt.NDArray[Any]:
    if name not in file:
        raise UsageError(f"{source}: a file has no array {name!r}")
    array: npt.NDArray[Any] = file[name]
    return array


def _filled(signal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each gap takes the last value before it, or at the start the first after it; a column of gaps is 0."""
    known = ~np.isnan(signal)
    last = np.maximum.accumulate(np.where(known, np.arange(len(signal))[:, None], -1), axis=0)
    first = np.where(known.any(0), known.argmax(0), 0)
    filled = np.take_along_axis(signal, np.where(last < 0, first, last), axis=0)
    return np.nan_to_num(filled)
