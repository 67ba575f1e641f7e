"""A client tests its own model on its own held-out pictures; only metrics leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from visard.core import BoundStep, Client, Disclosure, Method, Names, Weights, client_step, nothing
from visard.core.method import AtLeastOne, Number, Positive
from visard.data.augment import Augment
from visard.data.faces import FaceView
from visard.errors import PublicError
from visard.evaluation.arrays import Ints, unit_rows
from visard.evaluation.identification import identify
from visard.evaluation.metrics import CLIENT_FAR, brief, names_of
from visard.evaluation.protocols import personal_metrics, personal_names
from visard.evaluation.scores import Roc, roc_of
from visard.evaluation.verification import verify_all
from visard.learning.features import client_head, embed, input_batch
from visard.learning.heads import HeadSettings
from visard.learning.train import Training, batches, train
from visard.learning.weights import load_weights
from visard.models.files import split_transform, with_transform

TUNED = ("untuned", "tuned", "statistics", "gain", "learnt")  # the models of a test before and after tuning
TEST = "score"  # the step that tests a client's model


@dataclass(frozen=True)
class Tuning:
    """`[evaluation.tuning]`: the test of a client's model before and after tuning, on drawn pairs."""

    batches: Number = 0  # of the client's own training pictures that it tunes on; 0 = no such test
    batch_size: AtLeastOne = 64
    lr: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    head: Literal["means", "random"] = "means"  # where the head of a client without one starts
    flip: bool = True  # mirror half of the pictures that it tunes on, drawn at random
    norm: Literal["update", "frozen"] = "update"  # frozen: batch norm keeps the statistics that the model came with
    pairs: Annotated[int, Field(ge=2)] = 1000  # half of one identity, half of two
    draws: AtLeastOne = 5  # times that batches and pairs are drawn; metrics are means
    alone: bool = False  # True: clients make no other test
    between: Literal["test", "val"] = "test"  # pictures of tests between rounds; val: impostors are the client's own


@dataclass(frozen=True)
class ScoreRequest:
    """Test your own model, made from the generic one if there is one, also on these public test sets."""

    theta: Weights | None
    benchmarks: tuple[str, ...] = ()
    tuning: Tuning | None = None  # test it also before and after tuning
    W: Tensor | None = None  # the global head to tune with, where there is one


def score_names(method: Method[Any], message: ScoreRequest) -> Iterator[str]:
    """All names that a client's test metrics can have."""
    pairs, personal = names_of("verification", CLIENT_FAR), personal_names()
    alone = [*pairs, "rank1", *personal]
    yield from alone
    yield from (f"{other}/{name}" for other in method.compared for name in alone)
    yield from (f"{test_set}/{name}" for test_set in message.benchmarks for name in pairs)
    if message.tuning is not None:
        drawn = [*pairs, *(f"own/{name}" for name in pairs)]
        yield from (f"{model}/{name}" for model in TUNED for name in drawn)


@dataclass(frozen=True)
class Scores:
    """A client's test metrics."""

    figures: Annotated[dict[str, float], Disclosure.metric, Names(of=score_names)]
    pictures: Annotated[int, Disclosure.count]


@client_step(trains=nothing)
def score(method: Method[Any], client: Client, message: ScoreRequest) -> Scores:
    """Test the client's own model where its pictures are; only metrics leave."""
    theta = method.personal(client.state, message.theta)
    if message.tuning is not None and message.tuning.alone:
        return Scores(score_tuned(client, theta, message.tuning, method, message.W), len(client.data.test))
    metrics, pictures = score_client(client, theta, message.benchmarks)
    if message.tuning is not None:
        metrics |= score_tuned(client, theta, message.tuning, method, message.W)
    for name, other in method.alternatives(client.state, message.theta).items():
        metrics |= {f"{name}/{key}": value for key, value in score_client(client, other, ())[0].items()}
    return Scores(metrics, pictures)


def steps_of(method: Method[Any] | type[Method[Any]]) -> dict[str, BoundStep[Any, Any]]:
    """All that a client of this method can be asked for, by name: the method's own steps, and to test its model."""
    owner, kind = (None, method) if isinstance(method, type) else (method, type(method))
    steps = {**kind.steps(), TEST: score}
    return {name: step.__get__(owner, kind) for name, step in steps.items()}


def score_client(client: Client, theta: Weights | None, benchmarks: tuple[str, ...]) -> tuple[dict[str, float], int]:
    """Figures of the client's test pictures and of the named public test sets, and the number of test pictures.

    Verification: all pairs of its test pictures. Identification: gallery = mean features of its training
    pictures, probes = its test pictures. Where the client has the test pictures of all clients (evaluation.impostors
    = all), also the personal protocols among them. A metric that the pictures cannot give is left out.
    """
    if theta is None:
        raise PublicError("has no model to test")
    metrics: dict[str, float] = {}
    weights, transform = split_transform(theta)
    load_weights(client.network(), weights)
    model = with_transform(client.network(), transform, client.embedding)
    test, train = client.data.test, client.data.train
    probes = embed(model, test)
    if _has_both_kinds_of_pairs(test):
        metrics.update(_verification(probes, test.identity, ""))
    if len(test) and len(train):
        gallery = embed(model, train)
        result = identify(gallery, train.identity, probes, test.identity, ranks=(1,))
        metrics["rank1"] = result.rank[1]
        if client.others is not None:
            others = client.others
            local = np.unique(test.identity)
            metrics |= personal_metrics(gallery, train.identity, embed(model, others), others.identity, local)
    for name in benchmarks:
        view = client.benchmarks[name]
        metrics.update(_verification(embed(model, view), view.identity, f"{name}/"))
    return metrics, len(test)


def _has_both_kinds_of_pairs(view: FaceView) -> bool:
    counts = np.bincount(view.labels, minlength=1)
    return bool((counts > 1).any() and (counts > 0).sum() > 1)


def _verification(features: np.ndarray, identity: np.ndarray, prefix: str) -> dict[str, float]:
    return _metrics(verify_all(features, identity, far=CLIENT_FAR), prefix)


def _metrics(roc: Roc, prefix: str = "") -> dict[str, float]:
    """The registered metrics of a 1:1 test that have a value."""
    found = brief({"verification": roc.to_dict()})
    return {f"{prefix}{name}": value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Drawn:
    """Pairs (P, 2): rows of the client's own test pictures, and (own row, row of the others)."""

    genuine: Ints
    impostor: Ints
    within: Ints | None = None  # impostors among the client's own identities, where the others are more than those


def draw_pairs(own: FaceView, others: FaceView, count: int, rng: np.random.Generator) -> Drawn | None:
    """count / 2 genuine and count / 2 impostor pairs, drawn with replacement; None if a kind is impossible.

    The first picture of a pair is any of the client's (of those with a partner, for genuine pairs), the second any
    other one of the same identity, or any one of another identity among all `others`.
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
    impostors of the client's own identities alone. Every draw has its own pairs, the same before and after tuning,
    and its own batches. Tuning starts from the client's own head, from its rows of a global head W, or from a new one
    of the method's kind. A client without a genuine pair among its test pictures, or without training pictures, has no
    metrics.
    """
    found: dict[str, list[float]] = {}
    own = client.data.test if tuning.between == "test" else client.data.val
    everyone = client.others if tuning.between == "test" else None
    others = own if everyone is None else everyone
    if theta is None or not len(client.data.train) or not len(own):
        return {}
    model, settings = client.network(), getattr(method, "head", HeadSettings())
    for rng in _streams(client.rng, tuning.draws):
        drawn = draw_pairs(own, others, tuning.pairs, rng)
        if drawn is None:
            return {}
        if everyone is not None:
            within = draw_pairs(own, own, tuning.pairs, rng)
            drawn = replace(drawn, within=None if within is None else within.impostor)
        load_weights(model, theta)
        metrics = {f"untuned/{k}": v for k, v in pair_metrics(model, own, others, drawn).items()}
        if tuning.norm == "update":
            before = client.rng.get_state()
            settle(client, model, tuning)
            metrics |= {f"statistics/{k}": v for k, v in pair_metrics(model, own, others, drawn).items()}
            load_weights(model, theta)
            client.rng.set_state(before)
        tune(client, model, tuning, settings, W)
        metrics |= {f"tuned/{k}": v for k, v in pair_metrics(model, own, others, drawn).items()}
        for name, value in metrics.items():
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


def pair_metrics(model: nn.Module, own: FaceView, others: FaceView, drawn: Drawn) -> dict[str, float]:
    """TAR at FAR, EER and AUC of the drawn pairs; of the others only the pictures that were drawn are embedded."""
    mine = unit_rows(embed(model, own))
    rows, place = np.unique(drawn.impostor[:, 1], return_inverse=True)
    theirs = unit_rows(embed(model, others.take(rows)))
    genuine = np.einsum("nd,nd->n", mine[drawn.genuine[:, 0]], mine[drawn.genuine[:, 1]])
    impostor = np.einsum("nd,nd->n", mine[drawn.impostor[:, 0]], theirs[place])
    metrics = _metrics(roc_of(genuine, impostor, far=CLIENT_FAR))
    if drawn.within is not None:
        within = np.einsum("nd,nd->n", mine[drawn.within[:, 0]], mine[drawn.within[:, 1]])
        metrics |= {f"own/tar@far={p.far:g}": p.tar for p in roc_of(genuine, within, far=CLIENT_FAR).tar}
    return metrics


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
            model(input_batch(pictures, rows, client.numerics, client.rng, training.augment))


def _training(tuning: Tuning) -> Training:
    return Training(
        lr=tuning.lr, momentum=tuning.momentum, weight_decay=0.0, batch_size=tuning.batch_size,
        unit="iterations", amount=tuning.batches, partial=False, schedule="constant", clip=0.0,
        augment=Augment(flip=tuning.flip),
    )  # fmt: skip
