"""A client tests a model before and after it made the model its own with a few batches; only figures leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visard.core import Client, Method, Weights
from visard.core.tuning import Tuning
from visard.data.augment import augment, to_float
from visard.data.faces import FaceView
from visard.evaluation.embedding import embed
from visard.evaluation.inputs import Ints, unit_rows
from visard.evaluation.scores import roc_of
from visard.ops.client_head import client_head
from visard.ops.training import HeadSettings, Training, batches, load_weights, train

FAR = (0.1, 0.01)


@dataclass(frozen=True)
class Drawn:
    """Pairs (P, 2): rows of the client's own test pictures, and (own row, row of the others)."""

    genuine: Ints
    impostor: Ints
    within: Ints | None = None  # impostors among the client's own people, where the others are more than those


def draw_pairs(own: FaceView, others: FaceView, count: int, rng: np.random.Generator) -> Drawn | None:
    """count / 2 genuine and as many impostor pairs, drawn with replacement; None if a kind cannot be had.

    The first picture of a pair is any of the client's (of those with a partner, for genuine pairs), the second any
    other one of the same person, or any one of other people among all `others`.
    """
    half = count // 2
    identity, strangers = own.identity, others.identity
    partners = [np.flatnonzero(identity == who) for who in identity]
    paired = np.flatnonzero([len(p) > 1 for p in partners])
    if not len(paired) or not (strangers[:, None] != np.unique(identity)[None, :]).any():
        return None
    first = rng.choice(paired, half)
    second = [rng.choice(p[p != row]) for row in first for p in (partners[row],)]
    pairs = np.empty((0, 2), np.int64)
    while len(pairs) < half:
        tried = np.stack([rng.integers(len(own), size=2 * half), rng.integers(len(others), size=2 * half)], axis=1)
        pairs = np.concatenate([pairs, tried[identity[tried[:, 0]] != strangers[tried[:, 1]]]])
    return Drawn(np.stack([first, np.array(second, np.int64)], axis=1), pairs[:half])


def score_tuned(
    client: Client, theta: Weights | None, tuning: Tuning, method: Method[Any], W: Tensor | None
) -> dict[str, float]:
    """Figures "untuned/...", "tuned/..." (means over the draws) and "gain/..." of TAR at FAR, EER and AUC.

    "statistics/...": after batch norm alone has seen the batches that the client tunes on, without a gradient; what
    gradients add to that is "learnt/...". Where impostors are of all clients, ".../own/..." has TAR at FAR with
    impostors of the client's own people alone. Every draw has its own pairs, the same before and after tuning, and its
    own batches. Tuning starts from the client's own head, from its rows of a global head W, or from a new one of the
    method's kind. A client without a genuine pair among its test pictures, or without training pictures, has no
    figures.
    """
    found: dict[str, list[float]] = {}
    others = client.data.test if client.others is None else client.others
    if theta is None or not len(client.data.train) or not len(client.data.test):
        return {}
    model, settings = client.network(), getattr(method, "head", HeadSettings())
    for rng in _streams(client.rng, tuning.draws):
        drawn = draw_pairs(client.data.test, others, tuning.pairs, rng)
        if drawn is None:
            return {}
        if client.others is not None:
            within = draw_pairs(client.data.test, client.data.test, tuning.pairs, rng)
            drawn = replace(drawn, within=None if within is None else within.impostor)
        load_weights(model, theta)
        figures = {f"untuned/{k}": v for k, v in pair_figures(model, client.data.test, others, drawn).items()}
        if tuning.norm == "update":
            before = client.rng.get_state()
            settle(client, model, tuning)
            figures |= {f"statistics/{k}": v for k, v in pair_figures(model, client.data.test, others, drawn).items()}
            load_weights(model, theta)
            client.rng.set_state(before)
        tune(client, model, tuning, settings, W)
        figures |= {f"tuned/{k}": v for k, v in pair_figures(model, client.data.test, others, drawn).items()}
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    tars = [name.removeprefix("tuned/") for name in means if name.startswith("tuned/") and "tar@" in name]
    over = {"gain": "untuned", "learnt": "statistics"}
    return means | {
        f"{gain}/{tar}": means[f"tuned/{tar}"] - means[f"{base}/{tar}"]
        for gain, base in over.items()
        for tar in tars
        if f"{base}/{tar}" in means
    }


def _streams(rng: torch.Generator, draws: int) -> Iterator[np.random.Generator]:
    for seed in torch.randint(2**62, (draws,), generator=rng).tolist():
        yield np.random.default_rng(seed)


def pair_figures(model: nn.Module, own: FaceView, others: FaceView, drawn: Drawn) -> dict[str, float]:
    """TAR at FAR, EER and AUC of the drawn pairs; of the others only the pictures that were drawn are embedded."""
    mine = unit_rows(embed(model, own))
    rows, place = np.unique(drawn.impostor[:, 1], return_inverse=True)
    theirs = unit_rows(embed(model, others.take(rows)))
    genuine = np.einsum("nd,nd->n", mine[drawn.genuine[:, 0]], mine[drawn.genuine[:, 1]])
    impostor = np.einsum("nd,nd->n", mine[drawn.impostor[:, 0]], theirs[place])
    roc = roc_of(genuine, impostor, far=FAR)
    figures = {f"tar@far={p.far:g}": p.tar for p in roc.tar} | {"eer": roc.eer, "auc": roc.auc}
    if drawn.within is not None:
        within = np.einsum("nd,nd->n", mine[drawn.within[:, 0]], mine[drawn.within[:, 1]])
        figures |= {f"own/tar@far={p.far:g}": p.tar for p in roc_of(genuine, within, far=FAR).tar}
    return figures


def tune(client: Client, model: nn.Module, tuning: Tuning, settings: HeadSettings, W: Tensor | None) -> None:
    """SGD on `model` for a few batches of the client's training pictures; nothing of it is kept."""
    head, labels, mask = client_head(client, settings, W, model, tuning.head)
    train(
        model, head, client.data.train, _training(tuning), client.rng, client.numerics,
        labels=labels, mask=mask, frozen_norm=tuning.norm == "frozen",
    )  # fmt: skip


def settle(client: Client, model: nn.Module, tuning: Tuning) -> None:
    """Batch norm sees the batches that `tune` would draw from here, and nothing else of the network changes."""
    training, pictures = _training(tuning), client.data.train
    model.train()
    with torch.no_grad(), client.numerics.autocast():
        for rows in batches(len(pictures), training, client.rng):
            x = to_float(pictures.batch(rows), client.numerics.channels_last)
            model(client.numerics.place(augment(x, client.rng, training.augment)))


def _training(tuning: Tuning) -> Training:
    return Training(
        lr=tuning.lr, momentum=tuning.momentum, weight_decay=0.0, batch_size=tuning.batch_size,
        unit="iterations", amount=tuning.batches, partial=False, schedule="constant", clip=0.0,
    )  # fmt: skip
