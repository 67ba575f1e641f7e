"""Trunk and tail: every network of visard, at every cut, gives the same bits as the whole; the rule of `tail`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from visard import models
from visard.errors import UsageError, VisardError
from visard.models.cut import NUMBERS, SHARE, Trunk, choose, cuts, digest_of, split

SHAPES = {"mlp": (54,), "mlp128": (54,), "cnn_gru": (20, 20, 20)}
SIZES = {"mlp": 54, "mlp128": 54, "cnn_gru": 8000}


def network(name: str, size: int = 32) -> tuple[nn.Module, tuple[int, ...]]:
    """A network whose statistics are those of some pictures, so that deep ones do not overflow."""
    torch.manual_seed(0)
    shape = SHAPES.get(name, (3, size, size))
    built = models.build(name, embedding=32, size=SIZES.get(name, size)).train()
    with torch.no_grad():
        for module in built.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(0.5)
        built(torch.randn(4, *shape))
    return built.eval(), shape


@pytest.mark.parametrize("name", models.BACKBONES.built_in)
def test_tail_of_trunk_is_the_network_bit_for_bit(name: str) -> None:
    whole, shape = network(name)
    x = torch.randn(3, *shape)
    with torch.no_grad():
        expected = whole(x)
    assert torch.isfinite(expected).all()
    known = cuts(whole, shape)
    assert known
    assert all(p.requires_grad for n, p in whole.named_parameters() if n != "features.weight"), (
        "looking freezes nothing"
    )
    some = {known[0].layer, known[-1].layer, *(cut.layer for cut in known[:: max(1, len(known) // 3)])}
    for cut in (cut for cut in known if cut.layer in some):
        trunk, tail = split(copy.deepcopy(whole), cut.layer)
        between = trunk(x)
        assert tuple(between.shape[1:]) == cut.shape
        with torch.no_grad():
            assert torch.equal(tail.eval()(between), expected), cut.layer
        names = [*trunk.network.state_dict(), *tail.state_dict()]
        assert sorted(names) == sorted(whole.state_dict()), "every entry is on one side, under its own name"
        assert sum(p.numel() for p in tail.parameters()) == cut.parameters


def test_a_trunk_never_trains() -> None:
    whole, shape = network("mobilefacenet")
    trunk, tail = split(whole, "blocks.13")
    before = digest_of(trunk.network.state_dict())
    trunk.train()
    tail.train()
    tail(trunk(torch.randn(4, *shape))).square().mean().backward()
    assert digest_of(trunk.network.state_dict()) == before
    assert not any(module.training for module in trunk.network.modules())
    assert all(p.grad is None for p in trunk.parameters())
    assert all(p.grad is not None for p in tail.parameters())


@pytest.mark.parametrize("name", ["tiny", "mobilefacenet", "resnet18", "iresnet18", "spherenet20", "mlp", "cnn_gru"])
def test_the_rule_of_tail(name: str) -> None:
    whole, shape = network(name)
    known = cuts(whole, shape)
    chosen = next(cut for cut in known if cut.layer == choose(whole, "tail", shape))
    later = known[known.index(chosen) + 1 :]
    assert chosen.share >= SHARE
    if chosen.numbers <= NUMBERS:
        assert all(cut.share < SHARE or cut.numbers > NUMBERS for cut in later)
    else:
        assert all(cut.numbers >= chosen.numbers for cut in known if cut.share >= SHARE)


def test_the_layers_of_a_real_recogniser() -> None:
    whole = models.build("mobilefacenet", embedding=128, size=112)
    known = {cut.layer: cut for cut in cuts(whole, (3, 112, 112))}
    assert list(known)[-5:] == ["blocks.13", "blocks.14", "widen", "gdconv", "fc"]
    assert known["blocks.13"].shape == (128, 7, 7)
    assert choose(whole, "tail", (3, 112, 112)) == "blocks.13"
    assert choose(whole, "last:1", (3, 112, 112)) == "fc"
    assert choose(whole, "last:5", (3, 112, 112)) == choose(whole, "from:blocks.13", (3, 112, 112)) == "blocks.13"


@pytest.mark.parametrize(
    ("how", "said"),
    [("from:block.13", "blocks.13"), ("from:features", "no layer"), ("last:99", "last 1 to 19 layers")],
)
def test_a_cut_that_is_none_is_one_clear_line(how: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose(models.build("mobilefacenet", size=48), how, (3, 48, 48))


class Around(nn.Module):
    """Layers that cannot be told apart by a cut: a shortcut round `b` and `inner`, and `c` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.inner, self.c, self.d = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.inner(self.b(x)) + x
        out: Tensor = self.d(self.c(self.c(x)))
        return out


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_no_cut_goes_through_a_shortcut_or_a_layer_that_is_used_twice() -> None:
    # before b its input alone is needed, before inner two things are; the first c stays in front of the second
    assert [cut.layer for cut in cuts(Around(), (4,))] == ["b", "c", "d"]
    trunk, tail = split(Around(), "c")
    assert {name.split(".")[0] for name in tail.state_dict()} == {"c", "d"}
    assert {name.split(".")[0] for name in trunk.network.state_dict()} == {"a", "b", "inner"}
    with pytest.raises(UsageError, match="cannot be cut"):
        cuts(Branching(), (4,))


def test_a_trunk_is_known_by_the_digest_of_its_weights() -> None:
    def build() -> nn.Module:
        return models.build("tiny", embedding=8, size=32)

    whole = build().state_dict()
    trunk = Trunk.of(build, "layer3", whole)
    assert trunk.whole(trunk.of_tail(whole)).keys() == whole.keys()
    assert {k.split(".")[0] for k in trunk.of_tail(whole)} == {"layer3", "fc", "features"}
    other = {k: v + 1 if k == "conv.weight" else v for k, v in trunk.weights.items()}
    assert digest_of(dict(reversed(trunk.weights.items()))) == trunk.digest != digest_of(other)
    with pytest.raises(VisardError, match="digest"):
        Trunk(build, "layer3", trunk.digest, lambda: other).network()
