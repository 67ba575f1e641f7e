"""The final figures of a run, taken from metrics.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from visard.report.disclosure import Leaving
from visard.report.run_folder import Evaluation, Run, mapping, number, numbers, whole
from visard.report.text import duration, percent, plain, plural, share, size, visible

# ----------
# What each figure is called, what it means and which way is better.

TAR = re.compile(r"^(?:tar|tpr|tmr)\W*(?:at|@)?\W*(?:far|fpr|fmr)?[\s_@=:<]*([0-9.]+(?:e-?[0-9]+)?)$", re.I)
RANK = re.compile(r"^rank[\s_@=-]*([0-9]+)$", re.I)
TPIR = re.compile(r"^(?:tpir)\W*(?:at|@)?\W*(?:fpir)?[\s_@=:<]*([0-9.]+(?:e-?[0-9]+)?)$", re.I)
LOWER = re.compile(r"loss|error|eer|fnmr|frr|fnir|\bfar\b|\bfmr\b", re.I)
SHARES = re.compile(r"^(accuracy|acc|.*_accuracy|eer|auc|.*_auc|.*_f1|jain)$", re.I)


@dataclass(frozen=True)
class Figure:
    """The description of a figure."""

    key: str
    label: str
    meaning: str = ""
    is_share: bool = False  # between 0 and 1, shown in per cent
    higher_is_better: bool | None = None

    def text(self, value: float | None, digits: int = 2) -> str:
        return percent(value, digits) if self.is_share else plain(value)


MEANINGS = {
    "accuracy": (
        "Verification accuracy",
        "Share of picture pairs judged rightly as same person or not. The threshold is chosen on nine tenths of"
        " the pairs and tested on the last tenth, ten times over.",
    ),
    "eer": (
        "Equal error rate",
        "The error at the threshold where the share of genuine pairs rejected equals the share of impostor pairs"
        " accepted. Lower is better.",
    ),
    "auc": (
        "Area under the ROC",
        "The chance that a genuine pair scores higher than an impostor pair: 100 % is perfect, 50 % guessing.",
    ),
    "balanced_accuracy": (
        "Balanced accuracy",
        "Share of test samples whose class was predicted rightly, as the mean over the classes.",
    ),
    "weighted_f1": (
        "Weighted F1",
        "Harmonic mean of precision and recall of each class, weighted by how many samples it has.",
    ),
    "gradients": (
        "Gradient evaluations",
        "Forward and backward passes of all clients in a round: what a step costs differs between methods.",
    ),
    "samples": ("Pictures drawn", "Training pictures that all clients drew in a round."),
    "loss": (
        "Training loss",
        "What the clients minimise, as the mean over those that replied. Lower is better.",
    ),
}
COUNTERS = ("encryptions", "decryptions", "multiplications", "refreshes")  # of ciphertexts; a round's are sums
BYTES_MEANING = "Mean size of all that one client sent to the server in one round in which it replied, from the ledger."
SECONDS_MEANING = "Median wall time of a round on the machine named above: training and averaging, without evaluation."


def describe(key: str) -> Figure:
    """The description of a figure by its name in the run folder; an unknown name speaks for itself.

    A figure of a named test set is written "test set/figure".
    """
    test_set, slash, inner = key.rpartition("/")
    if slash:
        figure = describe(inner)
        return replace(figure, key=key, label=f"{figure.label}, {visible(test_set, 30)}")
    name = key.lower()
    if name in ("acc", "verification_accuracy"):
        name = "accuracy"
    if name in MEANINGS:
        label, meaning = MEANINGS[name]
        return Figure(key, label, meaning, bool(SHARES.match(name)), not LOWER.search(name))
    if match := TAR.match(key):
        return tar_at(float(match[1]), key)
    if match := RANK.match(key):
        return rank(int(match[1]), key)
    if match := TPIR.match(key):
        return tpir_at(float(match[1]), key)
    if name == "lr":
        return Figure(key, "Learning rate")
    lower = bool(LOWER.search(key))
    is_share = bool(SHARES.match(key))
    better = False if lower else True if is_share else None
    return Figure(key, visible(key.replace("_", " "), 40), "", is_share, better)


def order(key: str) -> tuple[str, int, float]:
    """Sorts figures as one reads them: accuracy, TAR from lax to strict, rank, TPIR, EER, AUC, the others."""
    test_set, _, name = key.rpartition("/")
    for place, pattern in enumerate((re.compile("acc"), TAR, RANK, TPIR, re.compile("eer$"), re.compile("auc$"))):
        if match := pattern.match(name):
            value = float(match[1]) if match.groups() else 0.0
            return test_set, place, value if pattern is RANK else -value
    return test_set, 9, 0.0


def tar_at(far: float, key: str = "") -> Figure:
    """True accept rate at a false accept rate."""
    return Figure(
        key,
        f"TAR at FAR {share(far)}",
        "True accept rate: the share of genuine pairs accepted at the threshold at which at most"
        f" {share(far)} of the impostor pairs are accepted (the false accept rate).",
        True,
        True,
    )


def rank(k: int, key: str = "") -> Figure:
    """Closed-set identification."""
    among = "is the right person" if k == 1 else f"has the right person among the first {k}"
    return Figure(
        key,
        f"Rank-{k} identification",
        f"Share of searches in a gallery of known people whose best match {among}. A larger gallery is harder.",
        True,
        True,
    )


def tpir_at(fpir: float, key: str = "") -> Figure:
    """Open-set identification."""
    return Figure(
        key,
        f"TPIR at FPIR {share(fpir)}",
        "Open-set search: the share of known people that are found first and above the threshold at which"
        f" {share(fpir)} of the strangers raise a false alarm.",
        True,
        True,
    )


BYTES = Figure("bytes", "Left a client, per round", BYTES_MEANING, False, False)
SECONDS = Figure("seconds", "Time per round", SECONDS_MEANING)


LEVEL = 0.95  # of the confidence intervals that the page shows
FEW = 10  # below this many expected false accepts the figure depends on single pairs


@dataclass(frozen=True)
class Rate:
    """A true rate at a false rate."""

    far: float
    value: float | None
    low: float | None = None
    high: float | None = None
    reliable: bool = True


@dataclass(frozen=True)
class Verification:
    """What the page shows of a 1:1 test. Ranges are 95 % intervals."""

    accuracy: float | None = None
    accuracy_range: tuple[float, float] | None = None
    tar: tuple[Rate, ...] = ()
    eer: float | None = None
    eer_range: tuple[float, float] | None = None
    auc: float | None = None
    genuine: int | None = None
    impostors: int | None = None
    threshold: float | None = None  # where both errors are equal
    roc: tuple[tuple[float, float], ...] = ()  # (FAR, TAR), FAR rising
    genuine_scores: tuple[float, ...] = ()  # counts in equal bins from -1 to 1
    impostor_scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Identification:
    """What the page shows of a 1:N test."""

    ranks: dict[int, float | None] = field(default_factory=dict)
    tpir: tuple[Rate, ...] = ()
    gallery: int | None = None
    mated: int | None = None
    unmated: int | None = None


def _range(intervals: dict[str, Any], name: str) -> tuple[float, float] | None:
    """The 95 % interval of a figure."""
    said = mapping(intervals.get(name))
    low, high = number(said.get("low")), number(said.get("high"))
    if low is None or high is None or said.get("level", LEVEL) != LEVEL:
        return None
    return low, high


def _series(value: Any) -> tuple[float, ...]:
    """A list of numbers; empty if one of them is none."""
    found = [number(v) for v in value] if isinstance(value, list) else []
    return tuple(v for v in found if v is not None) if None not in found else ()


def _rates(rows: Any, at: str, key: str, trials: int | None, intervals: dict[str, Any]) -> tuple[Rate, ...]:
    """Rates from a list of objects, lax ones first.

    Unreliable if the run says so, or if the asked false rate stands for fewer than `FEW` trials.
    """
    rates = []
    for row in map(mapping, rows if isinstance(rows, list) else []):
        far = number(row.get(at))
        if far is not None:
            low, high = _range(intervals, f"{key}/{far:g}") or (None, None)
            few = trials is not None and far * trials < FEW
            reliable = not few and row.get("unreliable") is not True
            rates.append(Rate(far, number(row.get(key)), low, high, reliable))
    return tuple(sorted(rates, key=lambda r: -r.far))


def verification(source: Any) -> Verification | None:
    """The 1:1 test from its dictionary in metrics.json, or None if there is none."""
    said = mapping(source)
    if not said:
        return None
    curve, bars, intervals = (mapping(said.get(key)) for key in ("curve", "histogram", "intervals"))
    far, tar = _series(curve.get("far")), _series(curve.get("tar"))
    impostors = whole(said.get("impostors"))
    return Verification(
        accuracy=number(said.get("accuracy")),
        accuracy_range=_range(intervals, "accuracy"),
        tar=_rates(said.get("tar"), "far", "tar", impostors, intervals),
        eer=number(said.get("eer")),
        eer_range=_range(intervals, "eer"),
        auc=number(said.get("auc")),
        genuine=whole(said.get("genuine")),
        impostors=impostors,
        threshold=number(said.get("eer_threshold")),
        roc=tuple(sorted(zip(far, tar, strict=True))) if len(far) == len(tar) else (),
        genuine_scores=_series(bars.get("genuine")),
        impostor_scores=_series(bars.get("impostor")),
    )


def identification(source: Any) -> Identification | None:
    """The 1:N test from its dictionary in metrics.json, or None if there is none."""
    said = mapping(source)
    if not said:
        return None
    ranks = {int(k): number(v) for k, v in mapping(said.get("rank")).items() if str(k).isdecimal()}
    return Identification(
        ranks=dict(sorted(ranks.items())),
        tpir=_rates(said.get("tpir"), "fpir", "tpir", whole(said.get("unmated")), {}),
        gallery=whole(said.get("gallery")),
        mated=whole(said.get("mated")),
        unmated=whole(said.get("unmated")),
    )


def verifications(run: Run) -> list[tuple[str, Verification]]:
    """(test set, 1:1 result) of the generic model."""
    generic = mapping(run.metrics.get("generic"))
    found = ((name, verification(mapping(g).get("verification"))) for name, g in generic.items())
    return [(name, v) for name, v in found if v]


def identifications(run: Run) -> list[tuple[str, Identification]]:
    """(test set, 1:N result) of the generic model."""
    generic = mapping(run.metrics.get("generic"))
    found = ((name, identification(mapping(g).get("identification"))) for name, g in generic.items())
    return [(name, v) for name, v in found if v]


def client_figures(run: Run, who: str = "clients") -> dict[str, dict[str, float | None]]:
    """figure -> client -> value, of the clients that trained or of those that were `held_out`."""
    by_client = {c: numbers(f) for c, f in mapping(mapping(run.metrics.get(who)).get("figures")).items()}
    names = list(dict.fromkeys(n for f in by_client.values() for n in f))
    return {n: {c: f[n] for c, f in by_client.items() if n in f} for n in names}


def client_summary(run: Run, who: str = "clients") -> dict[str, dict[str, Any]]:
    """figure -> mean, std, worst, worst_client, ..."""
    summary = mapping(mapping(run.metrics.get(who)).get("summary"))
    return {name: s for name, s in summary.items() if isinstance(s, dict)}


def measured(run: Run) -> list[Evaluation]:
    """The evaluations of a run, the final figures as the last of them."""
    found, last = run.evaluations, run.rounds[-1] if run.rounds else None
    if last is None or not run.metrics or (found and found[-1].step >= last.step):
        return found
    generic: dict[str, dict[str, float | None]] = {}
    for name, v in verifications(run):
        rates = {f"tar@far={r.far:g}": r.value for r in v.tar}
        generic[name] = {"accuracy": v.accuracy, **rates, "eer": v.eer, "auc": v.auc}
    for name, i in identifications(run):
        generic.setdefault(name, {}).update({f"rank{k}": value for k, value in i.ranks.items() if k == 1})
    final = Evaluation(last.stage, last.round, last.step, None, generic, client_summary(run))
    return [*found, final]


@dataclass(frozen=True)
class Card:
    """A headline figure."""

    figure: Figure
    value: float | None
    text: str
    detail: str = ""
    flag: str = ""


def doubt(rate: Rate, trials: int | None) -> str:
    """Why a rate is not to be relied on; empty if it is."""
    if rate.reliable:
        return ""
    if trials is None:
        return "unreliable: too few pairs for this rate"
    return f"unreliable: FAR × impostors = {plain(rate.far * trials, 3)} < {FEW}"


def headline(run: Run, leaving: Leaving | None, every_rate: bool = False) -> list[Card]:
    """The figures at the top of the page; `every_rate`: not only the most telling false accept rates."""
    cards = _verification_cards(run, every_rate) or _evaluation_cards(run) or client_cards(run) or _class_cards(run)
    cards += _traffic_cards(run, leaving)
    seconds = [r.seconds for r in run.rounds if r.seconds is not None]
    if seconds:
        middle = median(seconds)
        cards.append(Card(SECONDS, middle, duration(middle), f"{duration(run.seconds)} in all"))
    return cards


def _traffic_cards(run: Run, leaving: Leaving | None) -> list[Card]:
    """What left a client in a round; for a method that pools, what was pooled instead."""
    if leaving is None:
        sent = [r.bytes_up / r.replied for r in run.rounds if r.bytes_up is not None and r.replied]
        return [Card(BYTES, mean(sent), size(mean(sent)), "from the event log")] if sent else []
    cards = []
    if leaving.pooled:
        meaning = "Private data that was moved to one place before the first round."
        figure = Figure("pooled", "Pooled before training", meaning, False, False)
        total = leaving.pool.total
        cards.append(Card(figure, total, size(total), ", ".join(leaving.pooled), "not federated"))
    if leaving.per_visit is not None:
        detail = f"{size(leaving.rounds.total)} from all clients in all rounds"
        cards.append(Card(BYTES, leaving.per_visit, size(leaving.per_visit), detail))
    elif not leaving.pooled:  # a method that pools has no merit in sending nothing afterwards
        cards.append(Card(BYTES, 0, size(0), "nothing left a client in the rounds"))
    return cards


def _between(low: float | None, high: float | None, digits: int = 1) -> str:
    if low is None or high is None:
        return ""
    return f"95 % interval {100 * low:.{digits}f} – {percent(high, digits)}"


def _verification_cards(run: Run, every_rate: bool) -> list[Card]:
    cards = []
    for name, v in verifications(run)[:1]:
        where = f"on {name}" if len(verifications(run)) > 1 else ""
        if v.accuracy is not None:
            detail = _between(*v.accuracy_range) if v.accuracy_range else where
            cards.append(Card(describe("accuracy"), v.accuracy, percent(v.accuracy, 2), detail))
        for rate in v.tar if every_rate else _telling(v.tar):
            detail = _between(rate.low, rate.high) or where
            flag = doubt(rate, v.impostors)
            cards.append(Card(tar_at(rate.far), rate.value, percent(rate.value, 1), detail, flag))
        if v.eer is not None:
            detail = _between(*v.eer_range, 2) if v.eer_range else where
            cards.append(Card(describe("eer"), v.eer, percent(v.eer, 2), detail))
    for _, i in identifications(run)[:1]:
        for k, value in list(i.ranks.items())[:1]:
            detail = f"gallery of {plural(i.gallery, 'identity', 'identities')}" if i.gallery else ""
            cards.append(Card(rank(k), value, percent(value, 1), detail))
    return cards


def _telling(rates: Sequence[Rate]) -> list[Rate]:
    """Two rates for the headline: the strictest reliable one, and the next stricter one."""
    known = [r for r in rates if r.value is not None]
    reliable = [r for r in known if r.reliable]
    if not reliable:
        return known[:1]
    return [reliable[-1], *[r for r in known if r.far < reliable[-1].far][:1]] if len(known) > 1 else known


def _evaluation_cards(run: Run) -> list[Card]:
    """A run without final figures: those of its last evaluation."""
    last = next((e for e in reversed(run.evaluations) if e.generic), None)
    if last is None:
        return []
    figures = next(iter(last.generic.values()))
    known = [(describe(k), figures[k]) for k in sorted(figures, key=order)]
    flag = f"not final: after round {last.step + 1}"
    return [Card(f, v, f.text(v), flag=flag) for f, v in known if v is not None and f.meaning][:5]


def _class_cards(run: Run) -> list[Card]:
    """A run that predicts classes of samples: how well, after the last round."""
    last = run.rounds[-1].figures if run.rounds else {}
    known = [(describe(k), last.get(k)) for k in ("balanced_accuracy", "weighted_f1")]
    return [Card(f, v, f.text(v, 1)) for f, v in known if v is not None]


def client_cards(run: Run) -> list[Card]:
    """A method without a generic model: means over clients."""
    cards = []
    for name, s in sorted(client_summary(run).items(), key=lambda item: order(item[0]))[:4]:
        figure, value, worst = describe(name), number(s.get("mean")), number(s.get("worst"))
        if value is not None:
            figure = replace(figure, label=f"{figure.label}, mean over clients")
            detail = f"worst {figure.text(worst, 1)} ({s.get('worst_client', '?')})"
            cards.append(Card(figure, value, figure.text(value), detail))
    return cards


def rate_label(rate: Rate) -> str:
    return tar_at(rate.far).label
