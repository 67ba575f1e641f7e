"""A run of encrypted MMD or of its reference goes on with the whole classifier of an earlier run, biases included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import visard
from visard.errors import UsageError
from visard.models.files import read_model, save_model

DATA = ("data.identities=4", "data.images_per_identity=10", "data.size=32", "model.embedding=4",
        "method.training.batch_size=8", "engine.kind=local")  # fmt: skip
SEALED = ("method.min_batch=8", "method.key_bits=512", "method.insecure_keys=true")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> visard.Run:
    settings = [*DATA, *SEALED, "method.rounds=0", "method.pretrain_rounds=5"]
    return visard.run("encrypted-mmd-sensors", overrides=settings, out=tmp_path_factory.mktemp("given") / "first")


def go_on(preset: str, first: visard.Run, classifier: Path, out: Path) -> visard.Run:
    given = (f"model.weights={first.folder / 'model.safetensors'}", f"model.class_vectors={classifier}")
    steps = ("method.pretrain_rounds=0", "method.rounds=1", "method.exchanges=1", "method.training.lr=1e-9")
    sealed = SEALED if preset.startswith("encrypted") else ()
    return visard.run(preset, overrides=[*DATA, *sealed, *given, *steps], out=out)


@pytest.mark.parametrize("preset", ["encrypted-mmd-sensors", "central-mmd"])
def test_biases_go_on(first: visard.Run, preset: str, tmp_path: Path) -> None:
    held, spec = read_model(first.folder / "class_vectors.safetensors")
    assert held["biases"].shape == (4,)
    assert held["biases"].abs().min() > 0, "training moved them"
    same = go_on(preset, first, first.folder / "class_vectors.safetensors", tmp_path / "same")
    known = first.metrics["training"]
    assert same.metrics["training"]["balanced_accuracy"] == known["balanced_accuracy"]
    held["biases"] = torch.tensor([0.0, 0.0, 1e4, 0.0])
    save_model(tmp_path / "one.safetensors", held, spec)
    one = go_on(preset, first, tmp_path / "one.safetensors", tmp_path / "one")
    assert one.metrics["training"]["balanced_accuracy"] == 0.25, "all rows are taken for class 2"


def test_a_classifier_without_its_biases_is_refused(first: visard.Run, tmp_path: Path) -> None:
    held, spec = read_model(first.folder / "class_vectors.safetensors")
    del held["biases"]
    save_model(tmp_path / "bare.safetensors", held, spec)
    with pytest.raises(UsageError, match="holds no biases, the softmax head has some"):
        go_on("central-mmd", first, tmp_path / "bare.safetensors", tmp_path / "run")


def test_biases_of_another_number_are_refused(first: visard.Run, tmp_path: Path) -> None:
    held, spec = read_model(first.folder / "class_vectors.safetensors")
    save_model(tmp_path / "odd.safetensors", held | {"biases": torch.zeros(3)}, spec)
    with pytest.raises(UsageError, match="4 class vectors, biases"):
        go_on("central-mmd", first, tmp_path / "odd.safetensors", tmp_path / "run")
