"""Encrypted MMD with a weight other than 1, and the mean that pre-training ends in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sealed_wire import method, start, wire

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from tests.golden.test_encrypted_mmd_golden import centrally, close, run, weights


@pytest.mark.parametrize("weight", [0.25, 3.0])
@pytest.mark.parametrize("protocol", ["packed", "both", "compressed"])
def test_equation_2_with_a_weight(protocol: str, weight: float) -> None:
    """lambda counts in both parts of MMD, by features (packed, both) and by parameters (compressed)."""
    how, net = method(protocol=protocol, weight=weight), wire(2, 4)
    how = replace(how, training=replace(how.training, lr=0.1))
    states, kernel = run(how, net)
    expected, _ = centrally(how, net, states, kernel)
    for c in net.clients:
        close(weights(net, c), expected[c], states[c])


def test_pre_training_ends_in_the_mean_of_the_sources() -> None:
    """Section 4.1: three sources of the same size, each with the same share."""
    net = wire(3, 4)
    server = start(method(), net)
    for key, value in server.theta.items():
        each = [net.parties[c].state["theta"][key].double() for c in ("s0", "s1", "s2")]
        torch.testing.assert_close(value.double(), (each[0] + each[1] + each[2]) / 3, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(each[0], each[1], atol=1e-4)
