"""The test of one model on people whom it was not trained on: 1:1 over all pairs and in ten folds, and 1:N."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from visard.errors import VisardError
from visard.evaluation.identification import identify, split_gallery
from visard.evaluation.verification import make_pairs, verify_all, verify_pairs

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
