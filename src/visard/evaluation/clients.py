"""A client tests its own model on its own held-out pictures; only figures leave."""

from __future__ import annotations

import numpy as np

from visard.core import Client, Weights
from visard.data.faces import FaceView
from visard.errors import Told
from visard.evaluation.embedding import embed
from visard.evaluation.identification import identify
from visard.evaluation.personal import personal_figures
from visard.evaluation.verification import verify_all
from visard.models.personal import split_transform, with_transform
from visard.ops.training import load_weights

FAR = (0.1, 0.01)


def score_client(client: Client, theta: Weights | None, benchmarks: tuple[str, ...]) -> tuple[dict[str, float], int]:
    """Figures of the client's test pictures and of the named public test sets, and the number of test pictures.

    Verification: all pairs of its test pictures. Identification: gallery = mean features of its training
    pictures, probes = its test pictures. Where the client has the test pictures of all parties (evaluation.impostors
    = all), also the personal protocols among them. A figure that the pictures cannot give is left out.
    """
    if theta is None:
        raise Told("has no model to test")
    figures: dict[str, float] = {}
    weights, transform = split_transform(theta)
    load_weights(client.network(), weights)
    model = with_transform(client.network(), transform, client.embedding)
    test, train = client.data.test, client.data.train
    probes = embed(model, test)
    if _has_both_kinds_of_pairs(test):
        figures.update(_verification(probes, test.identity, ""))
    if len(test) and len(train):
        gallery = embed(model, train)
        result = identify(gallery, train.identity, probes, test.identity, ranks=(1,))
        figures["rank1"] = result.rank[1]
        if client.others is not None:
            others = client.others
            local = np.unique(test.identity)
            figures |= personal_figures(gallery, train.identity, embed(model, others), others.identity, local)
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
