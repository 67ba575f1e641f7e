"""Networks: names and shapes that others rely on, sizes, determinism; weights files good and bad."""

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from visard import models
from visard.errors import UsageError, VisardError
from visard.models.cut import digest_of
from visard.models.files import (
    load,
    located,
    open_model,
    read_model,
    read_weights,
    save_model,
    start,
)
from visard.models.iresnet import DEPTHS
from visard.models.published import guess
from visard.models.spherenet import SphereNet
from visard.presets import presets

# Parameters at size 112 and the default embedding, as recorded from these networks: a change must be meant.
# resnet18 is the exception, torchvision's published count.
COUNTS = {
    "iresnet18": 24_025_600,
    "iresnet34": 34_139_328,
    "iresnet50": 43_590_848,
    "iresnet100": 65_156_160,
    "mobilefacenet": 1_200_512,
    "spherenet20": 24_505_664,
    "resnet18": 11_689_512 + 512_512,  # torchvision's, and the linear map to the embedding
}
SMALL = [name for name in models.NAMES if name not in ("iresnet34", "iresnet50", "iresnet100", "spherenet64")]
SPEC = {"model": "tiny", "embedding": "128", "size": "64"}


def parameters_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def shapes_of(name: str, **given: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network that takes no memory."""
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in models.build(name, **given).state_dict().items()}


def insightface_names(depths: tuple[int, ...], embedding: int, grid: int) -> dict[str, tuple[int, ...]]:
    """What InsightFace's arcface_torch stores for an IResNet: written down once more, entry by entry."""

    def bn(name: str, width: int) -> dict[str, tuple[int, ...]]:
        entries = {f"{name}.{k}": (width,) for k in ("weight", "bias", "running_mean", "running_var")}
        return entries | {f"{name}.num_batches_tracked": ()}

    names: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 3, 3)} | bn("bn1", 64) | {"prelu.weight": (64,)}
    before = 64
    for stage, (width, depth) in enumerate(zip((64, 128, 256, 512), depths, strict=True), start=1):
        for block in range(depth):
            at = f"layer{stage}.{block}"
            names |= bn(f"{at}.bn1", before) | {f"{at}.conv1.weight": (width, before, 3, 3)}
            names |= bn(f"{at}.bn2", width) | {f"{at}.prelu.weight": (width,)}
            names |= {f"{at}.conv2.weight": (width, width, 3, 3)} | bn(f"{at}.bn3", width)
            if block == 0:
                names |= {f"{at}.downsample.0.weight": (width, before, 1, 1)} | bn(f"{at}.downsample.1", width)
            before = width
    fc = {"fc.weight": (embedding, 512 * grid * grid), "fc.bias": (embedding,)}
    return names | bn("bn2", 512) | fc | bn("features", embedding)


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        ("iresnet18", (2, 2, 2, 2)),
        ("iresnet34", (3, 4, 6, 3)),
        ("iresnet50", (3, 4, 14, 3)),
        ("iresnet100", (3, 13, 30, 3)),
    ],
)
def test_iresnet_has_the_names_of_insightface(name: str, depths: tuple[int, ...]) -> None:
    assert shapes_of(name) == insightface_names(depths, 512, 7)
    assert shapes_of(name, embedding=256, size=64) == insightface_names(depths, 256, 4)


def test_iresnet50_in_figures() -> None:
    shapes = shapes_of("iresnet50")
    assert shapes["layer3.13.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["fc.weight"] == (512, 25088)
    assert len(shapes) == 24 * 18 + 4 * 6 + 1 + 5 + 1 + 5 + 2 + 5
    with torch.device("meta"):
        model = models.build("iresnet50")
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["features.weight"]


def test_iresnet_features_start_at_one() -> None:
    model = models.build("iresnet18", size=32)
    assert (model.state_dict()["features.weight"] == 1).all()


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        assert parameters_count(models.build(name)) == COUNTS[name]


@pytest.mark.parametrize("name", ["tiny", "tiny_nobn"])
def test_tiny_is_tiny(name: str) -> None:
    assert 300_000 <= parameters_count(models.build(name, size=64)) <= 1_000_000


def test_resnet18_has_the_names_of_torchvision() -> None:
    shapes = shapes_of("resnet18")
    assert len([key for key in shapes if not key.startswith("embed.")]) == 122
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.bn2.running_var"] == (64,)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes["layer2.0.downsample.1.num_batches_tracked"] == ()
    assert shapes["layer4.1.conv2.weight"] == (512, 512, 3, 3)
    assert shapes["fc.weight"] == (1000, 512)
    assert shapes["embed.weight"] == (512, 1000)
    assert "layer1.0.downsample.0.weight" not in shapes


def test_spherenet_stages() -> None:
    with torch.device("meta"):
        default, paper = models.build("spherenet64"), SphereNet((3, 8, 16, 3))
    convs = [m for m in default.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 4 + 2 * (3 + 7 + 16 + 3)
    assert len([m for m in paper.modules() if isinstance(m, nn.Conv2d)]) == 64
    assert tuple(default.state_dict()["fc.weight"].shape) == (512, 512 * 7 * 7)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [32, 50, 64])
def test_forward_shapes_and_determinism(name: str, size: int) -> None:
    torch.manual_seed(0)
    model = models.build(name, embedding=24, size=size).eval()
    x = torch.rand(3, 3, size, size) * 2 - 1
    with torch.no_grad():
        y = model(x)
        assert y.shape == (3, 24)
        assert torch.isfinite(y).all()
        assert torch.equal(model(x), y)
        # each picture on its own: no statistics of the batch in evaluation
        alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(alone / y.abs().max(), y / y.abs().max(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", models.NAMES)
def test_forward_at_112_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name).eval()
        assert model(torch.empty(2, 3, 112, 112)).shape == (2, models.default_embedding(name))


@pytest.mark.parametrize("name", SMALL)
def test_training_step_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, size=32).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = (torch.rand(4, 3, 32, 32) * 2 - 1).contiguous(memory_format=torch.channels_last)
    # where bfloat16 is emulated it takes seconds on the large networks
    with torch.autocast("cpu", torch.bfloat16, enabled=name.startswith("tiny")):
        features = model(x)
    (features.float() ** 2 * torch.arange(features.shape[1])).mean().backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", ["tiny", "tiny_nobn", "mobilefacenet", "resnet18"])
def test_seed_decides_the_network(name: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return models.build(name, size=32).state_dict()

    first, again, other = weights(5), weights(5), weights(6)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_networks_without_batch_norm() -> None:
    with torch.device("meta"):
        for name in (*DEPTHS, "mobilefacenet", "resnet18", "spherenet20", "spherenet64", "tiny", "tiny_nobn"):
            has = any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in models.build(name).modules())
            assert has == (name not in ("spherenet20", "spherenet64", "tiny_nobn")), name


def test_tiny_nobn_trains_on_one_picture() -> None:
    model = models.build("tiny_nobn", size=64)
    x = torch.rand(2, 3, 64, 64) * 2 - 1
    torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("iresnet5", {}, r"unknown model 'iresnet5' \(did you mean 'iresnet50'"),
        ("vgg", {}, "unknown model 'vgg'.*tiny_nobn"),
        ("tiny", {"size": 16}, "at least 32 x 32"),
        ("tiny", {"embedding": 0}, "at least 1 dimension"),
    ],
)
def test_wrong_use_is_one_line(name: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        models.build(name, **given)
    assert "\n" not in str(caught.value)


# --- visard's own files


def test_model_file_round_trip(tmp_path: Path) -> None:
    model = models.build("tiny", size=64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    path = tmp_path / "model.safetensors"
    save_model(path, model.state_dict(), SPEC)
    weights, spec = read_model(path)
    assert list(tmp_path.iterdir()) == [path]
    assert spec.items() >= (SPEC | {"mean": "0.5,0.5,0.5", "std": "0.5,0.5,0.5"}).items()
    assert spec["visard"]
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    loaded, _ = load(path)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(loaded(x), model.eval()(x))
    assert start(path, "tiny", None, 64)[1].keys() == weights.keys()


def test_same_model_same_bytes(tmp_path: Path) -> None:
    weights = models.build("tiny", size=32).state_dict()
    for k in range(5):
        save_model(tmp_path / f"{k}.safetensors", weights, SPEC | {"size": "32"})
    assert len({(tmp_path / f"{k}.safetensors").read_bytes() for k in range(5)}) == 1


def test_shared_and_sliced_tensors_are_written(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    save_model(tmp_path / "m.safetensors", {"a": base, "b": base, "c": base[:, 1:].t()}, SPEC)
    weights, _ = read_model(tmp_path / "m.safetensors")
    assert torch.equal(weights["b"], base)
    assert torch.equal(weights["c"], base[:, 1:].t())


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_model(path, {"a": torch.ones(3)}, SPEC)
    before = path.read_bytes()
    with pytest.raises(VisardError, match="lacks size"):
        save_model(path, {"a": torch.zeros(3)}, {"model": "tiny", "embedding": "128"})
    assert path.read_bytes() == before
    with pytest.raises(VisardError, match="cannot write"):
        save_model(tmp_path / "absent" / "m.safetensors", {"a": torch.ones(3)}, SPEC)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 200)


def _foreign(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, path)


def _no_number(path: Path) -> None:
    save_model(path, {"a": torch.ones(2)}, SPEC | {"size": "big"})


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a readable model file"),
        (_garble, "not a readable model file"),
        (lambda path: path.write_bytes(b""), "not a readable model file"),
        (_foreign, "not written by visard"),
        (_no_number, "size is 'big'"),
        (lambda path: path.unlink(), "no model file"),
        (_folder, "no model file"),
    ],
)
def test_bad_model_files_are_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, models.build("tiny", size=32).state_dict(), SPEC | {"size": "32"})
    damage(path)
    with pytest.raises(VisardError, match=message) as caught:
        read_model(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_model_file_with_the_wrong_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, models.build("tiny", size=32).state_dict(), SPEC)
    with pytest.raises(VisardError, match=r"fc\.weight"):
        load(path)
    save_model(path, {}, SPEC | {"model": "tinny"})
    with pytest.raises(VisardError, match="did you mean 'tiny'"):
        load(path)


# --- weights of others


@pytest.fixture(scope="module")
def iresnet18() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return models.build("iresnet18", embedding=64, size=32).state_dict()


@pytest.mark.parametrize("wrapping", ["plain", "module", "checkpoint", "old_format", "half", "no_counters"])
def test_insightface_round_trip(tmp_path: Path, iresnet18: dict[str, Tensor], wrapping: str) -> None:
    path = tmp_path / "backbone.pth"
    content: dict[str, object] = dict(iresnet18)
    if wrapping == "module":
        content = {f"module.{key}": value for key, value in iresnet18.items()}
    elif wrapping == "checkpoint":
        content = {
            "epoch": 3,
            "state_dict_backbone": content,
            "state_dict_softmax_fc": {"weight": torch.ones(2)},
        }
    elif wrapping == "half":
        content = {key: v.half() if v.is_floating_point() else v for key, v in iresnet18.items()}
    elif wrapping == "no_counters":
        content = {key: value for key, value in content.items() if "num_batches" not in key}
    torch.save(content, path, _use_new_zipfile_serialization=wrapping != "old_format")
    weights = open_model(path)[0].state_dict()
    assert guess(weights) == ("iresnet18", 64, 32)
    model = models.build("iresnet18", embedding=64, size=32)
    model.load_state_dict(weights, strict=True)
    tolerance = 1e-3 if wrapping == "half" else 0
    for key, value in iresnet18.items():
        torch.testing.assert_close(weights[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["iresnet18", "iresnet34", "iresnet50", "iresnet100"])
def test_guess(name: str) -> None:
    with torch.device("meta"):
        assert guess(models.build(name, embedding=512).state_dict()) == (name, 512, 112)


class Evil:
    """On unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.target), os.O_CREAT)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path, iresnet18: dict[str, Tensor]) -> None:
    target = tmp_path / "created_by_the_file"
    for new_format in (True, False):
        path = tmp_path / f"evil{new_format}.pth"
        content = {**iresnet18, "x": Evil(target)}
        torch.save(content, path, _use_new_zipfile_serialization=new_format)
        with pytest.raises(VisardError, match=r"refused, it holds pickled code \(posix\.open\)") as caught:
            open_model(path)
        assert "\n" not in str(caught.value)
        assert not target.exists()


def _saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "hello")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated or damaged"),
        (b"hello, this is no file of weights", "not a file of weights"),
        (b"\x89PNG\r\n" + bytes(100), "not a file of weights"),
        (_zip(), "not a file of weights"),
        (_saved({"a": torch.ones(9)})[:-200], "truncated or damaged"),
        (_saved([1, 2]), "holds no weights but list"),
        (_saved(torch.ones(3)), "holds no weights but Tensor"),
        (_saved({}), "holds no weights"),
        (_saved({"lr": 0.1, "a": torch.ones(3)}), "holds more than weights: 'lr' is float"),
        (_saved({1: torch.ones(3)}), "holds more than weights"),
        (_saved({"conv1.weight": torch.ones(3)}), "looks like no network that visard knows"),
    ],
)
def test_bad_weights_files_are_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "backbone.pth"
    path.write_bytes(data)
    with pytest.raises(VisardError, match=message) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_weights_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weights file"):
        read_weights(tmp_path / "absent.pth")


def test_wrong_weights_are_named(tmp_path: Path, iresnet18: dict[str, Tensor]) -> None:
    path = tmp_path / "backbone.pth"
    nan = iresnet18["bn2.bias"].clone()
    nan[0] = torch.nan
    spoilt: list[tuple[dict[str, Tensor], str]] = [
        (
            {key: v for key, v in iresnet18.items() if key != "layer2.0.conv1.weight"},
            "missing, first 'layer2.0.conv1",
        ),
        (iresnet18 | {"extra.weight": torch.ones(2)}, "unknown to the network, first 'extra.weight'"),
        (
            iresnet18 | {"bn1.weight": torch.ones(63)},
            r"'bn1.weight' has the shape \(63,\) instead of \(64,\)",
        ),
        (iresnet18 | {"fc.weight": torch.ones(64, 700)}, "512 times a square"),
        (iresnet18 | {"bn2.bias": nan}, "'bn2.bias' holds NaN"),
        (iresnet18 | {"layer1.2.prelu.weight": torch.ones(64)}, r"\(3, 2, 2, 2\) blocks"),
    ]
    for weights, message in spoilt:
        torch.save(weights, path)
        with pytest.raises(VisardError, match=message):
            open_model(path)


def test_torchvision_weights_start_resnet18(tmp_path: Path) -> None:
    torch.manual_seed(2)
    theirs = {k: v for k, v in models.build("resnet18").state_dict().items() if not k.startswith("embed.")}
    path = tmp_path / "resnet18.pth"
    torch.save(theirs, path)
    state = torch.random.get_rng_state()
    first = start(path, "resnet18", 32, 112)[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    again = start(path, "resnet18", 32, 112)[1]
    assert torch.equal(first["layer4.1.conv2.weight"], theirs["layer4.1.conv2.weight"])
    assert first["embed.weight"].shape == (32, 1000)
    assert torch.equal(first["embed.weight"], again["embed.weight"])
    assert start(path, "tiny", None, 112)[0]["model"] == "onnx", "the file decides, whatever the settings name"


def test_torchvision_weights_see_pictures_as_imagenet_normalises_them(tmp_path: Path) -> None:
    """x in [-1, 1] through ours is (x / 2 + 1 / 2 - mean) / std through theirs, but for the border and its padding."""
    torch.manual_seed(3)
    net = models.build("resnet18").eval()
    theirs = {k: v + torch.rand(v.shape) if "running" in k else v for k, v in net.state_dict().items()}
    path = tmp_path / "resnet18.pth"
    torch.save({k: v for k, v in theirs.items() if not k.startswith("embed.")}, path)
    x, outs = torch.rand(2, 3, 64, 64) * 2 - 1, []
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    ours = start(path, "resnet18", None, 112)[1]
    for weights, seen in ((theirs, ((x + 1) / 2 - mean) / std), (ours, x)):
        net.load_state_dict(weights)
        outs.append(net.bn1(net.conv1(seen))[:, :, 2:-2, 2:-2])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


# Digests of the weights that come with visard, and of the presets that made them: `make weights` after a change.
SHIPPED = {
    "tiny-synthetic": (
        "ef538836d6a9e461cb975e0a98c07645452e5b6b47d6b73edfe1d9d0a443f951",
        "2b6526944e8c1f62",
    )
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_weights_that_come_with_visard(name: str) -> None:
    weights, settings = SHIPPED[name]
    found, spec = read_model(name)
    assert digest_of(found) == weights
    assert hashlib.sha256(presets()[name].encode()).hexdigest()[:16] == settings
    assert (spec["model"], spec["embedding"], spec["size"]) == ("tiny", "128", "64")
    assert located(name).stat().st_size <= 2_350_000
    assert located(f"folder/{name}") == Path("folder", name)  # a path is a path
    with pytest.raises(UsageError, match="no model file at tiny-synthetik"):
        read_model("tiny-synthetik")
