"""How well a client's own model knows the client's people among everybody's (Liu et al. 2022).

1:1  genuine = all pairs of pictures of one local person; impostors = every other pair with at least one local picture.
1:N  gallery = the local people, each from its registered (training) pictures; probes = the test pictures of everybody.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from visard.errors import VisardError
from visard.evaluation.arrays import Floats, Ints, labels, matrix, unit_rows
from visard.evaluation.bins import Progress
from visard.evaluation.identification import Identification, identify
from visard.evaluation.ijb import Legacy, legacy_rule
from visard.evaluation.metrics import PERSONAL_FAR, PERSONAL_FPIR, values
from visard.evaluation.scores import Limits, Roc, stream_roc

STREAM = Limits(exact_auc_pairs=0)  # TAR at FAR is exact; the area, which nobody asks for here, comes from the bins


def personal_roc(
    features: Any,
    identity: Any,
    local: Any,
    *,
    far: tuple[float, ...] = PERSONAL_FAR,
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
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, *, fpir: tuple[float, ...] = PERSONAL_FPIR
) -> Identification:
    """1:N by the standard definition (identification.py): a false alarm is a stranger who finds anybody."""
    return identify(gallery, gallery_identity, probes, probe_identity, ranks=(1,), fpir=fpir)


def personal_search_legacy(
    gallery: Any, gallery_identity: Any, probes: Any, probe_identity: Any, *, fpir: tuple[float, ...] = PERSONAL_FPIR
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
        found |= _named({"verification": roc.to_dict()}, roc.impostors)
    if not np.isin(wanted, np.asarray(gallery_identity)).any():
        return found
    search = personal_search(gallery, gallery_identity, probes, wanted)
    found |= _named({"identification": search.to_dict()}, search.unmated)
    if len(np.unique(gallery_identity)) > 1 or not mine.all():
        old = personal_search_legacy(gallery, gallery_identity, probes, wanted)
        for before in old.tpir:
            if before.tpir is not None and before.fpir * len(wanted) >= 1:
                found[f"personal/legacy_tpir@fpir={before.fpir:g}"] = before.tpir
    return found


def _named(test: dict[str, Any], trials: int) -> dict[str, float]:
    """The registered metrics of a test, without rates that stand for less than one of its impostors or strangers."""
    return {
        f"personal/{v.name}": v.value
        for v in values(test)
        if v.value is not None and (v.at is None or v.at * trials >= 1)
    }
