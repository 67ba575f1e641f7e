"""The test of one model on people whom it was not trained on: 1:1 over all pairs and in ten folds, and 1:N."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from visard.data.faces import FaceView
from visard.errors import VisardError
from visard.evaluation.identification import identify, split_gallery
from visard.evaluation.verification import make_pairs, verify_all, verify_pairs
from visard.models.files import Inputs, resized

Features = npt.NDArray[np.float32]
Identity = npt.NDArray[np.int64]


class Settings(Protocol):
    """What `[evaluation]` says; see `visard.config.EvaluationSettings`."""

    @property
    def pairs(self) -> int: ...
    @property
    def far(self) -> tuple[float, ...]: ...
    @property
    def bootstrap(self) -> int: ...


def verification(features: Features, identity: Identity, settings: Settings, seed: int = 0) -> dict[str, Any]:
    """TAR at FAR, EER and AUC over all pairs, and the ten-fold accuracy over balanced pairs, as plain values."""
    every = verify_all(features, identity, far=settings.far, bootstrap=settings.bootstrap, seed=seed).to_dict()
    chosen = make_pairs(identity, _pairs(identity, settings.pairs), seed)
    folds = verify_pairs(
        features, chosen.pairs, chosen.same, identity=identity, bootstrap=settings.bootstrap, seed=seed
    ).to_dict()  # fmt: skip
    for name in (
        "accuracy",
        "accuracy_std",
        "fold_accuracy",
        "fold_distance",
        "best_accuracy",
        "best_threshold",
    ):
        every[name] = folds[name]
    every["intervals"] = {
        **(every["intervals"] or {}),
        **{k: v for k, v in (folds["intervals"] or {}).items() if k in ("accuracy", "best")},
    }
    return every | {"fold_pairs": len(chosen.pairs), "folds_disjoint": chosen.disjoint}


def _pairs(identity: Identity, wanted: int) -> int:
    """As many balanced pairs as asked for, or as the set can give."""
    sizes = np.unique(identity, return_counts=True)[1]
    genuine = int((sizes * (sizes - 1) // 2).sum())
    impostors = len(identity) * (len(identity) - 1) // 2 - genuine
    possible = 2 * min(genuine, impostors)
    if possible < 20:
        raise VisardError(f"the test set has {genuine} genuine and {impostors} impostor pairs: too few for ten folds")
    return min(wanted, possible // 2 * 2)


def identification(features: Features, identity: Identity, settings: Settings, seed: int = 0) -> dict[str, Any]:
    """Rank-k and TPIR at FPIR: one picture of most people as gallery, the rest as probes, as plain values."""
    parts = split_gallery(identity, seed)
    result = identify(
        features[parts.gallery], identity[parts.gallery], features[parts.probe], identity[parts.probe]
    )  # fmt: skip
    return result.to_dict()


def flat(test: dict[str, Any]) -> dict[str, float | None]:
    """The few figures of a test that a curve or a table shows."""
    ver, ident = test.get("verification", {}), test.get("identification", {})
    figures = {"accuracy": ver.get("accuracy")}
    figures |= {f"tar@far={p['far']:g}": p["tar"] for p in ver.get("tar", [])}
    figures |= {"eer": ver.get("eer"), "auc": ver.get("auc")}
    figures |= {f"rank{k}": v for k, v in ident.get("rank", {}).items() if k == "1"}
    return figures


# ----------
# Pictures to features, in float32 whatever the training precision was.

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
