"""CelebA in its official layout (Liu et al. 2015): aligned pictures in a zip or folder, and text files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.data.listing import Container, Files, Listing, coordinates, fields, number
from visard.data.pictures import Crop, is_picture
from visard.errors import UsageError

OFFICIAL_SIZE = (178, 218)
MARKS = {"1": 1, "-1": -1, "0": 0}
PICTURES = "img_align_celeba"
IDENTITIES, ATTRIBUTES, PARTITION = "identity_CelebA.txt", "list_attr_celeba.txt", "list_eval_partition.txt"
LANDMARKS = "list_landmarks_align_celeba.txt"


def read(source: Path, *, crop: int = 148, attributes: bool = True) -> Listing:
    """List CelebA at `source`: its folder, or the zip of pictures with the text files beside it.

    Pictures of the official 178 x 218 keep their centre `crop` x `crop`; others (already aligned and square)
    are only resized. The official partition (0 train, 1 validation, 2 test) is kept as array `partition`, landmarks
    of pictures of the official size as `landmarks`, if their files are there.
    """
    cut = Crop(crop, OFFICIAL_SIZE)
    folder = source if source.is_dir() else source.parent
    container = Container(_pictures(source))
    try:
        where = {name.rsplit("/", 1)[-1]: name for name in container.names() if is_picture(name)}
        identity_of = _read_identities(_needed(folder, IDENTITIES))
        order = sorted(identity_of, key=lambda name: (_natural(identity_of[name]), name))
        columns, marks = _read_attributes(_needed(folder, ATTRIBUTES), order) if attributes else ([], None)
        landmark_file, partition_file = _find(folder, LANDMARKS), _find(folder, PARTITION)
        points = None if landmark_file is None else _read_landmarks(landmark_file, order)
        parts = None if partition_file is None else _read_partition(partition_file, order)
    except BaseException:
        container.close()
        raise
    files = [where.get(name, name) for name in order]
    return Listing(
        Files(container, files), files, *number(identity_of[name] for name in order), crop=cut, info={"crop": crop},
        attribute_names=columns, attributes=marks, landmarks=points,
        extras=None if parts is None else lambda kept: {"partition": parts[kept]},
    )  # fmt: skip


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _pictures(source: Path) -> Path:
    if not source.is_dir():
        return source
    for name in (f"{PICTURES}.zip", f"Img/{PICTURES}.zip", PICTURES, f"Img/{PICTURES}"):
        if (source / name).exists():
            return source / name
    raise UsageError(f"{source} has neither {PICTURES}.zip nor a folder {PICTURES}")


def _find(folder: Path, name: str) -> Path | None:
    places = (folder / name, folder / "Anno" / name, folder / "Eval" / name)
    return next((path for path in places if path.is_file()), None)


def _needed(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise UsageError(f"{folder / name} is missing")
    return path


def _read_identities(path: Path) -> dict[str, str]:
    identity: dict[str, str] = {}
    for where, words in fields(path):
        if len(words) != 2:
            raise UsageError(f"{where}: expected a file name and an identity, found {len(words)} words")
        if words[0] in identity:
            raise UsageError(f"{where}: {words[0]} is listed twice")
        identity[words[0]] = words[1]
    if not identity:
        raise UsageError(f"{path} lists no pictures")
    return identity


def _table(path: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """The names of the columns and the lines below: a count, names, then a file name and values in each line."""
    lines = fields(path)
    where, words = next(lines, (f"{path}:1", []))
    if len(words) != 1 or not words[0].isdecimal():
        raise UsageError(f"{where}: expected the number of pictures")
    where, names = next(lines, (f"{path}:2", []))
    if not names or len(set(names)) != len(names):
        raise UsageError(f"{where}: expected the names of the columns, each once")
    return names, lines


def _read_attributes(path: Path, order: list[str]) -> tuple[list[str], npt.NDArray[np.int8]]:
    names, lines = _table(path)
    item_of = {name: item for item, name in enumerate(order)}
    values = np.zeros((len(order), len(names)), np.int8)
    for where, words in lines:
        if len(words) != len(names) + 1:
            raise UsageError(f"{where}: expected a file name and {len(names)} values, found {len(words)} words")
        try:
            marks = [MARKS[word] for word in words[1:]]
        except KeyError as error:
            raise UsageError(f"{where}: attribute values must be 1, -1 or 0, found {error}") from None
        if words[0] in item_of:
            values[item_of[words[0]]] = marks
    return names, values


def _read_landmarks(path: Path, order: list[str]) -> npt.NDArray[np.float32]:
    """Landmarks (pictures, 5, 2): eyes, nose, mouth, left before right as one sees them."""
    names, lines = _table(path)
    if len(names) != 10:
        raise UsageError(f"{path}:2: expected the names of ten coordinates, found {len(names)}")
    item_of = {name: item for item, name in enumerate(order)}
    points = np.full((len(order), 5, 2), np.nan, np.float32)
    for where, words in lines:
        values = coordinates(where, words[1:])
        if words[0] in item_of:
            points[item_of[words[0]]] = values
    return points


def _read_partition(path: Path, order: list[str]) -> npt.NDArray[np.int8]:
    parts: dict[str, int] = {}
    for where, words in fields(path):
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise UsageError(f"{where}: expected a file name and 0, 1 or 2")
        parts[words[0]] = int(words[1])
    return np.array([parts.get(name, -1) for name in order], np.int8)
