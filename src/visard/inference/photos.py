"""Photographs on their way into a network: read, decoded on all cores, cut by the face in them, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.data.detection import FiveFraming, open_detector
from visard.data.listing import Container
from visard.data.pictures import Framed, Framing, Haar, is_picture, why_not
from visard.errors import UsageError
from visard.files import read_bytes

Squares = npt.NDArray[np.uint8]  # (n, size, size, 3)
ALIGNMENTS = ("five", "none", "haar")
BATCH = 256  # pictures decoded and embedded at a time


def framing(align: str, say: Callable[[str], None] = lambda text: None) -> Framing | FiveFraming:
    """How pictures are cut: the centre square, by five landmarks, or around the face that a Haar cascade finds."""
    if align not in ALIGNMENTS:
        raise UsageError(f"alignment {align!r}: must be one of {', '.join(ALIGNMENTS)}")
    if align == "five":
        return FiveFraming(open_detector(say=say))
    return Framing(align=align, detect=Haar() if align == "haar" else None)


class Photos:
    """Picture files: of a folder or zip file, by their names inside, or of a list of files, folders and zip files."""

    def __init__(self, source: Path | Sequence[Path]) -> None:
        paths = [source] if isinstance(source, Path) else list(source)
        self.name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
        self._containers: list[Container] = []
        self._files: list[tuple[str, Callable[[], bytes]]] = []  # name, and the function that reads it
        for path in paths:
            alone = isinstance(source, Path) and not is_picture(path.name)
            if path.is_dir() or path.suffix.lower() == ".zip" or alone:
                container = Container(path)
                self._containers.append(container)
                inside = [name for name in container.names() if is_picture(name)]
                if not inside:
                    self.close()
                    raise UsageError(f"{path} holds no pictures")
                where = "" if len(paths) == 1 else f"{path}/"
                self._files += [(where + name, partial(container.read, name)) for name in inside]
            else:
                self._files.append((str(path), partial(read_bytes, path)))
        if not self._files:
            raise UsageError("no pictures were named")

    @property
    def names(self) -> list[str]:
        """The name of each picture."""
        return [name for name, _ in self._files]

    def close(self) -> None:
        """Let go of open files."""
        for container in self._containers:
            container.close()

    def squares(
        self, cut: Framing | FiveFraming, size: int, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[list[str], Squares, list[tuple[str, str]], list[str]]]:
        """Some pictures at a time, in order: names of those that could be cut, their squares, why not the others, and
        names of those that show more faces than the one in the square.

        `progress(done, total)` hears of each batch when the next one is asked for.
        """
        with ThreadPoolExecutor(None, "visard-decode") as threads:
            for start in range(0, len(self._files), BATCH):
                some = self._files[start : start + BATCH]
                cuts = threads.map(lambda file: _square(file[1], cut, size), some)
                found = [(name, one) for (name, _), one in zip(some, cuts, strict=True)]
                good = [(name, one) for name, one in found if not isinstance(one, str)]
                failed = [(name, one) for name, one in found if isinstance(one, str)]
                squares = np.stack([one.square for _, one in good]) if good else np.empty((0, size, size, 3), np.uint8)
                yield [name for name, _ in good], squares, failed, [name for name, one in good if one.left]
                if progress is not None:
                    progress(start + len(some), len(self._files))


def _square(read: Callable[[], bytes], cut: Framing | FiveFraming, size: int) -> Framed | str:
    """The square that goes into the network, or why not."""
    try:
        data = read()
        return cut(data, 0, size)[0] if data else "the file is empty"
    except Exception as error:  # decoders fail in every way there is on damaged data
        return why_not(error)
