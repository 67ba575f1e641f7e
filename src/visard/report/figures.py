"""What each figure is called, what it means and which way is better."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from visard.report.words import percent, plain, share, visible

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
