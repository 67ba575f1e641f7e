"""ONNX graphs that become networks which train: every operator against onnxruntime, hostile graphs, model files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visard.errors import VisardError
from visard.models import build, build_spec
from visard.models import onnx as networks
from visard.models.convert import NONE, OPERATORS, convert
from visard.models.cut import choose, cuts, split
from visard.models.files import load, open_model, save_model, start
from visard.models.inputs import Inputs
from visard.models.onnx import OnnxNetwork, export_onnx
from visard.models.steps import blocks_of, checked, parse
from visard.onnx_process import Port, _describe

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SIZE = 12
rng = np.random.default_rng(0)


def f32(*shape: int, low: float = -0.5) -> np.ndarray:
    return rng.uniform(low, 0.5, shape).astype(np.float32)


def node(op: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op, [i.strip("-") for i in inputs.split()], [output], name=f"the_{output}", **attributes)


def write(
    path: Path, nodes: list[Any], arrays: dict[str, Any], *, batch: int | str = "n", last: str = "f", opset: int = 18,
    shape: tuple[int, ...] = (3, SIZE, SIZE), kind: int = TensorProto.FLOAT,
) -> Path:  # fmt: skip
    given = [helper.make_tensor_value_info("x", kind, [batch, *shape])]
    known = [numpy_helper.from_array(np.asarray(a), k) for k, a in arrays.items()]
    made = helper.make_graph(nodes, "g", given, [helper.make_tensor_value_info(last, kind, None)], known)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), str(path))
    return path


W = {"w": f32(6, 3, 3, 3), "b": f32(6)}
CONV = node("Conv", "x w b", "c", pads=[1, 1, 1, 1], strides=[2, 2])  # (n, 6, 6, 6)
END = [node("Flatten", "z", "f")]
i64 = lambda *v: np.array(v, np.int64)  # noqa: E731

# operator: nodes from c (n, 6, 6, 6) to z, and their arrays
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Conv": ([node("Conv", "c v", "z", group=3, dilations=[2, 2], pads=[1, 2, 0, 1])], {"v": f32(6, 2, 2, 2)}),
    "Conv auto_pad": ([node("Conv", "c v", "z", auto_pad="SAME_UPPER", strides=[2, 2])], {"v": f32(4, 6, 3, 3)}),
    "Conv auto_pad lower": ([node("Conv", "c v", "z", auto_pad="SAME_LOWER", strides=[2, 2])], {"v": f32(4, 6, 3, 3)}),
    "BatchNormalization": (
        [node("BatchNormalization", "c s t m v", "z", epsilon=0.01)],
        {"s": f32(6), "t": f32(6), "m": f32(6), "v": f32(6, low=0.1)},
    ),
    "PRelu": ([node("PRelu", "c s", "z")], {"s": f32(6, 1, 1)}),
    "PRelu of one": ([node("PRelu", "c s", "z")], {"s": f32(1)}),
    "Relu": ([node("Relu", "c", "z")], {}),
    "LeakyRelu": ([node("LeakyRelu", "c", "z", alpha=0.3)], {}),
    "Sigmoid": ([node("Sigmoid", "c", "z")], {}),
    "Tanh": ([node("Tanh", "c", "z")], {}),
    "Clip": ([node("Clip", "c lo hi", "z")], {"lo": np.float32(-0.1), "hi": np.float32(0.2)}),
    "Clip of one end": (
        [helper.make_node("Clip", ["c", "", "hi"], ["z"])],
        {"hi": np.float32(0.2)},
    ),
    "Add": ([node("Relu", "c", "r"), node("Add", "c r", "z")], {}),
    "Add constant": ([node("Add", "c k", "z")], {"k": f32(1, 6, 1, 1)}),
    "Mul": ([node("Mul", "k c", "z")], {"k": f32(6, 1, 1)}),
    "Sub": ([node("Sub", "k c", "z")], {"k": np.float32(2.0)}),
    "Div": ([node("Div", "c k", "z")], {"k": f32(6, 1, 1) + 2}),
    "Div left": ([node("Sigmoid", "c", "r"), node("Div", "k r", "z")], {"k": f32(1, 6, 1, 1)}),
    "Gemm": (
        [node("Flatten", "c", "y"), node("Gemm", "y g h", "z", alpha=0.5, beta=2.0)],
        {"g": f32(216, 7), "h": f32(7)},
    ),
    "Gemm transB": ([node("Flatten", "c", "y"), node("Gemm", "y g", "z", transB=1)], {"g": f32(7, 216)}),
    "MatMul": ([node("Flatten", "c", "y", axis=-3), node("MatMul", "y g", "z")], {"g": f32(216, 5)}),
    "MatMul of values": (
        [node("Reshape", "c s", "y"), node("Transpose", "y", "t", perm=[0, 2, 1]), node("MatMul", "y t", "z")],
        {"s": i64(0, 6, 36)},
    ),
    "Flatten": ([node("Flatten", "c", "z")], {}),
    "Reshape": ([node("Reshape", "c s", "z")], {"s": i64(-1, 3, 72)}),
    "Transpose": ([node("Transpose", "c", "z", perm=[0, 2, 3, 1])], {}),
    "AveragePool": ([node("AveragePool", "c", "z", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {}),
    "AveragePool whole": (
        [node("AveragePool", "c", "z", kernel_shape=[2, 3], pads=[0, 1, 1, 2], count_include_pad=1)],
        {},
    ),
    "AveragePool ceil": ([node("AveragePool", "c", "z", kernel_shape=[4, 4], strides=[4, 4], ceil_mode=1)], {}),
    "GlobalAveragePool": ([node("GlobalAveragePool", "c", "z")], {}),
    "MaxPool": ([node("MaxPool", "c", "z", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {}),
    "MaxPool uneven": ([node("MaxPool", "c", "z", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], {}),
    "ReduceMean": ([node("ReduceMean", "c a", "z", keepdims=0)], {"a": i64(-1, 2)}),
    "ReduceL2": ([node("ReduceL2", "c a", "r"), node("Div", "c r", "z")], {"a": i64(1)}),
    "LpNormalization": ([node("LpNormalization", "c", "z", axis=1, p=2)], {}),
    "Concat": ([node("Relu", "c", "r"), node("Concat", "c r", "z", axis=-3)], {}),
    "Pad": ([node("Pad", "c p v", "z")], {"p": i64(0, 1, 2, 0, 0, 0, 1, 3), "v": np.float32(0.7)}),
    "Pad reflect": ([node("Pad", "c p", "z", mode="reflect")], {"p": i64(0, 0, 1, 0, 0, 0, 0, 2)}),
    "Pad edge": ([node("Pad", "c p", "z", mode="edge")], {"p": i64(0, 0, 1, 0, 0, 0, 0, 2)}),
    "Pad of some axes": (
        [node("Pad", "c p v a", "z")],
        {"p": i64(1, 0, 2, 3), "v": np.float32(0.7), "a": i64(-1, 2)},
    ),
    "Constant": ([node("Constant", "", "k", value_float=0.5), node("Mul", "c k", "z")], {}),
    "Identity": ([node("Identity", "c", "z")], {}),
    "Dropout": ([node("Dropout", "c", "z")], {}),
    "Shape": (
        [
            node("Shape", "c", "s"), node("Gather", "s zero", "n", axis=0), node("Unsqueeze", "n zeros", "u"),
            node("Concat", "u rest", "t", axis=0), node("Cast", "t", "k", to=7), node("Reshape", "c k", "z"),
        ],
        {"zero": np.int64(0), "zeros": i64(0), "rest": i64(36, 6)},
    ),
    "Shape divided": (
        [
            node("Shape", "c", "s"), node("Gather", "s two", "h", axis=0), node("Div", "h four", "d"),
            node("Mul", "d two2", "m"), node("Concat", "zero m rest", "t", axis=0), node("Reshape", "c t", "z"),
        ],  # 6 / 4 of whole numbers is 1
        {"two": i64(2), "four": i64(4), "two2": i64(2), "zero": i64(0), "rest": i64(108)},
    ),
    "Gather": ([node("Gather", "c k", "z", axis=1)], {"k": i64(2, -1, 0)}),
    "Gather one": ([node("Gather", "c k", "z", axis=2)], {"k": np.int64(3)}),
    "Squeeze": ([node("GlobalAveragePool", "c", "g"), node("Squeeze", "g a", "z")], {"a": i64(-1, 2)}),
    "Squeeze of all": (
        [node("GlobalAveragePool", "c", "g"), node("Squeeze", "g", "q"), node("MatMul", "q v", "z")], {"v": f32(6, 5)},
    ),
    "Unsqueeze": ([node("Unsqueeze", "c a", "z")], {"a": i64(1)}),
    "Slice": ([node("Slice", "c a q d e", "z")], {"a": i64(1, 0), "q": i64(5, -1), "d": i64(1, 3), "e": i64(2, 1)}),
    "Slice back": ([node("Slice", "c a q d e", "z")], {"a": i64(-1), "q": i64(-(2**63)), "d": i64(1), "e": i64(-1)}),
    "Cast": ([node("Cast", "c", "z", to=1)], {}),
}  # fmt: skip


def test_there_is_a_case_for_every_operator() -> None:
    assert set(OPERATORS) == {name.split()[0] for name in CASES}


class InProcess:
    """What `visard.onnx_process.Graph` does, without a process for each of many small graphs."""

    def __init__(self, path: Path, threads: int) -> None:
        self.model = onnx.load(str(path))
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = [Port(p.name, tuple(p.shape), p.type) for p in self.session.get_inputs()]
        self.outputs = [Port(p.name, tuple(p.shape), p.type) for p in self.session.get_outputs()]
        self.metadata: dict[str, str] = {}
        self.normalises = False

    def run(self, outputs: list[str], name: str, pictures: np.ndarray) -> list[np.ndarray]:
        return self.session.run(outputs or None, {name: pictures})

    def nodes(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        about, arrays = _describe(onnx, self.model)
        return about, dict(zip(about["weights"], arrays, strict=True))

    def close(self) -> None: ...


@pytest.mark.parametrize("case", CASES)
def test_operator_is_as_onnxruntime_has_it(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "Graph", InProcess)
    nodes, arrays = CASES[case]
    path = write(tmp_path / "m.onnx", [CONV, *nodes, *END], W | arrays)
    found = convert(path, check=16)
    assert found.difference < 1e-5
    x = torch.randn(5, 3, SIZE, SIZE)  # more pictures than it was made with
    theirs = OnnxNetwork(path)
    torch.testing.assert_close(found.network(x), theirs(x), rtol=1e-4, atol=1e-5)
    trained = [p for p in found.network.parameters() if p.requires_grad]
    found.network(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


def test_older_forms(tmp_path: Path) -> None:
    """Clip, Squeeze, Slice and Pad with attributes, as files of opset 9 have them."""
    nodes = [
        CONV,
        node("Clip", "c", "d", min=-0.1, max=0.3),
        node("Pad", "d", "e", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=0.5),
        node("Slice", "e", "g", starts=[1], ends=[4], axes=[1]),
        node("GlobalAveragePool", "g", "h"),
        node("Squeeze", "h", "f", axes=[2, 3]),
    ]
    assert convert(write(tmp_path / "m.onnx", nodes, W, opset=9)).difference < 1e-5


def test_graphs_for_one_picture_take_many(tmp_path: Path) -> None:
    nodes = [CONV, node("Reshape", "c s", "f")]
    path = write(tmp_path / "m.onnx", nodes, W | {"s": i64(1, 216)}, batch=1)
    found = convert(path)
    x = torch.randn(7, 3, SIZE, SIZE)
    torch.testing.assert_close(found.network(x), OnnxNetwork(path)(x), rtol=1e-4, atol=1e-5)


def test_graphs_with_channels_last(tmp_path: Path) -> None:
    nodes = [node("Transpose", "x", "y", perm=[0, 3, 1, 2]), node("Conv", "y w b", "z"), *END]
    found = convert(write(tmp_path / "m.onnx", nodes, W, shape=(SIZE, SIZE, 3)))
    assert found.network(torch.randn(2, 3, SIZE, SIZE)).shape == (2, 600)


def test_sixteen_bits_become_thirty_two(tmp_path: Path) -> None:
    arrays = {k: v.astype(np.float16) for k, v in W.items()}
    found = convert(write(tmp_path / "m.onnx", [CONV, node("Flatten", "c", "f")], arrays, kind=TensorProto.FLOAT16))
    assert {p.dtype for p in found.network.parameters()} == {torch.float32}
    assert 0 < found.difference < 0.01


def test_what_a_graph_does_to_pixels_does_not_train(tmp_path: Path) -> None:
    nodes = [node("Sub", "x m", "y"), node("Mul", "y s", "q"), node("Conv", "q w b", "z"), *END]
    path = write(tmp_path / "m.onnx", nodes, W | {"m": f32(1, 3, 1, 1) + 127, "s": f32(1, 3, 1, 1)})
    found = convert(path)
    assert found.spec["mean"] == "0,0,0"  # it wants raw pixels
    frozen = {n for n, p in found.network.named_parameters() if not p.requires_grad}
    assert frozen == {"block0.sub0.weight", "block0.mul0.weight"}


HOSTILE: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "another operator": ([node("Softplus", "c", "z")], {}, r"node 'the_z' \(Softplus\): this operator cannot be"),
    "over the batch": ([node("Reshape", "c s", "y"), node("Reshape", "y t", "z")],
                       {"s": i64(6, -1), "t": i64(-1, 216)}, NONE),
    "mean over the batch": ([node("ReduceMean", "c a", "y"), node("Add", "c y", "z")], {"a": i64(0)}, NONE),
    "counts pictures": (
        [node("Shape", "c", "s"), node("Gather", "s o", "n"), node("Cast", "n", "k", to=1), node("Mul", "c k", "z")],
        {"o": np.int64(0)}, NONE,
    ),
    "backwards over a part": (
        [node("Slice", "c a q d e", "z")], {"a": i64(-1), "q": i64(2), "d": i64(1), "e": i64(-1)}, "goes backwards",
    ),
    "slopes along a row": ([node("PRelu", "c s", "z")], {"s": f32(6)}, "slopes of shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_graphs_that_cannot_train_are_one_line(tmp_path: Path, case: str) -> None:
    nodes, arrays, message = HOSTILE[case]
    path = write(tmp_path / "m.onnx", [CONV, *nodes, *END], W | arrays)
    with pytest.raises(VisardError, match=message) as caught:
        convert(path)
    assert "\n" not in str(caught.value)


def test_arrays_do_not_grow_beyond_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node doubles an array; onnxruntime would end in its own limits, so that it is left out here."""
    nodes = [node("Concat", "k k", "k0", axis=0)]
    nodes += [node("Concat", f"k{i} k{i}", f"k{i + 1}", axis=0) for i in range(40)]
    arrays = {"k": f32(1, 6)}
    path = write(tmp_path / "m.onnx", [CONV, *END], W)
    from visard.models import convert as module

    network = OnnxNetwork(write(tmp_path / "o.onnx", [CONV, node("Flatten", "c", "f")], W))
    network.probe(SIZE)
    about, found = network.graph.nodes()
    about["nodes"] = [[n.op_type, "", n.name, [*n.input], [*n.output], {"axis": 0}] for n in nodes] + about["nodes"]
    about["nodes"][-1][3] = ["k40"]
    with pytest.raises(VisardError, match="many times larger than its file"):
        module._steps(about, found | arrays, network, 2)
    assert path.exists()


def test_the_difference_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visard.models import steps

    path = write(tmp_path / "m.onnx", [CONV, node("Relu", "c", "z"), *END], W)
    monkeypatch.setitem(steps.FUNCTIONS, "relu", lambda x: x.relu() * 1.001)
    with pytest.raises(VisardError, match=r"differs by 1\.0e-03 from onnxruntime"):
        convert(path)


def test_blocks_end_where_one_value_crosses() -> None:
    conv = lambda i: ["conv", [i], {}]  # noqa: E731
    steps = [
        ["relu", [0], {}], conv(1), ["relu", [2], {}],  # the first relu belongs to the first block
        ["relu", [3], {}], conv(4), ["add", [5, 3], {}],  # a shortcut around two
        ["relu", [6], {}], conv(7), ["relu", [8], {}],
    ]  # fmt: skip
    assert [(r.start, r.stop) for r in blocks_of(parse(json.dumps(steps)))] == [(0, 3), (3, 7), (7, 9)]


def exported(path: Path, name: str, embedding: int, size: int) -> torch.nn.Module:
    torch.manual_seed(1)
    network = build(name, embedding=embedding, size=size)
    network.train()
    for _ in range(2):  # statistics of its own
        network(torch.randn(4, 3, size, size))
    export_onnx(network, path, {"model": name, "embedding": str(embedding), "size": str(size)})
    return network


def test_cut_save_open_and_export_again(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    exported(tmp_path / "tiny.onnx", "tiny", 16, 32)
    spec, weights = start(tmp_path / "tiny.onnx", "mobilefacenet", None, 32)
    assert spec["model"] == "onnx"
    network = build_spec(spec, 32)
    network.load_state_dict(weights)
    network.eval()
    x = torch.randn(3, 3, 32, 32)
    whole = network(x).detach()
    layers = [cut.layer for cut in cuts(network, (3, 32, 32))]
    assert layers == ["block1", "block2", "block3", "block4"]
    for layer in layers:
        trunk, tail = split(network, layer)
        assert torch.equal(tail.eval()(trunk(x)), whole)
    assert choose(network, "last:1", (3, 32, 32)) == "block4"
    save_model(tmp_path / "m.safetensors", weights, spec)
    (tmp_path / "tiny.onnx").unlink()
    again, found = load(tmp_path / "m.safetensors")
    assert torch.equal(again(x), whole)
    assert export_onnx(again, tmp_path / "again.onnx", found).difference < 1e-5
    theirs, contract = open_model(tmp_path / "again.onnx")
    torch.testing.assert_close(theirs(x), whole, rtol=1e-4, atol=1e-4)
    assert Inputs.of_spec(contract) == Inputs.of_spec(spec)


def test_a_run_sees_pictures_as_the_network_does(tmp_path: Path) -> None:
    """Sizes, order and normalisation of a contract give the features that evaluation gives, and weights keep names."""
    path = write(tmp_path / "m.onnx", [CONV, *END[:0], node("Flatten", "c", "f")], W)
    found = convert(path)
    pixels = rng.integers(0, 256, (4, 20, 20, 3), np.uint8)
    from visard.models.inputs import resized

    for inputs in (
        Inputs(size=SIZE),
        Inputs("bgr", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), SIZE),
        Inputs(mean=(0, 0, 0), std=(1 / 255,) * 3, size=SIZE),
    ):
        spec = found.spec | inputs.to_spec()
        network = build_spec(spec, 20)
        assert network.state_dict().keys() == found.weights.keys()
        network.load_state_dict(found.weights)
        seen = network(Inputs(size=20).tensor(pixels))
        want = found.network(inputs.tensor(resized(pixels, SIZE)))
        torch.testing.assert_close(seen, want, rtol=1e-4, atol=1e-3 if inputs.mean[0] == 0 else 1e-5)


DAMAGED = {
    "[]": "a list of 1 to",
    "{": "damaged",
    '[["exec",[0],{}]]': "unknown operation 'exec'",
    '[["relu",[1],{}]]': "takes what is not there yet",
    '[["relu",[0],{"inplace":true}]]': "unknown setting",
    '[["reshape",[0],{"shape":[1e400]}]]': "whole numbers",
    '[["add_constant",[0],{"how":1,"shape":[3],"left":false,"fixed":true}]]': "unknown setting",
    '[["relu",[0],{}]]': "one vector for each picture",
    '[["reshape",[0],{"shape":[7]}]]': "do not fit together",
    '[["pad",[0],{"pads":[100000,100000,100000,100000]}]]': "numbers of one picture",
    '[["pad",[0],{"pads":[0,0,0,0,0,0,1,1]}]]': "pads the batch",
    '[["conv",[0],{"width":4096,"channels":3,"kernel":[500,500],"stride":[1,1],"pad":[250,250],"dilation":[1,1],'
    '"groups":1,"bias":false}]]': "numbers of one picture|multiplications",
    '[["mean",[0],{"dims":[0],"keep":true}]]': "do not fit together",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_steps_in_a_file_are_checked(text: str) -> None:
    with pytest.raises(VisardError, match=DAMAGED[text]) as caught:
        checked(text, 64)
    assert "\n" not in str(caught.value)


def test_long_chains_are_quick(tmp_path: Path) -> None:
    steps = [["relu", [i], {}] for i in range(4900)] + [["mean", [4900], {"dims": [2, 3], "keep": False}]]
    assert checked(json.dumps(steps), 8) == 3
