"""RFW as the test of a bench's runs: the pairs of each domain, and rank-1 among its people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from visard.api import embed, evaluate, load_model, open_data
from visard.bench.figures import NoFigure
from visard.bench.plan import Column
from visard.data.faces import FaceView
from visard.errors import UsageError
from visard.evaluation.generic import Features
from visard.evaluation.identification import identify
from visard.files import read_json, write_json

SET = "rfw"  # its name in the data folder
FILE = "rfw.json"  # in a run's folder: embedding takes minutes, tables are made again and again
RATES = ("0.1", "0.01", "0.001")


def columns(side: str, domain: str) -> tuple[Column, ...]:
    """Ten-fold accuracy, TAR at three FARs and rank-1 of a domain, called by its side of the adaptation."""
    rates = [Column(f"{side} TAR @ FAR {far}", _figure(domain, far)) for far in RATES]
    return (
        Column(f"{side} accuracy", _figure(domain, "accuracy")),
        *rates,
        Column(f"{side} rank-1", _figure(domain, "rank-1")),
    )


def _figure(domain: str, name: str) -> Callable[[Path], float | None]:
    def of(folder: Path) -> float | None:
        known: dict[str, float | None] = tested(folder).get(domain, {})
        if name not in known:
            raise NoFigure(f"RFW: the set {SET} has no domain {domain}")
        return known[name]

    return of


def tested(folder: Path) -> dict[str, Any]:
    """Domain -> figure -> value of a run's model on the set `rfw`; made once."""
    if not (folder / FILE).exists():
        try:
            view = open_data(SET)
        except UsageError as error:
            raise NoFigure(f"RFW: {error} (visard data import rfw)") from None
        features = embed(load_model(folder / "model.safetensors"), view, flip=True)
        write_json(folder / FILE, figures(features, view))
    found: dict[str, Any] = read_json(folder / FILE)
    return found


def figures(features: Features, view: FaceView) -> dict[str, dict[str, float | None]]:
    """From the features of all pictures of the set."""
    groups = evaluate(features, view, protocols=("rfw",))["rfw"]["groups"]
    found = {}
    for domain, pairs in groups.items():
        rows = np.flatnonzero(view.faces.domain == view.faces.domains.index(domain))
        rates = {f"{point['far']:g}": point["tar"] for point in pairs["roc"]["tar"]}
        found[domain] = {"accuracy": pairs["accuracy"], **rates, "rank-1": rank_1(features[rows], view.identity[rows])}
    return found


def rank_1(features: Features, identity: Any) -> float | None:
    """Share of queries, one picture of everybody who has two or more, whose nearest picture of the rest is a mate."""
    _, first, counts = np.unique(identity, return_index=True, return_counts=True)
    query = np.zeros(len(identity), bool)
    query[first[counts > 1]] = True
    if not query.any():
        return None
    rest = ~query
    return identify(features[rest], identity[rest], features[query], identity[query], template="max").rank[1]
