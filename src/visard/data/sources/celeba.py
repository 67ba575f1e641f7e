"""CelebA in its official layout (Liu et al. 2015): aligned pictures in a zip or folder, and text files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.data.decoding import Crop, is_picture, open_container
from visard.data.sources.listing import Listing
from visard.errors import UsageError, VisardError

OFFICIAL_SIZE = (178, 218)
MARKS = {"1": 1, "-1": -1, "0": 0}
PICTURES = "img_align_celeba"
IDENTITIES, ATTRIBUTES, PARTITION = "identity_CelebA.txt", "list_attr_celeba.txt", "list_eval_partition.txt"


def read(source: Path, *, crop: int = 148, attributes: bool = True) -> Listing:
    """List CelebA at `source`: its folder, or the zip of pictures with the text files beside it.

    Pictures of the official 178 x 218 keep their centre `crop` x `crop`; others (already aligned and square)
    are only resized. The official partition (0 train, 1 validation, 2 test) is kept as array `partition`.
    """
    if crop < 1:
        raise UsageError(f"crop = {crop}: must be at least 1 pixel")
    if not source.exists():
        raise UsageError(f"no such file or folder: {source}")
    folder = source if source.is_dir() else source.parent
    pictures = _pictures(source)
    where = _members(pictures)
    identity = _read_identities(_find(folder, IDENTITIES))
    order = sorted(identity, key=lambda name: (_natural(identity[name]), name))
    names: list[str] = []
    marks: npt.NDArray[np.int8] | None = None
    if attributes:
        names, values = _read_attributes(_find(folder, ATTRIBUTES))
        unknown = np.zeros(len(names), np.int8)
        marks = np.array([values.get(name, unknown) for name in order], np.int8).reshape(
            len(order), len(names)
        )
    files = [where.get(name, name) for name in order]
    listing = Listing(
        container=pictures,
        files=files,
        identity=[identity[name] for name in order],
        attribute_names=names,
        attributes=marks,
        crop=Crop(crop, OFFICIAL_SIZE),
        info={"crop": crop},
    )
    partition_file = _find(folder, PARTITION, required=False)
    if partition_file is None:
        return listing
    part_of = {where.get(name, name): part for name, part in _read_partition(partition_file).items()}

    def extras(rows: dict[str, int]) -> dict[str, npt.NDArray[np.int8]]:
        return {"partition": np.array([part_of.get(file, -1) for file in rows], np.int8)}

    return Listing(**{**vars(listing), "extras": extras})


def _natural(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _pictures(source: Path) -> Path:
    if source.is_file():
        return source
    candidates = [source / f"{PICTURES}.zip", source / "Img" / f"{PICTURES}.zip"]
    candidates += [source / PICTURES, source / "Img" / PICTURES]
    for path in candidates:
        if path.exists():
            return path
    raise UsageError(f"{source} has neither {PICTURES}.zip nor a folder {PICTURES}")


def _members(pictures: Path) -> dict[str, str]:
    """Plain file name -> name inside the zip or folder."""
    container = open_container(pictures)
    names = container.names()
    container.close()
    return {name.rsplit("/", 1)[-1]: name for name in names if is_picture(name)}


def _find(folder: Path, name: str, required: bool = True) -> Path | None:
    for path in (folder / name, folder / "Anno" / name, folder / "Eval" / name):
        if path.is_file():
            return path
    if required:
        raise UsageError(f"{folder / name} is missing")
    return None


def _fields(path: Path | None) -> Iterator[tuple[str, list[str]]]:
    """("file:line", words) of each line that is not empty."""
    assert path is not None
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                words = line.split()
                if words:
                    yield f"{path}:{number}", words
    except OSError as error:
        raise VisardError(f"cannot read {path}: {error.strerror}") from None


def _read_identities(path: Path | None) -> dict[str, str]:
    identity: dict[str, str] = {}
    for where, words in _fields(path):
        if len(words) != 2:
            raise VisardError(f"{where}: expected a file name and an identity, found {len(words)} words")
        if words[0] in identity:
            raise VisardError(f"{where}: {words[0]} is listed twice")
        identity[words[0]] = words[1]
    if not identity:
        raise VisardError(f"{path} lists no pictures")
    return identity


def _read_attributes(path: Path | None) -> tuple[list[str], dict[str, npt.NDArray[np.int8]]]:
    lines = _fields(path)
    where, words = next(lines, (f"{path}:1", []))
    if len(words) != 1 or not words[0].isdecimal():
        raise VisardError(f"{where}: expected the number of pictures")
    where, names = next(lines, (f"{path}:2", []))
    if not names or len(set(names)) != len(names):
        raise VisardError(f"{where}: expected the names of the attributes, each once")
    values: dict[str, npt.NDArray[np.int8]] = {}
    for where, words in lines:
        if len(words) != len(names) + 1:
            raise VisardError(
                f"{where}: expected a file name and {len(names)} values, found {len(words)} words"
            )
        try:
            values[words[0]] = np.array([MARKS[word] for word in words[1:]], np.int8)
        except KeyError as error:
            raise VisardError(f"{where}: attribute values must be 1, -1 or 0, found {error}") from None
    return names, values


def _read_partition(path: Path) -> dict[str, int]:
    parts: dict[str, int] = {}
    for where, words in _fields(path):
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise VisardError(f"{where}: expected a file name and 0, 1 or 2")
        parts[words[0]] = int(words[1])
    return parts
