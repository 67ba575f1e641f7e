"""Weights that others publish, the catalogue of recognisers, and what evaluation says of contracts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.fuzz.formats import Ended, command
from tests.toys import noise_faces
from torch import Tensor, nn
from torch.nn import functional as F

import visard
from visard import models, plugins
from visard.errors import UsageError, VisardError
from visard.inference.model import FaceModel
from visard.models import catalogue
from visard.models.files import open_model, save_model, start
from visard.models.inputs import Inputs
from visard.models.published import looks_like, recognise


class Names(nn.Module):
    """Layers by the dotted names that a file has."""

    def put(self, name: str, layer: nn.Module) -> nn.Module:
        at: nn.Module = self
        *front, last = name.split(".")
        for part in front:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(last, layer)
        return layer


class ArcFaceMobile(Names):
    """arcface_torch's network by its own rules, written down from the paper's table and the names in its files."""

    def __init__(self, scale: int, blocks: tuple[int, ...], size: int = 112) -> None:
        super().__init__()
        self.todo: list[tuple] = []
        w = 64 * scale
        self.block("layers.0", 3, w, 3, 2)
        if blocks[0] == 1:
            self.block("layers.1", w, w, 3, 1, 64)
        else:
            self.residual("layers.1", w, 128, blocks[0])
        self.depthwise("layers.2", w, w, 128, 2)
        self.residual("layers.3", w, 128, blocks[1])
        self.depthwise("layers.4", w, 2 * w, 256, 2)
        self.residual("layers.5", 2 * w, 256, blocks[2])
        self.depthwise("layers.6", 2 * w, 2 * w, 512, 2)
        self.residual("layers.7", 2 * w, 256, blocks[3])
        self.block("conv_sep", 2 * w, 512, 1)
        self.gdc = self.put("features.layers.0.layers.0", nn.Conv2d(512, 512, size // 16, groups=512, bias=False))
        self.gdn = self.put("features.layers.0.layers.1", nn.BatchNorm2d(512))
        self.fc = self.put("features.layers.2", nn.Linear(512, 128, bias=False))
        self.last = self.put("features.layers.3", nn.BatchNorm1d(128))

    def block(
        self, name: str, a: int, b: int, k: int, s: int = 1, g: int = 1, act: bool = True, run: bool = True
    ) -> list:
        conv = self.put(f"{name}.layers.0", nn.Conv2d(a, b, k, s, k // 2, groups=g, bias=False))
        made = [conv, self.put(f"{name}.layers.1", nn.BatchNorm2d(b))]
        made += [self.put(f"{name}.layers.2", nn.PReLU(b))] if act else []
        if run:
            self.todo.append((False, made))
        return made

    def depthwise(self, name: str, a: int, b: int, inner: int, s: int) -> None:
        made = self.block(f"{name}.layers.0", a, inner, 1, run=False)
        made += self.block(f"{name}.layers.1", inner, inner, 3, s, inner, run=False)
        made += self.block(f"{name}.layers.2", inner, b, 1, act=False, run=False)
        self.todo.append((s == 1, made))

    def residual(self, name: str, a: int, inner: int, count: int) -> None:
        for i in range(count):
            self.depthwise(f"{name}.layers.{i}", a, a, inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        for shortcut, layers in self.todo:
            y = x
            for layer in layers:
                y = layer(y)
            x = x + y if shortcut else y
        return self.last(self.fc(self.gdn(self.gdc(x)).flatten(1)))


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Weights by the names in files; statistics that are not those of a new network."""
    rng = torch.Generator().manual_seed(0)
    for name, value in network.state_dict().items():
        if "running" in name:
            drawn = torch.rand(value.shape, generator=rng)
            value.copy_(drawn + 0.5 if name.endswith("var") else 0.2 * (drawn - 0.5))
    return {k: v for k, v in network.state_dict().items() if not k.startswith(("gdc.", "gdn.", "fc.", "last."))}


@pytest.mark.parametrize(("scale", "blocks"), [(2, (1, 4, 6, 2)), (1, (2, 1, 2, 1))])
def test_mobilefacenet_of_arcface_torch(tmp_path: Path, scale: int, blocks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = ArcFaceMobile(scale, blocks).eval()
    weights = weights_of(theirs)
    torch.save(weights, tmp_path / "mbf.pt")
    ours, spec = open_model(tmp_path / "mbf.pt")
    assert (spec["size"], spec["embedding"]) == ("112", "128")
    if scale == 2:  # what is published has 512 numbers: 2.06 million with these 128 fewer
        assert sum(p.numel() for p in ours.parameters()) == 2_059_520 - 512 * 384 - 2 * 384
    x = torch.randn(2, 3, 112, 112)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    assert Inputs.of_spec(spec) == Inputs(size=112)


class Residual(Names):
    """torchvision's ResNet, or timm's variant d."""

    def __init__(self, depths: tuple[int, ...], deep: bool, d: bool, classes: int) -> None:
        super().__init__()
        self.depths, self.deep, self.d = depths, deep, d
        conv = lambda name, a, b, k, s=1: self.put(name, nn.Conv2d(a, b, k, s, k // 2, bias=False))  # noqa: E731
        norm = lambda name, c: self.put(name, nn.BatchNorm2d(c))  # noqa: E731
        if d:
            conv("conv1.0", 3, 8, 3, 2), norm("conv1.1", 8), conv("conv1.3", 8, 8, 3), norm("conv1.4", 8)
            conv("conv1.6", 8, 16, 3)
        else:
            conv("conv1", 3, 16, 7, 2)
        norm("bn1", 16)
        c = 16
        for stage, count in enumerate(depths, 1):
            w = 8 * 2**stage
            out = 4 * w if deep else w
            for i in range(count):
                name, s = f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1
                conv(f"{name}.conv1", c, w, 1 if deep else 3, 1 if deep else s), norm(f"{name}.bn1", w)
                conv(f"{name}.conv2", w, w, 3, s if deep else 1), norm(f"{name}.bn2", w)
                if deep:
                    conv(f"{name}.conv3", w, out, 1), norm(f"{name}.bn3", out)
                if s != 1 or c != out:
                    conv(f"{name}.downsample.{int(d)}", c, out, 1, 1 if d else s)
                    norm(f"{name}.downsample.{1 + d}", out)
                c = out
        self.put("fc", nn.Linear(c, classes))

    def at(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.d:
            x = F.relu(self.at("conv1.1", self.at("conv1.0", x)))
            x = self.at("conv1.6", F.relu(self.at("conv1.4", self.at("conv1.3", x))))
        else:
            x = self.at("conv1", x)
        x = F.max_pool2d(F.relu(self.at("bn1", x)), 3, 2, 1)
        for stage, count in enumerate(self.depths, 1):
            for i in range(count):
                name = f"layer{stage}.{i}"
                y = F.relu(self.at(f"{name}.bn1", self.at(f"{name}.conv1", x)))
                y = self.at(f"{name}.bn2", self.at(f"{name}.conv2", y))
                if self.deep:
                    y = self.at(f"{name}.bn3", self.at(f"{name}.conv3", F.relu(y)))
                if hasattr(self.get_submodule(name), "downsample"):
                    if self.d and stage > 1:
                        x = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
                    x = self.at(f"{name}.downsample.{1 + self.d}", self.at(f"{name}.downsample.{int(self.d)}", x))
                x = F.relu(x + y)
        pooled = x.mean((2, 3))
        return pooled if self.fc.out_features == 1000 else self.fc(pooled)


@pytest.mark.parametrize(
    ("deep", "d", "classes", "ending"),
    [(False, False, 1000, "pth"), (True, False, 24, "pth"), (True, True, 1000, "st")],
)
def test_resnets_of_torchvision_and_timm(tmp_path: Path, deep: bool, d: bool, classes: int, ending: str) -> None:
    torch.manual_seed(0)
    theirs = Residual((2, 1, 1, 1), deep, d, classes).eval()
    weights = {**weights_of(theirs), "fc.weight": theirs.fc.weight.detach(), "fc.bias": theirs.fc.bias.detach()}
    path = tmp_path / ("r.safetensors" if ending == "st" else "r.pth")
    save_file(weights, path) if ending == "st" else torch.save({"state_dict": weights, "epoch": 3}, path)
    ours, spec = open_model(path, size=48)
    assert Inputs.of_spec(spec).mean[0] == 0.485
    x = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    assert ours(x).std() > 0.01
    if not d:
        first = start(path, "tiny", None, 48)[1]
        assert first.keys() == ours.state_dict().keys()


class FoamliuMobile(Names):
    """foamliu's network, narrow: ReLU6, expanding blocks with shortcuts, a last map of 2 x 2 pixels for 32 x 32."""

    BLOCKS = ((2, 8, 2, 2), (4, 16, 1, 2), (2, 16, 2, 1), (4, 16, 1, 2), (2, 16, 1, 1))  # as the paper's table: t c n s

    def __init__(self) -> None:
        super().__init__()
        self.todo: list[tuple] = []
        self.block("conv1", 3, 8, 3, 2)
        for name, kernel, groups in (("depthwise", 3, 8), ("pointwise", 1, 1)):
            conv = self.put(f"dw_conv.{name}", nn.Conv2d(8, 8, kernel, 1, kernel // 2, groups=groups, bias=False))
            norm = self.put(f"dw_conv.bn{1 + (kernel == 1)}", nn.BatchNorm2d(8))
            self.todo.append((False, [conv, norm, nn.ReLU()]))
        width, number = 8, 0
        for expand, out, count, stride in self.BLOCKS:
            for k in range(count):
                name, inner, s = f"features.{number}.conv", width * expand, stride if k == 0 else 1
                made = self.block(f"{name}.0", width, inner, 1, run=False)
                made += self.block(f"{name}.1", inner, inner, 3, s, inner, run=False)
                made += [self.put(f"{name}.2", nn.Conv2d(inner, out, 1, bias=False))]
                made += [self.put(f"{name}.3", nn.BatchNorm2d(out))]
                self.todo.append((s == 1 and width == out, made))
                width, number = out, number + 1
        self.block("conv2", width, 24, 1)
        pooled = self.put("gdconv.depthwise", nn.Conv2d(24, 24, 2, groups=24, bias=False))
        self.todo.append((False, [pooled, self.put("gdconv.bn", nn.BatchNorm2d(24))]))
        self.todo.append((False, [self.put("conv3", nn.Conv2d(24, 12, 1)), self.put("bn", nn.BatchNorm2d(12))]))

    def block(self, name: str, a: int, b: int, k: int, s: int = 1, g: int = 1, run: bool = True) -> list:
        made = [self.put(f"{name}.0", nn.Conv2d(a, b, k, s, k // 2, groups=g, bias=False))]
        made += [self.put(f"{name}.1", nn.BatchNorm2d(b)), nn.ReLU6()]
        nn.init.constant_(made[1].weight, 6.0)  # so that some values reach the upper end of ReLU6
        if run:
            self.todo.append((False, made))
        return made

    def forward(self, x: Tensor) -> Tensor:
        for shortcut, layers in self.todo:
            y = x
            for layer in layers:
                y = layer(y)
            x = x + y if shortcut else y
        return x.flatten(1)


def test_mobilefacenet_of_foamliu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = FoamliuMobile().eval()
    torch.save(weights_of(theirs), tmp_path / "mobilefacenet.pt")
    ours, spec = open_model(tmp_path / "mobilefacenet.pt")
    assert (spec["size"], spec["embedding"], spec["mean"]) == ("32", "12", "0.485,0.456,0.406")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)


@pytest.mark.shared
def test_foamliu_file_is_its_onnx(tmp_path: Path) -> None:
    home = Path(__file__).parents[3] / "shared" / "data" / "models"
    if not (home / "mobilefacenet.pt").exists():
        pytest.skip("no ../shared")
    ours, spec = open_model(home / "mobilefacenet.pt")
    theirs, _ = open_model(home / "MobileFaceNet.onnx", name="imagenet")
    x = torch.randn(2, 3, 112, 112)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    assert spec["mean"] == "0.485,0.456,0.406"


def test_iresnet_is_found_in_run_as_in_eval(tmp_path: Path) -> None:
    network = models.build("iresnet18", embedding=32, size=32)
    torch.save(network.state_dict(), tmp_path / "backbone.pth")
    spec, weights = start(tmp_path / "backbone.pth", "tiny", None, 64)
    assert (spec["model"], spec["size"], spec["embedding"]) == ("iresnet18", "32", "32")
    assert spec["align"] == "five", "as nearly every public network was trained"
    assert weights.keys() == network.state_dict().keys()


WRONG = {
    "input_layer.0.weight": "looks like an IR network",
    "blocks.0.attn.qkv.weight": "looks like a vision transformer",
    "head.weight": r"looks like no network that visard knows \(1 weights, the first is 'head.weight'\)",
    "gdconv.depthwise.weight": "looks like a MobileFaceNet of foamliu for pictures of",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_says_what_it_looks_like_and_what_would_fit(tmp_path: Path, name: str) -> None:
    path = tmp_path / "w.pth"
    torch.save({name: torch.zeros(3, 3)}, path)
    for read in (lambda: open_model(path), lambda: start(path, "tiny", None, 64)):
        with pytest.raises(VisardError, match=WRONG[name]) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert "visard reads weights of IResNet" in str(caught.value) or "gdconv" in name


def test_one_weight_too_many_or_too_few_is_named(tmp_path: Path) -> None:
    weights = weights_of(ArcFaceMobile(1, (2, 1, 1, 1), 32))
    assert recognise(weights) is not None
    with pytest.raises(VisardError, match="has 'more' besides"):
        recognise(weights | {"more": torch.zeros(2)})
    del weights["conv_sep.layers.1.bias"]
    with pytest.raises(VisardError, match="lacks 'conv_sep.layers.1.bias'"):
        recognise(weights)
    assert looks_like(weights) == "a MobileFaceNet of arcface_torch"


def test_weights_of_a_network_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_zoo_net.py").write_text(
        "from torch import nn\n"
        "def make(embedding=6, size=32):\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(4 * (size // 4) ** 2, embedding))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plugins, "_loaded", {})
    from my_zoo_net import make

    theirs = make()
    torch.save(theirs.state_dict(), tmp_path / "own.pth")
    with pytest.raises(UsageError, match="is a plug-in"):
        open_model(tmp_path / "own.pth", network="my_zoo_net:make", size=32)
    spec, weights = start(tmp_path / "own.pth", "my_zoo_net:make", None, 32)
    assert (spec["model"], len(weights)) == ("my_zoo_net:make", 4)
    plugins.load(["my_zoo_net"])
    command("models", "add", tmp_path / "own.pth", "--name", "own", "--network", "my_zoo_net:make", "--size", 32)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(visard.load_model("own").network(x), theirs(x))
    wrong = {k: v[:1] for k, v in theirs.state_dict().items()}
    torch.save(wrong, tmp_path / "own.pth")
    with pytest.raises(VisardError, match="does not fit the network my_zoo_net:make: '0.weight' has the shape"):
        start(tmp_path / "own.pth", "my_zoo_net:make", None, 32)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "theirs.pth"
    torch.manual_seed(0)
    torch.save(models.build("iresnet18", embedding=16, size=32).state_dict(), path)
    words = ("--name", "mine", "--input", "127.5,128", "--bgr", "--licence", "for tests alone")
    command("models", "add", path, *words)
    return path


def test_a_kept_model_has_its_contract_everywhere(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (entry,) = catalogue.entries()
    assert (entry.order, entry.align, entry.licence, entry.model) == ("bgr", "five", "for tests alone", "iresnet18")
    model = visard.load_model("mine")
    assert model.inputs.to_spec() == Inputs("bgr", std=(128 / 255,) * 3, size=32).to_spec()
    assert model.contract == "32 x 32 BGR, (x - 127.5) / 128 (cosface), aligned to five points, 16 numbers"
    plain = visard.load_model(kept)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    assert not np.allclose(visard.embed(model, pictures), visard.embed(plain, pictures), atol=1e-3)
    spec, _ = start("mine", "tiny", None, 32)
    assert (spec["order"], spec["licence"], spec["align"]) == ("bgr", "for tests alone", "five")
    noise_faces(tmp_path / "set", 12, 4)
    command("embed", tmp_path / "set", "--model", "mine", "--out", tmp_path / "f.npy")
    assert np.load(tmp_path / "f.npy").shape == (48, 16)
    command("models", "list", "--json")
    command("models", "list")
    command("models", "remove", "mine")
    assert catalogue.entries() == []
    with pytest.raises(Ended, match="a model file ends in"):
        command("embed", tmp_path / "set", "--model", "mine", "--out", tmp_path / "f.npy")


def test_the_alignment_of_a_kept_model_is_the_users_or_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of visard that was trained on faces as they came, and one whose file says that it wants a Haar box."""
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    weights, spec = models.build("tiny", embedding=16, size=32).state_dict(), {"model": "tiny", "embedding": "16"}
    save_model(tmp_path / "own.safetensors", weights, spec | {"size": "32"})
    save_model(tmp_path / "haar.safetensors", weights, spec | {"size": "32", "align": "haar"})
    for file, words, align in (
        ("own", (), "none"), ("haar", (), "haar"), ("haar", ("--align", "none"), "none"),
        ("own", ("--align", "five"), "five"),
    ):  # fmt: skip
        command("models", "add", tmp_path / f"{file}.safetensors", "--name", "m", *words)
        assert visard.load_model("m").align == align
    with pytest.raises(Ended, match="--align eyes: must be five, haar or none"):
        command("models", "add", tmp_path / "own.safetensors", "--name", "m", "--align", "eyes")


def test_evaluation_says_the_contract_and_that_pictures_are_not_aligned(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("visard.cli.models.say", said.append)
    monkeypatch.setattr("visard.cli.models.mark", lambda word, text: said.append(text))
    faces = noise_faces(tmp_path / "set", 12, 4)
    about = json.loads((tmp_path / "set" / "faces.json").read_text())
    about["info"]["kind"] = "folder"
    (tmp_path / "set" / "faces.json").write_text(json.dumps(about))
    command("eval", "mine", "--data", tmp_path / "set", "--protocol", "identification")
    assert said[0] == f"pictures go in as {visard.load_model('mine').contract}"
    line = "set is not aligned, and the model wants faces aligned to five points: expect worse figures"
    assert said[1].startswith(line)
    about["info"]["align"] = "five"
    (tmp_path / "set" / "faces.json").write_text(json.dumps(about))
    said.clear()
    command("eval", "mine", "--data", tmp_path / "set", "--protocol", "identification")
    assert said[0].startswith("pictures go in as")
    assert not any(text.startswith(line) for text in said)
    assert FaceModel(nn.Identity(), {"visard": "1", "size": "32"}).misaligned(faces) is None


def test_damaged_entries_are_one_line(kept: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache" / "models" / "mine"
    model = next(home.glob("model.*"))
    good = (home / "contract.json").read_text()
    model.write_bytes(model.read_bytes() + b"x")
    with pytest.raises(VisardError, match="is not the file that was added as mine"):
        visard.load_model("mine")
    files = ({"file": text} for text in ("../../../theirs.pth", "a" * 300, "", "a\0b"))
    sizes = ({"size": size} for size in (3, "", "-1", "0", "1.5", "9" * 20))
    for change in (*files, *sizes, {"name": "other"}):
        (home / "contract.json").write_text(json.dumps(json.loads(good) | change))
        with pytest.raises(VisardError, match="is damaged: add the model again"):
            visard.load_model("mine")
    with pytest.raises(Ended, match="--name ../up"):
        command("models", "add", kept, "--name", "../up")
    with pytest.raises(Ended, match="--input 1,2,3"):
        command("models", "add", kept, "--name", "m", "--input", "1,2,3")
