"""How well a client's own model knows the client's people among everybody's (Liu et al. 2022).

1:1  genuine = all pairs of pictures of one local person; impostors = every other pair with at least one local picture.
1:N  gallery = the local people, each from its registered (training) pictures; probes = the test pictures of everybody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from visard.errors import VisardError
from visard.evaluation.arrays import Floats, Ints, Result, labels, matrix, unit_rows
from visard.evaluation.bins import Progress
from visard.evaluation.identification import Identification, identify
from visard.evaluation.ijb import Legacy, legacy_rule
from visard.evaluation.scores import Limits, Roc, stream_roc

FAR = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
FPIR = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
STREAM = Limits(exact_auc_pairs=0)  # TAR at FAR is exact; the area, which nobody asks for here, comes from the bins


def personal_roc(
    features: Any,
    identity: Any,
    local: Any,
    *,
    far: tuple[float, ...] = FAR,
    rule: str = "conservative",
    limits: Limits = STREAM,
    progress: Progress | None = None,
) -> Roc:
    """1:1 over test pictures (N, E) of everybody with their `identity` (N,); `local`: the client's identities.

    L local pictures of N give L(N - L) + L(L - 1)/2 pairs, each counted once, in bounded memory.
    """
    people = labels(identity, len(matrix(features, "features")))
    order, count = _locals_first(people, local)
    return stream_roc(features, order, below=count, far=far, rule=rule, limits=limits, progress=progress)


def _locals_first(identity: Ints, local: Any) -> tuple[Ints, int]:
    """The identities renumbered so that local ones are the smallest, and how many those are."""
    names, inverse = np.unique(identity, return_inverse=True)
    mine = np.isin(names, np.asarray(local))
    if not mine.any():
        raise VisardError("no test picture shows a person of the client")
    number = np.empty(len(names), np.int64)
    number[mine] = np.arange(mine.sum())
    number[~mine] = np.arange(mine.sum(), len(names))
    return number[inverse], int(mine.sum())


def personal_search(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, *, fpir: tuple[float, ...] = FPIR
) -> Identification:
    """1:N by the standard definition (identification.py): a false alarm is a stranger who finds anybody."""
    return identify(gallery, gallery_identity, probes, probe_identity, ranks=(1,), fpir=fpir)


def personal_search_legacy(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, *, fpir: tuple[float, ...] = FPIR
) -> Legacy:
    """1:N as the paper's released code counts (`galleries.search_legacy`).

    Its gallery row is the mean of unit features and is not scaled to length one again.
    """
    rows, people = unit_rows(gallery, "gallery features"), labels(gallery_identity, len(np.asarray(gallery)))
    names, inverse, count = np.unique(people, return_inverse=True, return_counts=True)
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, inverse, rows)
    means: Floats = (sums / count[:, None]).astype(np.float32)
    wanted = labels(probe_identity, len(np.asarray(probes)), "probe identity")
    return legacy_rule(means, names, unit_rows(probes, "probe features"), wanted, ranks=(1,), fpir=fpir)


def personal_figures(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, local: Any
) -> dict[str, float]:
    """The figures of both protocols by name; one that stands for less than one impostor is left out."""
    wanted = np.asarray(probe_identity)
    mine = np.isin(wanted, np.asarray(local))
    found: dict[str, float] = {}
    if np.unique(wanted[mine], return_counts=True)[1].max(initial=0) > 1 and len(np.unique(wanted)) > 1:
        roc = personal_roc(probes, wanted, local)
        found |= {f"personal/tar@far={p.far:g}": p.tar for p in roc.tar if p.far * roc.impostors >= 1}
        found |= {"personal/eer": roc.eer, "personal/auc": roc.auc}
    if not np.isin(wanted, np.asarray(gallery_identity)).any():
        return found
    search = personal_search(gallery, gallery_identity, probes, wanted)
    found["personal/rank1"] = search.rank[1]
    for point in search.tpir:
        if point.tpir is not None and point.fpir * search.unmated >= 1:
            found[f"personal/tpir@fpir={point.fpir:g}"] = point.tpir
    if len(np.unique(gallery_identity)) > 1 or not mine.all():
        old = personal_search_legacy(gallery, gallery_identity, probes, wanted)
        for before in old.tpir:
            if before.tpir is not None and before.fpir * len(wanted) >= 1:
                found[f"personal/legacy_tpir@fpir={before.fpir:g}"] = before.tpir
    return found


# ----------
# Figures per client put together: mean, spread, worst and best client, fairness.

LOWER_IS_BETTER = ("eer", "loss", "frr", "fnir", "error")


@dataclass(frozen=True)
class ClientSummary(Result):
    """One metric over clients. `std` has the stated `ddof`; gap = |best - worst|.

    Jain index = (Σx)² / (n Σx²): 1 when all clients fare alike, 1/n when one has everything; None for figures
    below zero. `missing`: clients without this figure.
    """

    metric: str
    clients: int
    mean: float
    std: float
    ddof: int
    worst: float
    worst_client: str
    best: float
    best_client: str
    gap: float
    jain: float | None
    lower_is_better: bool
    missing: tuple[str, ...]


def jain_index(values: Collection[float]) -> float | None:
    """(Σx)² / (n Σx²); all zeros are perfectly equal."""
    x = np.asarray(list(values), np.float64)
    if (x < 0).any():
        return None
    largest = x.max()
    if largest == 0:
        return 1.0
    x = x / largest  # squares of tiny figures would vanish
    return float(x.sum() ** 2 / (len(x) * np.square(x).sum()))


def summarise(
    figures: Mapping[str, Mapping[str, float | None]],
    *,
    lower_is_better: Collection[str] = LOWER_IS_BETTER,
    ddof: int = 0,
) -> dict[str, ClientSummary]:
    """Summary of each metric of {client: {metric: value}}; None and NaN count as missing.

    A metric is lower-is-better if its last part ("lfw/eer" -> "eer") is listed. Of equal clients the first
    by name is named. The deviation of fewer than ddof + 1 clients is NaN; a metric nobody has is left out.
    """
    if not figures:
        raise VisardError("summary: there are no clients")
    metrics = dict.fromkeys(metric for values in figures.values() for metric in values)
    found: dict[str, ClientSummary] = {}
    for metric in metrics:
        have = {
            client: float(value)
            for client, values in sorted(figures.items())
            if (value := values.get(metric)) is not None and math.isfinite(value)
        }
        if not have:
            continue
        lower = metric.rsplit("/", 1)[-1] in lower_is_better
        low, high = min(have, key=have.__getitem__), max(have, key=have.__getitem__)
        worst, best = (high, low) if lower else (low, high)
        x = np.array(list(have.values()))
        found[metric] = ClientSummary(
            metric=metric,
            clients=len(have),
            mean=float(x.mean()),
            std=float(x.std(ddof=ddof)) if len(x) > ddof else math.nan,
            ddof=ddof,
            worst=have[worst],
            worst_client=worst,
            best=have[best],
            best_client=best,
            gap=abs(have[best] - have[worst]),
            jain=jain_index(have.values()),
            lower_is_better=lower,
            missing=tuple(client for client in sorted(figures) if client not in have),
        )
    return found
