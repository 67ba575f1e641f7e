"""Parquet and Arrow files as `datasets` writes them, and everything that can be wrong with one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.pictures import pixels, png

from visard.data.faces import FaceSet
from visard.data.sources import parquet, parquet_pages
from visard.data.sources.importing import import_faces
from visard.data.sources.parquet_pages import Compact, check_pages
from visard.errors import UsageError, VisardError

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(seeds: range, labels: list[Any], names: list[str] | None = None) -> Any:
    """The layout of `datasets`: {bytes, path} and numbers, with the names of the classes in the metadata."""
    rows = [{"bytes": png(seed), "path": f"{seed}.png"} for seed in seeds]
    made = pa.table({"image": pa.array(rows, STRUCT), "label": pa.array(labels)})
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})} if names else {}
    return made.replace_schema_metadata(about)


def test_a_folder_of_shards(tmp_path: Path) -> None:
    (tmp_path / "hub" / "data").mkdir(parents=True)
    names = ["cem", "ann", "bob"]
    pq.write_table(
        table(range(150), [k % 3 for k in range(150)], names),
        tmp_path / "hub/data/train-00000-of-00002.parquet",
        row_group_size=40,
    )
    pq.write_table(table(range(150, 160), [2] * 10, names), tmp_path / "hub/data/train-00001-of-00002.parquet")
    pq.write_table(table(range(200, 204), [0] * 4, names), tmp_path / "hub/data/test-00000-of-00001.parquet")
    faces = FaceSet.open(import_faces("parquet", tmp_path / "hub", tmp_path / "set", size=16, split="train").path)
    assert faces.names == names
    assert len(faces) == 160
    assert all(np.array_equal(faces.images[k], pixels(k)) for k in range(160))
    assert faces.identity[:150].tolist() == [k % 3 for k in range(150)]
    assert (faces.file(0), faces.file(150)) == ("train-00000-of-00002.parquet:0", "train-00001-of-00002.parquet:0")
    assert len(FaceSet.open(import_faces("parquet", tmp_path / "hub", tmp_path / "all", size=16).path)) == 164
    with pytest.raises(UsageError, match="of split 'dev'"):
        import_faces("parquet", tmp_path / "hub", tmp_path / "none", split="dev")


def test_limits_skip_rows_without_decoding_them(tmp_path: Path) -> None:
    pq.write_table(table(range(30), [k % 3 for k in range(30)]), tmp_path / "a.parquet", row_group_size=7)
    report = import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", size=16, limit_identities=2, workers=1)
    faces = FaceSet.open(report.path)
    wanted = [k for k in range(30) if k % 3 < 2]
    assert all(np.array_equal(faces.images[row], pixels(k)) for row, k in enumerate(wanted))
    assert len(faces) == 20


def test_plain_bytes_text_labels_and_other_names(tmp_path: Path) -> None:
    made = pa.table({"face": [png(0), png(1), b"broken", None], "who": ["ann", "bob", "ann", "bob"]})
    pq.write_table(made, tmp_path / "a.parquet", compression="zstd")
    report = import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", size=16, image="face", label="who")
    assert report.skipped == [
        ("a.parquet:2", "not a picture that can be read"),
        ("a.parquet:3", "the file is empty"),
    ]
    assert FaceSet.open(report.path).names == ["ann", "bob"]


def test_pictures_that_are_only_paths_are_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(0))
    rows = [{"bytes": None, "path": str(tmp_path / "x.png")}, {"bytes": png(1), "path": None}]
    pq.write_table(pa.table({"image": pa.array(rows, STRUCT), "label": [0, 0]}), tmp_path / "a.parquet")
    report = import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", size=16)
    assert report.skipped == [("a.parquet:0", "the file is empty")]


def test_arrow_stream_of_save_to_disk(tmp_path: Path) -> None:
    made = table(range(100), [k // 50 for k in range(100)], ["x", "y"])
    with (
        pa.OSFile(str(tmp_path / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, made.schema) as writer,
    ):
        writer.write_table(made, max_chunksize=30)
    faces = FaceSet.open(import_faces("parquet", tmp_path, tmp_path / "set", size=16).path)
    assert (len(faces), faces.names) == (100, ["x", "y"])
    assert np.array_equal(faces.images[77], pixels(77))


@pytest.mark.parametrize("column", ["image", "label"])
def test_offsets_that_lead_outside_do_not_end_the_process(tmp_path: Path, column: str) -> None:
    """In a process of its own: where it is not checked, it dies."""
    made = pa.table({"image": [png(k) for k in range(3)], "label": ["a", "b", "c"]})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, made.schema) as writer:
        writer.write_table(made)
    ends = np.cumsum([0, *(len(value.as_buffer()) for value in made[column])]).astype("<i4")
    data = path.read_bytes()
    assert data.count(ends.tobytes()) == 1
    path.write_bytes(data.replace(ends.tobytes(), np.array([0, *ends[1:-1], 2**30], "<i4").tobytes()))
    code = "import sys; from visard.data.sources.importing import *; import_faces('parquet', *sys.argv[1:])"
    given = [sys.executable, "-c", code, str(path), str(tmp_path / "set")]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done
    assert "is damaged" in done.stderr


@pytest.mark.parametrize("text", [b"2.png", b"second"])
def test_text_that_is_no_utf8(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.parquet"
    made = table(range(3), ["first", "second", "third"])
    pq.write_table(made, path, compression="none", use_dictionary=False, write_statistics=False)
    data = path.read_bytes()
    assert data.count(text) == 1
    path.write_bytes(data.replace(text, text[:1] + b"\xae" + text[2:]))
    with pytest.raises(UsageError, match=r"a.parquet is damaged .* UTF8"):
        import_faces("parquet", path, tmp_path / "set", size=16)
    assert not (tmp_path / "set").exists()


def test_an_identity_taken_back_moves_the_others_together(tmp_path: Path) -> None:
    """Rows of several people are mixed here, so what is dropped at the end leaves holes."""
    rows = [b"broken" if k in (0, 3) else png(k) for k in range(9)]
    pq.write_table(pa.table({"image": rows, "label": [f"p{k % 3}" for k in range(9)]}), tmp_path / "a.parquet")
    report = import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", size=16, min_images=2)
    faces = FaceSet.open(report.path)
    assert faces.names == ["p1", "p2"]
    assert faces.identity.tolist() == [0, 1, 0, 1, 0, 1]
    assert all(np.array_equal(faces.images[row], pixels(k)) for row, k in enumerate((1, 2, 4, 5, 7, 8)))
    assert [faces.file(row) for row in range(6)] == [f"a.parquet:{k}" for k in (1, 2, 4, 5, 7, 8)]
    assert ("a.parquet:6", "only 1 readable pictures of p0") in report.skipped


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"",
        lambda d: d[:100],
        lambda d: d[:-1],
        lambda d: b"junk" * 99,
        lambda d: d[:40] + b"\xff" * 400 + d[440:],
        lambda d: d.replace(b"label", b"lab\xffl"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, name: str, damage: Any) -> None:
    made = table(range(5), [0] * 5)
    if name.endswith("arrow"):
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_stream(file, made.schema) as writer:
            writer.write_table(made)
    else:
        pq.write_table(made, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(damage(data))
    try:
        report = import_faces("parquet", tmp_path / name, tmp_path / "set", size=16)
    except VisardError as error:
        assert "\n" not in str(error)
        assert name in str(error)
        assert [p.name for p in tmp_path.iterdir()] == [name]
    else:  # an Arrow stream may lack its end mark; damaged pictures are skipped
        assert len(damage(data)) > 1000
        assert len(FaceSet.open(report.path)) + len(report.skipped) == 5


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"image": [b"x"], "who": [1]}, {}, r"which column has the labels\? \(image, who\)"),
        ({"face": [b"x"], "label": [1]}, {}, "which column has the pictures"),
        ({"image": [b"x"], "label": [1]}, {"label": "lable"}, r"no column 'lable' \(did you mean 'label'"),
        ({"image": [b"x"], "label": [None]}, {}, "row 0 has no identity in 'label'"),
        ({"image": [b"x"], "label": [1.5]}, {}, "row 0 has no identity"),
        ({"image": [b"x"], "label": [True]}, {}, "row 0 has no identity"),
        ({"image": [b"x"], "label": [[1]]}, {}, "row 0 has no identity"),
        ({"image": ["text"], "label": [1]}, {}, "not one of 1 pictures could be used"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, {}, "has no rows"),
    ],
)
def test_wrong_columns(tmp_path: Path, columns: dict[str, Any], options: dict[str, str], message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(VisardError, match=message):
        import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", **options)  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_wrong_metadata_is_ignored(tmp_path: Path) -> None:
    for text in ("", "[", "[]", '{"info": 3}', '{"info": {"features": {"label": {"names": [1]}}}}'):
        pq.write_table(table(range(2), [5, 6]).replace_schema_metadata({"huggingface": text}), tmp_path / "a.parquet")
        report = import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set", size=16, overwrite=True)
        assert FaceSet.open(report.path).names == ["5", "6"]


def test_wrong_paths_and_no_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        import_faces("parquet", tmp_path / "nowhere", tmp_path / "set")
    with pytest.raises(UsageError, match=r"no \.parquet or \.arrow files"):
        import_faces("parquet", tmp_path, tmp_path / "set")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"install visard\[parquet\]"):
        import_faces("parquet", tmp_path / "a.parquet", tmp_path / "set")


def test_pyarrow_is_loaded_only_when_needed() -> None:
    program = "import sys, visard.data.sources.importing; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert parquet.BATCH <= 256


def page_header(unpacked: int, packed: int) -> bytes:
    """As Thrift's compact protocol has it: type, sizes, a check sum, a struct with text, list, map and truth."""

    def number(value: int) -> bytes:
        value, found = (value << 1) ^ (value >> 63), b""
        while value > 127:
            found, value = found + bytes([value & 127 | 128]), value >> 7
        return found + bytes([value])

    inside = (
        b"\x18\x03abc"
        + b"\x19\x25"
        + number(-3)
        + number(700)
        + b"\x1b\x01\x58\x04\x02xy"
        + b"\x11"
        + b"\x17"
        + bytes(8)
        + b"\x00"
    )
    sizes = b"\x15" + number(unpacked) + b"\x15" + number(packed)
    return b"\x15\x00" + sizes + b"\x15" + number(-5) + b"\x1c" + inside + b"\x00"


def test_headers_of_pages_are_read_to_their_end() -> None:
    header = page_header(70_000, 12)
    reader = Compact(b"??" + header + b"page", 2)
    inside = {1: b"abc", 2: [-3, 700], 3: None, 4: None, 5: None}
    assert reader.struct() == {1: 0, 2: 70_000, 3: 12, 4: -5, 5: inside}
    assert reader.at == 2 + len(header)
    for cut in range(len(header)):
        with pytest.raises(ValueError, match="cut off|unknown kind|too long"):
            Compact(header[:cut], 0).struct()


@pytest.mark.parametrize("unpacked", [2**28, 2**28 + 1, 2**31 - 1])
def test_a_page_that_is_said_to_be_large_is_refused_before_it_takes_memory(tmp_path: Path, unpacked: int) -> None:
    """The size in the header of the first page of labels is another; the reader would allocate that much."""
    path = tmp_path / "a.parquet"
    table = pa.table({"image": [png(pixels(k, 8)) for k in range(40)], "label": [k % 4 for k in range(40)]})
    pq.write_table(table, path, compression="gzip", use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    data, at = path.read_bytes(), chunk.data_page_offset
    known = Compact(data, at)
    sizes = known.struct()
    old = page_header(sizes[2], sizes[3])[2 : 2 + 1 + len(_varint(sizes[2]))]
    assert data[at + 2 : at + 2 + len(old)] == old, "type, then the unpacked size"
    check_pages(path, "label")
    changed = data[:at] + data[at : at + 2] + b"\x15" + _varint(unpacked) + data[at + 2 + len(old) :]
    moved = tmp_path / "b.parquet"
    moved.write_bytes(changed)
    if unpacked == 2**28:
        check_pages(moved, "label")
        return
    with pytest.raises(ValueError, match=f"is said to become {unpacked}"):
        check_pages(moved, "label")


def _varint(value: int) -> bytes:
    value, found = value << 1, b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def test_too_many_pages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": list(range(5000))}), path, data_page_size=64, write_batch_size=8)
    check_pages(path, "label")
    monkeypatch.setattr(parquet_pages, "PAGES", 3)
    with pytest.raises(ValueError, match="more than 3 pages"):
        check_pages(path, "label")


def test_statistics_that_do_not_fit_their_column_are_one_line(tmp_path: Path) -> None:
    """pyarrow's view of such a column ends the process, so it is imported in another one."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [png(pixels(k, 8)) for k in range(4)], "label": [1, 1, 2, 2]}), path)
    data = path.read_bytes()
    optional, required = b"\x25\x02\x18\x05label", b"\x25\x00\x18\x05label"  # repetition, then the name
    assert data.count(optional) == 1
    path.write_bytes(data.replace(optional, required))
    words = ["data", "import", "parquet", str(path), "--out", str(tmp_path / "set"), "--align", "none"]
    code = f"import sys; sys.argv = {['visard', *words]!r}; from visard.cli import main; main()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "is damaged or no Parquet or Arrow file" in done.stderr
