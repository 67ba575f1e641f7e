"""Pictures in a folder to features with names: for galleries and for single queries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.api import FaceModel, embed
from visard.data.align import Haar
from visard.data.containers import open_container
from visard.data.decoding import is_picture, why_not
from visard.data.framing import Framing
from visard.data.importing import printable
from visard.errors import UsageError, VisardError
from visard.gallery import Gallery

ALIGNMENTS = ("none", "haar")
BATCH = 256  # pictures decoded and embedded at a time


def person_of(name: str) -> str:
    """Whom a file shows: its outermost folder, or its own name without a number at the end (anna_2.jpg -> anna)."""
    folder, slash, _ = name.partition("/")
    if slash:
        return folder
    stem = Path(name).stem
    return re.sub(r"[_ ]\(?\d+\)?$", "", stem) or stem


def framing(align: str) -> Framing:
    """How pictures are cut: the centre square, or around the largest face that a Haar cascade finds."""
    if align not in ALIGNMENTS:
        raise UsageError(f"alignment {align!r}: must be one of {', '.join(ALIGNMENTS)}")
    return Framing(align=align, detect=Haar() if align == "haar" else None)


def enrol_folder(
    folder: Path,
    model: FaceModel,
    *,
    align: str = "none",
    flip: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Gallery, list[tuple[str, str]]]:
    """A gallery of the people in a folder (or zip), and the pictures that could not be used with the reason.

    Either a folder for each person, or pictures named by person: anna.jpg, or anna_1.jpg and anna_2.jpg.
    """
    cut, container = framing(align), open_container(folder)
    try:
        names = [name for name in container.names() if is_picture(name)]
        if not names:
            raise UsageError(f"{folder} holds no pictures")
        people: list[str] = []
        parts: list[npt.NDArray[np.float32]] = []
        skipped: list[tuple[str, str]] = []
        with ThreadPoolExecutor(thread_name_prefix="visard-decode") as threads:
            for start in range(0, len(names), BATCH):
                some = names[start : start + BATCH]
                squares = list(threads.map(lambda name: _square(container.read, name, cut, model.size), some))
                good = [
                    (name, square) for name, square in zip(some, squares, strict=True) if not isinstance(square, str)
                ]
                skipped += [(printable(n), s) for n, s in zip(some, squares, strict=True) if isinstance(s, str)]
                if good:
                    parts.append(embed(model, np.stack([square for _, square in good]), flip=flip))
                    people += [printable(person_of(name)) for name, _ in good]
                if progress is not None:
                    progress(min(start + BATCH, len(names)), len(names))
    finally:
        container.close()
    if not people:
        file, reason = skipped[0]
        raise UsageError(f"{folder}: not one of {len(skipped)} pictures could be used ({file}: {reason})")
    about = {key: model.spec[key] for key in ("order", "mean", "std", "size")}
    about |= {"model": model.fingerprint, "model_file": str(model.path.absolute()) if model.path else ""}
    about |= {"align": align, "flip": str(int(flip))}
    return Gallery.enrol(people, np.concatenate(parts), about), skipped


def features_of(
    files: Iterable[Path], model: FaceModel, *, align: str = "none", flip: bool = False
) -> npt.NDArray[np.float32]:
    """Features (n, E) of picture files; one that cannot be read is an error that names it."""
    cut, squares = framing(align), []
    for file in files:
        square = _square(lambda name: Path(name).read_bytes(), str(file), cut, model.size)
        if isinstance(square, str):
            raise (UsageError if not file.is_file() else VisardError)(f"{file}: {square}")
        squares.append(square)
    return embed(model, np.stack(squares), flip=flip)


def _square(read: Callable[[str], bytes], name: str, cut: Framing, size: int) -> npt.NDArray[np.uint8] | str:
    """The square that goes into the network, or why not."""
    try:
        data = read(name)
        return cut(data, 0, size)[0] if data else "the file is empty"
    except Exception as error:  # decoders fail in every way there is on damaged data
        return why_not(error)
