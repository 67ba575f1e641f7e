"""Alignment: pictures warped with OpenCV and with Pillow, landmarks carried along, faces found by a cascade."""

import io
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tests.unit.pictures import encode, pixels

from visard.data import pictures
from visard.data.faces import FaceSet
from visard.data.pictures import CASCADES, Haar, similarity, template, warp
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError

FACE = np.array([(90.0, 80.0), (140.0, 95.0), (105.0, 120.0), (80.0, 140.0), (120.0, 152.0)])


def spots(points: npt.NDArray[np.float64], size: tuple[int, int] = (240, 220)) -> npt.NDArray[np.uint8]:
    """A smooth picture with a bright spot at every point."""
    y, x = np.mgrid[: size[1], : size[0]]
    light = sum(np.exp(-((x - px) ** 2 + (y - py) ** 2) / 50) for px, py in points)
    return np.repeat((40 + 200 * np.clip(light, 0, 1)).astype(np.uint8)[..., None], 3, 2)


def brightest(picture: npt.NDArray[np.uint8], near: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The centre of light around a point."""
    y, x = np.mgrid[: picture.shape[0], : picture.shape[1]]
    weight = np.clip(picture[..., 0].astype(float) - 60, 0, None) * (np.hypot(x - near[0], y - near[1]) < 9)
    return np.array([(x * weight).sum(), (y * weight).sum()]) / weight.sum()


@pytest.mark.parametrize("size", [112, 64])
def test_spots_land_where_the_transform_says(size: int) -> None:
    matrix = similarity(FACE, template(size))
    out = warp(spots(FACE), matrix, size)
    assert out.shape == (size, size, 3)
    assert out.dtype == np.uint8
    for point in pictures.move(FACE, matrix):
        assert np.abs(brightest(out, point) - point).max() < 0.35


def test_outside_is_black() -> None:
    shift = np.array([[1.0, 0, 10], [0, 1, 0]])
    out = warp(np.full((32, 32, 3), 200, np.uint8), shift, 32)
    assert out[:, :9].max() == 0
    assert out[:, 11:].min() == 200


def test_too_few_points() -> None:
    points = np.stack([np.full((5, 2), 3.0), np.full((5, 2), np.nan), FACE])
    found = similarity(points, template(112))
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2]).all()
    with pytest.raises(ValueError, match="too few landmarks"):
        warp(pixels(0), found[0], 112)


def test_landmarks_of_a_crop_are_of_pixel_centres() -> None:
    """The centre square of 20 of 40 pixels, twice as large: the centre of pixel 10 is half a pixel from the edge."""
    points = np.full((1, 5, 2), 10.0, np.float32)
    (framed,) = pictures.Framing(pictures.Crop(20), landmarks=points)(encode(pixels(0, 40)), 0, 40)
    assert framed.points is not None
    assert np.allclose(framed.points, 0.5)


def test_a_given_box_without_landmarks_gets_a_margin() -> None:
    """IJB-A: 20 pixels of a box become the middle of 26."""
    picture = np.zeros((100, 100, 3), np.uint8)
    picture[40:60, 40:60] = 255
    box, nothing = np.array([(40, 40, 20, 20)], np.float32), np.full((1, 5, 2), np.nan, np.float32)
    (framed,) = pictures.Framing(align="landmarks", landmarks=nothing, boxes=box)(encode(picture), 0, 104)
    bright = np.flatnonzero(framed.square[52, :, 0] > 127)
    assert (bright[0], bright[-1]) == (12, 91), "3 of 26 pixels, four times as large, lie on either side"


# through an import ----------------------------------------------------------------------------------


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def test_folder_with_landmarks(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2 x.png", "b/1.png"):
        put(tmp_path / "src" / name, encode(spots(FACE)))
    numbers = " ".join(f"{value}" for value in FACE.ravel())
    put(tmp_path / "points.csv", f"file,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5\na/1.png,{numbers.replace(' ', ',')}\n")
    report = import_faces("folder", tmp_path / "src", tmp_path / "set", size=112, landmarks=tmp_path / "points.csv")
    assert report.skipped == [("a/2 x.png", "too few landmarks"), ("b/1.png", "too few landmarks")]
    put(
        tmp_path / "points.txt",
        "".join(f"{name} {numbers}\n" for name in ("a/1.png", "a/2 x.png")) + f"else {numbers}\n",
    )
    report = import_faces(
        "folder", tmp_path / "src", tmp_path / "plain", size=112, landmarks=tmp_path / "points.txt", align="none"
    )
    plain, aligned = FaceSet.open(report.path), FaceSet.open(tmp_path / "set")
    assert (len(plain), len(aligned)) == (3, 1)
    assert np.isnan(plain.extra("landmarks")[2]).all()
    for faces in (plain, aligned):
        for point in faces.extra("landmarks")[0]:
            assert np.abs(brightest(faces.images[0], point) - point).max() < 0.5
    # five points that are no exact copy of the template: near it, and least squares has no shift left
    assert np.abs(aligned.extra("landmarks")[0].mean(0) - template(112).mean(0)).max() < 1e-3
    assert aligned.info["align"] == "landmarks"


def test_landmarks_follow_their_pictures(tmp_path: Path) -> None:
    """a is taken back, because one of two pictures is unreadable: b keeps its own points."""
    for name in ("a/1.png", "b/1.png", "b/2.png"):
        put(tmp_path / "src" / name, encode(spots(FACE, (240, 240))))
    put(tmp_path / "src" / "a/2.png", "broken")
    lines = [f"{name} {' '.join(str(v + 10 * k) for v in FACE.ravel())}" for k, name in
             enumerate(("a/1.png", "a/2.png", "b/1.png", "b/2.png"))]  # fmt: skip
    put(tmp_path / "points.txt", "\n".join(lines))
    report = import_faces(
        "folder", tmp_path / "src", tmp_path / "set", size=240, landmarks=tmp_path / "points.txt", align="none",
        min_images=2,
    )  # fmt: skip
    faces = FaceSet.open(report.path)
    assert faces.names == ["b"]
    assert np.allclose(faces.extra("landmarks"), [FACE + 20, FACE + 30])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no landmarks of any picture"),
        ("z.png 1 2 3 4 5 6 7 8 9 10\n", r"names are like 'a/1\.png'"),
        ("a/1.png 1 2 3\n", r"points\.txt:1: expected five landmarks"),
        ("a/1.png 1 2 3 4 5 6 7 8 9 nan\n", r"points\.txt:1: expected five landmarks"),
        ("a/1.png 1 2 3 4 5 6 7 8 9 1e30\n", r"points\.txt:1: expected five landmarks"),
        (None, "no such file"),
    ],
)
def test_broken_landmarks(tmp_path: Path, text: str | None, message: str) -> None:
    put(tmp_path / "src" / "a" / "1.png", encode(pixels(0)))
    if text is not None:
        put(tmp_path / "points.txt", text)
    with pytest.raises(UsageError, match=message):
        import_faces("folder", tmp_path / "src", tmp_path / "set", landmarks=tmp_path / "points.txt")
    assert not (tmp_path / "set").exists()


def celeba(root: Path) -> Path:
    """Two official-size pictures with spots at their landmarks; a third has none."""
    names = "lefteye_x lefteye_y righteye_x righteye_y nose_x nose_y leftmouth_x leftmouth_y rightmouth_x rightmouth_y"
    lines = ""
    for k in (1, 2, 3):
        points = np.round(FACE - (20 + k, 0))
        buffer = io.BytesIO()
        Image.fromarray(spots(points, (178, 218))).save(buffer, "PNG")
        put(root / "img_align_celeba" / f"{k:06d}.jpg", buffer.getvalue())
        if k < 3:
            lines += f"{k:06d}.jpg  {'  '.join(str(int(v)) for v in points.ravel())}\n"
    put(root / "identity_CelebA.txt", "000001.jpg 1\n000002.jpg 1\n000003.jpg 2\n")
    put(root / "list_landmarks_align_celeba.txt", f"2\n{names} \n{lines}")
    return root


def test_celeba_landmarks(tmp_path: Path) -> None:
    source = celeba(tmp_path / "celeba")
    plain = FaceSet.open(import_faces("celeba", source, tmp_path / "plain", size=128, attributes=False).path)
    report = import_faces("celeba", source, tmp_path / "set", size=112, attributes=False, align="landmarks")
    assert report.skipped == [("000003.jpg", "too few landmarks")]
    aligned = FaceSet.open(report.path)
    assert (len(plain), len(aligned)) == (3, 2)
    for faces in (plain, aligned):
        for row in (0, 1):
            for point in faces.extra("landmarks")[row]:
                assert np.abs(brightest(faces.images[row], point) - point).max() < 0.5
    assert np.isnan(plain.extra("landmarks")[2]).all()
    put(source / "list_landmarks_align_celeba.txt", "2\na b\n")
    with pytest.raises(VisardError, match="expected the names of ten coordinates"):
        import_faces("celeba", source, tmp_path / "bad", attributes=False)


def test_landmarks_of_a_set_without(tmp_path: Path) -> None:
    put(tmp_path / "src" / "a" / "1.png", encode(pixels(0)))
    faces = FaceSet.open(import_faces("folder", tmp_path / "src", tmp_path / "set", size=16, align="none").path)
    with pytest.raises(UsageError, match=r"no landmarks\.npy"):
        faces.extra("landmarks")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": "landmark"}, r"no alignment 'landmark' \(did you mean 'landmarks'"),
        ({"align": "landmarks"}, "importer folder found no landmarks"),
        ({"cascade": "x.xml"}, "only with alignment haar"),
    ],
)
def test_wrong_use(tmp_path: Path, options: dict[str, str], message: str) -> None:
    put(tmp_path / "src" / "a" / "1.png", encode(pixels(0)))
    with pytest.raises(UsageError, match=message):
        import_faces("folder", tmp_path / "src", tmp_path / "set", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "set").exists()


# Haar cascades --------------------------------------------------------------------------------------

# One stage with one feature in a window of 20 x 20: the upper half darker than the lower half.
OWN_CASCADE = """<?xml version="1.0"?>
<opencv_storage><cascade type_id="opencv-cascade-classifier">
<stageType>BOOST</stageType><featureType>HAAR</featureType><height>20</height><width>20</width>
<stageParams><maxWeakCount>1</maxWeakCount></stageParams><featureParams><maxCatCount>0</maxCatCount></featureParams>
<stageNum>1</stageNum>
<stages><_><maxWeakCount>1</maxWeakCount><stageThreshold>0.5</stageThreshold>
<weakClassifiers><_><internalNodes>0 -1 0 -0.75</internalNodes><leafValues>1. -1.</leafValues></_></weakClassifiers>
</_></stages>
<features><_><rects><_>0 0 20 20 -1.</_><_>0 0 20 10 2.</_></rects><tilted>0</tilted></_></features>
</cascade></opencv_storage>
"""


def half_dark(left: int, top: int, side: int, size: tuple[int, int] = (200, 160)) -> npt.NDArray[np.uint8]:
    picture = np.full((size[1], size[0], 3), 128, np.uint8)
    picture[top : top + side // 2, left : left + side] = 0
    picture[top + side // 2 : top + side, left : left + side] = 255
    return picture


def test_haar_crop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "CascadeClassifier"):
        pytest.skip(f"OpenCV {cv2.__version__} has no cascades")
    put(tmp_path / "own.xml", OWN_CASCADE)
    monkeypatch.setattr("visard.data.pictures.CASCADES", tmp_path)
    for name, picture in (("a/1", half_dark(90, 40, 60)), ("a/2", np.full((90, 90, 3), 99, np.uint8))):
        put(tmp_path / "src" / f"{name}.png", encode(picture))
    report = import_faces(
        "folder", tmp_path / "src", tmp_path / "set", align="haar", cascade=tmp_path / "own.xml", size=64
    )
    assert report.skipped == [("a/2.png", "no face was found")]
    square = FaceSet.open(report.path).images[0].astype(int)
    assert square[4:24, 20:44].max() < 60  # the dark half is the upper one of the crop
    assert square[40:60, 20:44].min() > 180


def test_haar_needs_a_cascade(tmp_path: Path) -> None:
    put(tmp_path / "bad.xml", "<no cascade>")
    with pytest.raises(UsageError, match="come with OpenCV|has no Haar cascades any more"):
        Haar(tmp_path / "bad.xml")


def test_a_cascade_that_opencv_would_follow_out_of_the_picture_is_refused(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2, "CascadeClassifier"):
        pytest.skip(f"OpenCV {cv2.__version__} has no cascades")
    own = (CASCADES / "haarcascade_eye.xml").read_text()
    put(tmp_path / "copy.xml", own)
    Haar(tmp_path / "copy.xml")(Image.new("RGB", (64, 64)))
    put(tmp_path / "changed.xml", re.sub(r"(<rects>\s*<_>\s*\d+ \d+) \d+", r"\1 1e5000", own, count=1))
    with pytest.raises(UsageError, match="come with OpenCV"):
        Haar(tmp_path / "changed.xml")


def test_a_found_box_becomes_a_square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The geometry without OpenCV: a detector that always answers the same box."""
    monkeypatch.setattr("visard.data.sources.importing.Haar", lambda cascade: lambda picture: (90.0, 40.0, 60.0, 60.0))
    put(tmp_path / "src" / "a" / "1.png", encode(half_dark(90, 40, 60)))
    square = FaceSet.open(
        import_faces("folder", tmp_path / "src", tmp_path / "set", size=60, align="haar").path
    ).images[0]
    assert np.array_equal(square, half_dark(90, 40, 60)[40:100, 90:150])
    monkeypatch.setattr(
        "visard.data.sources.importing.Haar", lambda cascade: lambda picture: (180.0, 130.0, 60.0, 60.0)
    )  # over the edge
    edge = FaceSet.open(import_faces("folder", tmp_path / "src", tmp_path / "edge", size=60, align="haar").path).images[
        0
    ]
    assert np.array_equal(edge, half_dark(90, 40, 60)[100:160, 140:200])
