"""Sets of sensor readings or feature vectors with classes and users, synthetic or imported, as if they were face sets.

A class stands where an identity stands and a user (a room, a camera) where a domain stands, so that partitions, views
and engines work on them as they are.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.data.storage import array_path, map_array, read_npz, refuse_others
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import PRIVATE_FOLDER, cache_folder, flush_to_disk, mapping, open_text, private, read_json, write_json

READINGS = "readings.json"
KINDS: dict[str, npt.DTypeLike] = {"values": np.float32, "identity": np.int32, "domain": np.int16}

# the synthetic set
VERSION = "1"
LATENT = 12
SPREAD, PERSONAL, OFFSET, GAIN, NOISE = 0.9, 0.35, 0.5, 0.25, 0.3  # sizes of e, B_u, o_u, log G_u and the noise
USER, ROWS = 1, 2  # streams of random numbers

# imported sets
GESTURES = ("push-pull", "sweep", "clap", "slide", "circle", "zigzag")  # of Widar3.0, 1 to 6
FRAMES = 16  # to which every gesture is brought
OFFICE = ("amazon", "caltech", "dslr", "webcam")
# of PAMAP2: activity -> how intense it is (Reiss and Stricker 2012, by metabolic equivalents)
INTENSITY = {1: 0, 2: 0, 3: 0, 17: 0, 4: 1, 6: 1, 7: 1, 13: 1, 16: 1, 5: 2, 12: 2, 24: 2}
MOST_CLASSES = 1000  # of a set of feature vectors
# what one is of a heart rate, a temperature, three accelerations twice, rotation and magnetic field: each column then
# varies by about 1. They are fixed: statistics of all users would be those of the one that is to be adapted to, too.
UNITS = (40.0, *(3.0, *(8.0,) * 6, *(1.5,) * 3, *(30.0,) * 3) * 3)  # beats a minute, C, m/s2, rad/s, uT
# what counts as a domain of Widar3.0, and which numbers of a recording say so
BY: dict[str, tuple[str, ...]] = {
    "user": ("room", "user"),
    "orientation": ("room", "orientation"),
    "location": ("room", "location"),
    "room": ("room",),
}
WINDOW, HOP = 512, 256  # rows of 100 Hz in one reading of PAMAP2, and between two readings


class Readings(FaceSet):
    """values (N, ...) float32, identity (N,): the class, domain (N,): the user; `size`: how many numbers a row has."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).absolute()
        header = _header(self.path)
        arrays = {name: map_array(self.path, name, None).view(np.ndarray) for name in KINDS}
        for name, array in arrays.items():
            shape = (header["count"], *array.shape[1:]) if name == "values" else (header["count"],)
            fits = array.dtype == KINDS[name] and array.shape == shape and array.flags.c_contiguous
            if not fits or not array.size or (name == "values" and array.ndim < 2):
                raise VisardError(f"{self.path} is broken: {name}.npy does not fit {READINGS}")
        self.images = arrays["values"]
        self.identity, self.domain = arrays["identity"], arrays["domain"]
        self.attributes = np.zeros((len(self.identity), 0), np.int8)
        self.names, self.domains, self.attribute_names = header["classes"], header["users"], []
        self.info = header["info"]
        self.size = int(np.prod(self.images.shape[1:]))
        self._check_names(READINGS)

    def __reduce__(self) -> tuple[Callable[[Path], FaceSet], tuple[Path]]:
        return Readings, (self.path,)

    def __repr__(self) -> str:
        return f"Readings({str(self.path)!r}: {len(self)} rows of {len(self.names)} classes)"

    @property
    def synthetic(self) -> bool:
        """There are no pictures to show."""
        return False

    def file(self, row: int) -> str:
        """Empty: readings have no files."""
        return f"{self.domains[self.domain[row]]}/{row}"


def is_readings(path: Path) -> bool:
    """Whether a folder holds readings."""
    return (path / READINGS).is_file()


def write_readings(
    out: Path,
    values: npt.ArrayLike,
    classes: Sequence[str],
    identity: npt.ArrayLike,
    users: Sequence[str],
    domain: npt.ArrayLike,
    info: dict[str, Any],
    overwrite: bool = False,
) -> Path:
    """Write a set beside `out`, then rename it."""
    arrays = {"values": values, "identity": identity, "domain": domain}
    for what, numbers, names in (("class", np.asarray(identity), classes), ("user", np.asarray(domain), users)):
        if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= len(names):
            raise VisardError(f"{out}: a {what} is none of the {len(names)}")
    typed = {name: np.ascontiguousarray(array, KINDS[name]) for name, array in arrays.items()}
    count = len(typed["values"])
    if not count or any(len(array) != count for array in typed.values()):
        raise VisardError(f"{out}: {count} rows, {len(typed['identity'])} classes, {len(typed['domain'])} users")
    if not np.isfinite(typed["values"]).all():
        raise VisardError(f"{out}: a reading is not finite")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already: --overwrite replaces it, or choose another place")
    if out.exists() and not is_readings(out):
        raise UsageError(f"{out} holds no readings, so it is not overwritten")
    if out.exists():
        refuse_others(out, READINGS)
    beside = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        beside.mkdir(PRIVATE_FOLDER, parents=True)
        for name, array in typed.items():
            with open(array_path(beside, name), "wb", opener=private) as file:
                np.save(file, array, allow_pickle=False)
        header = {"version": 1, "count": count, "classes": list(classes), "users": list(users), "info": info}
        write_json(beside / READINGS, header)
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
        flush_to_disk(out.parent)
    except OSError as error:
        if out.is_dir():  # another process made the same set first
            return out
        raise VisardError(f"cannot write {out}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return out


def _header(folder: Path) -> dict[str, Any]:
    header = read_json(folder / READINGS)
    fits = isinstance(header, dict) and header.get("version") == 1 and isinstance(header.get("count"), int)
    names = [header.get(k) for k in ("classes", "users")] if fits else []
    if not fits or not all(isinstance(n, list) and n and all(isinstance(s, str) for s in n) for n in names):
        raise VisardError(f"{folder / READINGS} is broken: it needs version 1, count, classes and users")
    return {**header, "info": mapping(header.get("info"))}


def draw(
    classes: int, rows: int, size: int, users: tuple[str, ...], seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`rows` synthetic readings (size,) of each class and user; values, classes and users. A seed fixes them all.

    As several users' motion sensors might see the same activities:

        z = c_k + e        an execution of activity k in a latent space: its centre, and what varies each time
        x = G_u tanh(A z + B_u z) + o_u + noise

    A is common, B_u (how user u moves), G_u (gain of each channel) and o_u (offset) belong to the user: a shift between
    users that a network trained on some of them meets at another.
    """
    common = np.random.default_rng(seed)
    centres = common.normal(size=(classes, LATENT))
    A = common.normal(size=(LATENT, size)) / np.sqrt(LATENT)
    values, labels, owners = [], [], []
    for number in range(len(users)):
        own = np.random.default_rng([seed, USER, number])
        B = PERSONAL * own.normal(size=A.shape) / np.sqrt(LATENT)
        gain, offset = np.exp(GAIN * own.normal(size=size)), OFFSET * own.normal(size=size)
        rng = np.random.default_rng([seed, ROWS, number])
        label = np.repeat(np.arange(classes), rows)
        z = centres[label] + SPREAD * rng.normal(size=(len(label), LATENT))
        x = gain * np.tanh(z @ (A + B)) + offset + NOISE * rng.normal(size=(len(label), size))
        values.append(x.astype(np.float32))
        labels.append(label)
        owners.append(np.full(len(label), number))
    return np.concatenate(values), np.concatenate(labels), np.concatenate(owners)


def cached_sensors(classes: int, rows: int, size: int, users: tuple[str, ...], seed: int) -> Path:
    """The folder of such a set, made on first use."""
    text = f"{classes} {rows} {size} {users} {seed} {VERSION}"
    out = cache_folder() / f"sensors-{classes}x{rows}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if not out.is_dir():
        values, labels, owners = draw(classes, rows, size, users, seed)
        names = [f"activity-{k}" for k in range(classes)]
        write_readings(out, values, names, labels, users, owners, {"kind": "sensors", "synthetic": True})
    return out


@dataclass(frozen=True)
class Found:
    """The result of an importer: values (N, ...), the class and the user of each row, and their names."""

    values: npt.NDArray[Any]
    classes: tuple[str, ...]
    identity: npt.NDArray[np.int64]
    users: tuple[str, ...]
    domain: npt.NDArray[np.int64]


def widar(source: Path, by: str = "user") -> Found:
    """Body-coordinate velocity profiles from bvp.npz: frames (sum of lengths, 20, 20), length, room, user, gesture.

    Domains are the users of each room, or `by` orientation or location those of all users of a room together.

    Every gesture becomes FRAMES frames, evenly picked in time, each of sum 1 (the power of a frame depends on the
    distance, not on the gesture), then scaled to values of about 1.
    """
    file = _npz(source / "bvp.npz" if source.is_dir() else source)
    length, frames = _array(file, "length", source).astype(np.int64), _array(file, "frames", source, 3)
    if by not in BY:
        raise UsageError(f"domains of Widar3.0: by {', '.join(BY)}, not {by!r}{did_you_mean(by, BY)}")
    named = [_array(file, name, source) for name in (*BY[by], "gesture")]
    if length.min(initial=0) < 0 or length.max(initial=0) > len(frames) or length.sum() != len(frames):
        raise UsageError(f"{source}: the lengths of the gestures are not those of {len(frames)} frames")
    if any(len(numbers) != len(length) for numbers in named):
        raise UsageError(f"{source}: {len(length)} gestures, but not as many rooms, users and kinds")
    begin, rows = np.cumsum(length) - length, np.flatnonzero(length > 0)
    steps = np.round(np.linspace(0, 1, FRAMES)[None] * (length[rows, None] - 1)).astype(np.int64)
    values = frames[begin[rows, None] + steps].astype(np.float32)
    values /= values.sum((2, 3), keepdims=True) + 1e-6
    values = values * 100 - 0.25
    who = list(zip(*(numbers[rows].tolist() for numbers in named[:-1]), strict=True))
    known = sorted(set(who))
    domain = np.array([known.index(one) for one in who], np.int64)
    names = tuple("-".join(f"{what}-{k}" for what, k in zip(BY[by], one, strict=True)) for one in known)
    return Found(values, GESTURES, named[-1][rows].astype(np.int64) - 1, names, domain)


def office_caltech(source: Path) -> Found:
    """SURF bags of words, `<domain>.npz` with fts (n, 800) and labels 1 to 10.

    Rows have mean 1: how often each word occurs, whatever the size of the picture.
    """
    values, identity, domain = [], [], []
    for number, name in enumerate(OFFICE):
        file = _npz(source / f"{name}.npz")
        counts = _array(file, "fts", source, 2).astype(np.float64)
        labels = _array(file, "labels", source, 0).reshape(-1)
        if not counts.shape[1] or len(counts) != len(labels):
            raise UsageError(f"{source / name}.npz: values of shape {counts.shape} for {len(labels)} labels")
        values.append(counts / counts.mean(1, keepdims=True).clip(1 / counts.shape[1]))
        identity.append(labels.astype(np.int64) - 1)
        domain.append(np.full(len(counts), number))
    together = np.concatenate(identity)
    if not len(together) or not 0 <= int(together.min()) <= int(together.max()) < MOST_CLASSES:
        raise UsageError(f"{source}: labels must be 1 to {MOST_CLASSES}")
    classes = tuple(f"class-{k}" for k in range(int(together.max()) + 1))
    return Found(np.concatenate(values), classes, together, OFFICE, np.concatenate(domain))


def pamap2(source: Path) -> Found:
    """`subject1NN.dat` files of the protocol: means and deviations of each sensor over windows of five seconds.

    Columns: time, activity, heart rate, and three inertial units of 17, of which the first 13 (temperature,
    accelerations, rotation, magnetic field) are used. Gaps (nan) take the last value before them. Values are in UNITS;
    networks standardise them by the statistics of the sources.
    """
    files = sorted(source.glob("**/subject1*.dat"))
    if not files:
        raise UsageError(f"{source}: there is no subject1NN.dat of PAMAP2")
    columns = [2, *(3 + 17 * unit + k for unit in range(3) for k in range(13))]
    values, identity, domain = [], [], []
    for number, file in enumerate(files):
        try:
            with open_text(file) as lines:
                rows = np.loadtxt(lines)
        except (ValueError, OSError) as error:
            raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
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
    users = tuple(f"user-{file.stem.removeprefix('subject')}" for file in files)
    x = np.array(values) / np.array(UNITS + UNITS)
    return Found(x, ("light", "moderate", "vigorous"), np.array(identity), users, np.array(domain))


READERS: dict[str, Callable[..., Found]] = {"widar": widar, "office-caltech": office_caltech, "pamap2": pamap2}


def import_readings(
    kind: str, source: Path, out: Path, overwrite: bool = False, by: str | None = None
) -> tuple[Path, int]:
    """Read `source` with the importer of that name and write it to `out`; how many rows there are."""
    if by is not None and kind != "widar":
        raise UsageError(f"--by is for widar, not for {kind}")
    found = READERS[kind](source, by) if by is not None else READERS[kind](source)
    info = {"kind": kind, "source": source.name}
    write_readings(out, found.values, found.classes, found.identity, found.users, found.domain, info, overwrite)
    return out, len(found.values)


def _npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not path.is_file():
        raise UsageError(f"{path} is not there")
    return read_npz(path)


def _array(file: dict[str, npt.NDArray[Any]], name: str, source: Path, dimensions: int = 1) -> npt.NDArray[Any]:
    if name not in file:
        raise UsageError(f"{source}: a file has no array {name!r}")
    if dimensions not in (0, file[name].ndim) or file[name].dtype.kind not in "iuf":
        raise UsageError(f"{source}: {name!r} is {file[name].dtype} {file[name].shape}, which it should not be")
    return file[name]


def _filled(signal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each gap takes the last value before it, or at the start the first after it; a column of gaps is 0."""
    known = ~np.isnan(signal)
    last = np.maximum.accumulate(np.where(known, np.arange(len(signal))[:, None], -1), axis=0)
    first = np.where(known.any(0), known.argmax(0), 0)
    filled = np.take_along_axis(signal, np.where(last < 0, first, last), axis=0)
    return np.nan_to_num(filled)
