"""Runs ONNX graphs from untrusted sources, each in a separate process with bounded time and memory.

onnxruntime checks whether to stop only between two operations, and folds constants while it opens a graph: one huge
convolution or constant would take hours and all memory of the process that opened it. So a child process opens and
runs the graph, the system ends it when its processor time or memory is used up, and only numbers come back. This file
imports no torch, which the child would load.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.errors import UsageError, VisardError
from visard.files import read_bytes, read_text
from visard.processes import Child, ChildError, receive, send

SECONDS = 8.0  # of processor time to open a graph and to run it for the first time
MARGIN = 20.0  # how many times longer than the first pictures others may take
MEMORY = 2**30  # bytes beside 4 times the file, and
PICTURE = 2**26  # bytes for each picture of a batch
OUTPUT = 2**20  # bytes of all outputs for one picture
UNBOUNDED = ("Loop", "Scan", "If", "SequenceMap")
NODES = 20_000  # of a graph whose operations are asked for
LOOK = 8  # nodes at the start of a graph among which its own normalisation is


def need(name: str) -> Any:
    """A module of the extra `onnx`, or one line that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"ONNX needs the package {name.partition('.')[0]}: pip install 'visard[onnx]'") from None


def seconds_allowed() -> float:
    """`SECONDS`, or what $VISARD_ONNX_SECONDS says, for slow machines and large graphs."""
    text = os.environ.get("VISARD_ONNX_SECONDS") or str(SECONDS)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e6:
        raise UsageError(f"VISARD_ONNX_SECONDS={text}: must be a number of seconds")
    return found


class Refused(VisardError):
    """Why onnxruntime did not run a graph on these pictures."""


@dataclass(frozen=True)
class Port:
    """An input or output: a side is a number, or a name where it is open."""

    name: str
    shape: tuple[int | str | None, ...]
    type: str


class Graph:
    """A graph that is open in a child process; the process ends with this object."""

    def __init__(self, path: Path, threads: int) -> None:
        for package in ("onnx", "onnxruntime"):
            if find_spec(package) is None:
                need(package)
        self.path, self._left = path, seconds_allowed()
        self._pace: float | None = None  # seconds of processor time for each picture, once known
        self._lock = threading.Lock()
        self._child = Child(
            "visard.onnx_process:serve", quiet=True, path=str(path), threads=threads, seconds=self._left
        )
        self._end = weakref.finalize(self, self._child.kill)
        about = json.loads(self._answer(self._left))
        self.inputs, self.outputs = ([Port(n, tuple(s), t) for n, s, t in about[k]] for k in ("inputs", "outputs"))
        self.metadata: dict[str, str] = about["metadata"]
        self.normalises: bool = about["normalises"]
        self._left = max(1.0, self._left - about["seconds"])

    def run(self, outputs: list[str], name: str, pictures: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The outputs of these names (of all, if none is named) for pictures as the input of that name."""
        count = len(pictures)
        seconds = self._left if self._pace is None else max(self._left, MARGIN * self._pace * count)
        head = {"outputs": outputs, "input": name, "shape": pictures.shape, "type": pictures.dtype.str}
        with self._lock:
            try:
                send(self._child.channel, json.dumps(head | {"seconds": seconds}).encode())
                send(self._child.channel, pictures.tobytes())
            except OSError:
                raise VisardError(f"{self.path}: the process that had it open has ended") from None
            found = json.loads(self._answer(seconds))
            if "refused" in found:
                raise Refused(found["refused"])
            data = memoryview(self._answer(seconds))
        if self._pace is None:
            self._pace = found["seconds"] / max(1, count)
        return _arrays(found["arrays"], data)

    def nodes(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """The graph itself: `nodes`, `opset`, and its weights by name; tensors of attributes are weights, too.

        A node is [operation, domain, name, inputs, outputs, attributes].
        """
        with self._lock:
            try:
                send(self._child.channel, json.dumps({"nodes": True, "seconds": self._left}).encode())
                send(self._child.channel, b"")
            except OSError:
                raise VisardError(f"{self.path}: the process that had it open has ended") from None
            about = json.loads(self._answer(self._left))
            if "refused" in about:
                raise VisardError(f"{self.path}: {about['refused']}")
            data = memoryview(self._answer(self._left))
        return about, dict(zip(about["weights"], _arrays(about["arrays"], data), strict=True))

    def close(self) -> None:
        """End the process."""
        self._end()

    def _answer(self, seconds: float) -> bytes | bytearray:
        """The next frame; one line if the process came to its limits."""
        self._child.channel.settimeout(60 + 20 * seconds)  # it may wait for other processes; the limit is its own time
        try:
            return self._child.receive()
        except TimeoutError:
            self._end()
            raise VisardError(f"{self.path}: no answer within {60 + 20 * seconds:.0f} s") from None
        except ChildError as error:
            code = self._child.process.wait()
            self._end()
            if code == -signal.SIGXCPU:
                raise VisardError(
                    f"{self.path}: not done after {seconds:.0f} s of computing (VISARD_ONNX_SECONDS allows more)"
                ) from None
            if code < 0:
                raise VisardError(f"{self.path}: needs too much memory, or makes onnxruntime fail") from None
            raise VisardError(str(error)) from None


def serve(channel: socket.socket, path: str, threads: int, seconds: float) -> None:
    """The child process: opens a graph, describes it, and runs it as often as it is asked to."""
    onnx, runtime = need("onnx"), need("onnxruntime")
    begun, room = _used(), _Room()
    size = os.stat(path).st_size
    room.allow(seconds, MEMORY + 4 * size)
    try:
        data = read_bytes(path)
        model = onnx.load_model_from_string(data)
        check(model, path)
        first = {node.op_type for node in model.graph.node[:LOOK]}
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        del model
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what matters is raised
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.load_model_format", "ONNX")  # what was checked, and no other format
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except VisardError:
        raise
    except Exception as error:  # both libraries have exceptions of their own for everything
        raise VisardError(f"{path} is not a readable ONNX file: {_short(error)}") from None
    ports = {k: [(p.name, p.shape, p.type) for p in getattr(session, f"get_{k}")()] for k in ("inputs", "outputs")}
    about = {"metadata": metadata, "normalises": {"Sub", "Mul"} <= first or {"Sub", "Div"} <= first}
    send(channel, json.dumps(ports | about | {"seconds": _used() - begun}).encode())
    while (head := receive(channel)) is not None and (pixels := receive(channel)) is not None:
        asked = json.loads(head)
        if "nodes" in asked:
            room.allow(asked["seconds"], MEMORY + 12 * size)
            try:
                about, arrays = _describe(onnx, onnx.load_model_from_string(data))
            except Exception as error:  # as above
                send(channel, json.dumps({"refused": _short(error)}).encode())
                continue
            send(channel, json.dumps(about | {"arrays": [(a.dtype.str, a.shape) for a in arrays]}).encode())
            send(channel, b"".join(a.tobytes() for a in arrays))
            continue
        pictures = np.frombuffer(pixels, asked["type"]).reshape(asked["shape"])
        begun, count = _used(), len(pictures)
        room.allow(asked["seconds"], MEMORY + 4 * size + PICTURE * count)
        try:
            found = [np.asarray(v) for v in session.run(asked["outputs"] or None, {asked["input"]: pictures})]
            if any(array.dtype.kind not in "biuf" for array in found):
                raise ValueError("an output is not of numbers")
            if sum(array.nbytes for array in found) > OUTPUT * max(1, count):
                raise ValueError(f"its outputs are larger than {OUTPUT} bytes for each picture")
            answer = {"arrays": [(a.dtype.str, a.shape) for a in found], "seconds": _used() - begun}
        except Exception as error:  # as above
            send(channel, json.dumps({"refused": _short(error)}).encode())
            continue
        send(channel, json.dumps(answer).encode())
        send(channel, b"".join(array.tobytes() for array in found))


def _arrays(kinds: list[tuple[str, list[int]]], data: memoryview) -> list[npt.NDArray[Any]]:
    arrays, at = [], 0
    for kind, shape in kinds:
        length = math.prod(shape) * np.dtype(kind).itemsize
        arrays.append(np.frombuffer(data[at : at + length], kind).reshape(shape))
        at += length
    return arrays


def _describe(onnx: Any, model: Any) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Nodes of a graph as plain values, and its tensors."""
    if len(model.graph.node) > NODES or model.functions or model.graph.sparse_initializer:
        raise ValueError(f"has more than {NODES} nodes, functions of its own or sparse weights")
    names, arrays, nodes = [], [], []

    def take(name: str, tensor: Any) -> str:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name[:80]} is not of numbers")
        names.append(name)
        arrays.append(array)
        return name

    for tensor in model.graph.initializer:
        take(tensor.name, tensor)
    if len(set(names)) < len(names):
        raise ValueError("has two tensors of one name")
    for number, node in enumerate(model.graph.node):
        settings: dict[str, Any] = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if attribute.HasField("t"):
                value = {"tensor": take(f"\0{number}.{attribute.name}", attribute.t)}
            elif isinstance(value, bytes):
                value = value.decode()
            elif not isinstance(value, int | float):
                value = [v if isinstance(v, int | float) else str(v) for v in value]
            settings[attribute.name] = value
        nodes.append([node.op_type, node.domain, node.name, [*node.input], [*node.output], settings])
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return {"nodes": nodes, "opset": opset, "weights": names}, arrays


def check(model: Any, path: str) -> None:
    """Refuse a graph that can run without end, or that reads other files."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    tensors = list(model.graph.initializer)
    for node in nodes:
        inner = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        if inner or node.op_type in UNBOUNDED:
            raise VisardError(f"{path}: has the operation {node.op_type[:40]}, so that nothing bounds how long it runs")
        for attribute in node.attribute:
            tensors += [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    tensors += [part for sparse in model.graph.sparse_initializer for part in (sparse.values, sparse.indices)]
    if any(tensor.data_location or tensor.external_data for tensor in tensors):
        raise VisardError(f"{path}: keeps its weights in other files; save it as one file")


class _Room:
    """What this process may use from here on."""

    def __init__(self) -> None:
        self.before = int(read_text("/proc/self/statm").split()[0]) * resource.getpagesize() if _LINUX else 0

    def allow(self, seconds: float, memory: int) -> None:
        _limit(resource.RLIMIT_CPU, math.ceil(_used() + seconds))
        if _LINUX:  # elsewhere the limit is not kept
            _limit(resource.RLIMIT_AS, self.before + memory)


def _limit(what: int, value: int) -> None:
    most = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if most == resource.RLIM_INFINITY else min(value, most), most))


_LINUX = Path("/proc/self/statm").exists()


def _used() -> float:
    return time.process_time()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
