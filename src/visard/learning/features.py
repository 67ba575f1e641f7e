"""Pictures into a network and features out of it, and the head that a client trains on them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from visard.core import Client, Weights
from visard.data.augment import Augment, augment, to_float
from visard.data.faces import FaceSet, FaceView
from visard.learning.heads import Head, HeadSettings, direction
from visard.learning.weights import load_weights
from visard.models.inputs import Inputs, resized
from visard.numerics import Numerics, moved, on_device

BATCH = 256
Enter = Callable[[npt.NDArray[Any]], Tensor]


class Batches(Protocol):
    """Pictures in batches: a view, or several as one; of a set with stored activations these instead."""

    @property
    def faces(self) -> FaceSet: ...

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, mirrored: np.ndarray | None = None, /) -> np.ndarray: ...


KEPT = 2  # sets of features that a process remembers: those of this round, and of the one before

_known: OrderedDict[tuple[str, str], Tensor] = OrderedDict()


def input_batch(
    view: Batches,
    rows: npt.ArrayLike,
    numerics: Numerics,
    rng: torch.Generator | None = None,
    how: Augment | None = None,
) -> Tensor:
    """Pictures of a view as they go into a network in training; with `how` each one is changed at random.

    Where the first part of the network is frozen, its activations. Mirror images of stored activations are chosen with
    the same random numbers with which pictures are mirrored.
    """
    rows = np.asarray(rows)
    if view.faces.stored:
        flips = how is not None and rng is not None and how.flip and len(rows) > 0
        mirrored = (torch.rand(len(rows), generator=rng) < 0.5).numpy() if flips else None
        return numerics.place(_entering(view, rows, numerics.channels_last, mirrored))
    x = to_float(view.batch(rows), numerics.channels_last)
    return numerics.place(view.faces.through(x if how is None or rng is None else augment(x, rng, how)))


def _entering(view: Batches, rows: np.ndarray, channels_last: bool, mirrored: np.ndarray | None = None) -> Tensor:
    """Stored activations as they go into a network."""
    x = to_float(view.batch(rows, mirrored), channels_last)
    return x if channels_last else x.contiguous()


Chunk = tuple[Tensor, Callable[[], Tensor]]  # input of a network, and the same for the mirror images


def features_of(model: nn.Module, view: Batches, channels_last: bool = True) -> Tensor:
    """Features (n, E) of the pictures of a view on the CPU, not normalised; leaves the network in evaluation mode."""
    parts = _features(model, _chunks(view, BATCH, lambda pictures: to_float(pictures, channels_last), channels_last))
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def embed(
    model: nn.Module, view: FaceView, *, flip: bool = False, batch: int = BATCH, inputs: Inputs | None = None
) -> npt.NDArray[np.float32]:
    """Features (n, E) of the pictures of a view; with `flip` the sum over picture and mirror image.

    `inputs` says how pictures go in, by default in their own size and in [-1, 1].
    """
    taken = inputs or Inputs(size=view.faces.size)
    parts = _features(model, _chunks(view, batch, lambda pictures: taken.tensor(resized(pictures, taken.size))), flip)
    return _joined(model, parts, lambda: view.faces.through(moved(torch.zeros(2, 3, taken.size, taken.size))))


def _chunks(view: Batches, size: int, enter: Enter, channels_last: bool = True) -> Iterator[Chunk]:
    """The input of a network from a view, `size` pictures at a time."""
    for start in range(0, len(view), size):
        rows = np.arange(start, min(start + size, len(view)))
        if view.faces.stored:
            whole = np.ones(len(rows), bool)
            yield _entering(view, rows, channels_last), partial(_entering, view, rows, channels_last, whole)
        else:
            x = enter(view.batch(rows))
            yield view.faces.through(x), partial(_mirrored, view, x)


def _mirrored(view: Batches, x: Tensor) -> Tensor:
    return view.faces.through(x.flip(3))


def embed_pictures(
    model: nn.Module,
    pictures: npt.NDArray[np.uint8],
    *,
    flip: bool = False,
    inputs: Inputs | None = None,
) -> npt.NDArray[np.float32]:
    """Features (n, E) of pictures (n, size, size, 3)."""
    taken = inputs or Inputs(size=pictures.shape[1])
    parts = []
    for start in range(0, len(pictures), BATCH):
        some = np.array(pictures[start : start + BATCH])  # a copy: mapped files cannot be written to
        x = taken.tensor(resized(some, taken.size))
        parts += _features(model, [(x, partial(x.flip, 3))], flip)
    return _joined(model, parts, lambda: moved(torch.zeros(2, 3, taken.size, taken.size)))


def _joined(model: nn.Module, parts: list[Tensor], some: Callable[[], Tensor]) -> npt.NDArray[np.float32]:
    if not parts:  # the width of the features is known to the network alone
        parts = [part[:0] for part in _features(model, [(some(), some)])]
    return np.concatenate([part.numpy() for part in parts])


def _features(model: nn.Module, chunks: Iterable[Chunk], flip: bool = False) -> list[Tensor]:
    """Features in float32 whatever the training precision was, on the CPU."""
    on_device(model).eval()
    parts: list[Tensor] = []
    with torch.no_grad():
        for x, mirrored in chunks:
            # `forward` itself: a compiled network would be compiled again for evaluation
            found = model.forward(x)
            parts[-1:] = [part.cpu() for part in parts[-1:]]  # only now: a device is at the next ones meanwhile
            parts.append((found + model.forward(mirrored()) if flip else found).float())
    return [part.cpu() for part in parts]


def shared_features(model: nn.Module, theta: Weights, view: FaceView, channels_last: bool = True) -> Tensor:
    """`features_of` for pictures that every client has; `theta` are the weights that the network holds.

    Simulated clients of one process do the same work on the same weights: it is done once. The answer is a pure
    function of weights and pictures, so it is the same bits whichever client asks first.
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


HeadStart = Literal["random", "means"]  # where a head of a client's own starts


def client_head(
    client: Client,
    settings: HeadSettings,
    W: Tensor | None,
    model: nn.Module,
    start: HeadStart = "random",
    refresh: bool = False,
) -> tuple[Head, Tensor, Tensor | None]:
    """The head to train, the labels (n,) of the training pictures as its rows, and the mask of classes present.

    W None: the head that the client keeps in its state, or a new one, with no mask. The rows of a new one with start =
    "means", and of one that is kept with `refresh`, are the mean features of the client's identities as `model` gives
    them. W (identities, E): a global head; classes that the client does not have are masked, so that their logits are
    -inf and their gradients 0.
    """
    train = client.data.train
    labels = torch.from_numpy(train.labels)
    if W is not None:
        head = settings.build(len(W), client.embedding)
        head.weight.data.copy_(W)
        rows = torch.from_numpy(train.classes)
        return head, rows[labels], torch.zeros(len(W), dtype=torch.bool).index_fill_(0, rows, True)
    if kept := "head" in client.state:
        with torch.random.fork_rng(devices=[]):  # a new head draws random numbers, which this step must not notice
            head = settings.build(train.n_classes, client.embedding)
        load_weights(head, client.state["head"])
    else:
        head = settings.build(train.n_classes, client.embedding)
    if (refresh if kept else start == "means") and len(train):
        features = features_of(model, train, client.numerics.channels_last)
        head.weight.data.copy_(class_means(features, labels, train.n_classes))
    return head, labels, None
