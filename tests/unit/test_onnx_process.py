"""Hostile ONNX graphs: refused, or ended with one line in bounded time and memory."""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from visard.errors import VisardError
from visard.models.files import open_model
from visard.models.onnx import load_onnx
from visard.onnx_process import Graph

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

FLOAT = TensorProto.FLOAT


def value(name: str, shape: list | None = None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(path: Path, nodes: list, given=(), *, shape=("n", 3, 8, 8), functions=(), imports=()) -> Path:
    """A graph from pictures x to features f."""
    out = value("f", ["n", None])
    graph = helper.make_graph(list(nodes), "g", [value("x", list(shape))], [out], list(given))
    opsets = [helper.make_opsetid("", 18), *imports]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))
    path.write_bytes(model.SerializeToString())
    return path


def constant(name: str, values: object, kind: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, kind), name)


def endless() -> list:
    """A Loop that would run 2^62 times."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Mul", ["v", "v"], ["w"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("v")],
        [value("go_on", [], TensorProto.BOOL), value("w")],
    )
    flat = helper.make_node("Flatten", ["x"], ["flat"])
    return [flat, helper.make_node("Loop", ["times", "yes", "flat"], ["f"], body=body)]


def test_a_loop_is_refused_with_one_line(tmp_path: Path) -> None:
    path = save(tmp_path / "g.onnx", endless(), [constant("times", 2**62, np.int64), constant("yes", True, bool)])
    begun = time.monotonic()
    with pytest.raises(VisardError, match=r"g.onnx: has the operation Loop, so that nothing bounds") as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("kind", ["If", "Scan", "Loop"])
def test_a_loop_in_a_function_or_a_branch_is_refused(tmp_path: Path, kind: str) -> None:
    empty = helper.make_graph([], "b", [], [])
    attributes = {"If": {"then_branch": empty, "else_branch": empty}}.get(kind, {"body": empty})
    inner = helper.make_node(kind, ["a"], ["b"], **attributes)
    function = helper.make_function("own", "Hidden", ["a"], ["b"], [inner], [helper.make_opsetid("", 18)])
    node = helper.make_node("Hidden", ["x"], ["f"], domain="own")
    path = save(tmp_path / "g.onnx", [node], functions=[function], imports=[helper.make_opsetid("own", 1)])
    with pytest.raises(VisardError, match=f"has the operation {kind}"):
        open_model(path)


def test_an_enormous_convolution_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop, and legal: one operation of hours, or of more memory than there is."""
    nodes = [
        helper.make_node("Resize", ["x", "", "", "sizes"], ["large"]),
        helper.make_node("Conv", ["large", "w"], ["c"], kernel_shape=[513, 513], pads=[256] * 4),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
    ]
    given = [constant("sizes", [1, 3, 4000, 4000], np.int64), constant("w", np.ones((2, 3, 513, 513)))]
    path = save(tmp_path / "g.onnx", nodes, given, shape=(1, 3, 8, 8))
    monkeypatch.setenv("VISARD_ONNX_SECONDS", "2")
    with pytest.raises(VisardError, match=r"g.onnx: (not done after 2 s|does not run on pictures of 8)") as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("side", "times"), [(9000, 1), (1500, 2000)], ids=["one operation", "many operations"])
def test_slow_graphs_end_when_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, times: int
) -> None:
    """Products that fit into memory: only the limit of time can end them, also in the middle of an operation."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Expand", ["s", "sizes"], ["a0"]),
    ]
    nodes += [helper.make_node("MatMul", [f"a{k}", f"a{k}"], [f"a{k + 1}"]) for k in range(times)]
    nodes += [helper.make_node("ReduceSum", [f"a{times}", "axes"], ["f"], keepdims=1)]
    given = [constant("sizes", [side, side], np.int64), constant("axes", [1], np.int64)]
    path = save(tmp_path / "g.onnx", nodes, given)
    monkeypatch.setenv("VISARD_ONNX_SECONDS", "2")
    begun = time.process_time()
    with pytest.raises(VisardError, match=r"g.onnx: not done after 2 s of computing \(VISARD_ONNX_SECONDS allows more"):
        open_model(path)
    assert time.process_time() - begun < 2, "this process only waits"


@pytest.mark.parametrize("where", ["when it opens", "when it runs"])
def test_memory_is_bounded(tmp_path: Path, where: str) -> None:
    """64 GB: of a constant, which onnxruntime makes while it opens the graph, and of what depends on the pictures."""
    sizes = [2**17, 2**17]
    nodes = [helper.make_node("Flatten", ["x"], ["m"])]
    if where == "when it opens":
        nodes.append(helper.make_node("ConstantOfShape", ["sizes"], ["large"]))
    else:
        nodes += [
            helper.make_node("ReduceSum", ["m"], ["s"], keepdims=0),
            helper.make_node("Expand", ["s", "sizes"], ["large"]),
        ]
    nodes += [helper.make_node("ReduceSum", ["large"], ["t"], keepdims=0), helper.make_node("Add", ["m", "t"], ["f"])]
    path = save(tmp_path / "g.onnx", nodes, [constant("sizes", sizes, np.int64)])
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(VisardError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert "g.onnx" in str(caught.value)
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 2**21), "kilobytes: 2 GB"


def test_functions_that_double_each_other_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty functions, each calls the next twice: 2^40 nodes, if they were all written out."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function(
            "own", f"F{k}", ["a"], ["c"],
            [helper.make_node(f"F{k + 1}", [a], [b], domain="own") for a, b in ("ab", "bc")],
            imports,
        )
        for k in range(40)
    ]  # fmt: skip
    functions.append(helper.make_function("own", "F40", ["a"], ["c"], [helper.make_node("Neg", ["a"], ["c"])], imports))
    nodes = [helper.make_node("Flatten", ["x"], ["m"]), helper.make_node("F0", ["m"], ["f"], domain="own")]
    path = save(tmp_path / "g.onnx", nodes, functions=functions, imports=imports[1:])
    monkeypatch.setenv("VISARD_ONNX_SECONDS", "2")
    with pytest.raises(VisardError, match=r"g.onnx") as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


def test_weights_in_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(np.arange(192, dtype=np.float32).tobytes())
    weight = TensorProto(name="w", data_type=FLOAT, dims=[192, 1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="../secret")
    (tmp_path / "in").mkdir()
    nodes = [helper.make_node("Flatten", ["x"], ["m"]), helper.make_node("MatMul", ["m", "w"], ["f"])]
    path = save(tmp_path / "in" / "g.onnx", nodes, [weight])
    with pytest.raises(VisardError, match=r"keeps its weights in other files"):
        open_model(path)


@pytest.mark.parametrize("shape", [(10**9, 3, 8, 8), (1, 3, 10**6, 10**6), (2**62, 3, 2**31, 2**31)])
def test_enormous_inputs_are_not_made(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = save(tmp_path / "g.onnx", [helper.make_node("Flatten", ["x"], ["f"])], shape=shape)
    with pytest.raises(VisardError, match=r"pixels at a time: too many"):
        open_model(path)


def test_outputs_are_bounded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Flatten", ["x"], ["m"]),
        helper.make_node("Tile", ["m", "times"], ["f"]),
    ]
    path = save(tmp_path / "g.onnx", nodes, [constant("times", [1, 100_000], np.int64)])
    with pytest.raises(VisardError, match=r"outputs are larger than"):
        open_model(path)


def test_the_process_of_a_graph_ends_with_it(tmp_path: Path) -> None:
    network, spec = load_onnx(save(tmp_path / "g.onnx", [helper.make_node("Flatten", ["x"], ["f"])]))
    assert spec["embedding"] == "192"
    number = network.graph._child.process.pid
    assert Path(f"/proc/{number}").exists() or not Path("/proc/self").exists()
    del network
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_process_that_is_gone_is_one_line(tmp_path: Path) -> None:
    graph = Graph(save(tmp_path / "g.onnx", [helper.make_node("Flatten", ["x"], ["f"])]), 1)
    graph.close()
    with pytest.raises(VisardError, match=r"g.onnx"):
        graph.run([], "x", np.zeros((1, 3, 8, 8), np.float32))
