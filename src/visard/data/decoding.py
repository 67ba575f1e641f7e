"""One picture file, of whatever kind, to a square uint8 RGB array; or the reason why not."""

import io
import math
import os
import warnings
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from visard.errors import UsageError, VisardError

MAX_PIXELS = 100_000_000
MAX_BYTES = 256 * 2**20
EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga"),
)
# raster formats alone: Pillow would start an outside program for PostScript
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")


@dataclass(frozen=True)
class Crop:
    """Which centre square of a picture is kept: `side` pixels, of pictures of size `only` (any if None).

    Where it does not apply, the square is as large as the shorter side.
    """

    side: int | None = None
    only: tuple[int, int] | None = None

    def square(self, width: int, height: int) -> int:
        """The side in pixels of the square that is kept."""
        applies = self.side is not None and self.only in (None, (width, height))
        return min(width, height, self.side) if applies and self.side else min(width, height)


CENTRE = Crop()


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's."""
    return name.lower().endswith(EXTENSIONS)


def open_container(path: Path) -> "Container":
    """The folder or zip at `path`; anything else is a one-line error."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    try:
        return Container(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise VisardError(
            f"{path} is neither a folder nor a zip file: {' '.join(str(error).split())}"
        ) from None


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def decode(data: bytes, size: int, crop: Crop) -> npt.NDArray[np.uint8]:
    """Decode, turn upright (EXIF), crop the centre square and resize to (size, size, 3)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged metadata; what matters is raised
        with Image.open(io.BytesIO(data), formats=_formats()) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels are too many")
            shrink = crop.square(width, height) / size
            if picture.format == "JPEG" and shrink > 4:
                # JPEG can be decoded at 1/2, 1/4, 1/8: much faster, and still twice the size that is needed
                picture.draft(None, (math.ceil(width * 2 / shrink), math.ceil(height * 2 / shrink)))
            reduction = width / picture.size[0]
            ImageOps.exif_transpose(picture, in_place=True)
            upright = _to_rgb(picture)
            upright.load()
    side = crop.square(width, height) / reduction
    return np.asarray(_centre(upright, side, size))


def _centre(picture: Image.Image, side: float, size: int) -> Image.Image:
    width, height = picture.size
    if width == height == size == side:
        return picture
    left, top = max(0.0, (width - side) / 2), max(0.0, (height - side) / 2)
    box = (left, top, min(left + side, width), min(top + side, height))
    return picture.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I"):  # 16 bits a pixel, which convert() would cut off at 255
        values = np.asarray(picture)
        deep = values.dtype.itemsize == 2 or values.max() > 255
        return Image.fromarray((values / (257 if deep else 1)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("floating-point pixels are not supported")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


@dataclass
class Container:
    """A folder or a zip file that pictures are read from by name; nothing is ever unpacked to disk."""

    path: Path

    def __post_init__(self) -> None:
        self._zip = None if self.path.is_dir() else zipfile.ZipFile(self.path)

    def names(self) -> list[str]:
        """Every file inside, with forward slashes, sorted; hidden files and folders are left out."""
        found = (
            self._walk()
            if self._zip is None
            else (i.filename for i in self._zip.infolist() if not i.is_dir())
        )
        parts_of = ((name, name.split("/")) for name in found)
        return sorted(
            n for n, parts in parts_of if not any(p.startswith(".") or p == "__MACOSX" for p in parts)
        )

    def _walk(self) -> list[str]:
        found, seen = [], set()
        for folder, folders, files in os.walk(self.path, followlinks=True):
            here = os.stat(folder)
            if (here.st_dev, here.st_ino) in seen:  # a link that leads back
                folders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            relative = Path(folder).relative_to(self.path)
            found += [(relative / name).as_posix() for name in files]
        return found

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        if self._zip is None:
            file = self.path / name
            length = file.stat().st_size
        else:
            length = self._zip.getinfo(name).file_size
        if length > MAX_BYTES:
            raise ValueError(f"{length} bytes are too many")
        if length == 0:
            raise ValueError("the file is empty")
        return file.read_bytes() if self._zip is None else self._zip.read(name)

    def close(self) -> None:
        """Close the zip file, if it is one."""
        if self._zip is not None:
            self._zip.close()


def decode_file(container: Container, name: str, size: int, crop: Crop) -> npt.NDArray[np.uint8] | str:
    """The picture `name`, or in one line why it cannot be had."""
    try:
        return decode(container.read(name), size, crop)
    except (FileNotFoundError, KeyError):
        return "no such file"
    # decoders fail in every way there is on damaged data; the reason goes into the report
    except Exception as error:
        text = " ".join(str(error).split()).replace("<_io.BytesIO object at", "<")
        return (
            "not a picture that can be read"
            if "cannot identify" in text
            else text[:120] or type(error).__name__
        )
