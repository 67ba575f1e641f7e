"""How a picture becomes the square that a face set keeps: cropped, aligned by landmarks, or around a found face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image

from visard.data import align
from visard.data.align import Pixels, Points
from visard.data.decoding import CENTRE, Crop, centre, decode, upright

ALIGNMENTS = ("none", "landmarks", "haar")
BOX_MARGIN = 1.3  # how much larger than a given box the square around it is

Box = tuple[float, float, float, float]  # x, y, width, height


@dataclass(frozen=True, eq=False)
class Framing:
    """How to cut each picture; landmarks (N, 5, 2) and boxes (N, 4) in pixels of the source, NaN = unknown."""

    crop: Crop = CENTRE
    align: str = "none"
    landmarks: npt.NDArray[np.float32] | None = None
    boxes: npt.NDArray[np.float32] | None = None
    detect: Callable[[Image.Image], Box | None] | None = field(default=None, repr=False)

    def __call__(self, data: bytes, item: int, size: int) -> tuple[Pixels, Points | None]:
        """The square (size, size, 3), and the landmarks (5, 2) in it where they are known."""
        points = None if self.landmarks is None else self.landmarks[item].astype(np.float64)
        if self.align == "none" and points is None:
            return decode(data, size, self.crop), None
        picture = upright(data)
        matrix = np.full((2, 3), np.nan)
        if self.align == "landmarks" and points is not None:
            matrix = align.similarity(points, align.template(size))
        if np.isfinite(matrix).all():
            square = align.warp(np.asarray(picture), matrix, size)
        else:
            square, matrix = self._cut(picture, item, size)
        return square, None if points is None else align.move(points, matrix)

    def _cut(self, picture: Image.Image, item: int, size: int) -> tuple[Pixels, Points]:
        if self.align == "none":
            width, height = picture.size
            side = float(self.crop.square(width, height))
            # the left and top edge as `centre` has them
            return np.asarray(centre(picture, side, size)), _zoom((width - side) / 2, (height - side) / 2, side, size)
        if self.align == "haar":
            box = self.detect(picture) if self.detect else None
            if box is None:
                raise ValueError("no face was found")
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
