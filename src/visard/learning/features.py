"""Features of a view inside a client step: the network as it is, in evaluation mode and float32."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from visard.core import Client, Weights
from visard.data.augment import to_float
from visard.data.faces import FaceView
from visard.learning.heads import Head, direction
from visard.learning.train import HeadSettings
from visard.learning.weights import load_weights

BATCH = 256
KEPT = 2  # sets of features that a process remembers: those of this round, and of the one before

_known: OrderedDict[tuple[str, str], Tensor] = OrderedDict()


def features_of(model: nn.Module, view: FaceView, channels_last: bool = True) -> Tensor:
    """Features (n, E) of the pictures of a view, not normalised; leaves the network in evaluation mode."""
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(view), BATCH):
            x = to_float(view.batch(np.arange(start, min(start + BATCH, len(view)))), channels_last)
            # `forward` itself: a compiled network would be compiled again for evaluation
            parts.append(model.forward(x).float())
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def shared_features(model: nn.Module, theta: Weights, view: FaceView, channels_last: bool = True) -> Tensor:
    """`features_of` for pictures that every party has; `theta` are the weights that the network holds.

    Simulated clients of one process do the same work on the same weights: it is done once. The answer is a pure
    function of weights and pictures, so it is the same bits whoever asks first.
    """
    key = (_digest(theta), f"{view.faces.path}:{hashlib.sha256(view.index.tobytes()).hexdigest()}")
    if key not in _known:
        _known[key] = features_of(model, view, channels_last)
        while len(_known) > KEPT:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Directions (classes, E) of the mean unit feature of each class; a class without pictures gets zeros."""
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64)
    sums.index_add_(0, labels, direction(features).double())
    return direction(sums).float()


def _digest(weights: Weights) -> str:
    found = hashlib.sha256()
    for name, value in weights.items():
        found.update(name.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# ----------
# The head that a client trains: its own, or the rows of a global one that belong to its people.

HeadStart = Literal["random", "means"]  # where a head of a client's own starts


def client_head(
    client: Client, settings: HeadSettings, W: Tensor | None, model: nn.Module, start: HeadStart = "random"
) -> tuple[Head, Tensor, Tensor | None]:
    """The head to train, the labels (n,) of the training pictures as its rows, and the mask of classes present.

    W None: the head that the client keeps in its state, or a new one, with no mask; with start = "means" its rows are
    the mean features of the client's people as `model` gives them. W (identities, E): a global head; classes that
    the client does not have are masked, so that their logits are -inf and their gradients 0.
    """
    train = client.data.train
    labels = torch.from_numpy(train.labels)
    if W is not None:
        head = settings.build(len(W), client.embedding)
        head.weight.data.copy_(W)
        rows = torch.from_numpy(train.classes)
        return head, rows[labels], torch.zeros(len(W), dtype=torch.bool).index_fill_(0, rows, True)
    if "head" in client.state:
        head = _reused(settings, train.n_classes, client.embedding)
        load_weights(head, client.state["head"])
        return head, labels, None
    head = settings.build(train.n_classes, client.embedding)
    if start == "means" and len(train):
        features = features_of(model, train, client.numerics.channels_last)
        head.weight.data.copy_(class_means(features, labels, train.n_classes))
    return head, labels, None


@lru_cache(maxsize=8)
def _reused(settings: HeadSettings, classes: int, embedding: int) -> Head:
    """A head whose weights are whatever the last client left: as with the network, one serves all in turn.

    Making one draws random numbers, which a step must not notice: where it is the first of its kind differs by engine.
    """
    with torch.random.fork_rng(devices=[]):
        return settings.build(classes, embedding)
