"""Networks with factors beside their layers: every network of visard begins as it was, and nothing else trains."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tests.unit.test_cut import network
from torch import Tensor, nn

from visard import models
from visard.errors import UsageError
from visard.models.cut import Weights, digest_of
from visard.models.lora import LowRank, adapt, layers

DEEPER = ("iresnet34", "iresnet50", "iresnet100", "spherenet64", "mlp128")  # the same layers, more of them


def beside(name: str, rank: int = 2) -> tuple[nn.Module, LowRank, tuple[int, ...]]:
    whole, shape = network(name)
    return whole, LowRank.beside(lambda: copy.deepcopy(whole), rank, whole.state_dict()), shape


def moved(factors: Weights) -> Weights:
    rng = torch.Generator().manual_seed(1)
    return {name: value + 0.05 * torch.randn(value.shape, generator=rng) for name, value in factors.items()}


@pytest.mark.parametrize("name", [n for n in models.BACKBONES.built_in if n not in DEEPER])
def test_a_network_begins_as_it_was_and_merges_bit_for_bit(name: str) -> None:
    whole, part, shape = beside(name)
    adapted, x = part.tail().eval(), torch.randn(3, *shape)
    start = part.start(whole.state_dict(), 7)
    assert sorted(start) == sorted(adapted.state_dict())
    assert all(n.endswith(("lora_A", "lora_B")) for n in start)
    assert {n for n, _ in adapted.named_parameters()} == {*start}, "nothing else trains, nothing else leaves"
    assert sum(v.numel() for v in start.values()) < 0.6 * sum(p.numel() for p in whole.parameters())
    adapted.load_state_dict(start)
    same = partial(torch.allclose, atol=1e-6) if name == "cnn_gru" else torch.equal  # a frozen GRU has other kernels
    with torch.no_grad():
        assert same(adapted(x), whole(x))
    assert digest_of(part.whole(start)) == part.digest, "the start's bits"
    later = moved(start)
    adapted.load_state_dict(later)
    again = copy.deepcopy(whole)
    again.load_state_dict(part.whole(later))
    with torch.no_grad():
        assert same(adapted(x), again(x)), "what is tested is what is saved"
        assert not torch.allclose(adapted(x), whole(x))
    copied = copy.deepcopy(adapted)
    with torch.no_grad():
        assert torch.equal(copied(x), adapted(x))


def test_training_moves_the_factors_alone() -> None:
    whole, part, shape = beside("mobilefacenet")
    adapted = part.tail().train()
    adapted.load_state_dict(part.start(whole.state_dict(), 7))
    frozen = {n: v.clone() for n, v in adapted.named_buffers() if "running" not in n and "num_batches" not in n}
    optimiser = torch.optim.SGD(adapted.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        adapted(torch.randn(4, *shape)).square().sum().backward()
        optimiser.step()
    assert frozen
    assert all(torch.equal(frozen[n], v) for n, v in adapted.named_buffers() if n in frozen)
    before = part.start(whole.state_dict(), 7)
    assert all(not torch.equal(before[n], v) for n, v in adapted.state_dict().items())


def test_the_start_is_of_the_seed_and_asks_no_other_generator() -> None:
    whole, part, _ = beside("tiny")
    state = torch.get_rng_state()
    one, two, other = (part.start(whole.state_dict(), seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)
    assert all(bool(v.any()) == n.endswith("lora_A") for n, v in one.items())
    assert part.outline().state_dict().keys() == one.keys()


def test_negative_zeros_keep_their_bits() -> None:
    build = partial(nn.Linear, 8, 8, bias=False)
    weights = {"weight": torch.full((8, 8), -0.0)}
    part = LowRank.beside(build, 1, weights)
    assert digest_of(part.whole(part.start(weights, 0))) == part.digest


class Tied(nn.Module):
    """Two layers with one matrix, one layer twice, and one that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.b.weight = self.a.weight
        self.again = self.c

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.again(self.c(self.b(self.a(x)))))
        return out


def test_which_layers_have_factors() -> None:
    assert [name for name, _ in layers(Tied(), 1)] == ["c", "d"]
    assert [name for name, _ in layers(Tied(), 2)] == ["c"], "2 (8 + 2) numbers are not fewer than 16"
    mobile = models.build("mobilefacenet", size=48)
    small, large = ({name for name, _ in layers(mobile, rank)} for rank in (2, 8))
    depthwise = {
        n for n, m in mobile.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1 and m.kernel_size == (3, 3)
    }
    assert depthwise <= small, "kernels of groups are rows like others"
    assert not {
        n
        for n in depthwise & large
        if 8 * (mobile.get_submodule(n).out_channels + 9) >= 9 * mobile.get_submodule(n).out_channels
    }  # type: ignore[operator]
    torch.manual_seed(0)
    whole = Tied()
    part = LowRank.beside(lambda: copy.deepcopy(whole), 1, whole.state_dict())
    later, x = moved(part.start(whole.state_dict(), 0)), torch.randn(3, 8)
    later |= {n.replace("again", "c"): v for n, v in later.items() if n.startswith("again")}
    adapted, again = part.tail(), Tied()
    adapted.load_state_dict(later)
    again.load_state_dict(part.whole(later))
    assert torch.equal(adapted(x), again(x))


def test_a_rank_that_saves_nothing_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"model.train = lora:900: Tiny has no .* take a lower rank"):
        LowRank.beside(lambda: models.build("tiny", size=32), 900, models.build("tiny", size=32).state_dict())


def test_adapting_reaches_no_batch_norm() -> None:
    adapted = adapt(models.build("tiny", size=32), 2)
    norms = [m for m in adapted.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any([*m.parameters()] or m.state_dict() for m in norms)
