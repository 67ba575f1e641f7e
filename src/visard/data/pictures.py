"""One picture file, of whatever kind, to the square uint8 RGB array that a face set keeps; or the reason why not.

The square is cropped from the centre, aligned by five landmarks that are given, or cut around the box of a Haar
cascade; `detection` finds the landmarks of raw photographs.
"""

from __future__ import annotations

import filecmp
import io
import math
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from visard.errors import UsageError

Points = npt.NDArray[np.floating[Any]]
Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]  # x, y, width, height

MAX_PIXELS = 100_000_000
MAX_OTHER = 25_000_000  # of pictures with transparency, palette or 16 bits, which need four times the memory
LARGE = 30_000_000  # pixels from which on pictures are decoded one at a time, whatever the number of threads
ONE_AT_A_TIME = threading.Lock()
MAX_BYTES = 256 * 2**20
EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".tga"),
)
# raster formats alone: Pillow would start an outside program for PostScript
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")
ALIGNMENTS = ("none", "five", "landmarks", "haar")
CUTS = {"five": "aligned to five points", "haar": "cut by a Haar box", "none": "not aligned"}  # of faces, in words
NO_FACE, LOW_QUALITY = "no face was found", "quality"  # how the reasons begin why a face is left out
BOX_MARGIN = 1.3  # how much larger than a given box the square around it is
LANDMARKS = "landmarks"  # array (N, 5, 2) float32 of a face set
# eyes (left and right in the picture), nose, corners of the mouth: x, y in 112 x 112 pixels (ArcFace)
ARCFACE = np.array([(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)])
CASCADES, CASCADE = Path(cv2.__file__).with_name("data"), "haarcascade_frontalface_default.xml"
DETECT_SIDE = 640  # pixels; larger pictures are reduced before a detector looks at them


@dataclass(frozen=True)
class Crop:
    """Which centre square of a picture is kept: `side` pixels, of pictures of size `only` (any if None).

    Where it does not apply, the square is as large as the shorter side.
    """

    side: int | None = None
    only: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.side is not None and self.side < 1:
            raise UsageError(f"crop = {self.side}: must be at least 1 pixel")

    def square(self, width: int, height: int) -> int:
        """The side in pixels of the square that is kept."""
        applies = self.side is not None and self.only in (None, (width, height))
        return min(width, height, self.side) if applies and self.side else min(width, height)


CENTRE = Crop()


class Framed(NamedTuple):
    """A cropped picture: the square (size, size, 3), and what is known of the face in it."""

    square: Pixels
    points: Points | None = None  # landmarks (5, 2) in the square
    quality: npt.NDArray[np.float32] | None = None  # see `visard.data.detection.quality`
    left: int = 0  # other faces of the picture, which were left out


@dataclass(frozen=True, eq=False)
class Framing:
    """How to cut each picture; landmarks (N, 5, 2) and boxes (N, 4) in pixels of the source, NaN = unknown."""

    crop: Crop = CENTRE
    align: str = "none"
    landmarks: npt.NDArray[np.float32] | None = None
    boxes: npt.NDArray[np.float32] | None = None
    detect: Callable[[Image.Image], Box | None] | None = field(default=None, repr=False)

    def __call__(self, data: bytes, item: int, size: int) -> list[Framed]:
        """The one square, with its landmarks where they are known."""
        with ExitStack() as turn:
            return [self._square(data, item, size, turn)]

    def _square(self, data: bytes, item: int, size: int, turn: ExitStack) -> Framed:
        points = None if self.landmarks is None else self.landmarks[item].astype(np.float64)
        if self.align == "none" and points is None:
            picture, side = upright(data, self.crop, size, turn)
            return Framed(np.asarray(centre(picture, side, size)))
        picture, _ = upright(data, turn=turn)
        matrix = np.full((2, 3), np.nan)
        if self.align == "landmarks" and points is not None:
            matrix = similarity(points, template(size))
        if np.isfinite(matrix).all():
            square = warp(np.asarray(picture), matrix, size)
        else:
            square, matrix = self._cut(picture, item, size)
        return Framed(square, None if points is None else move(points, matrix))

    def _cut(self, picture: Image.Image, item: int, size: int) -> tuple[Pixels, Points]:
        if self.align == "none":
            width, height = picture.size
            side = float(self.crop.square(width, height))
            # the left and top edge as `centre` has them
            return np.asarray(centre(picture, side, size)), _zoom((width - side) / 2, (height - side) / 2, side, size)
        if self.align == "haar":
            box = self.detect(picture) if self.detect else None
            if box is None:
                raise ValueError(NO_FACE)
            return _around(picture, box, 1.0, size)
        if self.boxes is None or not np.isfinite(self.boxes[item]).all() or self.boxes[item, 2:].min() < 1:
            raise ValueError("too few landmarks")
        x, y, w, h = (float(value) for value in self.boxes[item])
        return _around(picture, (x, y, w, h), BOX_MARGIN, size)


def _around(picture: Image.Image, box: Box, margin: float, size: int) -> tuple[Pixels, Points]:
    """The square around a box, moved and shrunk so that it lies inside the picture."""
    x, y, w, h = box
    side = min(max(w, h) * margin, *picture.size)
    left = min(max(0.0, x + w / 2 - side / 2), picture.width - side)
    top = min(max(0.0, y + h / 2 - side / 2), picture.height - side)
    square = picture.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(square), _zoom(left, top, side, size)


def _zoom(left: float, top: float, side: float, size: int) -> Points:
    """The transform (2, 3) of pixel centres that a crop and a resize make."""
    scale = size / side
    return np.array([[scale, 0, (0.5 - left) * scale - 0.5], [0, scale, (0.5 - top) * scale - 0.5]])


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

    def __exit__(self, *details: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._catch.__exit__(*details)


QUIET = _Quiet()  # damaged metadata makes decoders warn; real errors are raised


def upright(
    data: bytes, crop: Crop | None = None, size: int = 1, turn: ExitStack | None = None
) -> tuple[Image.Image, float]:
    """The picture in RGB, turned upright (EXIF), and the side of the crop in its pixels.

    It is reduced where `crop` to `size` allows it, and whole without a crop. A large one waits for its `turn`.
    """
    with QUIET, Image.open(io.BytesIO(data), formats=_formats()) as picture:
        width, height = picture.size
        if width * height > (MAX_PIXELS if picture.mode in ("RGB", "L") else MAX_OTHER):
            raise ValueError(f"{width} x {height} pixels are too many")
        if width * height > LARGE and turn is not None:
            turn.enter_context(ONE_AT_A_TIME)
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


def template(size: int) -> Points:
    """Where the five landmarks (5, 2) of an aligned face are in a picture of `size` x `size`."""
    return ARCFACE * (size / 112)


def similarity(points: npt.ArrayLike, target: npt.ArrayLike) -> Points:
    """The rotation, uniform scale and shift (..., 2, 3) that take `points` (..., k, 2) closest to `target` (k, 2).

    Least squares (Umeyama 1991) over the points that are known (not NaN), at least two. In the plane, with points as
    complex numbers p and q about their means, a rotation with scale is one complex factor, and the factor with least
    sum of |a p - q|^2 is a = sum(conj(p) q) / sum(|p|^2): it has no reflections, so no sign has to be mended.
    Where the points are too few or all the same, the result is NaN.
    """
    p, q = _complex(points), _complex(target)
    known = np.isfinite(p)
    weight = known / np.maximum(known.sum(-1, keepdims=True), 1)
    p = np.where(known, p, 0)
    p_mean, q_mean = (weight * p).sum(-1, keepdims=True), (weight * q).sum(-1, keepdims=True)
    p_centred, q_centred = np.where(known, p - p_mean, 0), np.where(known, q - q_mean, 0)
    spread = (np.abs(p_centred) ** 2).sum(-1)
    usable = (known.sum(-1) >= 2) & (spread > 1e-6)
    product = (p_centred.conj() * q_centred).sum(-1)
    a = np.divide(product, spread, out=np.full(product.shape, complex(np.nan, np.nan)), where=usable)
    t = q_mean[..., 0] - a * p_mean[..., 0]
    rows = [[a.real, -a.imag, t.real], [a.imag, a.real, t.imag]]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))


def move(points: Points, matrix: Points) -> Points:
    """`points` (k, 2) taken through a transform (2, 3)."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def warp(picture: Pixels, matrix: Points, size: int) -> Pixels:
    """The picture (H, W, 3) through `matrix` (2, 3) into (size, size, 3); bilinear, black outside.

    Coordinates are of pixel centres. OpenCV does it, as in the face models' own tools.
    """
    if not np.isfinite(matrix).all():
        raise ValueError("too few landmarks")
    return np.asarray(cv2.warpAffine(picture, matrix, (size, size)), np.uint8)


def warp_engine() -> str:
    """Which library `warp` uses, for the record."""
    return f"opencv {cv2.__version__}"


def _complex(points: npt.ArrayLike) -> npt.NDArray[np.complex128]:
    plain = np.asarray(points, np.float64)
    return np.asarray(plain[..., 0] + 1j * plain[..., 1])


def _comes_with_opencv(cascade: Path) -> bool:
    return cascade.is_file() and any(filecmp.cmp(cascade, own, shallow=False) for own in CASCADES.glob("*.xml"))


class Haar:
    """Finds the largest face of a picture with a Haar cascade (Viola and Jones 2001); needs OpenCV 4.

    Only the cascades that come with OpenCV, or copies of them: it believes all that such a file says, and one with a
    changed number makes it read memory that is not its own.
    """

    def __init__(self, cascade: Path | None = None) -> None:
        if not hasattr(cv2, "CascadeClassifier"):
            what = f"OpenCV {cv2.__version__} has no Haar cascades any more"
            raise UsageError(f"{what}: install 'opencv-python-headless<5'")
        self._path = cascade or CASCADES / CASCADE
        if cascade is not None and not _comes_with_opencv(cascade):
            raise UsageError(f"{cascade} is none of the Haar cascades that come with OpenCV: {CASCADES}")
        self._local = threading.local()  # a classifier holds the picture it works on
        self._classifier()

    def _classifier(self) -> Any:
        found = getattr(self._local, "classifier", None)
        if found is None:
            try:
                found = cv2.CascadeClassifier(str(self._path)) if self._path.is_file() else None
            except Exception:  # OpenCV's own error has ten lines
                found = None
            if found is None or found.empty():
                raise UsageError(f"{self._path} is no Haar cascade that OpenCV can read")
            self._local.classifier = found
        return found

    def __call__(self, picture: Image.Image) -> Box | None:
        """The box x, y, width, height of the largest face, or None."""
        grey = picture.convert("L")
        scale = max(1.0, max(grey.size) / DETECT_SIDE)
        if scale > 1:
            grey = grey.resize((round(grey.width / scale), round(grey.height / scale)), Image.Resampling.BILINEAR)
        boxes = self._classifier().detectMultiScale(np.asarray(grey), scaleFactor=1.1, minNeighbors=5)
        if len(boxes) == 0:
            return None
        # of equally large ones the first from the top left, so that the choice is always the same
        x, y, w, h = min(np.asarray(boxes).tolist(), key=lambda box: (-box[2] * box[3], box[1], box[0]))
        return x * scale, y * scale, w * scale, h * scale
