"""The tables of an IJB protocol, and what is left of them when some pictures could not be imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.sources.listing import Numbers, rows_of


@dataclass(frozen=True, eq=False)
class Split:
    """One protocol: which item (T,) is in which template, and the comparisons; see `visard.data.templates`."""

    item: Numbers
    template: Numbers
    media: Numbers
    subject: Numbers
    score: npt.NDArray[np.float32]
    pairs: npt.NDArray[np.int32] | None = None  # (P, 3): template, template, same
    galleries: dict[str, Numbers] = field(default_factory=dict)  # name -> (n, 2): template, subject
    probes: Numbers | None = None  # (n, 2)


def keep_splits(
    splits: dict[int, Split], kept: Numbers, count: int, info: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays to save; pairs and gallery entries of templates without any picture are dropped and counted."""
    row_of = rows_of(kept, count)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    about: dict[str, Any] = {
        "splits": sorted(splits),
        "galleries": sorted({n for s in splits.values() for n in s.galleries}),
    }
    about |= {"templates": 0, "templates_dropped": 0, "pairs": 0, "pairs_dropped": 0}
    for k, split in splits.items():
        rows = row_of[split.item]
        there = rows >= 0
        table = np.stack([rows, split.template, split.media, split.subject], 1)[there]
        arrays[f"templates_{k}"], arrays[f"scores_{k}"] = table, split.score[there]
        left = np.unique(table[:, 1])
        about["templates"] += len(left)
        about["templates_dropped"] += len(np.unique(split.template)) - len(left)
        if split.pairs is not None:
            pairs = split.pairs[np.isin(split.pairs[:, :2], left).all(1)] if about["templates_dropped"] else split.pairs
            arrays[f"template_pairs_{k}"] = pairs
            about["pairs"] += len(pairs)
            about["pairs_dropped"] += len(split.pairs) - len(pairs)
        for name, gallery in split.galleries.items():
            arrays[f"gallery_{k}_{name}"] = gallery[np.isin(gallery[:, 0], left)]
        if split.probes is not None:
            arrays[f"probes_{k}"] = split.probes[np.isin(split.probes[:, 0], left)]
    info["ijb"] = about
    return arrays
