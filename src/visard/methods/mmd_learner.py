"""One party's training while its features are pulled towards others' (Kang et al. 2022, Eqs. 1, 2, 8, 9, 14).

v (n, L)    features of a batch inside the unit ball, where the kernel compares them
pull        gradient of the encrypted part of the loss, by v (chain rule, Eq. 14) or by the parameters (Eq. 12)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from visard.core import Client, Weights
from visard.crypto.moments import MIXED
from visard.data.augment import augment, to_float
from visard.errors import PublicError, VisardError
from visard.learning.heads import HeadSettings
from visard.learning.mmd import Compare, Polynomial, within
from visard.learning.train import Optimiser, Training, batches, new_optimiser
from visard.learning.weights import load_weights, weights_of

# ----------
# What sits on an extractor: a classification head, or a regressor, and how well it predicts on the own test data.

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
        raise PublicError("has no test data")
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


class Learner:
    """A party's extractor, classifier and optimiser, as its state has them. The target has no classifier."""

    def __init__(
        self, client: Client, training: Training, compare: Compare, head: HeadSettings | None, labelled: bool,
        lr: float, optimiser: Optimiser = "sgd",
    ) -> None:  # fmt: skip
        """`head` None: a regressor."""
        self.client, self.training, self.compare = client, training, compare
        self.view, self.state = client.data.train, client.state
        self.model = client.network()
        load_weights(self.model, self.state["theta"])
        self.model.train()
        self.head: Any = None
        if labelled:
            self.head = new_head(head, client.data.n_classes, client.embedding, self.state.get("head"))
        self.extractor = [p for p in self.model.parameters() if p.requires_grad]
        parameters = [*self.extractor, *(self.head.parameters() if labelled else [])]
        self.optimiser = new_optimiser(optimiser, parameters, lr, training.momentum, training.weight_decay)
        self.optimiser._velocity = {int(i): v for i, v in self.state.get("momentum", {}).items()}

    def save(self) -> None:
        """Keep everything in the client's state."""
        self.state["theta"] = weights_of(self.model)
        self.state["momentum"] = {str(i): v for i, v in self.optimiser._velocity.items()}
        if self.head is not None:
            self.state["head"] = weights_of(self.head)

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Random batches of the fixed size; with each the seed of its random changes, so that it can be seen again."""
        n, rng = self.training.batch_size, self.client.rng
        if len(self.view) < n:
            raise PublicError(f"has {len(self.view)} training pictures, fewer than a batch of {n}")
        order = [torch.randperm(len(self.view), generator=rng)[:n] for _ in range(count)]
        return [{"rows": rows, "seed": int(torch.randint(2**62, (), generator=rng))} for rows in order]

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Raw features (n, E) of a batch; the same again for the same weights, also with dropout."""
        return self._features(self._inputs(batch), batch["seed"])

    def _inputs(self, batch: dict[str, Any]) -> Tensor:
        rng = torch.Generator().manual_seed(batch["seed"])
        x = to_float(self.view.batch(batch["rows"].numpy()), self.client.numerics.channels_last)
        return augment(x, rng, self.training.augment)

    def _features(self, x: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)  # for layers that draw by themselves
        with self.client.numerics.autocast():
            features: Tensor = self.model(self.client.numerics.place(x))
        return features.float()

    def fit(self) -> float:
        """Ordinary training on the own labels for a round of `training`; the mean loss."""
        total, steps = 0.0, 0
        for rows in batches(len(self.view), self.training, self.client.rng):
            seed = int(torch.randint(2**62, (), generator=self.client.rng))
            batch = {"rows": torch.from_numpy(rows), "seed": seed}
            loss = self.head.loss(self.forward(batch), self.labels(batch))
            self.update(loss)
            total, steps = total + float(loss.detach()), steps + 1
        return finite(total / steps)

    def labels(self, batch: dict[str, Any]) -> Tensor:
        """Labels (n,) of a batch."""
        return torch.from_numpy(np.asarray(self.view.labels))[batch["rows"]]

    @torch.no_grad()
    def look(self, chosen: Sequence[dict[str, Any]], apart: bool = False) -> Tensor:
        """Features (batches, n, L) inside the ball, in float64; running statistics stay as they were.

        `apart`: refused if another first sample changes more than its own feature.
        """
        kept = {k: v.clone() for k, v in self.model.named_buffers()}
        seen = [self.compare.inside(self.forward(b)).double() for b in chosen]
        if apart:
            x = self._inputs(chosen[0]).clone()
            x[0] += 3
            for k, v in self.model.named_buffers():
                v.copy_(kept[k])
            others = self.compare.inside(self._features(x, chosen[0]["seed"])).double()[1:]
            if not torch.allclose(others, seen[0][1:], rtol=0, atol=1e-5):
                raise VisardError(MIXED)
        for k, v in self.model.named_buffers():
            v.copy_(kept[k])
        return torch.stack(seen)

    def by_parameters(self, batch: dict[str, Any], slopes: Tensor) -> Tensor:
        """Gradients (outputs, P) by the extractor's parameters from gradients (outputs, n, L) by its features."""
        kept = {k: v.clone() for k, v in self.model.named_buffers()}
        v = self.compare.inside(self.forward(batch))
        rows = []
        for slope in slopes:
            parts = torch.autograd.grad(v, self.extractor, slope.to(v.dtype), retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.extractor, parts, strict=True)]
            rows.append(torch.cat([g.flatten() for g in flat]).double())
        for k, b in self.model.named_buffers():
            b.data.copy_(kept[k])
        return torch.stack(rows)

    def step(
        self, batch: dict[str, Any], pull: Tensor, kernel: Polynomial, share: float, weight: float
    ) -> dict[str, float]:
        """One update: own loss, `weight` (lambda) times the own part of MMD and the pull of the others."""
        features = self.forward(batch)
        v = self.compare.inside(features)
        own = within(v.double(), kernel)
        loss = weight * share * own
        figures = {"within": float(own.detach())}
        if self.head is not None:
            task = self.head.loss(features, self.labels(batch))
            loss, figures["task"] = loss + task, finite(float(task.detach()))
        chained = pull.shape == v.shape
        self.update(loss + weight * (pull * v.double()).sum() if chained else loss, None if chained else weight * pull)
        return figures

    def update(self, loss: Tensor, beside: Tensor | None = None) -> None:
        """One step of the optimiser; `beside` is a gradient by the extractor's parameters to add."""
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if beside is not None:
            self._add(beside)
        if self.training.clip:
            self.optimiser.clip(self.training.clip)
        self.optimiser.step()

    def _add(self, flat: Tensor) -> None:
        """Add a gradient by all parameters of the extractor, one after the other."""
        at = 0
        for p in self.extractor:
            part = flat[at : at + p.numel()].view_as(p).to(p.dtype)
            p.grad = part if p.grad is None else p.grad + part
            at += p.numel()

    def decay(self) -> float:
        """The regulariser of the extractor: half its squared length times the weight decay."""
        return 0.5 * self.training.weight_decay * sum(float((p.detach() ** 2).sum()) for p in self.extractor)

    @property
    def size(self) -> int:
        """P, of the extractor."""
        return sum(p.numel() for p in self.extractor)


def finite(loss: float) -> float:
    """The loss, if it is a number."""
    if not math.isfinite(loss):
        raise PublicError(f"the loss became {loss} in training: lower method.training.lr")
    return loss
