"""One picture file, of whatever kind, to a square uint8 RGB array; or the reason why not."""

import io
import math
import threading
import warnings
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

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


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


class _Quiet:
    """No warnings while any thread is inside; `warnings.catch_warnings` alone would mix up the threads' filters."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._catch: warnings.catch_warnings[Any] = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._catch = warnings.catch_warnings()
                self._catch.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._catch.__exit__(kind, error, trace)


QUIET = _Quiet()  # damaged metadata makes decoders warn; what matters is raised


def upright(data: bytes) -> Image.Image:
    """The whole picture in RGB, turned upright (EXIF)."""
    return _upright(data, None, 1)[0]


def decode(data: bytes, size: int, crop: Crop) -> npt.NDArray[np.uint8]:
    """Decode, turn upright (EXIF), crop the centre square and resize to (size, size, 3)."""
    picture, side = _upright(data, crop, size)
    return np.asarray(centre(picture, side, size))


def _upright(data: bytes, crop: Crop | None, size: int) -> tuple[Image.Image, float]:
    """The picture, reduced where `crop` to `size` allows it, and the side of the crop in its pixels."""
    with QUIET, Image.open(io.BytesIO(data), formats=_formats()) as picture:
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width} x {height} pixels are too many")
        side = crop.square(width, height) if crop else min(width, height)
        shrink = side / size
        if crop and picture.format == "JPEG" and shrink > 4:
            # JPEG can be decoded at 1/2, 1/4, 1/8: much faster, and still twice the size that is needed
            picture.draft(None, (math.ceil(width * 2 / shrink), math.ceil(height * 2 / shrink)))
        reduction = width / picture.size[0]
        ImageOps.exif_transpose(picture, in_place=True)
        turned = _to_rgb(picture)
        turned.load()
        return turned, side / reduction


def centre(picture: Image.Image, side: float, size: int) -> Image.Image:
    """The centre square of `side` pixels, resized to `size`."""
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


def why_not(error: Exception) -> str:
    """In one line why a picture could not be decoded; decoders fail in every way there is on damaged data."""
    if isinstance(error, (FileNotFoundError, KeyError)):
        return "no such file"
    text = " ".join(str(error).split())
    if isinstance(error, UnidentifiedImageError) or "cannot identify" in text:
        return "not a picture that can be read"
    return text[:120] or type(error).__name__
