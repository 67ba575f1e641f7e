"""Importers: official layouts, every kind of picture, and everything that can be wrong with a source."""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visard.data import pictures
from visard.data.faces import FaceSet, list_sets
from visard.data.listing import Container, Slices
from visard.data.pairs import load_pairs
from visard.data.pictures import CENTRE, Crop, Framing, Pixels
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError

RED = (220, 30, 40)


def decode(data: bytes, size: int, crop: Crop) -> Pixels:
    return Framing(crop)(data, 0, size)[0].square


def encoded(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def plain(colour: tuple[int, ...] = RED, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour if len(colour) > 1 else colour[0])


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


# pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "form", "expected"),
    [
        (plain(), "PNG", RED),
        (plain(), "JPEG", RED),
        (plain(), "BMP", RED),
        (plain(), "WEBP", RED),
        (plain(), "TIFF", RED),
        (plain(), "GIF", RED),
        (plain((77,), mode="L"), "PNG", (77, 77, 77)),
        (plain((1,), mode="1"), "PNG", (255, 255, 255)),
        (plain((*RED, 255), mode="RGBA"), "PNG", RED),
        (plain((*RED, 0), mode="RGBA"), "PNG", (255, 255, 255)),
        (plain((77, 255), mode="LA"), "PNG", (77, 77, 77)),
        (plain().convert("P"), "PNG", RED),
        (plain((0, 255, 255, 0), mode="CMYK"), "JPEG", (255, 0, 0)),
        (Image.fromarray(np.full((64, 64), 77 * 257, np.uint16)), "PNG", (77, 77, 77)),
        (Image.fromarray(np.full((64, 64), 77 * 257, np.uint16)), "TIFF", (77, 77, 77)),
    ],
)
def test_every_kind_of_picture(picture: Image.Image, form: str, expected: tuple[int, ...]) -> None:
    array = decode(encoded(picture, form), 16, CENTRE)
    assert array.shape == (16, 16, 3)
    assert array.dtype == np.uint8
    assert np.abs(array.astype(int) - expected).max() <= 6


def test_exif_orientation_is_applied() -> None:
    picture = plain((0, 0, 0), (40, 40))
    picture.paste((255, 255, 255), (0, 0, 40, 20))  # bright above
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show rotated by 90 degrees clockwise
    array = decode(encoded(picture, "JPEG", exif=exif, quality=95), 40, CENTRE)
    assert array[:, 30:].mean() > 240
    assert array[:, :10].mean() < 15


def test_centre_crop_of_the_official_size_only() -> None:
    official = plain((0, 0, 0), (178, 218))
    official.paste((255, 255, 255), (15, 35, 163, 183))  # the centre 148 x 148
    crop = Crop(148, (178, 218))
    kept = decode(encoded(official), 64, crop)
    assert kept[2:-2, 2:-2].min() == 255
    assert kept.min() > 200  # the filter at the border sees a little of what lies outside
    assert decode(encoded(official), 64, CENTRE).min() == 0
    square = plain((0, 0, 0), (178, 178))
    square.paste((255, 255, 255), (15, 15, 163, 163))
    assert decode(encoded(square), 64, crop)[0].max() == 0  # square ones are only resized


def test_large_jpeg_is_decoded_small_and_looks_the_same() -> None:
    ramp = np.linspace(0, 255, 1600).astype(np.uint8)
    picture = Image.fromarray(np.stack([np.broadcast_to(ramp, (1200, 1600))] * 3, -1).copy())
    fast = decode(encoded(picture, "JPEG", quality=95), 64, Crop(800)).astype(int)
    exact = decode(encoded(picture, "PNG"), 64, Crop(800)).astype(int)
    assert np.abs(fast - exact).max() <= 4


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data, done = encoded(plain()), list[Pixels]()
    monkeypatch.setattr(pictures, "LARGE", 64 * 64 - 1)
    worker = threading.Thread(target=lambda: done.append(decode(data, 16, CENTRE)))
    with pictures.ONE_AT_A_TIME:
        worker.start()
        worker.join(0.2)
        assert worker.is_alive()
    worker.join(10)
    assert len(done) == 1
    monkeypatch.setattr(pictures, "LARGE", 64 * 64)
    with pictures.ONE_AT_A_TIME:
        assert decode(data, 16, CENTRE).shape == (16, 16, 3)


def test_pictures_that_need_more_memory_may_have_fewer_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_OTHER", 64 * 64 - 1)
    assert decode(encoded(plain()), 16, CENTRE).shape == (16, 16, 3)
    with pytest.raises(ValueError, match="64 x 64 pixels are too many"):
        decode(encoded(plain((*RED, 128), mode="RGBA")), 16, CENTRE)


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert np.array_equal(decode(encoded(Image.fromarray(noise)), 64, CENTRE), noise)


# a folder of folders --------------------------------------------------------------------------------


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """ann has 3 pictures (one nested), bob 2, cem 1; and things that are no pictures."""
    root = tmp_path / "people"
    for name in ("ann/1.png", "ann/deep/er/2.JPG", "ann/3.webp", "bob/1.png", "bob/2.png", "cem/1.png"):
        form = {"png": "PNG", "JPG": "JPEG", "webp": "WEBP"}[name.rsplit(".", 1)[1]]
        put(root / name, encoded(plain(), form))
    put(root / "ann" / "notes.txt", "none")
    put(root / "ann" / ".hidden.png", b"junk")
    put(root / "loose.png", encoded(plain()))
    return root


def test_folder(people: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = import_faces(
        "folder",
        people,
        tmp_path / "set",
        size=16,
        progress=lambda done, total: calls.append((done, total)),
        align="none",
    )
    faces = FaceSet.open(report.path)
    assert (report.pictures, report.identities, report.skipped) == (6, 3, [])
    assert faces.names == ["ann", "bob", "cem"]
    assert faces.identity.tolist() == [0, 0, 0, 1, 1, 2]
    assert faces.domains == ["folder"]
    assert {faces.file(i) for i in range(3)} == {"ann/1.png", "ann/3.webp", "ann/deep/er/2.JPG"}
    assert calls[-1] == (6, 6)
    assert not faces.synthetic
    assert faces.info["kind"] == "folder"


def test_folder_in_a_zip_is_read_in_place(people: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "people.zip", "w") as z:
        for file in sorted(people.rglob("*.png")):
            z.write(file, file.relative_to(people))
        z.writestr("../escape/evil.png", encoded(plain()))
        z.writestr("__MACOSX/ann/1.png", b"junk")
    before = {path.name for path in tmp_path.iterdir()}
    report = import_faces("folder", tmp_path / "people.zip", tmp_path / "set", size=16, align="none")
    assert report.identities == 3
    assert {path.name for path in tmp_path.iterdir()} == before | {"set"}
    assert not (tmp_path.parent / "escape").exists()


def test_min_images_and_limit(people: Path, tmp_path: Path) -> None:
    two = import_faces("folder", people, tmp_path / "two", size=16, min_images=2, align="none")
    assert FaceSet.open(two.path).names == ["ann", "bob"]
    one = import_faces("folder", people, tmp_path / "one", size=16, limit_identities=1, align="none")
    assert FaceSet.open(one.path).names == ["ann"]
    with pytest.raises(UsageError, match="no identity has 9 pictures"):
        import_faces("folder", people, tmp_path / "none", min_images=9, align="none")


def test_a_centre_square_needs_no_detector(people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object) -> None:
        raise AssertionError("a detector was opened")

    monkeypatch.setattr("visard.data.sources.importing.open_detector", search)
    faces = FaceSet.open(import_faces("folder", people, tmp_path / "set", size=16, crop=40).path)
    assert (faces.align, faces.info["crop"]) == ("none", 40)
    with pytest.raises(AssertionError, match="a detector was opened"):
        import_faces("folder", people, tmp_path / "other", size=16)


def test_pairs_follow_their_pictures(people: Path, tmp_path: Path) -> None:
    """ann is taken back for want of pictures: the rows of bob and of his pairs move up."""
    for file in ("1.png", "3.webp"):
        (people / "ann" / file).write_bytes(b"broken")
    put(tmp_path / "pairs.csv", "file_a,file_b,same\nbob/1.png,bob/2.png,1\nann/deep/er/2.JPG,bob/2.png,0\n")
    report = import_faces(
        "folder", people, tmp_path / "set", size=16, align="none", min_images=2, pairs=tmp_path / "pairs.csv"
    )
    faces = FaceSet.open(report.path)
    assert faces.names == ["bob"]
    pairs = load_pairs(faces)
    assert [(faces.file(a), faces.file(b)) for a, b in zip(pairs.first, pairs.second, strict=True)] == [
        ("bob/1.png", "bob/2.png")
    ]
    assert faces.info["pairs_dropped"] == 1


def test_domains_from_folders(tmp_path: Path) -> None:
    for name in ("north/ann/1.png", "north/bob/1.png", "south/ann/1.png"):
        put(tmp_path / "src" / name, encoded(plain()))
    faces = FaceSet.open(
        import_faces("folder", tmp_path / "src", tmp_path / "set", size=16, domains=True, align="none").path
    )
    assert faces.domains == ["north", "south"]
    assert faces.names == ["north/ann", "north/bob", "south/ann"]
    assert faces.domain.tolist() == [0, 0, 1]


def test_links_that_lead_back_end(people: Path, tmp_path: Path) -> None:
    (people / "ann" / "loop").symlink_to(people)
    assert import_faces("folder", people, tmp_path / "set", size=16, align="none").pictures == 6


def test_names_that_are_no_utf8(people: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"d\xff")
    try:
        (people / odd).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    put(people / odd / "1.png", encoded(plain()))
    faces = FaceSet.open(import_faces("folder", people, tmp_path / "set", size=16, align="none").path)
    assert faces.names[3] == r"d\xff"
    assert faces.file(6) == f"{odd}/1.png"


def bomb() -> bytes:
    """A PNG header that promises 60,000 x 60,000 pixels."""
    data = bytearray(encoded(plain()))
    data[16:24] = (60000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def test_unreadable_pictures_are_skipped_and_listed(people: Path, tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    put(people / "ann" / "a_empty.png", b"")
    put(people / "ann" / "b_text.jpg", "this is no picture")
    put(people / "ann" / "c_cut.jpg", encoded(noise, "JPEG")[:900])
    put(people / "ann" / "d_bomb.png", bomb())
    put(people / "ann" / "e_script.png", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    put(people / "ann" / "f_float.tif", encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"))
    (people / "ann" / "g_gone.png").symlink_to(people / "nowhere.png")
    put(people / "cem" / "1.png", encoded(noise)[:500])  # cem's only picture
    report = import_faces("folder", people, tmp_path / "set", size=16, align="none")
    reasons = {file.split("/")[1]: reason for file, reason in report.skipped}
    assert reasons["a_empty.png"] == "the file is empty"
    assert "not a picture" in reasons["b_text.jpg"]
    assert "truncated" in reasons["c_cut.jpg"]
    assert "pixels" in reasons["d_bomb.png"]
    assert "not a picture" in reasons["e_script.png"]
    assert "floating-point" in reasons["f_float.tif"]
    assert reasons["g_gone.png"] == "no such file"
    assert all("\n" not in reason for reason in reasons.values())
    faces = FaceSet.open(report.path)
    assert faces.names == ["ann", "bob"]
    assert report.pictures == len(faces) == 5
    assert faces.info["skipped_count"] == len(report.skipped)
    assert ["ann/a_empty.png", "the file is empty"] in faces.info["skipped"]


def test_an_identity_left_with_too_few_is_taken_back(people: Path, tmp_path: Path) -> None:
    put(people / "bob" / "2.png", b"broken")
    report = import_faces("folder", people, tmp_path / "set", size=16, min_images=2, align="none")
    assert FaceSet.open(report.path).names == ["ann"]
    assert report.pictures == 3
    assert ("bob/1.png", "only 1 readable pictures of bob") in report.skipped


def test_too_many_bytes(people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 10)
    with pytest.raises(VisardError, match=r"not one of 6 pictures could be used .* bytes are too many"):
        import_faces("folder", people, tmp_path / "set", align="none")


@pytest.mark.parametrize(
    ("packing", "data", "says"),
    [
        (zipfile.ZIP_LZMA, b"a picture", "packed in an unusual way"),
        (zipfile.ZIP_DEFLATED, bytes(2**24 + 1), "16777217 bytes packed into"),
        (zipfile.ZIP_DEFLATED, b"", "the file is empty"),
    ],
)
def test_a_zip_file_takes_no_more_memory_than_its_size_allows(
    tmp_path: Path, packing: int, data: bytes, says: str
) -> None:
    with zipfile.ZipFile(tmp_path / "people.zip", "w", packing) as z:
        z.writestr("ann/1.png", data)
    container = Container(tmp_path / "people.zip")
    with pytest.raises(ValueError, match=says):
        container.read("ann/1.png")
    container.close()


def test_no_room_is_made_for_bytes_that_a_zip_file_only_announces(tmp_path: Path) -> None:
    path = tmp_path / "people.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("ann/1.png", b"a picture")
    data = bytearray(path.read_bytes())
    place = data.rfind(b"PK\x01\x02") + 20  # packed bytes, in the directory at the end
    data[place : place + 4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(data)
    container = Container(path)
    with pytest.raises(ValueError, match="cut short: 2147483647 bytes are not in the file"):
        container.read("ann/1.png")
    container.close()


def test_a_file_without_a_name_in_a_zip_is_none(tmp_path: Path) -> None:
    path = tmp_path / "people.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("x", b"a picture")
        z.writestr("ann/1.png", b"a picture")
    data = path.read_bytes()
    place = data.find(b"PK\x01\x02") + 28  # the length of the first name, in the directory at the end
    path.write_bytes(data[:place] + b"\0\0\1\0" + data[place + 4 :])  # what was its name is something extra
    container = Container(path)
    assert container.names() == ["ann/1.png"]
    container.close()


def test_no_name_in_a_list_leads_out_of_its_folder(people: Path) -> None:
    (people.parent / "secret.png").write_bytes(encoded(plain()))
    for name in ("../secret.png", "ann/../../secret.png", str(people.parent / "secret.png")):
        with pytest.raises(ValueError, match="the file lies outside the folder"):
            Container(people).read(name)


def test_links_that_lead_back_and_hidden_files_are_left_out(people: Path) -> None:
    before = Container(people).names()
    (people / "again").symlink_to(people)
    (people / ".hidden").mkdir()
    (people / ".hidden" / "1.png").write_bytes(encoded(plain()))
    assert Container(people).names() == before


def test_a_picture_that_is_cut_short_in_a_larger_file(tmp_path: Path) -> None:
    (tmp_path / "many").write_bytes(b"0123456789")
    numbers = (np.array(n) for n in ([0, 0, 0], [0, 8, 0], [4, 4, 2**40]))
    slices = Slices([tmp_path / "many"], *numbers)
    assert slices.read(0) == b"0123"
    with pytest.raises(ValueError, match="cut short"):
        slices.read(1)
    with pytest.raises(ValueError, match="1099511627776 bytes are too many"):
        slices.read(2)


def test_many_pictures_in_processes_come_out_in_order(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as z:
        for i in range(700):
            data = encoded(plain((i % 251, i // 251, 7), (16, 16))) if i % 100 != 50 else b"broken"
            z.writestr(f"p{i // 70:02d}/{i:04d}.png", data)
    apart = import_faces("folder", tmp_path / "many.zip", tmp_path / "apart", size=16, workers=2, align="none")
    alone = import_faces("folder", tmp_path / "many.zip", tmp_path / "alone", size=16, workers=1, align="none")
    first, second = FaceSet.open(apart.path), FaceSet.open(alone.path)
    assert apart.skipped == alone.skipped
    assert len(apart.skipped) == 7
    assert first.fingerprint() == second.fingerprint()
    assert np.array_equal(first.images, second.images)
    for row in (0, 300, 692):
        i = int(first.file(row)[4:8])
        assert first.images[row, 0, 0].tolist() == [i % 251, i // 251, 7]
    assert not multiprocessing.active_children()


def test_an_interrupted_import_leaves_no_set(tmp_path: Path) -> None:
    for i in range(600):
        put(tmp_path / "src" / "p" / f"{i}.png", encoded(plain()))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_faces("folder", tmp_path / "src", tmp_path / "set", size=16, workers=1, progress=stop, align="none")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_import_leaves_no_set(tmp_path: Path) -> None:
    for i in range(600):
        put(tmp_path / "src" / "p" / f"{i}.png", encoded(plain()))
    program = (
        "import sys, time; from visard.data.sources.importing import import_faces\n"
        "def wait(*_): print('half', flush=True); time.sleep(60)\n"
        "import_faces('folder', sys.argv[1], sys.argv[2], size=16, workers=1, progress=wait)"
    )
    command = [sys.executable, "-c", program, tmp_path / "src", tmp_path / "set"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert list_sets(tmp_path) == []
    assert not (tmp_path / "set").exists()
    import_faces("folder", tmp_path / "src", tmp_path / "set", size=16, align="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "src"]


# CelebA ---------------------------------------------------------------------------------------------

NAMES = ["Male", "5_o_Clock_Shadow"]


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    """Five pictures of identities 2, 10 and 9 in the official layout."""
    root = tmp_path / "celeba"
    root.mkdir()
    with zipfile.ZipFile(root / "img_align_celeba.zip", "w") as z:
        for i in range(1, 6):
            z.writestr(f"img_align_celeba/{i:06d}.jpg", encoded(plain((i * 40, 0, 0), (178, 218)), "JPEG"))
    put(
        root / "identity_CelebA.txt",
        "000001.jpg 10\n000002.jpg 2\n000003.jpg 10\n000004.jpg 9\n000005.jpg 2\n",
    )
    rows = "".join(f"{i:06d}.jpg  {'1' if i % 2 else '-1'}  -1\n" for i in range(1, 6))
    put(root / "list_attr_celeba.txt", f"5\n{' '.join(NAMES)} \n{rows}")
    put(root / "list_eval_partition.txt", "".join(f"{i:06d}.jpg {i % 3}\n" for i in range(1, 6)))
    return root


def test_celeba_zip(celeba: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("celeba", celeba, tmp_path / "set", size=32).path)
    assert faces.names == ["2", "9", "10"]
    assert [faces.file(i)[-10:] for i in range(5)] == [f"{i:06d}.jpg" for i in (2, 5, 4, 1, 3)]
    assert np.abs(faces.images[:, 9, 9, 0].astype(int) - [80, 200, 160, 40, 120]).max() <= 4
    assert faces.attribute_names == NAMES
    assert faces.attribute("Male").tolist() == [-1, 1, -1, 1, 1]
    assert faces.extra("partition").tolist() == [2, 2, 1, 1, 0]
    assert faces.domains == ["celeba"]
    assert faces.info["crop"] == 148


def test_celeba_folder_and_subfolders(celeba: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(celeba / "img_align_celeba.zip") as z:
        z.extractall(celeba / "Img")
    (celeba / "img_align_celeba.zip").unlink()
    (celeba / "Anno").mkdir()
    for name in ("identity_CelebA.txt", "list_attr_celeba.txt"):
        (celeba / name).rename(celeba / "Anno" / name)
    (celeba / "list_eval_partition.txt").unlink()
    faces = FaceSet.open(import_faces("celeba", celeba, tmp_path / "set", size=32).path)
    assert len(faces) == 5
    with pytest.raises(UsageError, match=r"no partition\.npy"):
        faces.extra("partition")


def test_celeba_without_attributes(celeba: Path, tmp_path: Path) -> None:
    (celeba / "list_attr_celeba.txt").unlink()
    with pytest.raises(UsageError, match=r"list_attr_celeba\.txt is missing"):
        import_faces("celeba", celeba, tmp_path / "set")
    faces = FaceSet.open(import_faces("celeba", celeba, tmp_path / "set", attributes=False).path)
    assert faces.attribute_names == []


def test_celeba_listed_but_absent_picture_is_skipped(celeba: Path, tmp_path: Path) -> None:
    with (celeba / "identity_CelebA.txt").open("a") as file:
        file.write("000099.jpg 2\n")
    report = import_faces("celeba", celeba, tmp_path / "set")
    assert report.skipped == [("000099.jpg", "no such file")]
    assert FaceSet.open(report.path).extra("partition").shape == (5,)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "identity_CelebA.txt",
            "000001.jpg 10\n000002.jpg\n",
            r"identity_CelebA\.txt:2: expected a file name",
        ),
        ("identity_CelebA.txt", "000001.jpg 1\n\n000001.jpg 2\n", r":3: 000001\.jpg is listed twice"),
        ("identity_CelebA.txt", "", "lists no pictures"),
        ("identity_CelebA.txt", None, r"identity_CelebA\.txt is missing"),
        ("img_align_celeba.zip", None, r"neither img_align_celeba\.zip nor a folder"),
        ("img_align_celeba.zip", "no zip", "neither a folder nor a zip file"),
        ("list_attr_celeba.txt", "", r"list_attr_celeba\.txt:1: expected the number"),
        ("list_attr_celeba.txt", "5\n", r":2: expected the names"),
        ("list_attr_celeba.txt", "5\nMale Male\n", r":2: expected the names"),
        ("list_attr_celeba.txt", "5\nMale Young\n000001.jpg 1\n", r":3: expected a file name and 2 values"),
        ("list_attr_celeba.txt", "5\nMale Young\n000001.jpg 1 2\n", r":3: attribute values must be"),
        (
            "list_eval_partition.txt",
            "000001.jpg 3\n",
            r"partition\.txt:1: expected a file name and 0, 1 or 2",
        ),
    ],
)
def test_celeba_broken_files(celeba: Path, tmp_path: Path, file: str, text: str | None, message: str) -> None:
    (celeba / file).unlink() if text is None else put(celeba / file, text)
    with pytest.raises(VisardError, match=message) as caught:
        import_faces("celeba", celeba, tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["celeba"]


# LFW ------------------------------------------------------------------------------------------------


@pytest.fixture
def lfw(tmp_path: Path) -> Path:
    root = tmp_path / "lfw"
    for name, n in (("Ann_Lee", 3), ("Bo", 2)):
        for i in range(1, n + 1):
            put(root / name / f"{name}_{i:04d}.jpg", encoded(plain(size=(250, 250)), "JPEG"))
    return root


def test_lfw_pairs(lfw: Path, tmp_path: Path) -> None:
    lines = ["Ann_Lee\t1\t3", "Ann_Lee\t2\tBo\t1", "Bo\t1\t2", "Bo\t2\tAnn_Lee\t1"]
    put(tmp_path / "pairs.txt", "2\t1\n" + "\n".join(lines) + "\nAnn_Lee\t1\t9\n")
    faces = FaceSet.open(import_faces("lfw", lfw, tmp_path / "set", size=32, align="none").path)
    pairs = load_pairs(faces)
    assert (pairs.first.tolist(), pairs.second.tolist()) == ([0, 1, 3, 4], [2, 3, 4, 0])
    assert pairs.same.tolist() == [True, False, True, False]
    assert pairs.fold.tolist() == [0, 0, 1, 1]
    assert (faces.info["pairs"], faces.info["pairs_dropped"]) == (4, 1)


def test_lfw_dev_pairs_have_one_fold(lfw: Path, tmp_path: Path) -> None:
    put(tmp_path / "pairsDevTest.txt", "1\nBo 1 2\nBo 1 Ann_Lee 1\n")
    report = import_faces("lfw", lfw, tmp_path / "set", size=32, pairs=tmp_path / "pairsDevTest.txt", align="none")
    assert load_pairs(FaceSet.open(report.path)).fold.tolist() == [0, 0]


def test_lfw_without_pairs(lfw: Path, tmp_path: Path) -> None:
    faces = FaceSet.open(import_faces("lfw", lfw, tmp_path / "set", size=32, align="none").path)
    assert (len(faces), faces.names) == (5, ["Ann_Lee", "Bo"])
    with pytest.raises(UsageError, match=r"no pairs\.npy"):
        load_pairs(faces)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"pairs\.txt:1: expected the number of folds"),
        ("10 x\n", r"pairs\.txt:1"),
        ("1 1\nBo 1\n", r"pairs\.txt:2: expected 'name i j'"),
        ("1 1\nBo 1 2\nBo x Ann 1\n", r"pairs\.txt:3"),
    ],
)
def test_lfw_broken_pairs(lfw: Path, tmp_path: Path, text: str, message: str) -> None:
    put(lfw / "pairs.txt", text)
    with pytest.raises(VisardError, match=message):
        import_faces("lfw", lfw, tmp_path / "set", align="none")


# wrong use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "options", "message"),
    [
        ("celebra", "people", {}, r"no importer 'celebra'.*celeba"),
        ("folder", "people", {"cropp": 5}, r"no option 'cropp'.*crop"),
        ("folder", "nowhere", {}, "no such file or folder"),
        ("celeba", "nowhere", {}, "no such file or folder"),
        ("folder", "empty", {}, "holds no pictures as <identity>/<picture>"),
        ("folder", "people", {"size": 0}, "size >= 8"),
        ("folder", "people", {"crop": 0}, "crop = 0"),
        ("celeba", "people", {}, "neither img_align_celeba"),
        ("lfw", "people", {"pairs": "nowhere.txt"}, "no such file: nowhere.txt"),
    ],
)
def test_wrong_use(
    people: Path, tmp_path: Path, kind: str, source: str, options: dict[str, object], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message) as caught:
        import_faces(kind, tmp_path / source, tmp_path / "set", **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "set").exists()


def test_existing_set_is_refused_before_work_begins(people: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    started = time.perf_counter()
    with pytest.raises(UsageError, match="exists already"):
        import_faces("folder", people, tmp_path / "set", progress=lambda *_: pytest.fail("work began"), align="none")
    assert time.perf_counter() - started < 5
