"""The registry of metrics: the name of each, its meaning, which way is better, and how it is printed.

A new metric needs the function that computes it and one entry in `METRICS`: with `test` and `read` it then stands in
the evaluations of a run, in the table at its end, and in the curves and tables of the reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from visard.errors import VisardError
from visard.evaluation.arrays import Result
from visard.files import json_list, mapping, number, whole
from visard.plugins import Registry
from visard.text import NBSP, listing, percent, plain, share, visible

FAR = (1e-1, 1e-2, 1e-3)  # false accept rates where nothing else is asked for
CLIENT_FAR = (1e-1, 1e-2)  # on the test pictures of one client, which are few
PERSONAL_FAR = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # one client's identities among those of all
PERSONAL_FPIR = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
IJB_FAR = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FPIR = (1e-2, 1e-1)  # false positive identification rates
RANKS = (1, 5, 10)
LEVEL = 0.95  # of the confidence intervals that are shown
CHANCE = 0.6  # area under the ROC below which a model hardly tells people apart
WIDE = 0.2  # of a 95 % interval
FEW = 10  # below this many expected false accepts a rate depends on single pairs


@dataclass(frozen=True)
class Metric:
    """The description of a metric. In label and meaning, "{}" stands for the number in the name."""

    label: str
    meaning: str = ""
    is_share: bool = False  # from 0 to 1, printed in per cent
    higher_is_better: bool | None = None
    test: Literal["verification", "identification", ""] = ""  # the test of a model that has it
    read: Callable[[dict[str, Any]], Any] | None = None  # its value from the record of that test; {number: value}
    doubt: Callable[[dict[str, Any], float], str] | None = None  # why it is unreliable at this number; "" = it is not
    brief: Collection[float] | None = None  # the numbers at which it stands in curves and in the table of a run; all
    card: int | None = None  # decimals on its card at the top of a report; None: it has no card
    counts: bool = False  # the number in the name is a count, not a rate
    key: str = ""  # the name in the run folder

    def text(self, value: float | None, digits: int = 2) -> str:
        """The value as it is printed."""
        return percent(value, digits) if self.is_share else plain(value)


def _at(rate: str, value: str) -> Callable[[dict[str, Any]], dict[float, Any]]:
    """Reads a list of rates: {"far": 0.1, "tar": 0.6}, ... as {0.1: 0.6}, lax ones first."""

    def read(record: dict[str, Any]) -> dict[float, Any]:
        rows = map(mapping, json_list(record.get(value)))
        found = {at: row.get(value) for row in rows if (at := number(row.get(rate))) is not None}
        return dict(sorted(found.items(), reverse=True))

    return read


def _few(trials: str, words: str) -> Callable[[dict[str, Any], float], str]:
    """Doubts a rate that stands for fewer than `FEW` of the named trials."""

    def doubt(record: dict[str, Any], rate: float) -> str:
        count = whole(record.get(trials))
        few = count is not None and rate * count < FEW
        return f"unreliable: {words.format(plain(rate * (count or 0), 3))}" if few else ""

    return doubt


def _ranks(record: dict[str, Any]) -> dict[float, Any]:
    return dict(sorted((int(k), v) for k, v in mapping(record.get("rank")).items() if str(k).isdecimal()))


Share = partial(Metric, is_share=True, higher_is_better=True)

# In the order in which metrics are read. "{}" in a name is a number: tar@far=0.01.
METRICS: Registry[Metric] = Registry("metrics", {
    "accuracy": Share(
        "Verification accuracy",
        "Share of picture pairs judged rightly as same person or not. The threshold is chosen on nine tenths of"
        " the pairs and tested on the last tenth, ten times over.",
        test="verification", card=2,
    ),
    "tar@far={}": Share(
        "TAR at FAR {}",
        "True accept rate: the share of genuine pairs accepted at the threshold at which at most"
        " {} of the impostor pairs are accepted (the false accept rate).",
        test="verification", read=_at("far", "tar"), card=1,
        doubt=_few("impostors", f"{{}} false accepts allowed, at least {FEW} needed"),
    ),
    "rank1": Share(
        "Rank-1 identification",
        "Share of searches in a gallery of known people whose best match is the right person. A larger gallery is"
        " harder.",
        card=1,
    ),
    "rank{}": Share(
        "Rank-{} identification",
        "Share of searches in a gallery of known people whose best match has the right person among the first {}."
        " A larger gallery is harder.",
        test="identification", read=_ranks, brief=(1,), counts=True,
    ),
    "tpir@fpir={}": Share(
        "TPIR at FPIR {}",
        "Open-set search: the share of known people that are found first and above the threshold at which"
        " {} of the strangers raise a false alarm.",
        test="identification", read=_at("fpir", "tpir"), doubt=_few("unmated", "few strangers"), brief=(),
    ),
    "eer": Metric(
        "Equal error rate",
        "The error at the threshold where the share of genuine pairs rejected equals the share of impostor pairs"
        " accepted. Lower is better.",
        is_share=True, higher_is_better=False, test="verification", card=2,
    ),
    "auc": Share(
        "Area under the ROC",
        "The chance that a genuine pair scores higher than an impostor pair: 100 % is perfect, 50 % guessing.",
        test="verification",
    ),
    "balanced_accuracy": Share(
        "Balanced accuracy",
        "Share of test samples whose class was predicted rightly, as the mean over the classes.",
    ),
    "weighted_f1": Share(
        "Weighted F1",
        "Harmonic mean of precision and recall of each class, weighted by how many samples it has.",
    ),
    "gradients": Metric(
        "Gradient evaluations",
        "Forward and backward passes of all clients in a round: what a step costs differs between methods.",
    ),
    "samples": Metric("Pictures drawn", "Training pictures that all clients drew in a round."),
    "loss": Metric(
        "Training loss",
        "What the clients minimise, as the mean over those that replied. Lower is better.",
        higher_is_better=False,
    ),
    "loss_source": Metric(
        "Training loss, source", "What the source minimises. Lower is better.", higher_is_better=False
    ),
    "loss_target": Metric(
        "Training loss, sites", "What the sites minimise, as their mean. Lower is better.", higher_is_better=False
    ),
    "lr": Metric("Learning rate"),
}, lambda value: isinstance(value, Metric))  # fmt: skip
_NUMBER = r"([0-9.]+(?:e-?[0-9]+)?)"
# for names without an entry
_LOWER = re.compile(r"loss|error|eer|fnmr|frr|fnir|\bfar\b|\bfmr\b", re.I)
_SHARE = re.compile(r"(.*_)?(accuracy|acc|eer|auc|f1|jain)", re.I)


def _find(name: str) -> tuple[str, float | None]:
    """The entry of a name, and the number in it; an empty entry if there is none."""
    for entry in METRICS:
        before, numbered, after = entry.partition("{}")
        pattern = re.escape(before) + (_NUMBER + re.escape(after) if numbered else "")
        if match := re.fullmatch(pattern, name, re.I):
            return entry, float(match[1]) if numbered else None
    return "", None


def describe(key: str) -> Metric:
    """The description of a metric by its name in the run folder; an unknown name speaks for itself.

    A metric of a named test set is written "test set/metric".
    """
    test_set, slash, name = key.rpartition("/")
    if slash:
        inner = describe(name)
        return replace(inner, key=key, label=f"{inner.label}, {visible(test_set, 30)}")
    entry, at = _find(name)
    if not entry:
        is_share, lower = bool(_SHARE.fullmatch(name)), bool(_LOWER.search(name))
        better = False if lower else True if is_share else None
        return Metric(visible(name.replace("_", " "), 40), "", is_share, better, key=key)
    metric = METRICS[entry]
    if at is None:
        return replace(metric, key=key)
    shown = f"{at:g}" if metric.counts else share(at)
    return replace(metric, key=key, label=metric.label.format(shown), meaning=metric.meaning.format(shown))


def order(key: str) -> tuple[str, int, float]:
    """Sorts metrics as one reads them: test set by test set, as registered, rates from lax to strict, ranks rising."""
    test_set, _, name = key.rpartition("/")
    entry, at = _find(name)
    if not entry:
        return test_set, len(METRICS), 0.0
    return test_set, list(METRICS).index(entry), (at or 0.0) * (1 if METRICS[entry].counts else -1)


@dataclass(frozen=True)
class Value:
    """A metric as a test measured it."""

    metric: Metric
    value: float | None
    at: float | None = None  # the number in the name
    low: float | None = None  # the 95 % interval
    high: float | None = None
    doubt: str = ""  # why it is unreliable
    brief: bool = True

    @property
    def name(self) -> str:
        return self.metric.key


def values(test: Mapping[str, Any]) -> list[Value]:
    """All registered metrics of a test of a model, {"verification": {...}, "identification": {...}}, test by test."""
    found = []
    for kind in ("verification", "identification"):
        record = mapping(test.get(kind))
        intervals = mapping(record.get("intervals"))
        for entry, metric in METRICS.items() if record else ():
            if metric.test != kind:
                continue
            read = metric.read(record) if metric.read else record.get(entry)
            for at, value in read.items() if metric.read and isinstance(read, dict) else ((None, read),):
                name = entry if at is None else entry.format(f"{at:g}")
                interval = mapping(intervals.get(re.sub("@.*=", "/", name)))
                low, high = number(interval.get("low")), number(interval.get("high"))
                known = None not in (low, high) and interval.get("level", LEVEL) == LEVEL
                found.append(
                    Value(
                        describe(name),
                        number(value),
                        at,
                        low if known else None,
                        high if known else None,
                        metric.doubt(record, at) if metric.doubt and at is not None else "",
                        metric.brief is None or at in metric.brief,
                    )
                )
    return found


def names_of(test: str, numbers: Collection[float]) -> list[str]:
    """All names that `values` can give of a "verification" or an "identification" at these rates or ranks."""
    entries = [entry for entry, metric in METRICS.items() if metric.test == test]
    return [entry.format(f"{n:g}") for entry in entries for n in (numbers if "{}" in entry else (0,))]


def brief(test: Mapping[str, Any]) -> dict[str, float | None]:
    """The few metrics of a test that a curve or a table shows."""
    return {v.name: v.value for v in values(test) if v.brief}


def doubts(test: Mapping[str, Any]) -> list[str]:
    """Warnings about the metrics of a test: a model that guesses, intervals too wide for a comparison."""
    found, said = values(test), []
    area = next((v.value for v in found if v.name == "auc" and v.value is not None), None)
    if area is not None and area < CHANCE:
        said.append(
            f"Near chance: the area under the ROC is {percent(area)}, guessing gives 50 %. Check how pictures go into"
            " the network (size, order, mean, std) and how they were aligned, or train longer."
        )
    wide = [v for v in found if v.brief and not v.doubt and v.low is not None and v.high is not None
            and v.high - v.low > WIDE]  # fmt: skip
    if wide:
        texts = [f"{v.metric.label} is {percent(v.low)} to {percent(v.high)}" for v in wide]
        said.append(f"Wide intervals: {listing(texts)}. Tests on more people narrow them.")
    return [text.replace(NBSP, " ") for text in said]  # terminals show them too


@dataclass(frozen=True)
class ClientSummary(Result):
    """One metric over clients. `std` has the stated `ddof`; gap = |best - worst|.

    Jain index = (Σx)² / (n Σx²): 1 when all clients fare alike, 1/n when one has everything; None for values
    below zero. `missing`: clients without this metric.
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
    x = x / largest  # squares of tiny values would vanish
    return float(x.sum() ** 2 / (len(x) * np.square(x).sum()))


def summarise(measured: Mapping[str, Mapping[str, float | None]], ddof: int = 0) -> dict[str, ClientSummary]:
    """Summary of each metric of {client: {metric: value}}; None and NaN count as missing.

    Of equal clients the first by name is named. The deviation of fewer than ddof + 1 clients is NaN; a metric that
    no client has is left out.
    """
    if not measured:
        raise VisardError("summary: there are no clients")
    metrics = dict.fromkeys(metric for values in measured.values() for metric in values)
    found: dict[str, ClientSummary] = {}
    for metric in metrics:
        have = {
            client: float(value)
            for client, values in sorted(measured.items())
            if (value := values.get(metric)) is not None and math.isfinite(value)
        }
        if not have:
            continue
        lower = describe(metric).higher_is_better is False
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
            missing=tuple(client for client in sorted(measured) if client not in have),
        )
    return found
