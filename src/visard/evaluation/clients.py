"""A client tests its own model on its own held-out pictures; only figures leave."""

from __future__ import annotations

import numpy as np

from visard.core import Client, Weights
from visard.data.faces import FaceView
from visard.errors import VisardError
from visard.evaluation.embedding import embed
from visard.evaluation.identification import identify
from visard.evaluation.verification import verify_all
from visard.ops.training import load_weights

FAR = (0.1, 0.01)


def score_client(client: Client, theta: Weights | None, benchmarks: tuple[str, ...]) -> tuple[dict[str, float], int]:
    """Figures of the client's test pictures and of the named public test sets, and the number of test pictures.

    Verification: all pairs of its test pictures. Identification: gallery = mean features of its training
    pictures, probes = its test pictures. A figure that the pictures cannot give is left out.
    """
    if theta is None:
        raise VisardError("has no model to test")
    model, figures = client.network(), {}
    load_weights(model, theta)
    test, train = client.data.test, client.data.train
    probes = embed(model, test)
    if _has_both_kinds_of_pairs(test):
        figures.update(_verification(probes, test.identity, ""))
    if len(test) and len(train):
        result = identify(embed(model, train), train.identity, probes, test.identity, ranks=(1,))
        figures["rank1"] = result.rank[1]
    for name in benchmarks:
        view = client.benchmarks[name]
        figures.update(_verification(embed(model, view), view.identity, f"{name}/"))
    return figures, len(test)


def _has_both_kinds_of_pairs(view: FaceView) -> bool:
    counts = np.bincount(view.labels, minlength=1)
    return bool((counts > 1).any() and (counts > 0).sum() > 1)


def _verification(features: np.ndarray, identity: np.ndarray, prefix: str) -> dict[str, float]:
    result = verify_all(features, identity, far=FAR)
    return {f"{prefix}tar@far={p.far:g}": p.tar for p in result.tar} | {
        f"{prefix}eer": result.eer,
        f"{prefix}auc": result.auc,
    }
