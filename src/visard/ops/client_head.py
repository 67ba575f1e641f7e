"""The head that a client trains: its own, or the rows of a global one that belong to its people."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from visard.core import Client
from visard.heads import Head
from visard.ops.features import class_means, features_of
from visard.ops.training import HeadSettings, load_weights

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
