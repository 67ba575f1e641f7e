"""What must hold for every head, whatever the numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visard.learning.heads import HEADS, build_head

KINDS = sorted(HEADS)
seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(1, 9), st.integers(2, 12), st.integers(2, 16))  # batch, classes, embedding


def numbers(seed: int, size: tuple[int, int, int]) -> tuple[Tensor, Tensor, torch.Generator]:
    rng = torch.Generator().manual_seed(seed)
    batch, classes, embedding = size
    features = torch.randn(batch, embedding, generator=rng) * 10 ** torch.randn(batch, 1, generator=rng)
    return features, torch.randint(classes, (batch,), generator=rng), rng


@given(seeds, sizes, st.floats(1, 64))
@settings(max_examples=40, deadline=None)
def test_without_margin_all_softmax_heads_are_one(seed: int, size: tuple[int, int, int], scale: float) -> None:
    features, labels, _ = numbers(seed, size)
    heads = [
        build_head("arcface", *size[1:], scale=scale, margin=0.0),
        build_head("cosface", *size[1:], scale=scale, margin=0.0),
        build_head("softmax", *size[1:], scale=scale, normalise=True),
    ]
    for head in heads:
        head.weight.data = heads[0].weight.data
    reference = heads[0].logits(features, labels)
    for head in heads[1:]:
        torch.testing.assert_close(head.logits(features, labels), reference, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(head.loss(features, labels), heads[0].loss(features, labels))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, size=sizes)
@settings(max_examples=20, deadline=None)
def test_permuting_classes_permutes_logits(kind: str, seed: int, size: tuple[int, int, int]) -> None:
    features, labels, rng = numbers(seed, size)
    head = build_head(kind, *size[1:])  # type: ignore[arg-type]
    order = torch.randperm(size[1], generator=rng)
    before, loss = head.logits(features, labels), head.loss(features, labels)
    for p in head.parameters():
        p.data = p.data[order] if len(p) == size[1] else p.data
    moved = torch.argsort(order)[labels]
    torch.testing.assert_close(head.logits(features, moved), before[:, order], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(head.loss(features, moved), loss, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, size=sizes)
@settings(max_examples=20, deadline=None)
def test_masked_classes_have_no_gradient_and_no_say(kind: str, seed: int, size: tuple[int, int, int]) -> None:
    features, labels, rng = numbers(seed, size)
    mask = torch.rand(size[1], generator=rng) < 0.5
    mask[labels] = True
    head = build_head(kind, *size[1:])  # type: ignore[arg-type]
    loss = head.loss(features, labels, mask)
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None
    assert torch.isfinite(head.weight.grad).all()
    assert (head.weight.grad[~mask] == 0).all()
    assert torch.isneginf(head.logits(features, labels, mask)[:, ~mask]).all()
    head.weight.data[~mask] = 1e3 * torch.randn(int((~mask).sum()), size[2], generator=rng)
    torch.testing.assert_close(head.loss(features, labels, mask), loss)


@pytest.mark.parametrize("kind", ["arcface", "cosface", "sphereface2"])
@given(seed=seeds, size=sizes, factor=st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_length_of_features_does_not_matter(kind: str, seed: int, size: tuple[int, int, int], factor: float) -> None:
    features, labels, _ = numbers(seed, size)
    head = build_head(kind, *size[1:])  # type: ignore[arg-type]
    torch.testing.assert_close(head.loss(features, labels), head.loss(features * factor, labels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["arcface", "cosface"])
@given(seed=seeds, size=sizes, margin=st.floats(0.01, 1.0))
@settings(max_examples=20, deadline=None)
def test_a_margin_only_makes_it_harder(kind: str, seed: int, size: tuple[int, int, int], margin: float) -> None:
    features, labels, _ = numbers(seed, size)
    head = build_head(kind, *size[1:], margin=margin)  # type: ignore[arg-type]
    plain, hard = head.logits(features), head.logits(features, labels)
    others = torch.ones_like(plain, dtype=torch.bool).scatter(1, labels[:, None], False)
    assert torch.equal(plain[others], hard[others])
    assert (hard.gather(1, labels[:, None]) < plain.gather(1, labels[:, None])).all()
