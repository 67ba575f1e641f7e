"""The benchmark of quality scores: which pictures are left out, what is counted, and who is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.quality import rejecting

from visard.evaluation.verification import draws


def test_rates_and_intervals_are_those_of_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(8), [5, 4, 6, 5, 4, 6, 5, 5])
    features = (rng.normal(size=(8, 6))[identity] + 0.7 * rng.normal(size=(40, 6))).astype(np.float32)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    score = rng.permutation(40).astype(float)
    score[identity == 3] = -1.0 - np.arange(5)  # of this person one picture is left
    nothing, some = rejecting(features, identity, {"score": score}, rejected=0.1, fmr=0.05, bootstrap=30, seed=4)
    strangers = sorted(float(unit[i] @ unit[j]) for i in range(40) for j in range(i) if identity[i] != identity[j])
    refused = strangers[len(strangers) - 1 - int(0.05 * len(strangers))]  # the first that may not be accepted
    drawn = draws(np.random.default_rng(4), 8, 30)
    found = {}
    for name, kept in (("nothing", set(range(40))), ("some", set(range(40)) - set(np.argsort(score)[:4].tolist()))):
        pairs = [(i, j) for i in kept for j in kept if j < i and identity[i] == identity[j]]
        missed = [float(unit[i] @ unit[j]) <= refused for i, j in pairs]
        people = [identity[i] for i, _ in pairs]
        rates = [(row[people] * missed).sum() / row[people].sum() for row in drawn]
        found[name] = (np.mean(missed), np.array(rates))
    for line, name in ((nothing, "nothing"), (some, "some")):
        rate, rates = found[name]
        assert line.fnmr == pytest.approx(rate)
        assert (line.low, line.high) == pytest.approx(tuple(np.quantile(rates, [0.025, 0.975])))
    apart = np.quantile(found["some"][1] - found["nothing"][1], [0.025, 0.975])
    assert some.difference == pytest.approx(tuple(apart))
    assert nothing.difference is None
    assert nothing.fnmr > 0
