"""Pictures to features, in float32 whatever the training precision was."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from visard.data.faces import FaceView
from visard.models.inputs import Inputs, resized

BATCH = 256


def embed(
    model: nn.Module, view: FaceView, *, flip: bool = False, batch: int = BATCH, inputs: Inputs | None = None
) -> npt.NDArray[np.float32]:
    """Features (n, E) of the pictures of a view; with `flip` the sum over picture and mirror image.

    `inputs` says how pictures go in, by default in their own size and in [-1, 1].
    """
    chunks = (view.batch(np.arange(i, min(i + batch, len(view)))) for i in range(0, len(view), batch))
    return _embed(model, chunks, flip, inputs or Inputs(size=view.faces.size))


def embed_pictures(
    model: nn.Module,
    pictures: npt.NDArray[np.uint8],
    *,
    flip: bool = False,
    batch: int = BATCH,
    inputs: Inputs | None = None,
) -> npt.NDArray[np.float32]:
    """Features (n, E) of pictures (n, size, size, 3)."""
    chunks = (pictures[i : i + batch] for i in range(0, len(pictures), batch))
    return _embed(model, chunks, flip, inputs or Inputs(size=pictures.shape[1]))


def _embed(
    model: nn.Module, chunks: Iterable[npt.NDArray[np.uint8]], flip: bool, inputs: Inputs
) -> npt.NDArray[np.float32]:
    model.eval()
    parts = []
    with torch.inference_mode():
        for chunk in chunks:
            x = inputs.tensor(resized(chunk, inputs.size))
            # `forward` itself: a compiled network would be compiled again for evaluation
            features = model.forward(x)
            if flip:
                features = features + model.forward(x.flip(3))
            parts.append(features.float().numpy())
        if not parts:  # the width of the features is known to the network alone
            empty: npt.NDArray[np.float32] = model.forward(torch.zeros(2, 3, inputs.size, inputs.size)).numpy()[:0]
            return empty
    return np.concatenate(parts)
