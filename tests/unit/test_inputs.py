"""How pictures go into networks, and model files of every kind through one door."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.toys import noise_faces

import visard
from visard.data.augment import to_float
from visard.errors import UsageError, VisardError
from visard.models import build
from visard.models.files import save_model
from visard.models.inputs import PRESETS, Inputs, choose, preset, resized, three

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)


def test_the_default_is_what_networks_are_trained_with_to_the_bit() -> None:
    assert torch.equal(Inputs().tensor(PICTURES), to_float(PICTURES))
    assert torch.equal(preset("arcface").tensor(PICTURES), to_float(PICTURES))


@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_the_formula(name: str, order: str) -> None:
    constants = {
        "arcface": ([127.5] * 3, [127.5] * 3),
        "cosface": ([127.5] * 3, [128.0] * 3),
        "facenet": ([127.5] * 3, [128.0] * 3),
        "imagenet": ([0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]),
        "raw": ([0.0] * 3, [1.0] * 3),
    }
    mean, std = constants[name]
    found = choose(preset(name), None, order=order).tensor(PICTURES)
    for b, y, x in [(0, 0, 0), (1, 7, 3), (2, 15, 15)]:
        channels = [float(v) for v in PICTURES[b, y, x]]
        if order == "bgr":
            channels.reverse()
        expected = [(v - m) / s for v, m, s in zip(channels, mean, std, strict=True)]
        assert found[b, :, y, x].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_single_settings_override_a_preset_and_the_size_stays() -> None:
    own = Inputs(size=64)
    found = choose(own, "imagenet", mean="0.1,0.2,0.3", order="bgr")
    assert (found.size, found.mean, found.order, found.std) == (64, (0.1, 0.2, 0.3), "bgr", PRESETS["imagenet"].std)
    assert choose(own, None, std="0.25").std == (0.25, 0.25, 0.25)


def test_text_and_back() -> None:
    for inputs in PRESETS.values():
        again = Inputs.of_spec(inputs.to_spec())
        assert again.order == inputs.order
        assert again.mean == pytest.approx(inputs.mean)
        assert again.std == pytest.approx(inputs.std)
        assert Inputs.of_spec(again.to_spec()) == again
    assert three("0.5") == (0.5, 0.5, 0.5)


def test_resizing() -> None:
    assert resized(PICTURES, 16) is PICTURES
    flat = np.full((2, 16, 16, 3), 77, np.uint8)
    assert (resized(flat, 24) == 77).all()
    assert resized(PICTURES, 8).shape == (3, 8, 8, 3)
    assert resized(PICTURES, 8).mean() == pytest.approx(PICTURES.mean(), abs=2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: preset("arcfac"), "did you mean 'arcface'"),
        (lambda: Inputs(order="rbg"), "rbg"),
        (lambda: Inputs(std=(0.5, 0.0, 0.5)), "above 0"),
        (lambda: Inputs(mean=(float("nan"), 0.0, 0.0)), "finite"),
        (lambda: Inputs(size=0), "size = 0"),
        (lambda: choose(Inputs(), None, mean="1,2"), "one number or three"),
        (lambda: choose(Inputs(), None, std="x"), "one number or three"),
    ],
)
def test_wrong_settings(call, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


def test_damaged_metadata() -> None:
    with pytest.raises(VisardError, match="m.safetensors.*damaged"):
        Inputs.of_spec({"mean": "a,b,c"}, "m.safetensors")


def model_file(folder: Path, **more: str) -> Path:
    torch.manual_seed(0)
    spec = {"model": "tiny", "embedding": "16", "size": "32", **more}
    save_model(folder / "m.safetensors", build("tiny", embedding=16, size=32).state_dict(), spec)
    return folder / "m.safetensors"


def test_a_model_file_says_how_pictures_go_in(tmp_path: Path) -> None:
    pictures = RNG.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    plain = visard.load_model(model_file(tmp_path))
    features = visard.embed(plain, pictures)
    with torch.inference_mode():
        assert np.array_equal(features, plain.network(to_float(pictures, channels_last=True)).numpy())
    (tmp_path / "bgr").mkdir()
    other = visard.load_model(model_file(tmp_path / "bgr", order="bgr", mean="0.4,0.5,0.6"))
    assert (other.inputs.order, other.inputs.mean) == ("bgr", (0.4, 0.5, 0.6))
    assert not np.allclose(visard.embed(other, pictures), features)
    forced = visard.load_model(tmp_path / "bgr" / "m.safetensors", order="rgb", input="arcface")
    assert np.array_equal(visard.embed(forced, pictures), features)
    assert forced.fingerprint != other.fingerprint


def test_pictures_of_another_size(tmp_path: Path) -> None:
    """Squares are resized, also those of face sets, and a line says so; anything else is refused."""
    path = model_file(tmp_path)
    model, said = visard.load_model(path), list[str]()
    pictures = RNG.integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    assert np.array_equal(visard.embed(model, pictures), visard.embed(model, resized(pictures, 32)))
    faces = noise_faces(tmp_path / "set", 3, 2, size=48)
    found = model.embed(faces, say=said.append)
    assert np.array_equal(found.features, visard.embed(model, resized(np.array(faces.pixels), 32)))
    assert said == ["the pictures have 48 x 48 pixels, the model takes 32 x 32: they are reduced"]
    assert model.resizes(np.zeros((1, 16, 16, 3), np.uint8)) == (
        "the pictures have 16 x 16 pixels, the model takes 32 x 32: they are enlarged, which adds no detail"
    )
    assert model.resizes(np.zeros((1, 32, 32, 3), np.uint8)) is None
    for wrong in (pictures[:, :20], pictures[0], pictures.astype(np.float32), pictures[..., :1]):
        with pytest.raises(UsageError, match=r"\(n, 32, 32, 3\) or other squares, which are resized, not"):
            model.embed(wrong, say=said.append)
    assert len(said) == 1, "nothing was said of what is refused"
    with pytest.raises(UsageError, match="takes pictures of 32 pixels, not 48"):
        visard.load_model(path, size=48)


def test_insightface_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = build("iresnet18", embedding=32, size=32).eval()
    torch.save({"state_dict_backbone": network.state_dict()}, tmp_path / "backbone.pth")
    torch.save(network.state_dict(), tmp_path / "backbone.pt")
    pictures = RNG.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    with torch.inference_mode():
        expected = network(to_float(pictures, channels_last=True)).numpy()
    for name in ("backbone.pth", "backbone.pt"):
        model = visard.load_model(tmp_path / name, input="arcface")
        assert (model.spec["model"], model.size, model.spec["embedding"]) == ("iresnet18", 32, "32")
        assert visard.embed(model, pictures) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("name", "content"), [("m.bin", b"x"), ("m", b""), ("m.pkl", b"x")])
def test_files_that_are_no_models(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="a model file ends in"):
        visard.load_model(tmp_path / name)


def test_the_fingerprint_follows_weights(tmp_path: Path) -> None:
    a = visard.load_model(model_file(tmp_path))
    assert a.fingerprint == visard.load_model(tmp_path / "m.safetensors").fingerprint
    weights = a.network.state_dict()
    weights["conv.weight"][0] += 1
    save_model(tmp_path / "n.safetensors", weights, a.spec)
    assert visard.load_model(tmp_path / "n.safetensors").fingerprint != a.fingerprint
