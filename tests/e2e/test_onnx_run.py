"""A run that starts from an ONNX file: every engine gives the same bits, and its models need that file no more."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE, smoke
from tests.e2e.test_methods import assert_same_results
from tests.engines.test_parties import HOUSES, Heard, OwnLink
from tests.policies import ANYTHING
from tests.toys import noise_faces

import visard
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party
from visard.errors import UsageError
from visard.inference.export import export
from visard.models.files import read_model
from visard.report.run_folder import read_events

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

MEAN, STD = "0.485,0.456,0.406", "0.229,0.224,0.225"


def recogniser(path: Path, size: int = 32) -> Path:
    """Two convolutions with batch norm, a shortcut and a last layer, for one picture at a time, in ImageNet's way."""
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)  # noqa: E731
    side = size // 4
    arrays = {
        "w1": random(8, 3, 3, 3), "b1": random(8, 1)[:, 0], "w2": random(8, 8, 3, 3), "slope": random(8, 1, 1),
        "scale": np.ones(8, np.float32), "shift": random(8, 1)[:, 0], "mean": random(8, 1)[:, 0] / 9,
        "var": np.ones(8, np.float32), "shape": np.array([1, 8 * side**2]), "w3": random(16, 8 * side**2),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], strides=[4, 4], pads=[1, 1, 1, 1]),
        helper.make_node("PRelu", ["a", "slope"], ["b"]),
        helper.make_node("BatchNormalization", ["b", "scale", "shift", "mean", "var"], ["c"]),
        helper.make_node("Conv", ["c", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "d"], ["e"]),
        helper.make_node("Reshape", ["e", "shape"], ["g"]),
        helper.make_node("Gemm", ["g", "w3"], ["f"], transB=1),
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])]
    known = [numpy_helper.from_array(a, k) for k, a in arrays.items()]
    out = [helper.make_tensor_value_info("f", TensorProto.FLOAT, [1, 16])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", given, out, known),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    helper.set_model_props(model, {"mean": MEAN, "std": STD, "order": "bgr"})
    onnx.save(model, str(path))
    return path


def one(out: str, file: Path, *more: str) -> visard.Run:
    own = [s for s in smoke("fedavg") if not s.startswith("model.embedding")]
    return visard.run("fedavg", out=out, overrides=[*own, f"model.weights={file}", *more])


@pytest.mark.parametrize("train", ["all", "last:1"])
def test_engines_agree_and_the_file_is_needed_no_more(here: Path, train: str) -> None:
    file = recogniser(here / "theirs.onnx")
    theirs = visard.load_model(file)
    pictures = np.random.default_rng(1).integers(0, 256, (3, 32, 32, 3), np.uint8)
    before = visard.embed(theirs, pictures)
    for engine in ("local", "pool"):
        one(engine, file, f"engine.kind={engine}", "engine.workers=2", f"model.train={train}")
    assert_same_results(Path("local"), Path("pool"))
    nothing = one("nothing", file, "method.training.lr=1e-12", f"model.train={train}", "evaluation.every=0")
    file.unlink()
    kept = visard.load_model(nothing.folder / "model.safetensors")
    assert visard.embed(kept, pictures) == pytest.approx(before, abs=1e-4), "the same way in, the same features out"
    after = visard.load_model("local/model.safetensors")
    assert kept.inputs == after.inputs == theirs.inputs
    assert after.inputs.order == "bgr"
    changed = {k for k, v in load_file("local/model.safetensors").items() if not torch.equal(v, nothing_of(nothing)[k])}
    assert {k.split(".")[0] for k in changed} == ({"block2"} if train == "last:1" else {"block0", "block1", "block2"})
    pytest.importorskip("onnxscript")
    export(after, here / "ours.onnx")
    ours = visard.load_model(here / "ours.onnx")
    assert ours.inputs == theirs.inputs
    assert (theirs.align, after.align, ours.align) == ("five", "five", "five")
    assert visard.embed(ours, pictures) == pytest.approx(visard.embed(after, pictures), rel=1e-3, abs=1e-4)


def nothing_of(run: visard.Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model.safetensors")


@pytest.mark.flower
def test_flower_agrees(here: Path, ray: dict[str, str]) -> None:
    file = recogniser(here / "theirs.onnx")
    sets = [*smoke("fedavg"), f"model.weights={file}", "model.train=last:1", "method.rounds=1"]
    visard.run("fedavg", out="local", overrides=[*sets, "engine.kind=local"])
    program = f"import visard; visard.run('fedavg', out='flower', overrides={[*sets, 'engine.kind=flower']!r})"
    command = [sys.executable, "-W", "ignore", "-c", program]  # as Ray is
    ran = subprocess.run(command, check=False, capture_output=True, env=os.environ | ray)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert_same_results(Path("local"), Path("flower"))


def test_other_sizes_are_said_and_another_embedding_is_refused(here: Path) -> None:
    file = recogniser(here / "theirs.onnx", 48)
    run = one("run", file, "method.rounds=1", "model.name=iresnet50")
    said = [e["text"] for e in read_events(run.folder / "events.jsonl") if e["event"] == "warning"]
    assert said == ["pictures of 32 pixels are resized to 48, which theirs.onnx takes"]
    assert read_model(run.folder / "model.safetensors")[1]["size"] == "48"
    with pytest.raises(UsageError, match=r"model.embedding = 99: the network of .*theirs.onnx gives 16 numbers"):
        one("other", file, "model.embedding=99")
    with pytest.raises(UsageError, match="the network is in a file, give it with model.weights"):
        visard.run("fedavg", out="none", overrides=[*smoke("fedavg"), "model.name=onnx"])


@pytest.mark.parametrize("more", [(), ("model.train=last:1",)])
def test_parties_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    for seed, name in enumerate((*HOUSES, "public")):
        noise_faces(tmp_path / "homes" / name, 12, 8, seed)
    at = {
        role: Party(
            partial(world_of_party, data=str(tmp_path / "homes" / role), file=None, clients=[role]),
            OwnStates(tmp_path / role / "states"), Guard(tmp_path / role, ANYTHING),
            models=tmp_path / role / "models", trunks=tmp_path / role / "trunks",
        )
        for role in HOUSES
    }  # fmt: skip
    link = OwnLink(at)
    monkeypatch.setattr("visard.runs.run.connect", lambda *_: link)
    file = recogniser(tmp_path / "theirs.onnx")
    own = ("partition.kind=parties", "partition.clients=2", "partition.test_identities=0", "engine.kind=flower")
    mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine.", "model."))]
    sets = [*mine, *own, "engine.server=x", f"data.source={tmp_path / 'homes' / 'public'}", "evaluation.every=0"]
    heard = Heard()
    visard.run(
        "local",
        out=tmp_path / "run",
        overrides=[*sets, f"model.weights={file}", "evaluation.client_benchmarks=false", *more],
        watcher=heard,
    )
    assert heard.problems == []
    file.unlink()
    for role in HOUSES:
        (kept,) = (tmp_path / role / "models").rglob("*.safetensors")
        model = visard.load_model(kept)
        assert model.inputs.order == "bgr"
        assert visard.embed(model, np.zeros((2, 32, 32, 3), np.uint8)).shape == (2, 16)
