"""Files and names of strangers: no path, no memory beyond the bytes that are there, one clear line, and no control
characters on the terminal."""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.toys import noise_faces, toy_world

import visard
from visard import files, text
from visard.cli import main
from visard.cli.console import bar, console, list_skipped, mark, say, table
from visard.config import load as load_settings
from visard.crypto import session
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sources.importing import import_faces
from visard.data.storage import map_npy, read_npz
from visard.data.synthetic.sets import SyntheticSpec
from visard.deployment.policy import Policy
from visard.engines.checkpoint import Checkpoint
from visard.engines.request import MODEL_NAME, STATE_NAME
from visard.errors import UsageError, VisardError, one_line
from visard.files import LONGEST_NAME, parse_toml, read_json, safe_name, write_json
from visard.inference.features import read_vectors
from visard.inference.gallery import Gallery
from visard.models import build
from visard.models.files import load, open_model, read_weights, save_model
from visard.report.page import build_report

OUTSIDE = "../../../../outside"
DIGITS = "9" * 5000


@contextmanager
def memory(room: int = 2**30) -> Iterator[None]:
    """At most so many more bytes: an allocation beyond them is a MemoryError, not one of visard's lines."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(action: Callable[[], object], words: str | None = None) -> None:
    """One line of visard's own, soon, without a large allocation."""
    begun = time.monotonic()
    with memory(), pytest.raises(VisardError, match=words) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value.__context__, MemoryError), "nothing of that size was asked for"
    assert time.monotonic() - begun < 10


# ---------------------------------------------------------------- names


@given(st.text(max_size=300) | st.text("./\\ab~%-", max_size=150))
def test_a_safe_name_is_no_path(name: str) -> None:
    made = safe_name(name)
    assert 0 < len(made) <= LONGEST_NAME
    assert made.isascii()
    assert made.isprintable()
    assert not set(made) & set("/\\ \0")
    assert not made.startswith(".")
    assert (Path("a") / made).resolve().parent == Path("a").resolve()
    assert MODEL_NAME.fullmatch(made)
    assert STATE_NAME.fullmatch(f"clients/{made}-000001-1.bin")


@given(
    st.lists(st.text("./%~-aA2Eé\ud800", max_size=4) | st.text(min_size=100, max_size=130), unique=True, max_size=50)
)
def test_different_texts_have_different_names(texts: list[str]) -> None:
    assert len({safe_name(name) for name in texts}) == len(texts)


def test_no_text_is_called_like_a_shortened_one() -> None:
    long = "x" * 500
    assert safe_name(safe_name(long)) != safe_name(long)
    assert safe_name("person-1.A_b~c") == "person-1.A_b~c"


def spoken_for(tmp_path: Path) -> FaceSet:
    """A face set whose domains are called like paths."""
    rng = np.random.default_rng(0)
    with FaceSetWriter(
        tmp_path / "faces", count=32, size=32, names=[f"p{k}" for k in range(8)], domains=[OUTSIDE, "/outside", "last"],
        attributes=[], info={},
    ) as writer:  # fmt: skip
        identity = np.repeat(np.arange(8), 4)
        pictures = rng.integers(0, 255, (32, 32, 32, 3), np.uint8)
        writer.write(0, pictures, identity, np.arange(32) % 4 % 3, np.zeros((32, 0)), [f"{k}.png" for k in range(32)])
    return FaceSet.open(tmp_path / "faces")


def test_domains_and_clients_called_like_paths_stay_in_the_run_folder(tmp_path: Path) -> None:
    home = tmp_path / "a" / "b" / "c" / "d"
    faces = spoken_for(home)
    settings = {
        "method": {"name": "local", "rounds": 1, "training": {"batch_size": 4}},
        "data": {"source": str(faces.path)},
        "partition": {"kind": "one_domain", "target_domain": "last"},
        "evaluation": {"every": 0},
        "engine": {"kind": "local"},
    }
    found = visard.run(settings, out=home / "runs" / "run")
    assert set(found.metrics["clients"]["figures"]) == {OUTSIDE, "/outside", "target"}
    names = sorted(path.name for path in (found.folder / "clients").iterdir())
    outside = ["%2E.%2F..%2F..%2F..%2Foutside.safetensors", "%2Foutside.safetensors"]
    assert names == [*outside, "target.safetensors"]
    assert sorted(path.name for path in tmp_path.rglob("*outside*")) == outside


def test_names_of_runs_and_synthetic_sets_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no domain"):  # the names of synthetic sets are made of their domains
        SyntheticSpec(2, 2, 32, (OUTSIDE,), 0)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    (tmp_path / "in" / "c.toml").write_text('name = "../../evil"\n[method]\nname = "fedavg"\nrounds = 1\n')
    monkeypatch.setattr("visard.runs.run._open", lambda settings, folder, *rest: (_ for _ in ()).throw(Seen(folder)))
    with pytest.raises(Seen) as seen:
        visard.run("c.toml")
    assert seen.value.args[0].resolve().parent == tmp_path / "in" / "runs"


class Seen(Exception):
    pass


def test_keys_of_a_client_called_like_a_path_stay_in_their_folder(tmp_path: Path) -> None:
    _, kept = session.hello(OUTSIDE, str(tmp_path / "keys"), 512, insecure=True)
    assert Path(kept["private"]).parent == tmp_path / "keys"
    assert [p.name for p in (tmp_path / "keys").iterdir()] == [f"{safe_name(OUTSIDE)}.key"]


def test_states_of_a_client_called_like_a_path_stay_in_their_folder(tmp_path: Path) -> None:
    for client in (OUTSIDE, "..", ".", "x" * 5000):
        name = Checkpoint(tmp_path, "h", remote=True).new_state(client)
        assert STATE_NAME.fullmatch(name)
        assert (tmp_path / name).resolve().parent == tmp_path / "clients"


def test_the_header_of_a_set_names_no_array_elsewhere(tmp_path: Path) -> None:
    faces = noise_faces(tmp_path / "in" / "faces")
    np.save(tmp_path / "other.npy", np.zeros((3, 2), np.int64))
    for name in ("../../other", "/tmp/other", "x/../../../other"):
        with pytest.raises(UsageError, match="has no"):
            faces.extra(name)


@pytest.mark.parametrize(
    "change",
    [
        {"server": "../../secret"}, {"server": 3}, {"step": "1"}, {"step": -1}, {"ledger_bytes": 2**70},
        {"clients": {"a": ["../../secret", "0" * 64, 0, 4]}}, {"clients": {"a": ["clients/x", "0" * 64]}},
        {"clients": {"a": ["clients/000001-00000000-00000000.pack", 5, 0, 4]}}, {"clients": [1]}, {"digest": None},
    ],
)  # fmt: skip
def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, change: dict) -> None:
    made = Checkpoint(tmp_path, "h")
    made.commit({"a": 1}, 0)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    refused(lambda: Checkpoint(tmp_path, "h").resume(), "not a checkpoint")


# ---------------------------------------------------------------- sizes


def model(path: Path, **changes: str) -> Path:
    network = build("tiny", embedding=16, size=32)
    save_model(path, network.state_dict(), {"model": "tiny", "embedding": "16", "size": "32"} | changes)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding": "900000000"}, "has the shape"),
        ({"model": "iresnet100", "size": "4096"}, "missing"),
        ({"model": "spherenet64", "size": "999999999"}, "m.safetensors"),
        ({"embedding": DIGITS}, "not a number"),
        ({"size": DIGITS}, "not a number"),
        ({"model": "mlp", "size": "999999999"}, "m.safetensors"),
    ],
)
def test_metadata_of_a_model_take_no_memory(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    refused(lambda: open_model(model(tmp_path / "m.safetensors", **changes)), words)


def test_an_embedding_that_occurs_in_the_weights_takes_no_memory_either(tmp_path: Path) -> None:
    """It is the side of an empty tensor: only the network itself shows that it does not fit."""
    weights = build("tiny", embedding=16, size=32).state_dict() | {"more": torch.zeros(0, 900_000)}
    save_model(tmp_path / "m.safetensors", weights, {"model": "tiny", "embedding": "900000", "size": "4096"})
    refused(lambda: load(tmp_path / "m.safetensors"), "unknown to the network|shape")


def test_good_models_still_open(tmp_path: Path) -> None:
    network, spec = open_model(model(tmp_path / "m.safetensors"))
    assert spec["embedding"] == "16"
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 16)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8])
def test_types_that_weights_do_not_have_are_one_line(tmp_path: Path, kind: torch.dtype) -> None:
    weights = dict(build("tiny", embedding=16, size=32).state_dict())
    name = next(iter(weights))
    weights[name] = torch.zeros(weights[name].shape).to(kind)
    metadata = {"model": "tiny", "embedding": "16", "size": "32"}
    safetensors.torch.save_file(weights, str(tmp_path / "m.safetensors"), metadata)
    refused(lambda: load(tmp_path / "m.safetensors"), "m.safetensors")


def repeated(legacy: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        weights = {"fc.weight": torch.as_strided(torch.zeros(4), (65536, 65536), (0, 0))}
        torch.save(weights, path, _use_new_zipfile_serialization=not legacy)

    return write


def overlapping(path: Path) -> None:
    """Each row begins one number after the other: a million rows of a million numbers in two million."""
    torch.save({"a": torch.as_strided(torch.zeros(2_000_000), (1_000_000, 1_000_000), (1, 1))}, path)


def announced(path: Path) -> None:
    """A file of before 2020 whose pickle announces 7 GB that are not there."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue().replace(b"K\x0a", b"J\x00\x00\x00\x70"))


def long_text(path: Path) -> None:
    """A file of before 2020 whose pickle announces a text of two gigabytes."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue().replace(b"X\x01\x00\x00\x00a", b"X\xff\xff\xff\x7fa"))


def packed(path: Path) -> None:
    """Two gigabytes of zeros as two megabytes."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for part in old.infolist():
            new.writestr(part.filename, bytes(2 * 10**9) if part.filename.endswith("data/0") else old.read(part))


def shared(path: Path) -> None:
    """A thousand names of one tensor."""
    tensor = torch.zeros(1000, 1000)
    torch.save({f"a{k}": tensor for k in range(1000)}, path)


@pytest.mark.parametrize("write", [repeated(False), repeated(True), overlapping, announced, long_text, packed, shared])
def test_tensors_of_a_torch_file_are_no_larger_than_the_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), "w.pth")


def test_a_tar_file_that_ends_as_a_zip_file_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks at the beginning alone, and would make a folder to unpack it to."""
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(10)}, buffer)
    (tmp_path / "w.pth").write_bytes(bytes(10240) + buffer.getvalue())
    assert zipfile.is_zipfile(tmp_path / "w.pth")
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_: pytest.fail("a folder was made"))
    with pytest.raises(VisardError, match="a tar file of a very old torch"):
        read_weights(tmp_path / "w.pth")


@pytest.mark.parametrize("legacy", [False, True])
def test_good_torch_files_still_open(tmp_path: Path, legacy: bool) -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(())}
    torch.save({"state_dict": weights}, tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy)
    found = read_weights(tmp_path / "w.pth")
    assert torch.equal(found["a"], weights["a"])
    assert list(found) == ["a", "b"]


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin-1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 300 + ",)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': " + DIGITS + "}",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (-1,)}",  # numpy divides by 0, which ends the process
    "{'descr': '|O', 'fortran_order': False, 'shape': (2, 2)}",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 2)}",
    "{'descr': '<U4', 'fortran_order': False, 'shape': (1, 2)}",
    "{[]: 1}",
    "(" * 2000,
    "{'descr': " + "-" * 5000 + "1}",
    "{'descr': 'f4', 'fortran_order': False, 'shape': (True, 2L)",
    "'" * 3,
)


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_arrays_are_one_line(tmp_path: Path, header: str) -> None:
    (tmp_path / "f.npy").write_bytes(npy(header, bytes(64)))
    refused(lambda: map_npy(tmp_path / "f.npy"), "f.npy")
    refused(lambda: read_vectors(tmp_path / "f.npy"), "f.npy")
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as file:
        file.writestr("a.npy", npy(header, bytes(64)))
    refused(lambda: read_npz(tmp_path / "f.npz"), "f.npz")


def test_a_zip_file_called_npy_is_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", a=np.zeros((3, 2), np.float32))
    (tmp_path / "f.npz").rename(tmp_path / "f.npy")
    refused(lambda: read_vectors(tmp_path / "f.npy"), "f.npy")


def test_packed_arrays_take_no_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bvp.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        head = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2000000000,)}")
        file.writestr("frames.npy", head + bytes(2 * 10**9))
    refused(lambda: read_npz(tmp_path / "bvp.npz"), "says that it has 2000000000 bytes")
    np.savez_compressed(tmp_path / "good.npz", a=np.arange(6).reshape(2, 3), b=np.asfortranarray(np.ones((2, 3))))
    assert {name: array.tolist() for name, array in read_npz(tmp_path / "good.npz").items()} == {
        "a": [[0, 1, 2], [3, 4, 5]], "b": [[1.0] * 3] * 2,
    }  # fmt: skip


def manifest(tmp_path: Path) -> tuple[Path, dict]:
    faces = noise_faces(tmp_path / "faces")
    made = partition(faces, PartitionSettings(kind="equal", clients=3, test_identities=3), 0)
    return (path := made.save(tmp_path / "p.json")), json.loads(path.read_text())


@pytest.mark.parametrize("count", [10**15, 2**63, 10**30])
def test_a_partition_takes_no_memory_for_what_it_says(tmp_path: Path, count: int) -> None:
    path, content = manifest(tmp_path)
    path.write_text(json.dumps(content | {"count": count}))
    refused(lambda: Manifest.load(path), "p.json")
    next(iter(content["clients"].values()))["train"].append(count)
    path.write_text(json.dumps(content))
    refused(lambda: Manifest.load(path), "p.json")


def test_pictures_twice_are_still_found(tmp_path: Path) -> None:
    path, content = manifest(tmp_path)
    one, two = list(content["clients"])[:2]
    picture = content["clients"][one]["train"][0]
    content["clients"][two]["test"].append(picture)
    path.write_text(json.dumps(content))
    refused(lambda: Manifest.load(path), rf"picture {picture} is in {one} \(train\) and in {two} \(test\)")


@pytest.mark.parametrize("mode", ["P", "RGBA", "I;16"])
def test_pictures_of_many_pixels_take_no_memory(tmp_path: Path, mode: str) -> None:
    """A hundred million pixels of one colour are a small file."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(tmp_path / "photos" / "a" / "good.png")
    picture = Image.new(mode, (9_999, 9_999))
    picture.save(tmp_path / "photos" / "a" / "large.png", compress_level=1)
    del picture
    with memory():
        report = import_faces("folder", tmp_path / "photos", tmp_path / "out", size=16, workers=1, align="none")
    assert report.skipped == [("a/large.png", "9999 x 9999 pixels are too many")]


def test_templates_of_large_numbers_take_no_memory(tmp_path: Path) -> None:
    from visard.data.sources.ijb import _pairs

    (tmp_path / "p.txt").write_text("1 2147483646 0\n")
    assert _pairs(tmp_path / "p.txt", np.array([1, 2147483646])).tolist() == [[1, 2147483646, 0]]
    with memory(2**28):
        refused(lambda: _pairs(tmp_path / "p.txt", np.array([1, 2147483645])), "one has no pictures")


def test_bytes_of_a_verification_set_are_used_once(tmp_path: Path) -> None:
    """A pickle of 200 kB that names one picture a hundred thousand times: gigabytes on disk after the import."""
    picture = b"x" * 2000
    body = b"B" + struct.pack("<I", len(picture)) + picture + b"q\x00" + b"h\x00" * 99_999
    (tmp_path / "v.bin").write_bytes(b"\x80\x03](" + body + b"e](" + b"\x88" * 50_000 + b"e\x86.")
    refused(lambda: import_faces("bin", tmp_path / "v.bin", tmp_path / "out"), "100000 pictures in ")


# ---------------------------------------------------------------- one line

DEEP = "[" * 100_000
JSON = (DEEP, '{"a":' * 100_000, DIGITS, '{"a": ' + DIGITS + "}", "", "nul", "\udcff", '"\\ud800"', "NaN")


@pytest.mark.parametrize("content", [*JSON[:5], JSON[6]])
def test_json_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(lambda: read_json(tmp_path / "a.json"), "a.json")


@pytest.mark.parametrize("content", JSON)
def test_readers_of_json_say_one_line(tmp_path: Path, content: str) -> None:
    data = content.encode("utf-8", "surrogateescape")
    for name in ("p.json", "faces.json", "metrics.json", "ledger.json"):
        (tmp_path / name).write_bytes(data)
    refused(lambda: Manifest.load(tmp_path / "p.json"))
    refused(lambda: FaceSet.open(tmp_path))
    refused(lambda: build_report([tmp_path]), "metrics.json")
    (tmp_path / "metrics.json").write_text("{}")
    refused(lambda: build_report([tmp_path]), "ledger.json")
    (tmp_path / "ledger.json").unlink()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "manifest.json").write_bytes(data)
    refused(lambda: Checkpoint(tmp_path / "checkpoint", "h").resume())
    (tmp_path / "checkpoint" / "ledger.jsonl").write_bytes(data + b"\n")
    if content:
        refused(lambda: build_report([tmp_path]), "ledger")


TOML = {
    "a key of 50,000 parts": ".".join("a" * 50_000) + " = 1",
    "a key of quoted parts": '"a=b".' + ".".join("a" * 50_000) + " = 1",
    "a header of 50,000 parts": "[" + ".".join("a" * 50_000) + "]",
    "a table in a line": "x = {" + ".".join("1" * 50_000) + " = 1}",
    "nested lists": "a = " + "[" * 50_000,
    "nested tables": "a = " + "{a=" * 50_000,
    "5,000 digits": f"seed = {DIGITS}",
    "5,000 hexadecimal digits": "seed = 0x" + "f" * 5000,
    "65 bits": f"seed = {2**64}",
    "a large file": "# " + "x" * 2_000_000,
    "300 nested lists": "plugins = " + "[" * 300 + "]" * 300,
    "a key of 60 parts": ".".join("a" * 60) + " = 1",
    "plugins in 60 parts": "plugins." + ".".join("a" * 60) + " = 1",
}


@pytest.mark.parametrize("content", TOML.values(), ids=TOML)
def test_settings_are_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(content)
    refused(lambda: load_settings(path), "c.toml")
    refused(lambda: Policy.load(path), "c.toml")


@pytest.mark.parametrize("table", ["require", "local"])
@pytest.mark.parametrize("value", ["[" * 70 + "]" * 70, "{a=" * 70 + "1" + "}" * 70], ids=["lists", "tables"])
def test_settings_within_each_other_are_bounded(tmp_path: Path, table: str, value: str) -> None:
    """A policy may name any setting with any value; one that is too deep cannot be written or compared later."""
    path = tmp_path / "c.toml"
    path.write_text(f'methods = ["fedavg"]\n[{table}]\nmethod.training.batch_size = {value}\n')
    refused(lambda: Policy.load(path), "c.toml is not a file of settings: more than 64 lists or tables")
    path.write_text(path.read_text().replace(value, "[" * 60 + "]" * 60))
    Policy.load(path)


@pytest.mark.parametrize("value", ["[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65], ids=["lists", "objects"])
def test_json_within_each_other_is_bounded(tmp_path: Path, value: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(value)
    refused(lambda: read_json(path), "c.json cannot be read: more than 64 lists or objects")
    path.write_text(value[1:-1] if value[0] == "[" else value[5:-1])
    read_json(path)


def test_settings_with_dots_are_read(tmp_path: Path) -> None:
    rates = ", ".join(f"0.{k:04d}" for k in range(1, 300))
    text = f'# {"." * 60}\nname = "a.b.c"\n[method]\nname = "fedavg"\n[evaluation]\nfar = [{rates}]\n'
    assert parse_toml(text, "c")["name"] == "a.b.c"
    (tmp_path / "c.toml").write_text(text)
    assert len(load_settings(tmp_path / "c.toml").evaluation.far) == 299


def gallery(path: Path, names: bytes | None = None, **changes: object) -> Path:
    about = {
        "model": "f00", "model_file": "/m", "order": "rgb", "mean": "0.5", "std": "0.5", "size": "32", "align": "none",
        "flip": "0",
    }  # fmt: skip
    Gallery.enrol(["anna", "bert"], np.eye(2, 8), about).save(path)
    tensors = safetensors.torch.load_file(str(path))
    if names is not None:
        tensors["names"] = torch.frombuffer(bytearray(names), dtype=torch.uint8)
    header = json.dumps({"kind": "visard gallery", "version": 1, **about, **changes})
    safetensors.torch.save_file(tensors, str(path), {"gallery": str(changes.pop("whole", header))})
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"whole": DEEP}, {"whole": DIGITS}, {"whole": "[]"}, {"version": DEEP}, {"names": DEEP.encode()},
        {"names": DIGITS.encode()}, {"names": b'["a", 1]'}, {"names": b"{}"}, {"align": "x"},
    ],
)  # fmt: skip
def test_headers_of_galleries_are_one_line(tmp_path: Path, changes: dict) -> None:
    refused(lambda: Gallery.load(gallery(tmp_path / "g", **changes)))


@pytest.mark.parametrize("changes", [{"size": "x"}, {"size": DIGITS[:4000]}, {"mean": ""}, {"order": []}])
def test_what_a_gallery_says_of_its_model_is_one_line(tmp_path: Path, changes: dict) -> None:
    model(tmp_path / "m.safetensors")
    found = Gallery.load(gallery(tmp_path / "g", **changes))
    refused(lambda: found.load_model(tmp_path / "m.safetensors"), "the gallery")


# ---------------------------------------------------------------- what is printed

HOSTILE = "anna\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\u2028\r\n\x00bert\U000e0041\u200b"
ACTING = set("\x1b\x07\x9b\u202e\u2066\u2028\r\x00\U000e0041\u200b\x08\x7f")


def test_every_way_of_printing_shows_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.text import Text

    table(HOSTILE, (HOSTILE, "b"), [(HOSTILE, HOSTILE)])
    say(HOSTILE)
    mark("warning", HOSTILE)
    list_skipped([(HOSTILE, HOSTILE)])
    console.print(HOSTILE)
    console.print(Text(HOSTILE))
    with bar(HOSTILE, 3) as shown:
        shown.update(3, HOSTILE)
    out = capsys.readouterr().out
    assert "anna" in out
    assert not set(out) & ACTING


def test_a_bar_on_a_terminal_shows_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    monkeypatch.setattr(console, "_file", seen)
    monkeypatch.setattr(console, "_force_terminal", True)
    with bar(HOSTILE, 3) as shown:
        shown.update(3, HOSTILE)
    assert "anna" in seen.getvalue()
    assert "]0;title\x07" not in seen.getvalue(), "the terminal's title"
    assert "\x1b[2J" not in seen.getvalue(), "rich's own sequences alone"
    assert not set(seen.getvalue()) & (ACTING - set("\x1b\r"))


def test_a_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo\vthree\u2029four\x85five\n")
    assert capsys.readouterr().out.count("\n") == 1
    assert one_line(VisardError(HOSTILE)) == text.line(HOSTILE)
    assert not set(one_line(ValueError(HOSTILE))) & (ACTING | {"\n"})
    assert not set(one_line(VisardError(HOSTILE))) & (ACTING | {"\n"})


def test_errors_of_commands_show_every_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gallery(tmp_path / "g", json.dumps([HOSTILE, "bert"]).encode(), version=HOSTILE)
    monkeypatch.delenv("VISARD_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["visard", "identify", str(tmp_path / "x.png"), "--gallery", str(path)])
    with pytest.raises(SystemExit):
        main()
    err = capsys.readouterr().err
    assert "anna" in err
    assert not set(err) & ACTING
    assert err.count("\n") == 1


def test_names_in_json_files_show_every_character(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {HOSTILE: HOSTILE, "é": "ü"})
    content = (tmp_path / "a.json").read_text()
    assert not set(content) & ACTING
    assert "ü" in content
    assert json.loads(content) == {HOSTILE: HOSTILE, "é": "ü"}
    assert files.read_json(tmp_path / "a.json") == {HOSTILE: HOSTILE, "é": "ü"}


def test_a_party_prints_what_a_server_says_as_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from visard.deployment.party import failed
    from visard.engines.request import Request

    toy_world(tmp_path)
    for error in (VisardError(HOSTILE), ValueError(HOSTILE)):
        try:
            raise error
        except Exception as raised:
            failed(Request(client=HOSTILE), raised, all_local=False)
    err = capsys.readouterr().err
    assert "anna" in err
    assert not set(err) & ACTING
