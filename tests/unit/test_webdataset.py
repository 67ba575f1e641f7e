"""WebDataset shards: tar files put together byte by byte here, by tarfile, and damaged ones."""

import io
import random
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.unit.pictures import pixels, png

from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.errors import UsageError, VisardError


def member(name: str, data: bytes, kind: bytes = b"0", size: int | None = None) -> bytes:
    """A ustar header of 512 bytes, the data, and zeros up to a multiple of 512."""
    head = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2
    head += b"%011o\0" % (len(data) if size is None else size) + b"00000000000\0" + b" " * 8 + kind
    head += b"\0" * 100 + b"ustar\x0000" + b"\0" * 247
    head = head[:148] + b"%06o\0 " % sum(head) + head[156:]
    assert len(head) == 512
    return head + data + b"\0" * (-len(data) % 512)


def shard(path: Path, *members: bytes, end: bytes = bytes(1024)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(members) + end)
    return path


def sample(k: int, label: str) -> bytes:
    return member(f"a/{k:04d}.png", png(k)) + member(f"a/{k:04d}.cls", label.encode())


def test_shards_in_a_folder(tmp_path: Path) -> None:
    shard(tmp_path / "src" / "s-000.tar", sample(0, "7"), sample(1, "3\n"))
    shard(
        tmp_path / "src" / "s-001.tar", member("./2.cls", b"7"), member("./2.png", png(2)), member("./note.txt", b"x")
    )
    faces = FaceSet.open(import_faces("webdataset", tmp_path / "src", tmp_path / "set", size=16).path)
    assert (faces.names, faces.identity.tolist()) == (["7", "3"], [0, 1, 0])
    assert [faces.file(k) for k in range(3)] == ["s-000.tar/a/0000", "s-000.tar/a/0001", "s-001.tar/2"]
    assert all(np.array_equal(faces.images[k], pixels(k)) for k in range(3))


def test_json_labels_endings_and_tarfile(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for k, who in enumerate(("änn", "bob", "änn")):
            name = f"{'very_long_' * 20}{k}"
            for ending, data in (
                ("left.png", png(k)),
                ("right.png", png(50 + k)),
                ("json", f'{{"id": "{who}"}}'.encode()),
            ):
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    report = import_faces(
        "webdataset", tmp_path / "a.tar", tmp_path / "set", size=16, label="json:id", image="right.png"
    )
    faces = FaceSet.open(report.path)
    assert faces.names == ["änn", "bob"]
    assert all(np.array_equal(faces.images[k], pixels(50 + k)) for k in range(3))


def test_links_and_devices_are_no_pictures(tmp_path: Path) -> None:
    link = member("evil.png", b"", kind=b"2").replace(
        b"\0" * 100 + b"ustar", b"/etc/passwd".ljust(100, b"\0") + b"ustar"
    )
    head = bytearray(link)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    path = shard(
        tmp_path / "a.tar",
        bytes(head),
        member("evil.cls", b"1"),
        member("../../up.png", png(3)),
        member("../../up.cls", b"2"),
    )
    before = sorted(p.name for p in tmp_path.parent.iterdir())
    report = import_faces("webdataset", path, tmp_path / "set", size=16)
    assert (report.pictures, FaceSet.open(report.path).names) == (1, ["2"])
    assert sorted(p.name for p in tmp_path.parent.iterdir()) == before  # nothing was unpacked


def test_bad_pictures_are_skipped(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "a.tar",
        sample(0, "1"),
        member("b.jpg", b"junk"),
        member("b.cls", b"1"),
        member("c.jpg", b""),
        member("c.cls", b"1"),
    )
    report = import_faces("webdataset", path, tmp_path / "set", size=16)
    assert report.skipped == [("a.tar/b", "not a picture that can be read"), ("a.tar/c", "the file is empty")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no plain tar file|holds no pictures"),
        (b"junk" * 300, "no plain tar file"),
        (bytes(1024), "holds no pictures"),
        (sample(0, "1")[:700], "cut short"),
        (member("a.png", b"x", size=8**10), "cut short in 'a.png'"),  # a gigabyte announced
        (sample(0, "1")[:1024] + b"\xff" * 512, "sample a/0000 has no label|no plain tar|cut short"),
        (member("a.png", png(0)) + bytes(1024), r"sample a has no label \(\.cls"),
        (member("a.png", png(0)) + member("a.json", b"[1]") + bytes(1024), r"no usable label in \.json"),
        (member("a.png", png(0)) + member("a.json", b"[" * 100_000) + bytes(1024), r"no usable label in \.json"),
        (member("a.png", png(0)) + member("a.cls", b"\xff\xfe") + bytes(1024), r"no usable label in \.cls"),
        (member("a.png", png(0)) + member("a.cls", b"x" * 300) + bytes(1024), r"no usable label in \.cls"),
        (member("a.png", png(0)) + member("a.cls", b"\x1b[31m") + bytes(1024), r"no usable label in \.cls"),
        (member("a.png", png(0)) + member("a.cls", b"1", kind=b"2") + bytes(1024), "has no label"),
        (b"\x1f\x8b" + bytes(600), "no plain tar file"),  # compressed shards
        (member("x", b"", size=8**10, kind=b"x") + bytes(1024), "no plain tar|holds no pictures|cut short"),
        (member("././@LongLink", b"x" * 600, kind=b"L") * 2000, "no plain tar file|holds no pictures"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("webdataset", tmp_path / "a.tar", tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\x80" + bytes(6) + b"\x40" + bytes(4)])
def test_a_header_of_the_size_of_the_world(tmp_path: Path, size: bytes) -> None:
    """Sizes in base 256: more than an index can be, and 2^38 bytes, for which no room is made."""
    head = bytearray(member("x", b"", kind=b"x"))
    head[124:136], head[148:156] = size, b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    (tmp_path / "a.tar").write_bytes(bytes(head) + bytes(1024))
    with pytest.raises(UsageError, match="no plain tar file|holds no pictures"):
        import_faces("webdataset", tmp_path / "a.tar", tmp_path / "set")
    tracemalloc.start()
    with pytest.raises(UsageError):
        import_faces("webdataset", tmp_path / "a.tar", tmp_path / "set")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = sample(0, "1") + sample(1, "2") + bytes(1024)
    for _ in range(200):
        data = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(min(len(data), 512))] = rng.randrange(256)
        (tmp_path / "a.tar").write_bytes(data)
        try:
            import_faces("webdataset", tmp_path / "a.tar", tmp_path / "set", size=16, overwrite=True, workers=1)
        except VisardError as error:
            assert "\n" not in str(error)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \.tar files"):
        import_faces("webdataset", tmp_path, tmp_path / "set")
    with pytest.raises(UsageError, match="no such file"):
        import_faces("webdataset", tmp_path / "a.tar", tmp_path / "set")
