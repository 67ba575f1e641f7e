"""What sits on an extractor: a classification head, or a regressor, and how well it predicts on the own test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from visard.core import Client, Weights
from visard.data.augment import to_float
from visard.errors import Told
from visard.ops.training import HeadSettings, load_weights

BATCH = 512  # rows that are predicted at a time


class Regressor(nn.Module):
    """A linear predictor of one number, with squared error; stands where a head stands."""

    def __init__(self, embedding: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding, 1)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return mse_loss(self.logits(features)[:, 0], labels.to(features.dtype))

    def logits(self, features: Tensor) -> Tensor:
        values: Tensor = self.linear(features)
        return values


def new_head(settings: HeadSettings | None, classes: int, embedding: int, weights: Weights | None = None) -> Any:
    """A head, or without settings a regressor, with these weights or fresh."""
    head = settings.build(classes, embedding) if settings else Regressor(embedding)
    if weights:
        load_weights(head, weights)
    return head


@torch.no_grad()
def mean_output(model: nn.Module, heads: Sequence[Any], x: Tensor) -> Tensor:
    """The average of several classifiers (softmax outputs) or regressors on the same features."""
    features = model(x).float()
    outputs = [head.logits(features) for head in heads]
    return torch.stack(
        [o if isinstance(h, Regressor) else o.softmax(1) for h, o in zip(heads, outputs, strict=True)]
    ).mean(0)


def quality(client: Client, model: nn.Module, heads: Sequence[Any], everything: bool = False) -> dict[str, float]:
    """Balanced accuracy and weighted F1 on the client's test data, or the mean squared error of regressors.

    With `everything` on all its data: those that a target aligned had no labels for it.
    """
    data = client.data
    views = [view for view in ((data.train, data.val, data.test) if everything else (data.test,)) if len(view)]
    if not views:
        raise Told("has no test data")
    model.eval()
    outputs = []
    for view in views:
        for start in range(0, len(view), BATCH):
            x = to_float(view.batch(np.arange(start, min(start + BATCH, len(view)))), client.numerics.channels_last)
            outputs.append(mean_output(model, heads, client.numerics.place(x)))
    output, labels = torch.cat(outputs), np.concatenate([np.asarray(view.labels) for view in views])
    if isinstance(heads[0], Regressor):
        return {"mse": float(mse_loss(output[:, 0], torch.from_numpy(labels).to(output.dtype)))}
    return classification_figures(labels, output.argmax(1).numpy())


def classification_figures(labels: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Mean recall over the classes that occur, and F1 weighted by how often each occurs."""
    recalls, f1, weights = [], [], []
    for c in np.unique(labels):
        hits = int(((labels == c) & (found == c)).sum())
        is_c, says_c = int((labels == c).sum()), int((found == c).sum())
        recalls.append(hits / is_c)
        f1.append(2 * hits / (is_c + says_c))
        weights.append(is_c / len(labels))
    weighted = sum(w * f for w, f in zip(weights, f1, strict=True))
    return {"balanced_accuracy": sum(recalls) / len(recalls), "weighted_f1": weighted}
