"""InsightFace .bin files: written by Python's pickle and read by us, and the other way round; hostile ones refused."""

import os
import pickle
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.pictures import pixels, png

from visard.data.faces import FaceSet
from visard.data.pairs import load_pairs
from visard.data.sources.bin import read_bin, write_bin
from visard.data.sources.importing import import_faces
from visard.data.unpickle import load_plain
from visard.errors import UsageError, VisardError

SAME = [True, False, True]
PICTURES = [png(k) for k in range(6)]


def saved(tmp_path: Path, data: bytes, name: str = "set.bin") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def plain(path: Path) -> tuple[list[bytes], list[bool]]:
    pictures, same = read_bin(path)
    return [bytes(picture) for picture in pictures], same.tolist()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data, np.uint8).reshape(-1, 1),
        lambda data: np.frombuffer(bytearray(data), np.uint8),
    ],
)
def test_what_pickle_writes_is_read(tmp_path: Path, protocol: int, make: Any) -> None:
    for same in (SAME, [np.bool_(x) for x in SAME], np.array(SAME), np.array(SAME, np.int64), [1, 0, 1], tuple(SAME)):
        path = saved(tmp_path, pickle.dumps(([make(p) for p in PICTURES], same), protocol))
        assert plain(path) == (PICTURES, SAME)


@pytest.mark.parametrize("protocol", range(6))
def test_pictures_that_are_one_object_and_empty_bytes(tmp_path: Path, protocol: int) -> None:
    path = saved(tmp_path, pickle.dumps([[PICTURES[0]] * 4 + [b"", PICTURES[1]], SAME], protocol))
    assert plain(path) == ([PICTURES[0]] * 4 + [b"", PICTURES[1]], SAME)


def python2_binary() -> bytes:
    """Protocol 2 as Python 2 wrote it: strings are T or U, with memo entries in between."""
    items = b"".join(
        b"T" + struct.pack("<i", len(p)) + p + b"r" + struct.pack("<I", 900 + k) for k, p in enumerate(PICTURES)
    )
    return b"\x80\x02]q\x01(" + items + b"e]q\x02(\x88\x89\x88e\x86q\x03."


def python2_text() -> bytes:
    """Protocol 0 as Python 2 wrote it: strings as their repr in a line."""
    items = b"".join(b"S" + repr(p)[1:].encode() + b"\np%d\na" % (k + 5) for k, p in enumerate(PICTURES))
    return b"((lp1\n" + items + b"(lp2\nI01\naI00\naI01\natp3\n."


def python2_arrays() -> bytes:
    """Protocol 2 with numpy arrays whose bytes are strings of Python 2."""
    items = b""
    for p in PICTURES:
        items += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        items += b"J" + struct.pack("<i", len(p)) + b"\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        items += (
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(p)) + p + b"tb"
        )
    return b"\x80\x02](" + items + b"e](\x88\x89\x88e\x86."


@pytest.mark.parametrize("make", [python2_binary, python2_text, python2_arrays])
def test_python_2_files(tmp_path: Path, make: Any) -> None:
    data = make()
    theirs = pickle.loads(data, encoding="bytes")  # noqa: S301  (the bytes above, to prove that they are a pickle)
    assert [bytes(p) for p in theirs[0]] == PICTURES
    assert plain(saved(tmp_path, data)) == (PICTURES, SAME)


def test_what_we_write_pickle_reads(tmp_path: Path) -> None:
    write_bin(tmp_path / "set.bin", iter(PICTURES), SAME)
    assert pickle.loads((tmp_path / "set.bin").read_bytes()) == (PICTURES, SAME)  # noqa: S301
    assert pickle.loads((tmp_path / "set.bin").read_bytes(), encoding="bytes") == (PICTURES, SAME)  # noqa: S301
    assert plain(tmp_path / "set.bin") == (PICTURES, SAME)
    for pictures, same in ((PICTURES[:5], SAME), ([], []), ([b"", b"x"], [True])):
        with pytest.raises(VisardError):
            write_bin(tmp_path / "bad.bin", pictures, same)
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


def test_import_keeps_pixels_pairs_and_folds(tmp_path: Path) -> None:
    same = [k % 3 != 0 for k in range(23)]
    write_bin(tmp_path / "agedb_30.bin", (png(k, 112) for k in range(46)), same)
    faces = FaceSet.open(import_faces("bin", tmp_path / "agedb_30.bin", tmp_path / "set").path)
    assert faces.images.shape == (46, 112, 112, 3)
    assert all(np.array_equal(faces.images[k], pixels(k, 112)) for k in (0, 17, 45))
    pairs = load_pairs(faces)
    assert (pairs.first.tolist(), pairs.second.tolist()) == (list(range(0, 46, 2)), list(range(1, 46, 2)))
    assert pairs.same.tolist() == same
    # as sklearn's KFold(10, shuffle=False): 23 = 3 folds of 3 and 7 of 2
    assert np.bincount(pairs.fold).tolist() == [3, 3, 3, 2, 2, 2, 2, 2, 2, 2]
    assert (np.diff(pairs.fold) >= 0).all()
    assert faces.identity[0] != faces.identity[1]
    assert faces.identity[2] == faces.identity[3]


def test_a_folder_of_bins_is_one_set_with_domains(tmp_path: Path) -> None:
    for name, seed in (("African_test", 0), ("Asian_test", 100)):
        write_bin(tmp_path / "bins" / f"{name}.bin", (png(seed + k) for k in range(6)), SAME)
    for kind in ("bin", "rfw"):
        faces = FaceSet.open(import_faces(kind, tmp_path / "bins", tmp_path / kind, size=16).path)
        assert faces.domains == ["African", "Asian"]
        assert load_pairs(faces).first.tolist() == [0, 2, 4, 6, 8, 10]
        assert np.array_equal(faces.images[7], pixels(101))


def test_an_unreadable_picture_takes_its_pair_along(tmp_path: Path) -> None:
    write_bin(tmp_path / "set.bin", [*PICTURES[:3], b"no picture", *PICTURES[4:]], SAME)
    report = import_faces("bin", tmp_path / "set.bin", tmp_path / "set", size=16)
    assert report.skipped == [("set.bin:3", "not a picture that can be read")]
    faces = FaceSet.open(report.path)
    pairs = load_pairs(faces)
    assert (pairs.first.tolist(), pairs.second.tolist(), pairs.fold.tolist()) == ([0, 3], [1, 4], [0, 2])
    assert (faces.info["pairs"], faces.info["pairs_dropped"]) == (2, 1)
    assert np.array_equal(faces.images[3], pixels(4))


# hostile files --------------------------------------------------------------------------------------


class Evil:
    """Pickles as a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class State:
    """Pickles as an object of a class of ours with a state."""

    def __init__(self) -> None:
        self.x = 1


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    import subprocess

    touch = f"touch {mark}"
    return {
        "system": (Evil(os.system, touch), r"posix\.system|nt\.system"),
        "eval": (Evil(eval, f"open({str(mark)!r}, 'w')"), r"(builtins|__builtin__)\.eval"),
        "exec": (Evil(exec, f"open({str(mark)!r}, 'w')"), r"(builtins|__builtin__)\.exec"),
        "open": (Evil(open, str(mark), "w"), r"(io|_io)\.open"),
        "popen": (Evil(subprocess.Popen, ["touch", str(mark)]), r"(subprocess|commands)\.Popen"),
        "numpy load": (Evil(np.load, str(mark), None, True), r"numpy\.load"),
        "numpy fromfile": (Evil(np.fromfile, str(mark)), r"numpy"),
        "numpy ndarray": (Evil(np.ndarray, (2**20, 2**10)), r"a call of numpy\.ndarray"),
        "object": (State(), r"copyreg|copy_reg|test_bin\.State"),
    }


@pytest.mark.parametrize("where", ["top", "picture", "same", "nested"])
@pytest.mark.parametrize("attack", list(attacks(Path("mark"))))
def test_exploits_are_refused_by_name(tmp_path: Path, where: str, attack: str) -> None:
    evil, name = attacks(tmp_path / "executed")[attack]
    content = {
        "top": evil,
        "picture": ([*PICTURES[:5], evil], SAME),
        "same": (PICTURES, evil),
        "nested": (PICTURES, SAME, [[((evil,),)]]),
    }[where]
    message = rf"set\.bin is refused: its pickle asks for .*({name}).*nothing of it was run"
    for protocol in range(6):
        path = saved(tmp_path, pickle.dumps(content, protocol))
        with pytest.raises(UsageError, match=message) as caught:
            import_faces("bin", path, tmp_path / "set")
        assert "\n" not in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["set.bin"]


def test_the_exploits_work_where_pickle_runs_them(tmp_path: Path) -> None:
    evil, _ = attacks(tmp_path / "executed")["system"]
    pickle.loads(pickle.dumps(evil))  # noqa: S301  (ours: it makes an empty file)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", r"os\.system"),
        (b"(ios\nsystem\nS'true'\n.", r"os\.system"),  # INST
        (b"(S'true'\nios\nsystem\n.", r"os\.system"),
        (b"cposix\nsystem\n.", r"posix\.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"os\.system"),  # STACK_GLOBAL
        (b"\x80\x04\x8c\x05numpy\x8c\x12core.os.system.xyz\x93.", r"numpy\.core\.os"),
        (b"\x80\x04K\x01\x8c\x06system\x93.", "something without a name"),
        (b"c__main__\nx\n.", r"__main__\.x"),
        (b"cnumpy.core.multiarray\n_reconstruct_evil\n.", "_reconstruct_evil"),
        (b"Pabc\n.", "PERSID"),
        (b"\x80\x02NQ.", "BINPERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
        (b"\x80\x04cnumpy\nndarray\n)}\x92.", "EMPTY_DICT"),
        (b"\x80\x05\x97\x98.", "NEXT_BUFFER"),
        (b"(dp0\n.", "DICT"),
        (b"(cnumpy\nndarray\no.", "OBJ"),
        (b"\x80\x02]q\x00N2.", "DUP"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8\x85R.", "an array of O8"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.", "the encoding hex"),
        (b"\x80\x02KAKBR.", "a call of no function"),
        (b"\x80\x02K\x01}b.", "EMPTY_DICT"),
        (b"\x80\x02K\x01N\x85b.", "a change of something"),
        (b"c" + b"\xff\x1b[31m\nx\n.", r"\\xff\\x1b"),
    ],
)
def test_crafted_opcodes_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_bin(saved(tmp_path, data))
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x80\x04", "damaged: it is cut short"),
        (b"B\xff\xff\xff\xff", "cut short"),  # 4 GB announced
        (b"\x8e" + b"\xff" * 8, "cut short"),  # 2^64 bytes announced
        (b"\x96" + b"\xff" * 7 + b"\x7f", "cut short"),
        (b"\x8d" + b"\xff" * 7 + b"\x7f", "cut short"),
        (b"\x95" + b"\xff" * 8 + b"N.", "no verification set"),  # a frame of 2^64: it is only a hint
        (b"\x8b\xff\xff\xff\x7f", "too long"),
        (b"I" + b"9" * 5000 + b"\n.", "cut short|too long"),
        (b"L" + b"9" * 200 + b"L\n.", "too long"),
        (b"g99\n.", "damaged"),
        (b"Nr\xff\xff\xff\xff.", "no verification set"),  # memo number 2^32 - 1
        (b"t.", "a mark is missing"),
        (b"((((.", "ends in the middle"),
        (b"a.", "damaged"),
        (b"NNa.", "no list"),
        (b"Sabc\n.", "no quotes"),
        (b".", "ends in the middle"),
        (b"\x80\x02cnumpy\ndtype\nU\x02u1\x85Rcnumpy.core.numeric\n_frombuffer\n.", "ends in the middle"),
        (b"\x80\x03cnumpy._core.numeric\n_frombuffer\n(C\x02abcnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"
         b"J\xff\xff\xff\x7f\x85X\x01\x00\x00\x00CtR.", "has 2 bytes"),
        (pickle.dumps((PICTURES[:5], SAME)), "5 pictures for 3 pairs"),
        (pickle.dumps(([], [])), "0 pictures for 0 pairs"),
        (pickle.dumps(PICTURES), "no verification set"),
        (pickle.dumps((PICTURES, [1, 0, 2])), "no list of booleans"),
        (pickle.dumps((PICTURES, b"\1\0\1")), "no list of booleans"),
        (pickle.dumps(([*PICTURES[:5], "text"], SAME)), "picture 5 is a str"),
        (pickle.dumps(([*PICTURES[:5], pixels(0)], SAME)), r"picture 5 is an array of shape \(16, 16, 3\)"),
        (pickle.dumps(([*PICTURES[:5], 3], SAME)), "picture 5 is a int"),
        (pickle.dumps(([*PICTURES[:5], np.ones(3)], SAME)), "an array of f8"),
        (pickle.dumps(([*PICTURES[:5], np.array([{}])], SAME)), "an array of O8|EMPTY_DICT"),
        (pickle.dumps({"a": 1}), "EMPTY_DICT"),
        (png(0), "damaged|refused"),
        (b"<!DOCTYPE html><html>", "damaged|refused"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        import_faces("bin", saved(tmp_path, data), tmp_path / "set")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


def test_every_truncation_and_random_damage_is_one_line(tmp_path: Path) -> None:
    whole = pickle.dumps(([p[:40] for p in PICTURES], SAME), 2)
    rng = random.Random(0)
    broken = [whole[:k] for k in range(len(whole))]
    for _ in range(3000):
        data = bytearray(rng.choice([whole, python2_arrays(), pickle.dumps(([np.zeros(9, np.uint8)] * 2, [True]), 5)]))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        broken.append(bytes(data))
    for data in broken:
        try:
            load_plain(memoryview(data), "it")
        except UsageError as error:
            assert str(error).startswith("it is ")


def test_small_files_cannot_grow(tmp_path: Path) -> None:
    """One long text, encoded again and again, and memo entries with enormous numbers."""
    text = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    huge_memo = b"".join(b"r" + struct.pack("<I", 2**32 - 1 - k) for k in range(1000))
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(UsageError, match="grow without end"):
            load_plain(memoryview(b"\x80\x02(" + text + again * 100_000 + b"l."), "it")
        assert load_plain(memoryview(b"]" + huge_memo + b"."), "it") == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30e6
    assert time.perf_counter() - started < 10


def test_a_list_inside_itself_ends(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="no verification set"):
        read_bin(saved(tmp_path, pickle.dumps((loop, loop, loop))))
    nested = b"]" * 100_000 + b"a" * 99_999  # deeper than any recursion could go
    with pytest.raises(UsageError, match="picture 0 is a list"):
        read_bin(saved(tmp_path, nested + b"](\x88e\x86."))


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        import_faces("bin", tmp_path / "nowhere.bin", tmp_path / "set")
    with pytest.raises(UsageError, match=r"no \.bin files"):
        import_faces("bin", tmp_path, tmp_path / "set")
