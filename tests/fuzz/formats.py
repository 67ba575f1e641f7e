"""Every format that visard reads: a folder of valid files, and what a command does with them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from tests.toys import noise_faces
from tests.unit.fake_run import write_run
from tests.unit.pictures import encode, pixels
from visard import config
from visard.at_rest import Key
from visard.cli import main, watch
from visard.crypto import paillier
from visard.crypto.session import Binding, seal, unseal
from visard.data.expressions import evaluate
from visard.data.faces import FaceSet, describe
from visard.data.pairs import load_galleries, load_pairs, load_template_pairs, load_templates, read_pairs
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.pictures import Haar, template
from visard.data.removal import Receipt, remove_people
from visard.data.sensors import write_readings
from visard.data.sources.catalog import export, open_set
from visard.data.sources.importing import import_faces
from visard.deployment.certificates import read_request
from visard.deployment.key_lifecycle import load_ca, request, sign
from visard.deployment.keys import Assignment, PartyKeys, ServerKeys, bytes_of, make_keys, read_parties, write_parties
from visard.deployment.party import OwnStates
from visard.deployment.policy import Policy
from visard.engines.checkpoint import Checkpoint
from visard.engines.codec import decode
from visard.engines.codec import encode as to_bytes
from visard.engines.ledger import Ledger
from visard.engines.records import Records, read_records
from visard.engines.request import Reply, Request, StateFile, check_names, pack, unpack
from visard.engines.world import BIASES, CLASS_VECTORS, _class_vectors
from visard.errors import VisardError
from visard.files import write_json
from visard.inference.features import read_features, read_vectors
from visard.inference.gallery import Gallery
from visard.inference.model import load_model
from visard.methods.fedavg import Up
from visard.models import build
from visard.models.files import open_model, save_model, start
from visard.presets import presets
from visard.report import replay
from visard.report.live import Followed
from visard.report.page import build_report
from visard.report.run_folder import read_run as run_of

SIZE = 32
SPEC = {"model": "tiny_nobn", "embedding": "8", "size": str(SIZE)}


@dataclass(frozen=True)
class Format:
    """`make(folder)` writes valid files; `read(folder, scratch)` reads them as a command does.

    `kinds` says how files are mutated where their ending does not, `weight` how often the format is taken.
    """

    make: Callable[[Path], None]
    read: Callable[[Path, Path], object]
    kinds: dict[str, str] | None = None
    weight: float = 1.0
    fixed: tuple[str, ...] = ()  # names of files that stay as they are
    there: bool = False  # the files stand for messages, which are never missing

    def kind(self, name: str) -> str:
        """How a file is mutated."""
        ending = Path(name).suffix.lstrip(".")
        return (self.kinds or {}).get(Path(name).name, (self.kinds or {}).get(ending, ending))


class Printed(Exception):
    """A command printed what no command may print."""


class Ended(VisardError):
    """A command ended with one line."""


def command(*arguments: object) -> None:
    """A command in this process; VISARD_DEBUG lets what is a bug through."""
    out, err, before, failed = io.StringIO(), io.StringIO(), sys.argv, False
    sys.argv = ["visard", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        if end.code not in (0, None) and err.getvalue().count("\n") != 1:
            raise Printed(f"{err.getvalue().count(chr(10))} lines: {err.getvalue()[:200]!r}") from None
        failed = end.code not in (0, None)
    finally:
        sys.argv = before
    shown = out.getvalue() + err.getvalue()
    if acting := {c for c in shown if not c.isprintable() and c != "\n"}:
        raise Printed(f"control characters {sorted(acting)!r}")
    if "internal error" in shown or "Traceback" in shown:
        raise Printed(shown[-300:])
    if failed:
        raise Ended(err.getvalue().strip())


# ---------------------------------------------------------------- data


def faces(folder: Path) -> FaceSet:
    found = noise_faces(folder / "set", identities=4, images=3)
    table = np.array([(0, 1, 1, 0), (0, 3, 0, 0), (3, 4, 1, 1), (4, 7, 0, 1)])
    np.save(found.path / "pairs.npy", table)
    return found


def read_faces(folder: Path, scratch: Path) -> None:
    command("data", "show", folder / "set", "--sheet", scratch / "sheet.png")
    found = FaceSet.open(folder / "set")
    describe(found), [found.file(row) for row in range(min(50, len(found)))]
    load_pairs(found)
    forget_one(folder, scratch)


def forget_one(folder: Path, scratch: Path) -> None:
    """Take the first person out of the set."""
    moved = (folder / "set").rename(scratch / "set")
    name = FaceSet.open(moved).names[0]
    remove_people(moved, [name], Receipt(scratch / "receipt.json", "face set", "set", [name]))
    FaceSet.open(moved)


def ijb_set(folder: Path) -> None:
    ijbc(folder / "src")
    import_faces("ijb", folder / "src", folder / "set", size=16)
    shutil.rmtree(folder / "src")


def read_ijb_set(folder: Path, scratch: Path) -> None:
    found = FaceSet.open(folder / "set")
    load_templates(found), load_template_pairs(found), load_galleries(found)
    forget_one(folder, scratch)


def readings(folder: Path) -> None:
    rng = np.random.default_rng(0)
    write_readings(
        folder / "set", rng.random((12, 5)), ["a", "b"], np.arange(12) % 2, ["u", "v"], np.arange(12) // 6, {}
    )


def read_readings(folder: Path, scratch: Path) -> None:
    found = open_set(folder / "set")
    describe(found), found.file(0), found.all().batch([0])


def manifest(folder: Path) -> None:
    found = noise_faces(folder / "set", identities=8, images=3)
    settings = PartitionSettings(kind="equal", clients=2, test_identities=2, public_identities=1, hold_out=1)
    partition(found, settings, 0).save(folder / "partition.json")


def read_manifest(folder: Path, scratch: Path) -> None:
    Manifest.load(folder / "partition.json").federation(FaceSet.open(folder / "set"))


def importing(kind: str, name: str = "src", **options: Any) -> Callable[[Path, Path], None]:
    words = [part for key, text in options.items() for part in (f"--{key}", text)]

    def read(folder: Path, scratch: Path) -> None:
        own = [folder / w[1:] if str(w).startswith("@") else w for w in words]
        command("data", "import", kind, folder / name, "--out", scratch / "out", "--size", 16, *own)

    return read


def reading(kind: str) -> Callable[[Path, Path], None]:
    def read(folder: Path, scratch: Path) -> None:
        command("data", "import", kind, folder, "--out", scratch / "out")

    return read


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def photos(folder: Path) -> None:
    forms = {
        "png": "PNG",
        "jpg": "JPEG",
        "bmp": "BMP",
        "gif": "GIF",
        "tif": "TIFF",
        "webp": "WEBP",
        "ppm": "PPM",
        "tga": "TGA",
    }
    for k, (ending, form) in enumerate(forms.items()):
        put(folder / "src" / f"p{k % 3}" / f"{k}.{ending}", encode(pixels(k, 24), form))
    for k, mode in enumerate(("L", "RGBA", "P", "I;16", "LA", "1")):
        with io.BytesIO() as buffer:
            Image.fromarray(pixels(k, 24)).convert("L").convert(mode).save(buffer, "PNG")
            put(folder / "src" / "modes" / f"{k}.png", buffer.getvalue())
    for form, ending in (("JPEG2000", "jp2"), ("AVIF", "avif")):
        with contextlib.suppress(Exception):  # where Pillow can write them
            put(folder / "src" / "p0" / f"x.{ending}", encode(pixels(9, 24), form))


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "src.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for k in range(6):
            file.writestr(f"p{k // 2}/{k}.png", encode(pixels(k, 16)))


def packed_bin(folder: Path) -> None:
    found = faces(folder)
    export(found, folder / "v.bin")
    shutil.rmtree(folder / "set")
    pictures = [encode(pixels(k, 16)) for k in range(4)]
    put(folder / "a.bin", pickle.dumps((pictures, [True, False]), 2))
    put(folder / "b.bin", pickle.dumps(([np.frombuffer(p, np.uint8) for p in pictures], np.array([True, False])), 4))


def packed_rec(folder: Path) -> None:
    export(noise_faces(folder / "set", identities=3, images=2), folder / "train.rec")
    shutil.rmtree(folder / "set")


def parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pictures = [{"bytes": encode(pixels(k, 16)), "path": f"{k}.png"} for k in range(6)]
    kinds = {
        "a": ({}, [0, 0, 1, 1, 2, 2]),
        "b": ({"compression": "gzip"}, list("aabbcc")),
        "c": ({"compression": "none", "use_dictionary": False}, [1] * 6),
    }
    names = {"info": {"features": {"label": {"names": ["anna", "bert", "carl"]}}}}
    for name, (options, labels) in kinds.items():
        table = pyarrow.table({"image": pictures, "label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(names)}) if name == "a" else table
        (folder / name).mkdir(parents=True)
        pyarrow.parquet.write_table(table, folder / name / "x.parquet", **options)
    table = pyarrow.table({"image": [p["bytes"] for p in pictures], "label": [1, 1, 2, 2, 3, 3]})
    (folder / "d").mkdir()
    with pyarrow.OSFile(str(folder / "d" / "x.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)


def read_parquet(folder: Path, scratch: Path) -> None:
    for name in "abcd":
        importing("parquet", name)(folder, scratch)
        shutil.rmtree(scratch / "out", ignore_errors=True)


def shards(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for shard, style in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(folder / f"{shard}.tar", "w", format=style) as file:
            for k in range(3):
                label = {"label": f"p{k}"} if shard else None
                parts = {
                    "png": encode(pixels(k, 16)),
                    "json" if label else "cls": json.dumps(label).encode() if label else b"anna",
                }
                for ending, data in parts.items():
                    info = tarfile.TarInfo(f"{k:04d}.{ending}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))


def lfw(folder: Path) -> None:
    for name, count in (("Anna_A", 3), ("Bert_B", 2)):
        for k in range(1, count + 1):
            put(folder / "src" / name / f"{name}_{k:04d}.png", encode(pixels(k, 16)))
    put(folder / "src" / "pairs.txt", "1\t2\nAnna_A\t1\t2\nAnna_A\t1\t3\nAnna_A\t1\tBert_B\t1\nAnna_A\t2\tBert_B\t2\n")
    points = " ".join(f"{v:.2f}" for v in template(16).ravel())
    put(folder / "landmarks.txt", "".join(f"Anna_A/Anna_A_{k:04d}.png {points}\n" for k in (1, 2, 3)))


def rfw(folder: Path) -> None:
    for race in ("African", "Asian"):
        numbers = "\t".join(f"{v:.2f}" for v in template(16).ravel())
        points = ""
        for person in ("m.0a", "m.0b"):
            for k in (1, 2):
                put(folder / "src" / "data" / race / person / f"{person}_{k:04d}.png", encode(pixels(k, 16)))
                points += f"./{race}/{person}/{person}_{k:04d}.png\t0\t{numbers}\n"
        put(folder / "src" / "txts" / race / f"{race}_pairs.txt", "m.0a\t1\t2\nm.0a\t1\tm.0b\t2\n" * 5)
        put(folder / "src" / "txts" / race / f"{race}_lmk.txt", points)


def ijbc(folder: Path) -> None:
    numbers = " ".join(f"{value:.4f}" for value in template(16).ravel())
    for k in range(1, 7):
        put(folder / "loose_crop" / f"{k}.jpg", encode(pixels(k, 16)))
    meta = folder / "meta"
    put(meta / "ijbc_name_5pts_score.txt", "".join(f"{k}.jpg {numbers} 0.9{k}\n" for k in range(1, 7)))
    put(meta / "ijbc_face_tid_mid.txt", "1.jpg 1 11\n2.jpg 1 11\n3.jpg 2 12\n4.jpg 3 13\n5.jpg 4 14\n6.jpg 5 15\n")
    put(meta / "ijbc_template_pair_label.txt", "1 5 1\n1 2 0\n3 4 0\n2 4 0\n")
    head = "TEMPLATE_ID,SUBJECT_ID,FILENAME,FACE_X\n"
    put(meta / "ijbc_1N_gallery_G1.csv", head + "1,100,img/1.jpg,3\n2,200,img/3.jpg,3\n")
    put(meta / "ijbc_1N_probe_mixed.csv", head + "5,100,img/6.jpg,3\n")


def ijba(folder: Path) -> None:
    head = "TEMPLATE_ID,SUBJECT_ID,FILE,MEDIA_ID,SIGHTING_ID,FRAME,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT,"
    head += "RIGHT_EYE_X,RIGHT_EYE_Y,LEFT_EYE_X,LEFT_EYE_Y,NOSE_BASE_X,NOSE_BASE_Y\n"
    rows = [f"1{k},{k},img/{k}.png,9{k},,,0,0,16,16,5,6,11,6,8,10\n" for k in range(1, 5)]
    for k in range(1, 5):
        put(folder / "src" / "images" / "img" / f"{k}.png", encode(pixels(k, 16)))
    one, many = folder / "src" / "IJB-A_11_sets" / "split1", folder / "src" / "IJB-A_1N_sets" / "split1"
    put(one / "verify_metadata_1.csv", head + "".join(rows))
    put(one / "verify_comparisons_1.csv", "11,12\n11,13\n13,14\n")
    put(many / "search_gallery_1.csv", head + rows[0] + rows[2])
    put(many / "search_probe_1.csv", head + rows[1] + rows[3])


def celeba(folder: Path) -> None:
    names = [f"{k:06d}.png" for k in range(1, 7)]
    for k, name in enumerate(names):
        put(folder / "src" / "img_align_celeba" / name, encode(pixels(k, 16)))
    put(folder / "src" / "identity_CelebA.txt", "".join(f"{n} {k // 2}\n" for k, n in enumerate(names)))
    put(folder / "src" / "list_attr_celeba.txt", "6\nMale Young\n" + "".join(f"{n} 1 -1\n" for n in names))
    put(folder / "src" / "list_eval_partition.txt", "".join(f"{n} {k % 3}\n" for k, n in enumerate(names)))
    coordinates = " ".join(str(k) for k in range(10))
    put(
        folder / "src" / "list_landmarks_align_celeba.txt",
        f"6\n{' '.join('abcdefghij')}\n" + "".join(f"{n} {coordinates}\n" for n in names),
    )


def office31(folder: Path) -> None:
    for domain in ("amazon", "dslr"):
        for k, name in enumerate(("mug", "pen")):
            put(folder / "src" / domain / "images" / name / f"{k}.jpg", encode(pixels(k, 16), "JPEG"))


def pair_list(folder: Path) -> None:
    found = noise_faces(folder / "set", identities=3, images=2)
    put(folder / "rows.csv", "row_a,row_b,same,fold\n0,1,1,0\n0,2,0,0\n2,3,1,1\n3,4,0,1\n")
    put(
        folder / "files.csv",
        f"file_a,file_b,same\n{found.file(0)},{found.file(1)},1\n{found.file(0)},{found.file(2)},0\n",
    )


def read_pair_list(folder: Path, scratch: Path) -> None:
    found = FaceSet.open(folder / "set")
    read_pairs(folder / "rows.csv", found)
    read_pairs(folder / "files.csv", found)


def widar(folder: Path) -> None:
    frames = np.random.default_rng(0).random((43, 20, 20)).astype(np.float16)
    save = np.savez if folder.name.endswith("0") else np.savez_compressed
    save(folder / "bvp.npz", frames=frames, length=[3, 0, 40], room=[1, 1, 2], user=[5, 5, 3], gesture=[1, 2, 6])


def office(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("amazon", "caltech", "dslr", "webcam"):
        np.savez(folder / f"{name}.npz", fts=rng.integers(0, 5, (6, 800), np.uint8), labels=np.arange(1, 7)[:, None])


def pamap2(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows = np.round(rng.random((600, 54)), 2)
    rows[:, 1] = 4
    text = "\n".join(" ".join(map(str, row)) for row in rows)
    put(folder / "subject101.dat", text.replace("0.5 ", "nan ") + "\n")


# ---------------------------------------------------------------- models, galleries, features


def model(path: Path) -> Path:
    torch.manual_seed(0)
    save_model(path, build("tiny_nobn", embedding=8, size=SIZE).state_dict(), SPEC)
    return path


def models(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    model(folder / "m.safetensors")
    weights = dict(build("tiny", embedding=8, size=SIZE).state_dict())
    more = {"transform.weight": torch.eye(8), "transform.bias": torch.zeros(8)}
    save_model(folder / "personal.safetensors", weights | more, SPEC | {"model": "tiny"})


def read_models(folder: Path, scratch: Path) -> None:
    for name in ("m", "personal"):
        network, _ = open_model(folder / f"{name}.safetensors")
        with torch.inference_mode():
            network(torch.zeros(1, 3, SIZE, SIZE))


def torch_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    weights = build("tiny", embedding=8, size=SIZE).state_dict()
    torch.save({"state_dict": weights, "epoch": 3}, folder / "zip.pth")
    torch.save(weights, folder / "legacy.pt", _use_new_zipfile_serialization=False)


def read_torch_files(folder: Path, scratch: Path) -> None:
    for name in ("zip.pth", "legacy.pt"):
        with contextlib.suppress(VisardError):
            open_model(folder / name)
        start(folder / name, "tiny", 8, SIZE)


def graphs(folder: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper

    folder.mkdir(exist_ok=True)
    weight = numpy_helper.from_array(np.random.default_rng(0).random((5, 3, 8, 8)).astype(np.float32), "w")
    mean = numpy_helper.from_array(np.float32(127), "m")
    nodes = [
        helper.make_node("Sub", ["x", "m"], ["y"]), helper.make_node("Conv", ["y", "w"], ["c"], kernel_shape=[8, 8],
        strides=[1, 1]),
        helper.make_node("Relu", ["c"], ["r"]), helper.make_node("Flatten", ["r"], ["f"], axis=1),
    ]  # fmt: skip
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["n", 3, 8, 8]), ("f", ["n", 5]))
    ]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight, mean])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    put(folder / "g.onnx", made.SerializeToString())


def read_graphs(folder: Path, scratch: Path) -> None:
    network, _ = open_model(folder / "g.onnx")
    network(torch.zeros(1, 3, 8, 8))
    network.graph.close()


def recogniser(folder: Path) -> None:
    """A graph that a run can start from, and the model file that it becomes."""
    graphs(folder)
    spec, weights = start(folder / "g.onnx", "tiny", None, 8)
    save_model(folder / "g.safetensors", weights, spec)


def read_recogniser(folder: Path, scratch: Path) -> None:
    with contextlib.suppress(VisardError):
        open_model(folder / "g.safetensors")[0](torch.zeros(2, 3, 8, 8))
    start(folder / "g.onnx", "tiny", None, 8)


def kept_model(folder: Path) -> None:
    with in_cache(folder / "cache"):
        torch.save(build("iresnet18", embedding=8, size=SIZE).state_dict(), folder / "i.pth")
        command("models", "add", folder / "i.pth", "--name", "mine", "--licence", "none")


def read_kept_model(folder: Path, scratch: Path) -> None:
    with in_cache(folder / "cache"):
        command("models", "list")
        open_model("mine")


@contextlib.contextmanager
def in_cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("VISARD_CACHE")
    os.environ["VISARD_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("VISARD_CACHE")
        if before is not None:
            os.environ["VISARD_CACHE"] = before


def vectors(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_model(folder / "v.safetensors", {CLASS_VECTORS: torch.eye(5, 8), BIASES: torch.zeros(5)}, SPEC)


def read_vectors_file(folder: Path, scratch: Path) -> None:
    held, _biases = _class_vectors(str(folder / "v.safetensors"), 8, None)
    assert held is not None
    torch.nn.functional.normalize(held)


def gallery(folder: Path) -> None:
    found = load_model(model(folder / "m.safetensors"))
    about = {key: found.spec[key] for key in ("order", "mean", "std", "size")} | {"align": "none", "flip": "0"}
    about |= {"model": found.fingerprint, "model_file": "nowhere"}
    rng = np.random.default_rng(0)
    Gallery.enrol(["anna", "anna", "bert", "carl"], rng.standard_normal((4, 8)), about).save(folder / "staff.gallery")
    put(folder / "x.png", encode(pixels(0, SIZE)))


def read_gallery(folder: Path, scratch: Path) -> None:
    command(
        "identify",
        folder / "x.png",
        "--gallery",
        folder / "staff.gallery",
        "--model",
        folder / "m.safetensors",
        "--far",
        0.5,
    )
    command(
        "verify",
        folder / "x.png",
        folder / "x.png",
        "--gallery",
        folder / "staff.gallery",
        "--model",
        folder / "m.safetensors",
    )


def encrypted(folder: Path) -> None:
    gallery(folder)
    key = Key.make(folder / "secret.raw")
    Gallery.load(folder / "staff.gallery").save(folder / "sealed.raw", key)
    (folder / "staff.gallery").unlink()
    save_model(folder / "v.raw", {CLASS_VECTORS: torch.eye(5, 8)}, SPEC, key=key)


def read_encrypted(folder: Path, scratch: Path) -> None:
    (folder / "secret.raw").chmod(0o600)
    key = Key.load(folder / "secret.raw")
    with contextlib.suppress(VisardError):
        Gallery.load(folder / "sealed.raw", key)
    _class_vectors(str(folder / "v.raw"), 8, str(folder / "secret.raw"))


def features(folder: Path) -> None:
    found = noise_faces(folder / "set", identities=4, images=3)
    rows = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    np.save(folder / "f.npy", rows)
    about = {"version": 1, "rows": 12, "dimensions": 8, "normalisation": "none", "flip": False, "sha256": "",
        "model": {"file": "m"},
             "data": {"name": "set", "fingerprint": found.fingerprint(), "pictures": 12},
             "identity": found.identity.tolist(),
             "names": found.names}  # fmt: skip
    put(folder / "f.json", json.dumps(about))


def read_features_files(folder: Path, scratch: Path) -> None:
    with contextlib.suppress(VisardError):
        read_features(folder / "f.npy", FaceSet.open(folder / "set").all())
    read_vectors(folder / "f.npy")
    command("cluster", folder / "f.npy", "--method", "finch", "--out", scratch / "labels.csv")
    command("eval", folder / "f.npy", "--data", folder / "set", "--pairs", 20)


# ---------------------------------------------------------------- settings, runs, checkpoints


def settings(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("fedavg", "encrypted-mmd", "fedface", "hf-maml"):
        put(folder / f"{name}.toml", presets()[name])
    put(
        folder / "own.toml",
        config.load("demo").to_toml() + '\n[aggregation]\nrule = "mean"\n[[outgoing]]\nname = "clip"\nnorm = 1.0\n',
    )


def read_settings(folder: Path, scratch: Path) -> None:
    for path in sorted(folder.glob("*.toml")):
        with contextlib.suppress(VisardError):
            config.load(path).to_toml()
            config.load(path).fingerprint()


def policies(folder: Path) -> None:
    text = 'methods = ["fedavg"]\nkinds = ["weights", "count"]\n[bounds]\nrounds = 50\ndistance = 0.5\n'
    text += 'lr = { at_least = 1e-5, at_most = 1.0 }\n[weights]\nfrozen = ["trunk.*"]\n[retention]\ndays = 7\n'
    text += '[require]\nmethod.name = "fedavg"\nmethod.rounds = { at_most = 50 }\n'
    text += 'model.name = { one_of = ["tiny", "mlp"] }\n'
    put(
        folder / "policy.toml",
        text + '[local]\nmethod.training.batch_size = 8\n[plugins]\nallow = ["package.module"]\n',
    )


def read_policy(folder: Path, scratch: Path) -> None:
    found = Policy.load(folder / "policy.toml")
    plain = config.load("fedavg").to_dict()
    assert Policy.parse(found.model_dump(mode="json"), "again") == found
    found.check_method(plain)
    found.check(config.parse(found.applied(plain)).to_dict())


def run(folder: Path) -> None:
    write_run(folder / "one", clients=8, rounds=3)
    write_run(folder / "two", name="other", clients=8, rounds=3, stop_after=2, seed=1)
    np.save(folder / "one" / "samples.npy", np.stack([pixels(k, 16) for k in range(4)]))
    write_json(folder / "one" / replay.FILE, replay.record(run_of(folder / "two"), ["client-3"], ["a note"]))


def read_run(folder: Path, scratch: Path) -> None:
    with contextlib.suppress(VisardError):
        build_report([folder / "one"], scratch / "report.html")
    build_report([folder / "one", folder / "two"], scratch / "comparison.html")


def read_watched(folder: Path, scratch: Path) -> None:
    states = [Followed(folder / name).state() for name in ("one", "two")]
    json.dumps(states, allow_nan=False)
    for state in states:
        watch._words(state)
    Console(file=io.StringIO(), width=100).print(watch._tables(states))


def checkpoint(folder: Path) -> None:
    made = Checkpoint(folder / "checkpoint", "h")
    ledger = Ledger(made.ledger)
    for step in range(2):
        for client in ("a", "b"):
            state = made.packs.write(
                made.new_pack, {"w": torch.full((3,), float(step)), "n": 2, "x": b"abc", "f": 0.5}, None
            )
            assert state is not None
            made.adopt(client, state)
            ledger.record("train", step, client, Up({"w": torch.zeros(3)}, None, 3, 0.5, 1, 1))
        made.commit({"theta": {"w": torch.ones(4)}, "round": step}, ledger.flush())


def read_checkpoint(folder: Path, scratch: Path) -> None:
    found = Checkpoint(folder / "checkpoint", "h")
    if found.resume():
        found.server_state(dict)
        for client in list(found.committed.clients)[:5]:
            found.client_state(client)
    Ledger(found.ledger, found.committed.ledger_bytes).save(scratch / "ledger.json", frozenset())


def party_states(folder: Path) -> None:
    states = OwnStates(folder / "states")
    request = Request(run="0" * 32, client="a", new_state="clients/a-000001-1.bin", stage="train")
    made = states.write(request, {"w": torch.zeros(3)})
    assert made is not None
    put(folder / "place.txt", made.digest)


def read_party_states(folder: Path, scratch: Path) -> None:
    states = OwnStates(folder / "states")
    digest = (folder / "place.txt").read_text(errors="replace")
    name = "clients/a-000001-1.bin"
    states.read(
        Request(
            run="0" * 32,
            client="a",
            state=StateFile(name, digest),
            committed=name,
            new_state="clients/a-000002-1.bin",
            stage="t",
            round=1,
        )
    )


# ---------------------------------------------------------------- keys and messages


def keys(folder: Path) -> None:
    make_keys(folder / "keys", 2, ["server.example"], Assignment({"node-1": ("house-1",)}))
    asked = request(folder / "party", "3", ["house-3"])
    sign(asked, load_ca(folder / "keys" / "ca"), ServerKeys.load(folder / "keys"), folder / "party", None, 90)
    (folder / "state").mkdir()
    write_parties(folder / "state", {12345: "node-1", 678: "node-2"}, Assignment({"node-1": ("house-1",)}))


def read_keys(folder: Path, scratch: Path) -> None:
    with contextlib.suppress(VisardError):
        ServerKeys.load(folder / "keys")
    with contextlib.suppress(VisardError):
        PartyKeys.load(folder / "keys", "1")
    with contextlib.suppress(VisardError):
        PartyKeys.load(folder / "party", "3")
    with contextlib.suppress(VisardError):
        read_request(bytes_of(folder / "party" / "node-3.csr"), "a request")
    read_parties(folder / "state")


def messages(folder: Path) -> None:
    theta = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    put(folder / "reply.msg", to_bytes(Up(theta, torch.eye(2), 5, 0.25, 3, 4)))
    put(folder / "state.msg", to_bytes({"k": [1, None, "x", b"bytes", 1.5, {"t": torch.ones(2)}]}))
    state = StateFile("clients/a-000001-1.bin", "ab", 0, 0)
    put(
        folder / "request.json",
        pack(Request(run="0" * 32, client="a", stage="s", state=state, settings={"a": {"b": 1}})),
    )
    put(
        folder / "reply.json",
        pack(Reply(run="0" * 32, client="a", stage="s", state=state, roles={"a": {"pictures": 3}})),
    )


def read_messages(folder: Path, scratch: Path) -> None:
    for path, read in (
        ("reply.msg", lambda data: decode(data, Up)), ("state.msg", lambda data: decode(data, dict)),
        ("request.json", lambda data: check_names(unpack(data, Request))), ("reply.json", lambda data: unpack(data,
        Reply)),
    ):  # fmt: skip
        with contextlib.suppress(VisardError):
            read((folder / path).read_bytes())


def ledgers(folder: Path) -> None:
    """The records of a server and of a party, and their rows without the chain, for chains that a liar makes."""
    from tests.engines.test_two_ledgers import CLIENTS, RUN, Posted, far, rounds
    from tests.toys import Toy

    with tempfile.TemporaryDirectory() as place:
        link = Posted(Path(place))
        net = far(Path(place), link)
        rounds(net, Toy(), 0, 1)
        net.close()
        link.stop()
        for name, source in (("run/checkpoint", "far"), ("party", f"at/{CLIENTS[0]}")):
            (folder / name).mkdir(parents=True)
            if source == "far":
                shutil.copy(Path(place) / source / "ledger.jsonl", folder / name)
            for path in sorted((Path(place) / source).glob("*-000001.jsonl")):
                shutil.copy(path, folder / name)
                rows = [line.record for line in read_records([path])]
                put(folder / f"{path.stem[:-7]}.rows", "".join(f"{json.dumps(row)}\n" for row in rows))
    put(folder / "run" / "checkpoint" / "run.id", RUN)


def read_ledgers(folder: Path, scratch: Path) -> None:
    run, party = folder / "run", folder / "party"
    with contextlib.suppress(VisardError):
        command("ledger", "verify", party)
    with contextlib.suppress(VisardError):
        command("ledger", "compare", run, party)
    for name, place in (("received", scratch / "run" / "checkpoint"), ("ledger", scratch / "party")):
        place.mkdir(parents=True)
        chain = Records(place, name)
        for text in (folder / f"{name}.rows").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                chain.append(**{k: v for k, v in json.loads(text).items() if k not in ("n", "previous")})
        chain.close()
    for name in ("run.id", "ledger.jsonl"):
        shutil.copy(run / "checkpoint" / name, scratch / "run" / "checkpoint")
    command("ledger", "compare", scratch / "run", scratch / "party")


def flower(folder: Path) -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from visard.deployment.flower.link import record

    for number, (name, part) in enumerate(get_all_nested_objects(record(b"{}", b"payload" * 20)).items()):
        put(folder / f"{number}.obj", part.deflate())
        put(folder / f"{number}.name", name)


def read_flower(folder: Path, scratch: Path) -> None:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from visard.deployment.flower.link import parts

    contents = {p.with_suffix(".name").read_text(): p.read_bytes() for p in sorted(folder.glob("*.obj"))}
    last = max(folder.glob("*.name"), key=lambda path: int(path.stem)).read_text()
    try:
        content = inflate_object_from_contents(last, contents)
    except Exception as error:  # as visard does with whatever Flower raises
        raise VisardError(type(error).__name__) from None
    parts(SimpleNamespace(content=content))


def secret_keys(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    key = paillier.generate(512, insecure=True)
    paillier.save_key(folder / "own.key", key)
    put(folder / "public.raw", key.public.to_bytes())
    binding = Binding("s", 0, "offer", "a", "f")
    put(folder / "sealed.raw", seal(binding, [b"x" * 64, b"y" * 64], 64))


def read_secret_keys(folder: Path, scratch: Path) -> None:
    (folder / "own.key").chmod(0o600)
    for read in (
        lambda: paillier.load_key(folder / "own.key", 512),
        lambda: paillier.load_key(folder / "own.key", 512, trusted=True),
        lambda: paillier.PublicKey.from_bytes((folder / "public.raw").read_bytes(), 512),
        lambda: unseal((folder / "sealed.raw").read_bytes(), Binding("s", 0, "offer", "a", "f"), 64, 2),
    ):
        with contextlib.suppress(VisardError):
            read()


def cascade(folder: Path) -> None:
    import cv2

    small = min(Path(cv2.data.haarcascades).glob("*.xml"), key=lambda path: path.stat().st_size)
    put(folder / "c.xml", small.read_bytes())


def read_cascade(folder: Path, scratch: Path) -> None:
    Haar(folder / "c.xml")(Image.fromarray(pixels(0, 64)))


def expressions(folder: Path) -> None:
    put(folder / "a.expression", "Male & !(Wearing_Hat | Eyeglasses)")
    put(folder / "b.expression", "!Young | (Male & Smiling) | Wavy_Hair")


def read_expressions(folder: Path, scratch: Path) -> None:
    known = ["Male", "Wearing_Hat", "Eyeglasses", "Young", "Smiling", "Wavy_Hair"]
    for name in "ab":
        with contextlib.suppress(VisardError):
            evaluate((folder / f"{name}.expression").read_text(errors="replace"), known, lambda _: np.ones(3, np.int8))


def data_list(folder: Path, scratch: Path) -> None:
    os.environ["VISARD_DATA"] = str(folder)
    command("data", "list", folder)


FORMATS: dict[str, Format] = {
    "face set": Format(lambda f: (faces(f), None)[1], read_faces, weight=2),
    "face sets in a folder": Format(lambda f: (faces(f), None)[1], data_list),
    "templates of a face set": Format(ijb_set, read_ijb_set),
    "readings": Format(readings, read_readings),
    "partition": Format(manifest, read_manifest, fixed=("set",)),
    "settings": Format(settings, read_settings, weight=2),
    "policy": Format(policies, read_policy, weight=1.5),
    "model safetensors": Format(models, read_models, weight=1.5),
    "model torch": Format(torch_files, read_torch_files, {"pt": "raw", "pth": "pth"}, weight=1),
    "model onnx": Format(graphs, read_graphs, weight=0.25),
    "recogniser": Format(recogniser, read_recogniser, weight=0.25),
    "kept model": Format(kept_model, read_kept_model, weight=0.5, fixed=("i.pth", "model.pth")),
    "class vectors": Format(vectors, read_vectors_file),
    "gallery": Format(gallery, read_gallery, fixed=("m.safetensors",)),
    "encrypted at rest": Format(encrypted, read_encrypted, weight=0.5, fixed=("m.safetensors", "x.png"), there=True),
    "features": Format(features, read_features_files, fixed=("set",)),
    "bin": Format(packed_bin, importing("bin", "."), weight=1.5),
    "recordio": Format(packed_rec, importing("recordio", "train.rec")),
    "parquet": Format(parquet, read_parquet, weight=1.5),
    "webdataset": Format(shards, importing("webdataset", ".")),
    "pictures": Format(photos, importing("folder", align="none"), weight=2),
    "pictures in a zip": Format(zipped, importing("folder", "src.zip", align="none")),
    "lfw": Format(lfw, importing("lfw", align="none")),
    "landmarks": Format(lfw, importing("folder", landmarks="@landmarks.txt"), fixed=("src",)),
    "rfw": Format(rfw, importing("rfw")),
    "ijb": Format(lambda f: ijbc(f / "src"), importing("ijb")),
    "ijb-a": Format(ijba, importing("ijb")),
    "celeba": Format(celeba, importing("celeba")),
    "office31": Format(office31, importing("office31"), weight=0.5),
    "list of pairs": Format(pair_list, read_pair_list, fixed=("set",)),
    "widar": Format(widar, reading("widar")),
    "office-caltech": Format(office, reading("office-caltech")),
    "pamap2": Format(pamap2, reading("pamap2"), weight=0.5),
    "run folder": Format(run, read_run, weight=1.5),
    "watched run folder": Format(run, read_watched),
    "checkpoint": Format(checkpoint, read_checkpoint, weight=1.5),
    "states of a party": Format(party_states, read_party_states, there=True),
    "keys of a deployment": Format(keys, read_keys, {"crt": "pem", "key": "pem", "pub": "pem", "csr": "pem"}),
    "messages": Format(messages, read_messages, {"msg": "message"}, weight=2, there=True),
    "ledgers": Format(ledgers, read_ledgers, {"rows": "jsonl"}, there=True),
    "keys and sealed messages": Format(secret_keys, read_secret_keys, there=True),
    "cascade": Format(cascade, read_cascade, weight=0.3),
    "attribute expressions": Format(expressions, read_expressions, weight=0.5, there=True),
}
if find_spec("flwr") is not None:
    FORMATS["messages of flower"] = Format(flower, read_flower, weight=0.5, fixed=(".name",), there=True)
