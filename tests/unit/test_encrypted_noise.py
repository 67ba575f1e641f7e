"""Noise on moments at a party: it cannot be averaged away, and no network mixes what it is sized for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.sealed_wire import Wire, method, start, wire
from torch import Tensor, nn

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.core import Setup
from visard.crypto import exchange
from visard.crypto.moments import epsilon
from visard.crypto.session import Session
from visard.errors import UsageError, VisardError
from visard.methods.encrypted_alignment import Align
from visard.methods.fedfr_da import FedFRDA

LOUD = 1.0


class Centred(nn.Module):
    """Batch norm without its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_the_same_question_gets_the_same_noise() -> None:
    """An attacker who asks again and again, by a server that rewinds the party, hears the same answer."""
    net, how, heard = wire(1, 4), method(noise=LOUD), list[Tensor]()
    server = start(how, net)

    def before(step: str, client: str, message: Any) -> Any:
        if step == "answer" and client == "s0":
            target = Session.from_state(net.parties["t"].state["session"])
            for _ in range(3):
                mail = how.answer(copy.deepcopy(net.parties["s0"]), message)
                sealed = {"s0": mail.letters["t"] + mail.tags["t"]}
                features = net.parties["t"].state["features"]
                heard.append(exchange.take_packed(target, message.plan, features, sealed)[0])
        return message

    net.before = before
    how.round(server, net)
    assert torch.equal(heard[0], heard[1])
    assert torch.equal(heard[0], heard[2])


def test_every_batch_has_noise_of_its_own_which_no_other_client_can_make() -> None:
    net, how = wire(1, 4), method(noise=LOUD)
    how.round(start(how, net), net)
    mine, yours = (Session.from_state(net.parties[c].state["session"]) for c in ("s0", "t"))
    v = torch.zeros(2, 3, dtype=torch.float64)
    keys = [mine.noise_key(0, v), mine.noise_key(1, v), mine.next().noise_key(0, v), mine.noise_key(0, v + 1)]
    assert len({*keys, yours.noise_key(0, v)}) == 5
    again = Session.from_state(mine.to_state())
    assert again.noise_key(0, v) == keys[0], "also after a restart"


def test_a_run_logs_what_one_batch_is_worth() -> None:
    net, how = wire(1, 4), method(noise=LOUD, exchanges=2, batches=2)
    how.round(start(how, net), net)
    assert net.figures["epsilon_of_a_batch"] == epsilon(LOUD)
    assert "epsilon" not in net.figures


def mixed(layer: nn.Module) -> Wire:
    net = wire(1, 4)
    for party in net.parties.values():
        party.network = lambda: nn.Sequential(nn.Linear(6, 4), copy.deepcopy(layer))
    return net


def test_batch_norm_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="method.noise: one sample moves .* batch norm .* tiny_nobn"):
        start(method(noise=LOUD), mixed(nn.BatchNorm1d(4)))
    setup = Setup(("source", "target-0"), 3, 4, lambda: dict(nn.BatchNorm1d(4).state_dict()), given=True)
    align = Align(1.0, length=2, noise=LOUD)
    with pytest.raises(UsageError, match="batch norm"):
        FedFRDA(align=align).before(setup, FedFRDA().training)


def test_a_party_finds_out_whether_its_network_mixes_samples() -> None:
    net, how = mixed(Centred()), method(noise=LOUD)
    server = start(how, net)
    with pytest.raises(VisardError, match="one sample moves the features of others"):
        how.round(server, net)
    quiet, net = method(), mixed(Centred())
    quiet.round(start(quiet, net), net)
