"""Faces brought to a standard place: a similarity transform of five landmarks, or the box that a detector finds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from visard.data.faces import FaceSet
from visard.errors import UsageError, VisardError

Points = npt.NDArray[np.floating[Any]]
Pixels = npt.NDArray[np.uint8]

LANDMARKS = "landmarks"  # array (N, 5, 2) float32 of a face set
# eyes (left and right in the picture), nose, corners of the mouth: x, y in 112 x 112 pixels (ArcFace)
ARCFACE = np.array([(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)])
CASCADE = "haarcascade_frontalface_default.xml"
DETECT_SIDE = 640  # pixels; larger pictures are reduced before a detector looks at them

cv2: Any  # typed loosely: OpenCV 5 lacks what OpenCV 4 has
try:
    import cv2
except ImportError:
    cv2 = None


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

    Coordinates are of pixel centres. OpenCV does it where it is installed, as the face models' own tools do;
    Pillow does it elsewhere and differs from it by a rounding of the interpolation weights.
    """
    if not np.isfinite(matrix).all():
        raise ValueError("too few landmarks")
    if cv2 is not None:
        return np.asarray(cv2.warpAffine(picture, matrix, (size, size)), np.uint8)
    return warp_with_pillow(picture, matrix, size)


def warp_with_pillow(picture: Pixels, matrix: Points, size: int) -> Pixels:
    """`warp` without OpenCV."""
    A = np.linalg.inv(matrix[:, :2])
    t = -A @ matrix[:, 2]
    t += 0.5 - A @ (0.5, 0.5)  # Pillow counts from the corner of a pixel, not from its centre
    t += 1  # a black border, so that the edge fades as it does in OpenCV
    picture = np.pad(picture, ((1, 1), (1, 1), (0, 0)))
    rows = (A[0, 0], A[0, 1], t[0], A[1, 0], A[1, 1], t[1])
    moved = Image.fromarray(picture).transform((size, size), Image.Transform.AFFINE, rows, Image.Resampling.BILINEAR)
    return np.asarray(moved)


def warp_engine() -> str:
    """Which library `warp` uses, for the record."""
    return f"opencv {cv2.__version__}" if cv2 is not None else "pillow"


def load_landmarks(faces: FaceSet) -> npt.NDArray[np.float32]:
    """The landmarks (N, 5, 2) of an imported set in pixels of its pictures; NaN where one is not known."""
    points = np.array(faces.extra(LANDMARKS))
    if points.shape != (len(faces), 5, 2) or points.dtype != np.float32:
        raise VisardError(f"{faces.path / f'{LANDMARKS}.npy'} is damaged: {points.dtype} {points.shape}")
    return points


class Haar:
    """Finds the largest face of a picture with a Haar cascade (Viola and Jones 2001); needs OpenCV 4."""

    def __init__(self, cascade: Path | None = None) -> None:
        if cv2 is None:
            raise UsageError("detecting faces needs OpenCV: install visard[align]")
        if not hasattr(cv2, "CascadeClassifier"):
            raise UsageError(
                f"OpenCV {cv2.__version__} has no Haar cascades any more: install 'opencv-python-headless<5'"
            )
        self._path = cascade or Path(cv2.data.haarcascades) / CASCADE
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

    def __call__(self, picture: Image.Image) -> tuple[float, float, float, float] | None:
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


def _complex(points: npt.ArrayLike) -> npt.NDArray[np.complex128]:
    plain = np.asarray(points, np.float64)
    return np.asarray(plain[..., 0] + 1j * plain[..., 1])
