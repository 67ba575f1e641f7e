"""A round of encrypted MMD moves every party exactly as plain training on pooled features would (Eqs. 2, 3, 16-20)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sealed_wire import Wire, method, start, wire
from torch import Tensor

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.learning import mmd
from visard.learning.mmd import Compare, Polynomial
from visard.methods.encrypted_mmd import EncryptedMMD
from visard.methods.encrypted_mmd_party import Learner

# A weight after one step of lr 0.1 is right to 2e-5, or to 1/500 of the largest change: 20 bits after the point are
# fewer where the features fill only a small part of the ball (radius 8 here, lengths around 2).
TOLERANCE, SHARE = 2e-5, 1 / 500


def run(how: EncryptedMMD, net: Wire) -> tuple[dict[str, dict[str, Any]], Polynomial]:
    """One round; the states right after the offers, and the kernel that was agreed on."""
    states: dict[str, dict[str, Any]] = {}
    plans = []

    def watch(step: str, client: str, message: Any) -> Any:
        if step == "answer":
            states[client] = copy.deepcopy(net.parties[client].state)
            plans.append(message.plan)
        return message

    server = start(how, net)
    net.before = watch
    how.round(server, net)
    return states, plans[0].kernel


def centrally(
    how: EncryptedMMD, net: Wire, states: dict[str, dict[str, Any]], kernel: Polynomial
) -> tuple[dict[str, Tensor], Tensor]:
    """The extractors' weights after one step on the plain loss, by autograd over all parties at once."""
    sources = [c for c in net.clients if c != "t"]
    models, features, tasks = {}, {}, []
    for c in net.clients:
        learner = _learner(how, net, c, states[c])
        raw = learner.forward(states[c]["batches"][0])
        features[c] = how.compare.inside(raw).double()
        target = raw  # it comes last
        models[c] = list(learner.extractor)
        if c != "t":
            tasks.append(learner.head.loss(raw, learner.labels(states[c]["batches"][0])))
    if how.pooled:
        together = torch.cat([features[c] for c in sources])
        discrepancy = mmd.discrepancy(together, features["t"], kernel)
    else:
        discrepancy = torch.stack([mmd.within(features[c], kernel) for c in sources]).mean()
        discrepancy = discrepancy + mmd.within(features["t"], kernel)
        discrepancy = (
            discrepancy + torch.stack([mmd.between(features[c], features["t"], kernel) for c in sources]).mean()
        )
    loss = torch.stack(tasks).mean() + how.weight * discrepancy
    if how.target_entropy:
        W = states["t"]["head"]
        loss = loss + how.target_entropy * slow_information(target @ W["weight"].t() + W["bias"])
    after = {}
    for c, parameters in models.items():
        slopes = torch.autograd.grad(loss, parameters, retain_graph=True)
        # each source minimises its own part: the common 1 / S of Eq. 18 is its learning rate
        factor = len(sources) if c != "t" and not how.pooled else 1
        after[c] = torch.cat(
            [(p - 0.1 * factor * g).flatten() for p, g in zip(parameters, slopes, strict=True)]
        ).detach()
    if how.pooled:  # one set of weights, whose gradient is the sum over the sources
        slopes = sum(after[c] - torch.cat([p.flatten() for p in models[c]]).detach() for c in sources)
        common = torch.cat([p.flatten() for p in models[sources[0]]]).detach() + slopes
        after |= dict.fromkeys(sources, common)
    return after, discrepancy.detach()


def slow_information(logits: Tensor) -> Tensor:
    """The mean entropy of the predictions less the entropy of their mean, number by number."""
    rows = [[torch.exp(z) / sum(torch.exp(y) for y in row) for z in row] for row in logits]
    n, classes = len(rows), len(rows[0])
    own = sum(-p * torch.log(p) for row in rows for p in row) / n
    mean = [sum(row[k] for row in rows) / n for k in range(classes)]
    return own - sum(-p * torch.log(p) for p in mean)


def _learner(how: EncryptedMMD, net: Wire, c: str, state: dict[str, Any]) -> Learner:
    client = copy.copy(net.parties[c])
    client.state = copy.deepcopy(state)
    head = how.head if how.task == "classify" else None
    return Learner(client, how.training, how.compare, head, c != "t", 0.1)


def weights(net: Wire, c: str) -> Tensor:
    return torch.cat([v.flatten() for v in net.parties[c].state["theta"].values()])


def close(found: Tensor, expected: Tensor, before: dict[str, Any]) -> None:
    moved = float((expected - torch.cat([v.flatten() for v in before["theta"].values()])).abs().max())
    assert moved > 20 * TOLERANCE, "the step is far larger than the tolerance"
    assert float((found - expected).abs().max()) < max(TOLERANCE, SHARE * moved)


CASES = {
    "packed": {},
    "packed, degree 1": {"compare": Compare(unit=False, radius=8.0, kernel="taylor", degree=1)},
    "packed, Taylor": {"compare": Compare(unit=False, radius=8.0, kernel="taylor", alpha=0.9)},
    "packed, unit": {"compare": Compare(unit=True)},
    "packed, projected": {"compare": Compare(unit=False, radius=8.0, project=3)},
    "packed, each answer alone": {"sums": False},
    "both": {"protocol": "both"},
    "both, degree 3": {"protocol": "both", "compare": Compare(unit=False, radius=8.0, kernel="taylor", degree=3)},
    "chain_rule": {"protocol": "chain_rule"},
    "compressed": {"protocol": "compressed"},
    "naive": {"protocol": "naive"},
    "own classes": {"classes": "own"},
    "monitored": {"monitor": True},
    "packed, n_t = 5": {"target_batch": 5},
    "packed, n_t = 11, degree 1, monitored": {
        "target_batch": 11,
        "monitor": True,
        "compare": Compare(unit=False, radius=8.0, kernel="taylor", degree=1),
    },
    "both, n_t = 11": {"protocol": "both", "target_batch": 11},
    "naive, n_t = 5": {"protocol": "naive", "target_batch": 5},
    "ckks, n_t = 11": {"scheme": "ckks", "target_batch": 11},
    "ckks, n_t = 3": {"scheme": "ckks", "target_batch": 3},
    "ckks": {"scheme": "ckks"},
    "packed, information": {"target_entropy": 0.6},
    "naive, information": {"protocol": "naive", "target_entropy": 0.6},
    "ckks, degree 1": {"scheme": "ckks", "compare": Compare(unit=False, radius=8.0, kernel="taylor", degree=1)},
    "ckks, monitored, each answer alone": {"scheme": "ckks", "monitor": True, "sums": False},
}


SLOW = ("both, degree 3",)


@pytest.mark.parametrize(("case", "sources"), [(c, s) for c in CASES for s in (1, 3) if s == 1 or c not in SLOW])
def test_equations_18_to_20(case: str, sources: int) -> None:
    if case.startswith("ckks"):
        pytest.importorskip("tenseal", reason="needs the extra ckks")
    how, net = method(**CASES[case]), wire(sources, 4)
    states, kernel = run(how, net)
    expected, _ = centrally(how, net, states, kernel)
    for c in net.clients:
        n = how.target_batch if c == "t" and how.target_batch else 8
        assert len(states[c]["batches"][0]["rows"]) == n
        close(weights(net, c), expected[c], states[c])


@pytest.mark.parametrize("target_batch", [0, 11])
@pytest.mark.parametrize("protocol", ["packed", "both"])
def test_equations_16_and_17(protocol: str, target_batch: int) -> None:
    how, net = method(protocol=protocol, pooled=True, target_batch=target_batch), wire(3, 4)
    states, kernel = run(how, net)
    expected, _ = centrally(how, net, states, kernel)
    shared = torch.stack([weights(net, c) for c in ("s0", "s1", "s2")]).mean(0)
    close(shared, expected["s0"], states["s0"])
    close(weights(net, "t"), expected["t"], states["t"])


LONGER: list[tuple[str, int, int, int]] = [
    ("packed", 16, 1, 2), ("packed", 64, 1, 2), ("packed", 64, 3, 2), ("both", 16, 3, 2), ("chain_rule", 16, 3, 2),
    ("compressed", 16, 3, 2), ("naive", 16, 3, 2), ("compressed", 64, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("protocol", "L", "sources", "degree"), LONGER)
def test_longer_features(protocol: Any, L: int, sources: int, degree: int) -> None:
    compare = Compare(unit=False, radius=8.0, kernel="fitted" if degree == 2 else "taylor", degree=degree)
    how, net = method(protocol=protocol, compare=compare), wire(sources, L, inputs=3)
    states, kernel = run(how, net)
    expected, _ = centrally(how, net, states, kernel)
    for c in net.clients:
        close(weights(net, c), expected[c], states[c])


@pytest.mark.parametrize("protocol", ["packed", "both"])
def test_the_monitored_loss_is_the_plain_one(protocol: str) -> None:
    how, net = method(monitor=True, protocol=protocol, weight=0.5), wire(1, 4)
    how = replace(how, training=replace(how.training, weight_decay=0.01))
    states, kernel = run(how, net)
    _, discrepancy = centrally(how, net, states, kernel)
    decays = {c: _learner(how, net, c, states[c]).decay() for c in net.clients}
    assert net.figures["mmd"] == pytest.approx(float(discrepancy) + decays["t"] / 0.5, abs=1e-3)
    total = net.figures["task"] + 0.5 * float(discrepancy) + decays["s0"] + decays["t"]
    assert net.figures["total"] == pytest.approx(total, abs=1e-3)


def test_a_regressor_in_place_of_the_classifier() -> None:
    how, net = method(task="regress"), wire(1, 4, regress=True)
    states, kernel = run(how, net)
    expected, _ = centrally(how, net, states, kernel)
    for c in net.clients:
        close(weights(net, c), expected[c], states[c])
    assert net.figures["mse"] >= 0


@pytest.mark.parametrize("protocol", ["packed", "both"])
def test_many_batches_in_one_exchange(protocol: str) -> None:
    """Three batches travel together: with a small learning rate their steps add up, as far as plain ones do."""
    lr, how = 1e-3, method(batches=3, protocol=protocol)
    how, net = replace(how, training=replace(how.training, lr=lr)), wire(1, 4)
    states, kernel = run(how, net)
    before = {c: torch.cat([v.flatten() for v in states[c]["theta"].values()]) for c in net.clients}
    expected = {c: torch.zeros_like(v) for c, v in before.items()}
    for i in range(3):
        alone = {c: state | {"batches": state["batches"][i : i + 1]} for c, state in states.items()}
        for c, after in centrally(how, net, alone, kernel)[0].items():
            expected[c] += lr / 0.1 * (after - before[c])
    for c in net.clients:
        moved = weights(net, c) - before[c]
        assert float((moved - expected[c]).abs().max()) < 0.02 * float(expected[c].abs().max())
    one = method(batches=1, exchanges=3, protocol=protocol)
    other = wire(1, 4)
    run(one, other)
    assert net.figures["encryptions"] == other.figures["encryptions"]
    assert len(net.transcript) < len(other.transcript)
