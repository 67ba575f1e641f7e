"""With shared classes a source's classifier leaves once, at the end, and the target alone can read it.

The attack: between two classifiers of one source lies one step on one batch, so that their difference is the gradient
of a single batch.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.sealed_wire import Wire, method, start, wire
from torch import Tensor

pytest.importorskip("gmpy2", reason="needs the extra crypto")

import visard
from visard.core import Disclosure, declared_kinds
from visard.crypto.masked_weights import mask_weights, mean_of_masked
from visard.crypto.session import Session
from visard.errors import PublicError, UsageError, VisardError
from visard.learning.weights import load_weights
from visard.methods.encrypted_mmd import EncryptedMMD, Moved, Relayed
from visard.methods.encrypted_mmd_party import Learner, head_to_bytes, quality

LR = 0.1


def gradient_of_batch(how: EncryptedMMD, net: Wire, client: str) -> Tensor:
    """What the attack is after: the gradient of the last batch by the class vectors, from the client's own state."""
    party = copy.copy(net.parties[client])
    party.state = copy.deepcopy(party.state)
    learner = Learner(party, how.training, how.compare, how.head, True, LR)
    batch = party.state["batches"][0]
    learner.head.loss(learner.forward(batch), learner.labels(batch)).backward()
    found: Tensor = learner.head.weight.grad
    return found


def played(how: EncryptedMMD, net: Wire) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Gradients of s0's batches, and its classifier before the first and after every step."""
    gradients: list[Tensor] = []
    heads: list[dict[str, Tensor]] = []

    def before(step: str, client: str, message: Any) -> Any:
        if client == "s0" and step == "answer":  # the batch is drawn, the step on it comes next
            gradients.append(gradient_of_batch(how, net, "s0"))
            heads.append(copy.deepcopy(net.parties["s0"].state["head"]))
        return message

    server = start(how, net)
    net.before = before
    for net.round in range(how.rounds):
        server = how.round(server, net)
    heads.append(copy.deepcopy(net.parties["s0"].state["head"]))
    return gradients, heads


def readable(net: Wire, heads: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Those of the classifiers that stand in some reply after pre-training, in either precision."""
    sent = b"".join(data for step, _, data in net.transcript if step != "fit")
    forms = [(h, h["weight"].numpy().tobytes(), h["weight"].double().numpy().tobytes()) for h in heads]
    return [h for h, single, double in forms if single in sent or double in sent or head_to_bytes(h) in sent]


def attack(snapshots: list[dict[str, Tensor]]) -> list[Tensor]:
    """The gradients of single batches, from classifiers that were sent one after another."""
    return [(a["weight"] - b["weight"]) / LR for a, b in itertools.pairwise(snapshots)]


def test_the_classifier_of_every_exchange_would_give_the_gradient_of_a_batch_away() -> None:
    how, net = method(exchanges=3), wire(2, 4)
    gradients, heads = played(how, net)
    for found, true in zip(attack(heads), gradients, strict=True):  # what replies carried before
        assert torch.allclose(found, true, atol=1e-5)
    assert readable(net, heads) == [], "what they carry now"
    assert attack(readable(net, heads)) == []


def test_no_reply_of_an_exchange_declares_weights_or_class_vectors() -> None:
    assert set(declared_kinds(Moved).values()) == {Disclosure.ciphertext, Disclosure.metric}


def test_the_search_would_find_a_classifier() -> None:
    how, net = method(exchanges=2), wire(1, 4)
    _, heads = played(how, net)
    net.transcript.append(("advance", "s0", b"x" + heads[1]["weight"].numpy().tobytes()))
    assert len(readable(net, heads)) == 1


def test_it_leaves_once_after_the_last_round_and_the_target_predicts_with_it() -> None:
    how, net = method(rounds=2, exchanges=2), wire(2, 4)
    server = start(how, net)
    assert "balanced_accuracy" in net.figures, "of the pre-trained network"
    net.figures.clear()
    server = how.round(server, net)
    assert "balanced_accuracy" not in net.figures, "nothing to predict with before the end"
    assert "hand_over" not in {step for step, _, _ in net.transcript}
    net.round = 1
    how.round(server, net)
    assert [c for step, c, _ in net.transcript if step == "hand_over"] == ["s0", "s1"]
    target, heads = net.parties["t"], []
    model = target.network()
    load_weights(model, target.state["theta"])
    for s in ("s0", "s1"):
        head = how.head.build(3, 4)
        load_weights(head, net.parties[s].state["head"])
        heads.append(head)
    expected = quality(target, model, heads)
    assert {k: net.figures[k] for k in expected} == expected


def test_a_classifier_is_not_handed_over_early_or_where_it_stays_at_home() -> None:
    how, net = method(rounds=2), wire(1, 4)
    plans: list[Any] = []
    server = start(how, net)
    net.before = lambda step, client, message: plans.append(message.plan) or message if step == "answer" else message
    how.round(server, net)
    ask = Relayed(plans[-1])
    with pytest.raises(PublicError, match="goes after exchange 2: this is 1"):
        how.hand_over(copy.deepcopy(net.parties["s0"]), ask)
    for other in (replace(how, classes="own"), replace(how, pooled=True)):
        with pytest.raises(PublicError, match="keeps here"):
            other.hand_over(copy.deepcopy(net.parties["s0"]), ask)
    with pytest.raises(PublicError, match="keeps here"):
        how.hand_over(copy.deepcopy(net.parties["t"]), ask)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + (data[at + 1 :] if at != -1 else b"")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: {"s0": flipped(r["s0"], -60), "s1": r["s1"]}, "classifier from s0: its seal is broken"),
        (lambda r: {"s0": r["s1"], "s1": r["s0"]}, "classifier from s0: its seal is broken"),
        (lambda r: {"s1": r["s1"]}, "classifier from s0: its seal is broken"),
    ],
    ids=["altered", "exchanged", "lost"],
)
def test_a_relay_that_meddles_with_classifiers_is_found_out(change: Any, words: str) -> None:
    net, how = wire(2, 4), method()
    server = start(how, net)
    net.before = lambda step, _, message: (
        replace(message, received=change(message.received)) if step == "conclude" else message
    )
    with pytest.raises(VisardError, match=words):
        how.round(server, net)


def ends() -> tuple[Session, Session]:
    """A source and the target that have met."""
    net, how = wire(2, 4), method()
    how.round(start(how, net), net)
    s0, t = (Session.from_state(net.parties[c].state["session"]) for c in ("s0", "t"))
    return s0, t


def test_what_is_concealed_opens_in_its_place_alone() -> None:
    s0, t = ends()

    def whole(mail: Any) -> bytes:
        letters, tags = mail
        return bytes(letters["t"] + tags["t"])

    data = bytes(range(200))
    first, second = (whole(s0.conceal("classifier", data, "t")) for _ in range(2))
    assert first != second
    assert data[:16] not in first
    assert t.reveal("classifier", "s0", first, 200) == data
    for end, kind, sender, size, words in (
        (t, "other", "s0", 200, "its kind is"),
        (t, "classifier", "s1", 200, "its seal is broken"),
        (t, "classifier", "s0", 199, "its length is"),
        (t.next(), "classifier", "s0", 200, "its exchange is"),
    ):
        with pytest.raises(VisardError, match=words):
            end.reveal(kind, sender, first, size)
    # sealed by the right client, but with another key: the tag of the message alone is not what hides it
    stranger = replace(s0, secrets=s0.secrets | {"t": bytes(32)})
    box = stranger.conceal("classifier", data, "t")[0]["t"]
    inner = box[-(12 + 200 + 16) :]
    forged = whole(s0.seal("classifier", "t", [inner], len(inner), ["t"]))
    with pytest.raises(VisardError, match="was not encrypted for this client"):
        t.reveal("classifier", "s0", forged, 200)


def test_a_classifier_that_is_not_finite_is_refused() -> None:
    net, how = wire(1, 4), method()
    server = start(how, net)

    def before(step: str, client: str, message: Any) -> Any:
        if step == "hand_over":
            net.parties["s0"].state["head"]["weight"][0, 0] = float("nan")
        return message

    net.before = before
    with pytest.raises(PublicError, match="the classifier of s0 is not finite"):
        how.round(server, net)


def test_pooled_sources_show_the_sum_of_their_weights_and_no_part() -> None:
    how, net = method(pooled=True, exchanges=2), wire(3, 4)
    gradients, heads = played(how, net)
    own = [copy.deepcopy(net.parties[c].state) for c in ("s0", "s1", "s2")]
    sent = b"".join(data for step, _, data in net.transcript if step != "fit")
    assert readable(net, heads[1:]) == []
    for state in own:
        assert all(v.numpy().tobytes() not in sent for v in (*state["theta"].values(), *state["head"].values()))
    assert len(gradients) == 2


def test_the_server_goes_on_with_the_mean_of_pooled_weights() -> None:
    how, net = method(pooled=True), wire(3, 4)
    server = how.round(start(how, net), net)
    for part, mine in (("theta", server.theta), ("head", server.head)):
        for name, value in mine.items():
            mean = torch.stack([net.parties[c].state[part][name] for c in ("s0", "s1", "s2")]).double().mean(0)
            assert torch.allclose(value.double(), mean, atol=1e-7)
            assert value.dtype == torch.float32


def test_a_pooled_source_masks_what_it_computed_and_not_what_it_was_sent() -> None:
    """Masks of an exchange serve once: on weights that the server chose they would be known to it."""
    how, net = method(pooled=True), wire(2, 4)
    empty, masked = [], []
    real = net.ask

    def ask(step: Any, messages: Any, **more: Any) -> Any:
        replies = real(step, messages, **more)
        if step.name == "advance":
            for c, reply in replies.items():
                (masked if messages[c].received and c != "t" else empty).append(reply.masked)
        return replies

    net.ask = ask  # type: ignore[method-assign]
    how.round(start(how, net), net)
    assert empty
    assert not any(empty)
    assert [bool(m) for m in masked] == [True, True]


def test_a_single_pooled_source_is_refused() -> None:
    net = wire(1, 4)
    with pytest.raises(UsageError, match="there must be two"):
        start(method(pooled=True), net)


def test_masked_weights_add_up_and_nothing_else_does() -> None:
    weights = [{"w": torch.randn(3, 2), "n": torch.tensor(5 + i)} for i in range(3)]
    seeds = {(0, 1): b"a" * 32, (0, 2): b"b" * 32, (1, 2): b"c" * 32}

    def of(i: int) -> list[tuple[int, bytes]]:
        return [(1 if i == min(pair) else -1, seed) for pair, seed in seeds.items() if i in pair]

    masked = [mask_weights(w, of(i)) for i, w in enumerate(weights)]
    found = mean_of_masked(masked, weights[0])
    assert torch.allclose(found["w"], torch.stack([w["w"] for w in weights]).mean(0), atol=1e-7)
    assert torch.equal(found["n"], torch.tensor(6))
    for part, w in zip(masked, weights, strict=True):
        assert float((part["w"].double() / 2**40 - w["w"]).abs().min()) > 1, "a part alone is noise"
    with pytest.raises(VisardError, match="masks do not cancel"):
        mean_of_masked(masked[:2], weights[0])
    with pytest.raises(VisardError, match="different networks"):
        mean_of_masked([masked[0], {"w": masked[1]["w"]}], weights[0])
    with pytest.raises(VisardError, match="do not fit each other"):
        mean_of_masked([masked[0], masked[1] | {"w": masked[1]["w"].float()}], weights[0])
    for bad in (float("inf"), float("nan"), 2.0**22):
        with pytest.raises(VisardError, match="too large to be masked, or not finite"):
            mask_weights({"w": torch.tensor([bad])}, of(0))
    with pytest.raises(VisardError, match="one client alone"):
        mask_weights(weights[0], [])


def test_pre_training_can_be_summed_securely(tmp_path: Path) -> None:
    """Section 4.4: the server sees the sources' mean extractor and classifier, and no source's own."""
    small = ["method.rounds=0", "method.pretrain_rounds=2", "data.images_per_identity=8", "engine.kind=local"]
    runs = {
        secure: visard.run(
            "encrypted-mmd-sensors", overrides=[*small, f"aggregation.secure={secure}"], out=tmp_path / secure
        ).folder
        for secure in ("false", "true")
    }
    for file in ("model.safetensors", "class_vectors.safetensors"):
        plain, summed = (load_file(folder / file) for folder in runs.values())
        assert plain.keys() == summed.keys()
        for name, value in plain.items():
            torch.testing.assert_close(summed[name], value, rtol=1e-3, atol=1e-4)
    ledger = json.loads((runs["true"] / "ledger.json").read_text())
    at = {name: i for i, name in enumerate(ledger["columns"])}
    kinds = {r[at["kind"]] for r in ledger["rows"] if r[at["stage"]] == "pretrain" and r[at["bytes"]]}
    assert not kinds & {"weights", "class_vectors"}, kinds
