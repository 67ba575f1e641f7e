"""ONNX graphs as networks, exports checked against PyTorch, 8-bit integers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import visard
from visard.cli import main
from visard.data.synthetic.sets import SyntheticSpec, make
from visard.errors import UsageError, VisardError
from visard.inference.export import export
from visard.inference.model import FaceModel
from visard.models import build
from visard.models.inputs import Inputs
from visard.models.onnx import OnnxNetwork, check_against, export_onnx, load_onnx, quantise

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((5, 3, 8, 8)).astype(np.float32)


def graph(path: Path, shape: list, *, before=(), after=(), kind=TensorProto.FLOAT, inputs=1, extra=()) -> Path:
    """A graph with one 8 x 8 convolution over whole pictures, so features are sums that can be checked."""
    nodes = [*before, helper.make_node("Conv", ["y" if before else "x", "w"], ["c"]), *after]
    last = nodes[-1].output[0]
    if not after:
        nodes.append(helper.make_node("Flatten", ["c"], ["f"]))
        last = "f"
    weight = WEIGHT if kind == TensorProto.FLOAT else WEIGHT.astype(np.float16)
    given = [helper.make_tensor_value_info("x", kind, shape)]
    given += [helper.make_tensor_value_info(f"x{k}", kind, shape) for k in range(1, inputs)]
    made = helper.make_graph(
        nodes, "g", given, [helper.make_tensor_value_info(last, kind, None)],
        [numpy_helper.from_array(weight, "w"), *extra],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(path))
    return path


def expected(x: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.conv2d(x, torch.from_numpy(WEIGHT)).flatten(1).numpy()


def test_a_face_detector_is_named_as_one(tmp_path: Path) -> None:
    """Nine maps of scores, boxes and points, as SCRFD has them, and no vector for a picture."""
    maps = [helper.make_node("Conv", ["x", "w"], [f"map{k}"], pads=[4] * 4) for k in range(9)]
    made = helper.make_graph(
        maps, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(f"map{k}", TensorProto.FLOAT, None) for k in range(9)],
        [numpy_helper.from_array(WEIGHT, "w")],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(tmp_path / "det.onnx"))
    with pytest.raises(VisardError, match=r"looks like a face detector \(9 outputs\), which --detector takes"):
        load_onnx(tmp_path / "det.onnx")


def test_what_is_assumed_of_a_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first line of whatever command opens it; not where the user, the file or a kept contract says it."""
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    path = graph(tmp_path / "g.onnx", ["n", 3, 8, 8])
    np.save(tmp_path / "p.npy", RNG.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8))

    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["visard", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        return capsys.readouterr().out

    embed = ["embed", str(tmp_path / "p.npy"), "--out", str(tmp_path / "f.npy"), "--model"]
    assert "g.onnx does not say how pictures go in: (x - 127.5) / 127.5" in said(*embed, str(path))
    assert "does not say" not in said(*embed, str(path), "--input", "arcface")
    assert "does not say" not in said(*embed, str(path), "--mean", "0.4")
    said("models", "add", str(path), "--name", "mine")
    assert "does not say" not in said(*embed, "mine")
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5", "order": "rgb", "size": "8"})
    onnx.save(model, str(path))
    assert "does not say" not in said(*embed, str(path))


def test_any_batch(tmp_path: Path) -> None:
    network, spec = load_onnx(graph(tmp_path / "g.onnx", ["n", 3, 8, 8]))
    assert (network.batch, spec["embedding"], spec["size"]) == (None, "5", "8")
    x = torch.randn(7, 3, 8, 8)
    assert network(x).numpy() == pytest.approx(expected(x), abs=1e-4)
    assert network(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("batch", [1, 4])
def test_fixed_batch(batch: int, tmp_path: Path) -> None:
    network, _ = load_onnx(graph(tmp_path / "g.onnx", [batch, 3, 8, 8]))
    assert network.batch == batch
    x = torch.randn(7, 3, 8, 8)
    assert network(x).numpy() == pytest.approx(expected(x), abs=1e-4)


def test_a_graph_that_declares_any_batch_and_takes_one(tmp_path: Path) -> None:
    target = numpy_helper.from_array(np.array([1, 5], np.int64), "shape")
    reshape = helper.make_node("Reshape", ["c", "shape"], ["r"])
    network, _ = load_onnx(graph(tmp_path / "g.onnx", ["n", 3, 8, 8], after=[reshape], extra=[target]))
    assert network.batch == 1
    x = torch.randn(3, 3, 8, 8)
    assert network(x).numpy() == pytest.approx(expected(x), abs=1e-4)


def test_channels_last_and_half_precision(tmp_path: Path) -> None:
    turn = helper.make_node("Transpose", ["x"], ["y"], perm=[0, 3, 1, 2])
    network, _ = load_onnx(graph(tmp_path / "last.onnx", ["n", 8, 8, 3], before=[turn]))
    x = torch.randn(2, 3, 8, 8)
    assert network(x).numpy() == pytest.approx(expected(x), abs=1e-4)
    half, _ = load_onnx(graph(tmp_path / "half.onnx", ["n", 3, 8, 8], kind=TensorProto.FLOAT16))
    found = half(x)
    assert found.dtype == torch.float32
    assert found.numpy() == pytest.approx(expected(x), abs=0.1)


def test_a_graph_that_normalises_by_itself_gets_raw_pixels(tmp_path: Path) -> None:
    constants = [numpy_helper.from_array(np.float32(v), n) for n, v in (("m", 127.5), ("s", 1 / 128))]
    own = [helper.make_node("Sub", ["x", "m"], ["d"]), helper.make_node("Mul", ["d", "s"], ["y"])]
    path = graph(tmp_path / "g.onnx", ["n", 3, 8, 8], before=own, extra=constants)
    pictures = RNG.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    raw = visard.load_model(path)
    assert raw.inputs.std == pytest.approx((1 / 255,) * 3)
    plain = visard.load_model(graph(tmp_path / "plain.onnx", ["n", 3, 8, 8]), input="cosface")
    assert visard.embed(raw, pictures) == pytest.approx(visard.embed(plain, pictures), abs=1e-3)


def test_size_of_graphs_that_leave_it_open(tmp_path: Path) -> None:
    path = graph(tmp_path / "g.onnx", ["n", 3, "h", "w"])
    assert visard.load_model(path, size=8).size == 8
    assert visard.load_model(path).size == 112
    assert visard.load_model(path, input="imagenet").size == 224
    with pytest.raises(VisardError, match="does not run on pictures of 4 pixels"):
        visard.load_model(path, size=4)
    fixed = graph(tmp_path / "fixed.onnx", ["n", 3, 8, 8])
    with pytest.raises(UsageError, match="takes pictures of 8 pixels, not 16"):
        visard.load_model(fixed, size=16)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shape": ["n", 3, 8, 8], "inputs": 2}, "expected one input of pictures"),
        ({"shape": ["n", 3, 8, 9]}, "only squares"),
        ({"shape": ["n", 4, 8, 8]}, "4 channels"),
    ],
)
def test_graphs_that_are_no_face_networks(options: dict, says: str, tmp_path: Path) -> None:
    path = tmp_path / "g.onnx"
    shape = options.pop("shape")
    graph(path, ["n", 3, 8, 8], **options)
    if shape != ["n", 3, 8, 8]:  # onnx itself would not infer through a convolution that does not fit
        model = onnx.load(str(path))
        del model.graph.node[:]
        model.graph.node.append(helper.make_node("Flatten", ["x"], ["f"]))
        for dim, value in zip(model.graph.input[0].type.tensor_type.shape.dim, shape, strict=True):
            dim.Clear()
            if not isinstance(value, str):
                dim.dim_value = value
            else:
                dim.dim_param = value
        onnx.save(model, str(path))
    with pytest.raises(VisardError, match=says):
        visard.load_model(path)


@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_damaged_files(content: bytes | None, tmp_path: Path) -> None:
    path = graph(tmp_path / "g.onnx", ["n", 3, 8, 8])
    path.write_bytes(path.read_bytes()[:-900] if content is None else content)
    with pytest.raises(VisardError, match="g.onnx is not a readable ONNX file") as caught:
        visard.load_model(path)
    assert "\n" not in str(caught.value)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = graph(tmp_path / "g.onnx", ["n", 3, 8, 8])
    real = importlib.import_module

    def absent(name: str, *rest: object) -> object:
        if name.partition(".")[0] in ("onnx", "onnxruntime", "onnxscript"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    monkeypatch.setattr("visard.onnx_process.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'visard\[onnx\]'"):
        visard.load_model(path)
    with pytest.raises(UsageError, match=r"pip install 'visard\[onnx\]'"):
        export_onnx(build("tiny", size=32), tmp_path / "e.onnx", Inputs(size=32).to_spec())
    assert not (tmp_path / "e.onnx").exists()


# ---------------------------------------------------------------- exports


def small_model() -> FaceModel:
    torch.manual_seed(3)
    network = build("tiny", embedding=16, size=32).eval()
    inputs = Inputs(order="bgr", mean=(0.4, 0.5, 0.6), size=32)
    return FaceModel(network, inputs.to_spec() | {"model": "tiny", "embedding": "16", "align": "haar"})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[FaceModel, Path]:
    model, path = small_model(), tmp_path_factory.mktemp("onnx") / "tiny.onnx"
    made, loss = export(model, path)
    assert loss is None
    assert made.difference <= 1e-5
    assert made.bytes == path.stat().st_size
    assert [p.name for p in path.parent.iterdir()] == ["tiny.onnx"]
    return model, path


def test_an_export_gives_the_same_features_and_says_how_pictures_go_in(exported: tuple[FaceModel, Path]) -> None:
    model, path = exported
    again = visard.load_model(path)
    assert again.inputs == model.inputs
    assert again.align == "haar"
    pictures = RNG.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    one, two = visard.embed(model, pictures, flip=True), visard.embed(again, pictures, flip=True)
    assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()


def test_a_network_that_exports_wrongly_leaves_no_file(
    exported: tuple[FaceModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = exported

    def other(network: object, args: object, file: str, **options: object) -> None:
        Path(file).write_bytes(path.read_bytes())

    monkeypatch.setattr(torch.onnx, "export", other)
    changed = build("tiny", embedding=16, size=32)
    with pytest.raises(VisardError, match="differs from PyTorch by"):
        export_onnx(changed, tmp_path / "e.onnx", model.spec)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="opset 5"):
        export_onnx(changed, tmp_path / "e.onnx", model.spec, opset=5)
    with pytest.raises(UsageError, match="no folder"):
        export_onnx(changed, tmp_path / "gone" / "e.onnx", model.spec)
    with pytest.raises(UsageError, match="is an ONNX file already"):
        export_onnx(OnnxNetwork(path), tmp_path / "e.onnx", model.spec)


def test_check_against_finds_differences() -> None:
    one, two = small_model().network, small_model().network
    assert check_against(one, two, 32, (1, 2)) == 0.0
    with torch.no_grad():
        two.fc.weight[0, 0] += 10
    assert check_against(one, two, 32, (2,)) > 1e-3


def test_int8_by_either_way(exported: tuple[FaceModel, Path], tmp_path: Path) -> None:
    model, path = exported
    dynamic = quantise(path, tmp_path / "d.onnx")
    assert dynamic.bytes < path.stat().st_size / 2
    assert 0 < dynamic.difference < 0.2
    batches = [torch.rand(4, 3, 32, 32).mul_(2).sub_(1).numpy() for _ in range(3)]
    static = quantise(path, tmp_path / "s.onnx", batches)
    assert 0 < static.difference < 0.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.onnx", "s.onnx"]
    assert visard.load_model(tmp_path / "s.onnx").inputs == model.inputs


def test_the_loss_of_int8_is_measured(exported: tuple[FaceModel, Path], tmp_path: Path) -> None:
    _, path = exported
    faces = make(SyntheticSpec(12, 5, 32, ("north",), 0), tmp_path / "faces")
    model = visard.load_model(path)
    for static in (False, True):
        made, loss = export(model, tmp_path / "i.onnx", int8=True, data=faces, static=static)
        assert loss is not None
        assert loss.pictures == (30 if static else 60)
        assert 0.9 < loss.cosine < 1
        assert loss.before.keys() == loss.after.keys()
        assert loss.before["auc"] == pytest.approx(loss.after["auc"], abs=0.1)
        assert made.bytes == (tmp_path / "i.onnx").stat().st_size
    with pytest.raises(UsageError, match="static quantisation needs"):
        export(model, tmp_path / "i.onnx", int8=True, static=True)
