"""Mutations of files: `mutate(data, kind, rng)` knows the structure of its kind, and sometimes forgets about it."""

from __future__ import annotations

import base64
import io
import itertools
import json
import pickletools
import re
import string
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

INTS = [0, 1, -1, 2, 7, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1,
        2**63, 2**64 - 1, 2**64, 10**19, 10**30, -(2**31), -(2**63), -(2**63) - 1, 900_000, 10**9, 10**12]  # fmt: skip
TEXTS = ["", " ", ".", "..", "../../../../fuzzed", "/tmp/fuzzed", "a/b", "\x00", "\x1b[31mred\x1b[0m",
    "\x1b]0;x\x07", "\u202eabc",
         "\n", "a\r\nb", "\x9b2J", "a" * 300, "b" * 70_000, "é", "\U0001f98a", "NaN", "1e400", "-0", "0x10", "1_000",
         "٣", "²",
         "True", "null", "os:system", "os:getcwd", "tests.fuzz.formats:Evil", "{}", "[]", "%s%n", "north", "..\\x",
         "con", "\ufeff",
         "\u2028", "x.y.z", "5" * 5000, "-" * 40, "1" * 400]  # fmt: skip
FLOATS = ["1e308", "-1e308", "1e309", "5e-324", "0.1", "-0.0", "NaN", "Infinity", "-Infinity", "1e5000"]


def mutate(data: bytes, kind: str, rng: Random) -> bytes:
    """Changed bytes of a file of that kind."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = KINDS.get(kind, raw) if rng.random() < 0.7 else raw
        try:
            data = change(data, rng)
        except Exception:  # an earlier change left nothing that has this structure
            data = raw(data, rng)
        if len(data) > 4_000_000:
            data = data[:4_000_000]
    return data


# ---------------------------------------------------------------- bytes


def raw(data: bytes, rng: Random) -> bytes:
    """Changes that know nothing."""
    made = bytearray(data)
    if not made:
        return rng.randbytes(rng.choice([0, 1, 8, 100]))
    at = rng.randrange(len(made)) if rng.random() < 0.6 else rng.randrange(min(len(made), 64))
    how = rng.randrange(9)
    if how == 0:
        for _ in range(rng.choice([1, 1, 4, 32])):
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    elif how == 1:
        made[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x2E, rng.randrange(256)])
    elif how == 2:
        return bytes(made[:at])
    elif how == 3:
        made[at : at + rng.choice([1, 2, 4, 16, 100])] = b""
    elif how == 4:
        made[at:at] = rng.choice([rng.randbytes(rng.choice([1, 4, 50])), bytes(rng.choice([1, 8, 1000])), b"\xff" * 8])
    elif how == 5:
        end = at + rng.choice([1, 8, 64, 512])
        made[at:at] = made[at:end] * rng.choice([1, 2, 50])
    elif how == 6:
        made[at : at + 64] = bytes(min(64, len(made) - at))
    elif how == 7:  # a number of 1 to 8 bytes, as lengths and counts are
        width, order = rng.choice([1, 2, 4, 4, 8]), rng.choice(["<", ">"])
        number = rng.choice(INTS) & (2 ** (8 * width) - 1)
        code = {1: "B", 2: "H", 4: "I", 8: "Q"}[width]
        made[at : at + width] = struct.pack(order + code, number)
    else:
        other = rng.randrange(len(made))
        size = rng.choice([1, 8, 64])
        made[at : at + size], made[other : other + size] = made[other : other + size], made[at : at + size]
    return bytes(made)


# ---------------------------------------------------------------- trees and text


class Raw:
    """A piece of JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def dump(tree: Any) -> str:
    """JSON that may be wrong: pieces as they are, keys twice."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(k)}:{dump(v)}" for k, v in tree.pairs) + "}"
    if isinstance(tree, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{dump(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(dump, tree)) + "]"
    return json.dumps(tree)


class Pairs:
    """An object with its keys in any number."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def value(rng: Random) -> Any:
    """A value to put in the place of another."""
    deep = rng.choice([10, 150, 900, 5000, 60_000])
    return rng.choice([
        lambda: rng.choice(INTS), lambda: rng.choice(TEXTS), lambda: Raw(rng.choice(FLOATS)), lambda: None,
        lambda: True,
        list, dict, lambda: [rng.choice(INTS)] * rng.choice([1, 3, 2000]), lambda: {rng.choice(TEXTS): 1},
        lambda: Raw("[" * deep + "]" * deep), lambda: Raw('{"a":' * deep + "1" + "}" * deep), lambda: Raw("9" * 5000),
        lambda: Raw("[" * deep), lambda: rng.random(), lambda: -rng.random() * 10**6, lambda: [[]] * 50,
    ])()  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree[:40]) if isinstance(tree, list) else ()
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


def change_tree(tree: Any, rng: Random) -> Any:
    """A tree with one place changed."""
    path = rng.choice(places(tree))
    if not path:
        return rng.choice([value(rng), [tree], {"a": tree}]) if rng.random() < 0.3 else change_inside(tree, rng)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    how = rng.randrange(7)
    if how <= 2:
        parent[key] = value(rng)
    elif how == 3 and isinstance(parent, dict):
        del parent[key]
    elif how == 3:
        parent.insert(key, value(rng))
    elif how == 4:
        parent[key] = rng.choice([[old], {"a": old}, str(old), [old, old]])
    elif how == 5 and isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = rng.choice([old + 1, old - 1, -old, old * 2, float(old), old * 10**6, str(old)])
    else:
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    return tree


def change_inside(tree: Any, rng: Random) -> Any:
    """An object or list with one more entry, or with a key twice."""
    if isinstance(tree, dict):
        pairs = [*tree.items(), (rng.choice([*tree, *TEXTS] or TEXTS), value(rng))]
        return Pairs(rng.sample(pairs, len(pairs)))
    return [*tree, value(rng)] if isinstance(tree, list) else value(rng)


ODD: list[Any] = [0, -1, 2**63, 2**64, 1.5, Raw("1e308"), Raw("NaN"), "", "..", "../../x", "\x1b[31m", "a" * 300,
    None, True, [], {}, [[]], Raw("[" * 70 + "]" * 70), Raw('{"a":' * 70 + "1" + "}" * 70)]  # fmt: skip
ODD_TOML = ["0", "-1", str(2**63), "1.5", "1e308", "nan", '""', '".."', '"../../x"', '"\\u001b[31m"', "true", "[]",
    "{}", "[[]]", "1979-05-27", "[" * 70 + "]" * 70, "{a=" * 70 + "1" + "}" * 70]  # fmt: skip
MOST_PLACES = 30  # of one file


def every(data: bytes, kind: str) -> Iterator[bytes]:
    """A file of settings or of JSON with each value in turn replaced by each odd one."""
    if kind in ("json", "key"):
        found = places(json.loads(data))
        for path in found[:: max(1, len(found) // MOST_PLACES)]:
            for odd in ODD:
                tree = [json.loads(data)]
                parent: Any = tree
                for key in (way := (0, *path))[:-1]:
                    parent = parent[key]
                parent[way[-1]] = odd
                yield dump(tree[0]).encode("utf-8", "surrogatepass")
    elif kind == "toml":
        rows = data.decode().split("\n")
        for at in [k for k, row in enumerate(rows) if "=" in row][:MOST_PLACES]:
            for text in ODD_TOML:
                changed = f"{rows[at].partition('=')[0]} = {text}"
                yield "\n".join([*rows[:at], changed, *rows[at + 1 :]]).encode()


def as_json(data: bytes, rng: Random) -> bytes:
    return dump(change_tree(json.loads(data), rng)).encode("utf-8", "surrogatepass")


def as_jsonl(data: bytes, rng: Random) -> bytes:
    rows = data.split(b"\n")
    at = rng.randrange(len(rows))
    how = rng.randrange(5)
    if how <= 2 and rows[at]:
        rows[at] = as_json(rows[at], rng)
    elif how == 3:
        rows[at:at] = rows[at : at + 1] * rng.choice([1, 2, 100])
    else:
        rng.shuffle(rows)
    return b"\n".join(rows)


def rearrange(parts: list[Any], at: int, how: int, times: list[int], rng: Random) -> None:
    """Delete a part (0), repeat it (1), or swap it with another (2)."""
    if how == 0:
        del parts[at]
    elif how == 1:
        parts[at:at] = parts[at : at + 1] * rng.choice(times)
    else:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]


def as_text(data: bytes, rng: Random) -> bytes:
    """Lines of words: names and numbers."""
    rows = data.decode("utf-8", "surrogateescape").split("\n")
    at = rng.randrange(len(rows))
    how = rng.randrange(8)
    if how <= 3:
        parts = re.split(r"([ ,\t]+)", rows[at])
        k = rng.randrange(len(parts))
        parts[k] = rng.choice([str(rng.choice(INTS)), rng.choice(TEXTS), rng.choice(FLOATS), parts[k] * 2, "", "," * 5])
        rows[at] = "".join(parts)
    elif how <= 6:
        rearrange(rows, at, how - 4, [1, 2, 100], rng)
    else:
        rows.insert(at, rng.choice([*TEXTS, '"', '"a', "a " * 5000, "\ud800", "\udcff"]))
    return "\n".join(rows).encode("utf-8", "surrogatepass")


def as_toml(data: bytes, rng: Random) -> bytes:
    """Settings: values and keys are replaced by others that TOML can write."""
    text = data.decode("utf-8", "surrogateescape")
    deep = rng.choice([10, 60, 400, 60_000])
    values = [
        *map(str, INTS), "9" * 5000, "nan", "inf", "-inf", "1e400", "true", '""', "[]", "{}", "1979-05-27",
        "07:32:00", "[" * deep,
        "[" * deep + "]" * deep, "{a=" * deep, '["x", 1]', "[[1], [2]]", "{a = 1, b.c = 2}", "0x" + "f" * 5000,
        *(json.dumps(t) for t in TEXTS), "'''\n'''", '"\\u0000"', '"\\U0010ffff"', '"\\ud800"',
    ]  # fmt: skip
    keys = [
        "a" + ".a" * rng.choice([1, 60, 63, 70, 50_000]),
        '""',
        '"a.b"',
        "plugins",
        "name",
        "x" * 1000,
        "1.2.3",
        "method.name",
    ]
    rows = text.split("\n")
    at = rng.randrange(len(rows))
    how = rng.randrange(7)
    if how <= 2:
        settings = [k for k, row in enumerate(rows) if "=" in row] or [at]
        k = rng.choice(settings)
        rows[k] = f"{rows[k].partition('=')[0]} = {rng.choice(values)}"
    elif how == 3:
        rows.insert(at, f"{rng.choice(keys)} = {rng.choice(values)}")
    elif how == 4:
        name = rng.choice([*keys, "method", "data", "outgoing", "engine", "local"])
        rows.insert(at, f"{rng.choice(['[', '[['])}{name}{rng.choice([']', ']]'])}")
    else:
        return as_text(data, rng)
    return "\n".join(rows).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- arrays, containers, pickles


def as_npy(data: bytes, rng: Random) -> bytes:
    """The header of an array is Python text."""
    length = struct.unpack("<H", data[8:10])[0]
    header, rest = data[10 : 10 + length].decode("latin-1"), data[10 + length :]
    shape = rng.choice(["()", "(0,)", "(-1,)", f"({rng.choice(INTS)},)", f"({rng.choice(INTS)}, {rng.choice(INTS)})",
        "(True,)",
                        "(1.5,)", "'x'", "(2,) * 3", "((1,),)", "(" * 500, "[1]", "None",
                        "(1,) " + "#" * 100])  # fmt: skip
    kind = rng.choice(["'|O'", "'<f8'", "'<f4'", "'>f4'", "'<f2'", "'|u1'", "'<i8'", "'|S0'", "'|V0'", "'|S5'",
        "'<U3'", "'<M8[ns]'",
                       "[('a', '<f4')]", "[('a', '<f4', (1000000, 1000000))]", "'<f16'", "'<c16'", "'?'", "'x'", "1",
                       "()",
                       "('<f4', (2**30,))", "{'names': ['a'], 'formats': ['O']}"])  # fmt: skip
    how = rng.randrange(7)
    if how <= 1:
        header = re.sub(r"('shape': )\([^)]*\)", lambda m: m[1] + shape, header)
    elif how == 2:
        header = re.sub(r"('descr': )'[^']*'", lambda m: m[1] + kind, header)
    elif how == 3:
        header = header.replace("False", rng.choice(["True", "None", "1", "[]", "-" * 3000 + "1"]))
    elif how == 4:
        header = rng.choice(
            ["", "{}", "[]", "{" * 900, "{[]: 1}", "'" * 3, "1", "__import__('os').system('x')", "{'a'" + ": 1}"]
        )
    elif how == 5:
        rest = as_numbers(rest, rng)
    else:
        return data[:6] + bytes([rng.choice([0, 1, 2, 3, 9]), rng.choice([0, 1])]) + data[8:]
    text = header.rstrip().encode("latin-1", "replace")[:60_000]
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return data[:8] + struct.pack("<H", len(text)) + text + rest


def as_numbers(data: bytes, rng: Random) -> bytes:
    """Numbers at the extremes of their types: NaN, infinities, large, negative."""
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 10, 200])):
        at = rng.randrange(max(1, len(made) - 8)) // 4 * 4
        special = rng.choice(
            [
                b"\x00\x00\xc0\x7f",
                b"\x00\x00\x80\x7f",
                b"\xff" * 4,
                b"\xff\xff\x7f\x7f",
                b"\xff\xff\xff\x7f",
                bytes(4),
                b"\xff" * 8,
            ]
        )
        made[at : at + len(special)] = special
    return bytes(made[: len(data)])


def as_safetensors(data: bytes, rng: Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    how = rng.randrange(8)
    if how <= 2:
        tree = change_tree(header, rng)
    elif how == 3:
        tree = header | {"__metadata__": change_tree(header.get("__metadata__", {}), rng)}
        for key, entry in (tree["__metadata__"] or {}).items() if isinstance(tree["__metadata__"], dict) else ():
            if isinstance(entry, str) and entry.startswith("{") and rng.random() < 0.7:
                tree["__metadata__"][key] = dump(change_tree(json.loads(entry), rng))
    elif how == 4:
        name = rng.choice([k for k in header if k != "__metadata__"])
        tree = header
        tree[name] |= {
            "dtype": rng.choice(
                ["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", "I4", "E8M0", "U64"]
            )
        }
    elif how == 5:
        name = rng.choice([k for k in header if k != "__metadata__"])
        tree = header
        shapes = [
            [0],
            [-1],
            [0, 2**40],
            [2**62, 4],
            [],
            [1] * 70,
            [rng.choice(INTS)],
            [[1]],
            list(reversed(header[name]["shape"])),
        ]
        tree[name]["shape"] = rng.choice(shapes)
    elif how == 6:
        return data[:8] + data[8 : 8 + length] + as_numbers(rest, rng)
    else:
        return (rng.choice(INTS) & (2**64 - 1)).to_bytes(8, "little") + data[8:]
    text = dump(tree).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def as_zip(data: bytes, rng: Random) -> bytes:
    """Members changed by their own kind, names that are paths, sizes that lie, bombs."""
    how = rng.randrange(9)
    if how == 0:  # a field of a directory entry or of a header
        signs = [m.start() for m in re.finditer(rb"PK\x01\x02|PK\x03\x04|PK\x05\x06|PK\x06\x06", data)]
        at, field = rng.choice(signs), rng.choice([4, 6, 8, 10, 14, 16, 18, 20, 22, 24, 26, 28, 30, 42])
        made = bytearray(data)
        width = rng.choice([2, 4])
        made[at + field : at + field + width] = (rng.choice(INTS) & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        return bytes(made[: len(data)])
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        parts = [(info.filename, file.read(info)) for info in file.infolist()]
    at = rng.randrange(len(parts))
    name, content = parts[at]
    packing = zipfile.ZIP_STORED
    if how <= 3:
        inner = name.rpartition(".")[2]
        parts[at] = name, mutate(content, {"pkl": "pickle"}.get(inner, inner), rng)
    elif how == 4:
        parts[at] = rng.choice([t for t in TEXTS if t] + [f"../{name}", f"/{name}", name + "/", "." + name]), content
    elif how == 5:
        parts.insert(at, parts[at])
    elif how == 6:
        del parts[at]
    elif how == 7:
        parts[at] = name, content[:1000] + bytes(rng.choice([10**6, 3 * 10**7]))
        packing = zipfile.ZIP_DEFLATED
    else:
        packing = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing, compresslevel=1) as file:
        for name, content in parts:
            file.writestr(zipfile.ZipInfo(name.replace("\x00", "")[:60_000] or "x"), content, packing)
    return out.getvalue()


EVIL = [
    b"cos\nsystem\n(S'echo'\ntR", b"cbuiltins\nexec\n(S'x=1'\ntR", b"c__builtin__\neval\n(S'1'\ntR",
    b"\x8c\x02os\x8c\x06system\x93",
    b"cposix\nsystem\n", b"ctorch\nload\n", b"cnumpy\nndarray\n", b"ios\nsystem\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n)R", b"Vx\nQ", b"\x82\x01", b"ctorch.storage\n_load_from_bytes\n(C\x01xtR",
    b"csubprocess\nPopen\n",
]  # fmt: skip


def as_pickle(data: bytes, rng: Random) -> bytes:
    """Operations deleted, repeated and swapped, numbers blown up, calls put in."""
    starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    ops = [data[a:b] for a, b in itertools.pairwise(starts)]
    at = rng.randrange(len(ops))
    how = rng.randrange(7)
    if how == 0:
        ops.insert(at, rng.choice(EVIL))
    elif how <= 3:
        rearrange(ops, at, how - 1, [1, 2, 1000], rng)
    elif how <= 5:
        numbers = [k for k, op in enumerate(ops) if op[:1] in b"KMJ\x8aI"] or [at]
        number = rng.choice(INTS)
        size = max(1, (number.bit_length() + 8) // 8)
        ops[rng.choice(numbers)] = b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)
    else:
        ops[at:at] = [
            rng.choice(
                [b"(", b"]", b"}", b")", b"N", b"0", b"1", b"2", b"t", b"e", b"u", b"s", b"R", b"b", b".", b"a", b"("]
            )
        ] * rng.choice([1, 50])
    return b"".join(ops)


def as_tar(data: bytes, rng: Random) -> bytes:
    """Fields of headers with the sum made right again; headers of other kinds put in."""
    made = bytearray(data)
    heads = [at for at in range(0, len(made) - 511, 512) if made[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(heads)
    how = rng.randrange(7)
    if how == 0:
        size = rng.choice(
            [
                b"00000000000\x00",
                b"77777777777\x00",
                b"\x80" + b"\xff" * 11,
                b"\xff" * 12,
                b"-0000000001\x00",
                b"x" * 12,
                b"00000001000\x00",
            ]
        )
        made[at + 124 : at + 136] = size
    elif how == 1:
        made[at + 156 : at + 157] = rng.choice(
            [b"0", b"1", b"2", b"3", b"5", b"7", b"L", b"K", b"S", b"x", b"g", b"\x00", b"X"]
        )
    elif how == 2:
        name = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:100]
        made[at : at + 100] = name.ljust(100, b"\x00")
    elif how == 3:
        made[at + 345 : at + 500] = rng.choice([b"../" * 50, b"/" * 155, b"a" * 155]).ljust(155, b"\x00")[:155]
    elif how == 4:
        with io.BytesIO() as out, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as file:
            info = tarfile.TarInfo("0009.jpg")
            info.pax_headers = {
                rng.choice(
                    [
                        "size",
                        "path",
                        "GNU.sparse.size",
                        "GNU.sparse.major",
                        "GNU.sparse.realsize",
                        "mtime",
                        "hdrcharset",
                    ]
                ): rng.choice([str(rng.choice(INTS)), rng.choice(TEXTS).replace("\x00", "")])
            }
            file.addfile(info, io.BytesIO())
            made[at:at] = out.getvalue()
            return bytes(made)
    elif how == 5:
        made[at:at] = made[at : at + 512] * rng.choice([1, 3, 500])
    else:
        del made[at : at + 512]
        return bytes(made)
    made[at + 148 : at + 156] = b" " * 8
    made[at + 148 : at + 156] = b"%06o\0 " % (sum(made[at : at + 512]) & 0o777777)
    return bytes(made)


# ---------------------------------------------------------------- pictures, keys, graphs


def as_png(data: bytes, rng: Random) -> bytes:
    """Chunks with their sums made right again."""
    chunks, at = [], 8
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    k = rng.randrange(len(chunks))
    how = rng.randrange(6)
    if how <= 1:
        kind, body = chunks[0]
        sides = [(rng.choice([0, 1, 5000, 9999, 65535, 2**31 - 1, 2**32 - 1])).to_bytes(4, "big") for _ in range(2)]
        tail = bytes(
            [rng.choice([1, 2, 4, 8, 16, 3]), rng.choice([0, 2, 3, 4, 6, 1]), rng.choice([0, 1]), 0, rng.choice([0, 1])]
        )
        chunks[0] = kind, rng.choice([b"".join(sides) + body[8:], body[:8] + tail, b"".join(sides) + tail])
    elif how == 2:
        chunks[k] = chunks[k][0], raw(chunks[k][1], rng)
    elif how == 3:
        bomb = zlib.compress(bytes(rng.choice([10**5, 3 * 10**7])), 1)
        new = rng.choice([(b"zTXt", b"a\0\0" + bomb), (b"iCCP", b"a\0\0" + bomb), (b"iTXt", b"a\0\1\0\0\0" + bomb),
            (b"IDAT", bomb),
                          (b"PLTE", rng.randbytes(rng.choice([0, 3, 768, 5000]))), (b"tRNS",
                          rng.randbytes(rng.choice([0, 1, 300]))),
                          (b"acTL", b"\xff" * 8), (b"eXIf", rng.randbytes(60)), (b"gAMA", b"\0" * 4)])  # fmt: skip
        chunks.insert(rng.randrange(len(chunks) + 1), new)
    elif how == 4:
        rng.shuffle(chunks)
    else:
        chunks.insert(k, chunks[k])
    made = [len(b).to_bytes(4, "big") + t + b + zlib.crc32(t + b).to_bytes(4, "big") for t, b in chunks]
    return data[:8] + b"".join(made)


def as_jpg(data: bytes, rng: Random) -> bytes:
    """Lengths of segments and sides of the picture."""
    marks = [m.start() for m in re.finditer(rb"\xff[\xc0-\xcf\xda-\xef\xfe]", data)]
    at, made = rng.choice(marks), bytearray(data)
    frames = [m for m in marks if made[m + 1] in (0xC0, 0xC2)]
    if rng.random() < 0.4 and frames:
        at = frames[0]
        made[at + 5 : at + 9] = struct.pack(">HH", rng.choice([0, 1, 5000, 65535]), rng.choice([0, 1, 5000, 65535]))
    elif rng.random() < 0.5:
        made[at + 2 : at + 4] = struct.pack(">H", rng.choice([0, 1, 2, 255, 65535]))
    else:
        made[at + 1] = rng.choice([0xC0, 0xC2, 0xC4, 0xD8, 0xD9, 0xDA, 0xE1, 0xC9])
    return bytes(made)


def as_pem(data: bytes, rng: Random) -> bytes:
    """The bytes inside the lines."""
    text = data.decode("latin-1")
    found = re.search(r"(-----BEGIN [^-]*-----\n)(.*?)(-----END [^-]*-----)", text, re.S)
    assert found
    if rng.random() < 0.2:
        return (
            text.replace("EC", "RSA")
            .replace("PRIVATE KEY", rng.choice(["PUBLIC KEY", "CERTIFICATE", "ENCRYPTED PRIVATE KEY"]))
            .encode("latin-1")
        )
    inner = raw(base64.b64decode(found[2]), rng)
    return (found[1] + base64.encodebytes(inner).decode() + found[3] + text[found.end() :]).encode("latin-1")


OPS = ["Loop", "If", "Scan", "ConstantOfShape", "Expand", "Tile", "Resize", "Identity", "Flatten", "Gemm", "NonZero",
    "Range", "Conv",
       "Sub", "Mul", "Reshape", "Softmax", "Pad", "Einsum", "RandomNormal", "Cast", "Unknown", "SequenceMap",
       "ConvTranspose", "OneHot"]  # fmt: skip


def as_onnx(data: bytes, rng: Random) -> bytes:
    """Operations, attributes, sides and weights of a graph."""
    import onnx

    model = onnx.load_model_from_string(data)
    graph, how = model.graph, rng.randrange(10)
    node = rng.choice(graph.node)
    if how <= 1:
        node.op_type = rng.choice(OPS)
    elif how == 2 and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i = rng.choice(INTS) % 2**62
        for k in range(len(attribute.ints)):
            attribute.ints[k] = rng.choice([0, -1, 1, 2**31, 2**40, 10**6, 513])
    elif how == 3 and graph.initializer:
        weight = rng.choice(graph.initializer)
        for k in range(len(weight.dims)):
            if rng.random() < 0.5:
                weight.dims[k] = rng.choice([0, -1, 1, 10**6, 2**40, 2**62])
    elif how == 4:
        port = rng.choice([*graph.input, *graph.output])
        for side in port.type.tensor_type.shape.dim:
            if rng.random() < 0.5:
                side.dim_value = rng.choice([0, -1, 1, 3, 8, 5000, 10**6, 2**40])
    elif how == 5:
        graph.node.remove(node)
    elif how == 6:
        graph.node.add().CopyFrom(node)
    elif how == 7:
        node.input[:] = [
            rng.choice([*(o for n in graph.node for o in n.output), *(i.name for i in graph.initializer), "x"])
            for _ in node.input
        ]
    elif how == 8:
        sizes = onnx.numpy_helper.from_array(
            __import__("numpy").array([rng.choice([1, 10**4, 10**5, 2**31])] * 2, "int64"), "fuzz_sizes"
        )
        graph.initializer.append(sizes)
        graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["fuzz_sizes"], ["fuzz_large"]))
    else:
        model.metadata_props.add(key=rng.choice(["mean", "std", "size", "order"]), value=rng.choice(TEXTS))
        model.ir_version = rng.choice([0, 3, 10, 99])
    return model.SerializeToString()


def as_expression(data: bytes, rng: Random) -> bytes:
    """Words and signs of an attribute expression."""
    parts = re.findall(r"\w+|\S|\s+", data.decode("utf-8", "replace")) or [""]
    at = rng.randrange(len(parts))
    parts[at:at] = rng.choice(
        [
            ["("] * 40,
            ["!"] * 70,
            ["&"],
            ["|", "Male"],
            [")"],
            [rng.choice(TEXTS)],
            ["(", "Male", ")"] * 500,
            [rng.choice(string.punctuation)],
        ]
    )
    return "".join(parts).encode("utf-8", "surrogatepass")


KINDS: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": as_json, "jsonl": as_jsonl, "txt": as_text, "csv": as_text, "dat": as_text, "idx": as_text,
    "toml": as_toml, "npy": as_npy,
    "safetensors": as_safetensors, "gallery": as_safetensors, "zip": as_zip, "npz": as_zip, "pth": as_zip,
    "pickle": as_pickle,
    "bin": as_pickle, "tar": as_tar, "png": as_png, "jpg": as_jpg, "pem": as_pem, "onnx": as_onnx,
    "expression": as_expression,
    "key": as_json, "xml": as_text,
}  # fmt: skip
