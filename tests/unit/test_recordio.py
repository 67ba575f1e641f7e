"""RecordIO: records put together byte by byte here and read by us; files of ours taken apart byte by byte here."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.unit.pictures import pixels, png

from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.data.sources.recordio import RecordFile, write_recordio
from visard.errors import UsageError, VisardError

MAGIC = b"\x0a\x23\xd7\xce"


def piece(part: int, data: bytes) -> bytes:
    """Magic, a word of part (3 bits) and length (29 bits), data, zeros up to 4 bytes."""
    word = (part * 536870912 + len(data)).to_bytes(4, "little")
    return MAGIC + word + data + b"\0" * ((4 - len(data) % 4) % 4)


def header(flag: int, label: float, key: int = 0, labels: tuple[float, ...] = ()) -> bytes:
    return (
        flag.to_bytes(4, "little")
        + struct.pack("<f", label)
        + key.to_bytes(8, "little")
        + bytes(8)
        + b"".join(struct.pack("<f", value) for value in labels)
    )


def assemble(folder: Path, records: list[bytes], keys: list[int] | None = None, index: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    data, lines = b"", ""
    for key, record in zip(keys or range(len(records)), records, strict=True):
        lines += f"{key}\t{len(data)}\n"
        data += record
    (folder / "train.rec").write_bytes(data)
    if index:
        (folder / "train.idx").write_text(lines)
    return folder / "train.rec"


def training(n: int = 6) -> list[bytes]:
    """Header, n pictures of n / 2 people (every second label an array), and a record for each person."""
    people = n // 2
    records = [piece(0, header(2, 0.0, 0, (n + 1.0, n + 1.0 + people)))]
    for k in range(n):
        label = header(0, k // 2, k + 1) if k % 4 < 2 else header(2, 99.0, k + 1, (k // 2, 7.0))
        records.append(piece(0, label + png(k)))
    return records + [piece(0, header(2, 0.0, n + 1 + p, (2 * p + 1.0, 2 * p + 3.0))) for p in range(people)]


@pytest.mark.parametrize("index", [True, False])
def test_header_scalar_and_array_labels(tmp_path: Path, index: bool) -> None:
    path = assemble(tmp_path / "src", training(), index=index)
    for source in (path, tmp_path / "src"):
        faces = FaceSet.open(import_faces("recordio", source, tmp_path / f"set-{source.name}", size=16).path)
        assert len(faces) == 6
        assert faces.names == ["0", "1", "2"]
        assert faces.identity.tolist() == [0, 0, 1, 1, 2, 2]
        assert [faces.file(k) for k in range(6)] == ["1", "2", "3", "4", "5", "6"]
        assert all(np.array_equal(faces.images[k], pixels(k)) for k in range(6))
        assert faces.info["header"] == [7.0, 10.0]


def test_without_header_every_record_is_a_picture(tmp_path: Path) -> None:
    records = [piece(0, header(0, label) + png(k)) for k, label in enumerate((5, 3, 5))]
    faces = FaceSet.open(import_faces("recordio", assemble(tmp_path / "a", records), tmp_path / "set", size=16).path)
    assert (faces.names, faces.identity.tolist()) == (["3", "5"], [1, 0, 1])
    records = [piece(0, header(1, 0.0, k, (float(k),)) + png(k)) for k in range(2)]  # labels and a picture: no header
    assert import_faces("recordio", assemble(tmp_path / "b", records), tmp_path / "arrays", size=16).pictures == 2


def test_keys_that_do_not_follow_the_file(tmp_path: Path) -> None:
    records = training()
    keys = [6, 5, 4, 3, 2, 1]
    path = assemble(tmp_path / "src", [records[0], *records[1:7]], [0, *keys])
    faces = FaceSet.open(import_faces("recordio", path, tmp_path / "set", size=16).path)
    assert [faces.file(k) for k in range(6)] == [str(k) for k in keys]  # read in the order of the disk
    assert np.array_equal(faces.images[0], pixels(0))


def test_records_in_parts(tmp_path: Path) -> None:
    """A picture that holds the magic number is cut there; the number comes back between the parts."""
    picture = png(3)
    pad = b"\0" * (-(24 + len(picture)) % 4)
    payload = header(0, 4.0) + picture + pad + MAGIC + b"12345678" + MAGIC  # bytes after a PNG do not matter
    first = header(0, 4.0) + picture + pad
    record = piece(1, first) + piece(2, b"12345678") + piece(3, b"")
    path = assemble(tmp_path / "src", [record, piece(0, header(0, 1.0) + png(0))])
    records = RecordFile(path)
    assert header(0, 4.0) + records.record(0).data == payload
    assert records.labels().tolist() == [4.0, 1.0]
    faces = FaceSet.open(import_faces("recordio", path, tmp_path / "set", size=16).path)
    assert np.array_equal(faces.images[0], pixels(3))
    # the header itself is cut where its id is the magic number
    odd = struct.pack("<If", 0, 9.0), MAGIC + bytes(4), bytes(8) + png(1)
    cut = piece(1, odd[0]) + piece(3, odd[1][4:] + odd[2])
    path = assemble(tmp_path / "odd", [cut], index=False)
    assert RecordFile(path).labels().tolist() == [9.0]
    assert RecordFile(path).record(0).data == png(1)


def test_what_we_write(tmp_path: Path) -> None:
    tricky = png(9) + b"\0" * (-(len(png(9))) % 4) + MAGIC + b"tail" + MAGIC * 2
    pictures = [(png(0), 3), (png(1), 3), (tricky, 8)]
    assert write_recordio(tmp_path / "my.rec", iter(pictures)) == 3
    data = (tmp_path / "my.rec").read_bytes()
    index = dict(tuple(map(int, line.split())) for line in (tmp_path / "my.idx").read_text().splitlines())  # type: ignore[misc]
    assert sorted(index) == [0, 1, 2, 3, 4, 5]

    def take(key: int) -> bytes:
        at, whole = index[key], b""
        while True:
            assert data[at : at + 4] == MAGIC
            assert at % 4 == 0
            word = int.from_bytes(data[at + 4 : at + 8], "little")
            part, length = divmod(word, 2**29)
            whole += data[at + 8 : at + 8 + length]
            at += 8 + (length + 3) // 4 * 4
            if part in (0, 3):
                return whole
            whole += MAGIC

    assert take(0) == header(2, 0.0, 0, (4.0, 6.0))
    assert [take(k) for k in (1, 2, 3)] == [header(0, label, k) + p for k, (p, label) in enumerate(pictures, 1)]
    assert take(4) == header(2, 0.0, 3, (1.0, 3.0))
    assert take(5) == header(2, 0.0, 8, (3.0, 4.0))
    assert MAGIC not in [data[at : at + 4] for k in index for at in range(index[k] + 8, index[k] + 24, 4)]
    faces = FaceSet.open(import_faces("recordio", tmp_path / "my.rec", tmp_path / "set", size=16).path)
    assert (faces.names, faces.identity.tolist()) == (["3", "8"], [0, 0, 1])
    assert np.array_equal(faces.images[2], pixels(9))


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    for pictures in ([], [(b"x", 1), (b"x", 2), (b"x", 1)], [(b"x", -1)], [(b"x", 2**25)]):
        with pytest.raises(VisardError):
            write_recordio(tmp_path / "my.rec", pictures)
    assert list(tmp_path.iterdir()) == []


def test_bad_pictures_are_skipped(tmp_path: Path) -> None:
    records = training()
    records[2] = piece(0, header(0, 0.0, 2) + b"no picture")
    records[3] = piece(0, header(0, 1.0, 3))
    records[4] = piece(0, header(5000, 1.0, 4, (1.0,)) + png(1))
    report = import_faces("recordio", assemble(tmp_path / "src", records), tmp_path / "set", size=16)
    assert [file for file, _ in report.skipped] == ["2", "3", "4"]
    assert report.skipped[1][1] == "the file is empty"
    assert "5000 labels" in report.skipped[2][1]
    assert FaceSet.open(report.path).names == ["0", "2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rec, idx: (b"", idx), "is empty"),
        (lambda rec, idx: (rec[:5], idx), "cut short"),
        (lambda rec, idx: (rec[:-6], idx), "cut short: no whole record 9"),
        (lambda rec, idx: (rec[:-6], None), "cut short"),
        (lambda rec, idx: (rec[:200], None), "cut short: no whole record at byte 40"),
        (lambda rec, idx: (b"\x89PNG" + rec[4:], idx), "no whole record 0 at byte 0"),
        (lambda rec, idx: (b"\x89PNG" + rec[4:], None), "no whole record at byte 0"),
        (lambda rec, idx: (rec[:4] + b"\xff\xff\xff\x1f" + rec[8:], idx), "no whole record 0"),  # 512 MB announced
        (lambda rec, idx: (rec[:4] + b"\xff\xff\xff\x1f" + rec[8:], None), "no whole record"),
        (lambda rec, idx: (rec, ""), r"train\.idx is empty"),
        (lambda rec, idx: (rec, "0 0 0\n"), r"train\.idx:1: expected a key and an offset"),
        (lambda rec, idx: (rec, "0\t0\n1\t-40\n"), r"train\.idx:2"),
        (lambda rec, idx: (rec, "0\t0\n1\t99999999999999999999999\n"), r"train\.idx:2"),
        (lambda rec, idx: (rec, "0\t0\n1\t999999999999\n"), "no whole record 1 at byte 999999999999"),
        (lambda rec, idx: (rec, "0\t0\n1\t41\n"), "no whole record 1 at byte 41"),
        (lambda rec, idx: (rec, "0\t0\n1\t44\n"), "no whole record 1 at byte 44"),
        (lambda rec, idx: (rec, "0\t0\n0\t40\n"), "a key twice"),
        (lambda rec, idx: (rec, "0\t0\n"), "announces no pictures"),
        (lambda rec, idx: (rec[:32] + struct.pack("<f", np.nan) + rec[36:], idx), "announces no"),
        (lambda rec, idx: (piece(0, header(0, 0.5) + png(0)), None), "record 0 has label 0.5"),
        (lambda rec, idx: (piece(0, header(0, np.nan) + png(0)), None), "label nan"),
        (lambda rec, idx: (piece(0, header(0, -1.0) + png(0)), None), r"label -1\.0"),
        (lambda rec, idx: (piece(0, header(0, 3e30) + png(0)), None), "no identity number"),
        (lambda rec, idx: (piece(0, b"short"), None), "no whole record 0"),
        (lambda rec, idx: (piece(1, header(0, 1.0)) + piece(1, b"again"), None), "is damaged"),
        (lambda rec, idx: (piece(1, header(0, 1.0)), None), "is damaged"),
        (lambda rec, idx: (piece(2, header(0, 1.0)), None), "has no records"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_line(tmp_path: Path, damage: object, message: str) -> None:
    path = assemble(tmp_path / "src", training())
    rec, idx = damage(path.read_bytes(), path.with_suffix(".idx").read_text())  # type: ignore[operator]
    path.write_bytes(rec)
    path.with_suffix(".idx").unlink() if idx is None else path.with_suffix(".idx").write_text(idx)
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("recordio", path, tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = assemble(tmp_path / "src", training(2)).read_bytes()
    (tmp_path / "src" / "train.idx").unlink()
    for k in range(150):
        data = bytearray(whole[: rng.randrange(40, len(whole))] if k % 3 == 0 else whole)
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(min(len(data), 120))] = rng.randrange(256)
        (tmp_path / "src" / "train.rec").write_bytes(data)
        try:
            import_faces("recordio", tmp_path / "src", tmp_path / "set", size=16, overwrite=True, workers=1)
        except VisardError as error:
            assert "\n" not in str(error)


def test_which_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has 0 \.rec files"):
        import_faces("recordio", tmp_path, tmp_path / "set")
    with pytest.raises(UsageError, match="no such file"):
        import_faces("recordio", tmp_path / "train.rec", tmp_path / "set")
    assemble(tmp_path, training())
    (tmp_path / "val.rec").write_bytes(b"junk")
    assert import_faces("recordio", tmp_path, tmp_path / "set", size=16).pictures == 6
