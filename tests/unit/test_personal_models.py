"""Personal models as files: the client's own layer is applied wherever a model file is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.toys import noise_faces

from visard import models
from visard.data.faces import FaceSet
from visard.errors import VisardError
from visard.evaluation.arrays import unit_rows
from visard.inference.gallery import enrol_folder
from visard.inference.model import embed, evaluate, load_model
from visard.models.files import load, read_model, save_model, split_transform, with_transform

SPEC = {"model": "tiny", "embedding": "16", "size": "32"}


@pytest.fixture
def personal(tmp_path: Path) -> tuple[Path, Path]:
    """A generic model file, and a personal one with the same backbone."""
    torch.manual_seed(0)
    theta = models.build("tiny", embedding=16, size=32).state_dict()
    own = theta | {"transform.weight": torch.randn(16, 16), "transform.bias": torch.randn(16)}
    save_model(tmp_path / "model.safetensors", theta, SPEC)
    save_model(tmp_path / "client.safetensors", own, SPEC)
    return tmp_path / "model.safetensors", tmp_path / "client.safetensors"


def pictures(n: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (n, 32, 32, 3), dtype=np.uint8)


def test_the_layer_comes_last(personal: tuple[Path, Path]) -> None:
    generic, own = (load_model(path) for path in personal)
    weights = read_model(personal[1])[0]
    f = torch.from_numpy(embed(generic, pictures()))
    expected = f @ weights["transform.weight"].T + weights["transform.bias"]
    torch.testing.assert_close(torch.from_numpy(embed(own, pictures())), expected)
    assert generic.fingerprint != own.fingerprint


def test_eval_and_enroll_use_it(personal: tuple[Path, Path], tmp_path: Path) -> None:
    faces: FaceSet = noise_faces(tmp_path / "faces", identities=8, images=4)
    generic, own = (evaluate(load_model(path), faces, protocols=("verification",)) for path in personal)
    assert generic.verification.auc != own.verification.auc
    for person in ("anna", "ben"):
        (tmp_path / "photos" / person).mkdir(parents=True)
        for k, picture in enumerate(pictures(2)):
            Image.fromarray(picture).save(tmp_path / "photos" / person / f"{k}.png")
    gallery, skipped = enrol_folder(tmp_path / "photos", load_model(personal[1]))
    assert not skipped
    mean = unit_rows(embed(load_model(personal[1]), pictures(2))).sum(0, keepdims=True)
    np.testing.assert_allclose(unit_rows(np.asarray(gallery.templates[:1])), unit_rows(mean), atol=1e-3)


def test_export_writes_it(personal: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from visard.inference.export import export

    export(load_model(personal[1]), tmp_path / "client.onnx")
    one, two = (embed(load_model(path), pictures(3)) for path in (personal[1], tmp_path / "client.onnx"))
    np.testing.assert_allclose(one, two, atol=1e-4)


def test_damaged_files_say_so(personal: tuple[Path, Path], tmp_path: Path) -> None:
    weights = read_model(personal[1])[0]
    cases = {
        "needs transform.weight and transform.bias": {"transform.bias": None},
        "do not fit together": {"transform.bias": torch.zeros(3)},
        "takes features of 5": {"transform.weight": torch.zeros(16, 5)},
        "NaN or infinity": {"transform.bias": torch.full((16,), torch.nan)},
    }
    for reason, change in cases.items():
        broken = {k: v for k, v in (weights | change).items() if v is not None}
        save_model(tmp_path / "broken.safetensors", broken, SPEC)
        with pytest.raises(VisardError, match=reason):
            load(tmp_path / "broken.safetensors")


def test_a_generic_model_stays_as_it_is() -> None:
    backbone = torch.nn.Linear(3, 4)
    theta, layer = split_transform(dict(backbone.state_dict()))
    assert layer is None
    assert with_transform(backbone, layer, 4) is backbone
    assert set(theta) == {"weight", "bias"}
