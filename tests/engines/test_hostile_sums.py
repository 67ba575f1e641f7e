"""Secure sums between parties against a hostile server, and through kills: who is counted, and what is opened once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE
from tests.engines.test_parties import Heard, OwnLink
from tests.policies import ANYTHING
from tests.toys import noise_faces

import visard
from visard.aggregation.secure import (
    Agreed,
    Circle,
    Invitation,
    Listed,
    Opening,
    Plan,
    PublicKeys,
    digest_of_keys,
    of_list,
)
from visard.crypto.secure_sum import Member
from visard.crypto.signatures import Signer, signed_by
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party, own_secret
from visard.deployment.policy import Policy
from visard.engines.codec import decode, encode
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import PublicError, VisardError
from visard.methods.fedavg import Down, Up
from visard.runs.folder import check_removable, remove_written

HOUSES = ("house-1", "house-2", "house-3")
MESSAGES: dict[str, type] = {
    "secure_keys": Invitation, "secure_shares": Circle, "secure_agree": Listed, "secure_open": Opening, "local": Down,
}  # fmt: skip
SIGNED = ("aggregation.secure=true", "aggregation.signed=true")
SIGNERS = {house: Signer.of_secret(house.encode()) for house in HOUSES}
KNOWN = tuple(SIGNERS[house].fingerprint for house in HOUSES)


class Killed(BaseException):
    """The run dies here."""


Change = Callable[[Request, Any], tuple[Request, Any]]


class Server(OwnLink):
    """What a server does with its messages: changes them, writes all down, and dies at one of them."""

    change: Change | None = None
    dies: tuple[str, str] | None = None  # step and client
    after = False  # whether it dies before the message goes out, or before the reply to it is read
    said: list[tuple[Request, Any, Any]]

    def send(self, client: str, header: bytes, payload: bytes, timeout: float) -> str | None:
        request = unpack(header, Request)
        message = decode(payload, MESSAGES[request.step]) if request.step in MESSAGES else None
        if message is not None and self.change is not None:
            request, message = self.change(request, message)
            header, payload = pack(request), encode(message)
        dies = (request.step, client) == self.dies
        if dies and not self.after:
            raise Killed
        number = super().send(client, header, payload, timeout)
        if message is not None and isinstance(answer := self.answers.get(str(number)), tuple):
            reply = unpack(answer[0], Reply)
            kinds = {"secure_keys": PublicKeys, "secure_agree": Agreed, "local": Up}
            kind = kinds.get(request.step)
            self.said.append((request, message, decode(answer[1], kind) if kind and not reply.failure else None))
        if dies:
            raise Killed
        return number


def party(folder: Path, house: str, policy: Policy) -> Party:
    return Party(
        partial(world_of_party, data=str(folder / "homes" / house), file=None, clients=[house]),
        OwnStates(folder / house / "states"), Guard(folder / house, policy),
        models=folder / house / "models", trunks=folder / house / "trunks",
        secret=own_secret(folder / house / "secret.key"), signer=SIGNERS[house],
    )  # fmt: skip


def counting(known: Sequence[str], parties: int = 3) -> Policy:
    """A policy that counts the parties that it knows."""
    bounds = ANYTHING.bounds.model_copy(update={"parties": parties})
    return ANYTHING.model_copy(update={"known": tuple(known), "bounds": bounds})


Go = Callable[..., Path]


@pytest.fixture
def said() -> list[tuple[Request, Any, Any]]:
    return []


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> Go:
    for seed, name in enumerate((*HOUSES, "public")):
        noise_faces(tmp_path / "homes" / name, 12, 8, seed)

    def run(
        *more: str,
        name: str = "run",
        policy: Policy = ANYTHING,
        there: Sequence[str] = HOUSES,
        change: Change | None = None,
        dies: tuple[str, str] | None = None,
        after: bool = False,
        resume: bool = False,
    ) -> Path:
        link = Server({house: party(tmp_path, house, policy) for house in there})
        link.change, link.dies, link.after, link.said = change, dies, after, said
        monkeypatch.setattr("visard.runs.run.connect", lambda *_: link)
        own = ("partition.kind=parties", "partition.clients=3", "partition.test_identities=0", "engine.kind=flower")
        mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine."))]
        sets = [*mine, *own, "engine.server=x", f"data.source={tmp_path / 'homes' / 'public'}", "evaluation.every=0"]
        sets += ["method.rounds=2", *SIGNED, *more]
        out = tmp_path / name
        visard.run("fedavg", out=out, overrides=sets, watcher=Heard(), resume=resume)
        return out

    return run


# ---- who is counted --------------------------------------------------------------------------------------------------
def test_parties_that_know_each_other_give_the_sum(go: Go) -> None:
    out = go(policy=counting(KNOWN))
    rows = json.loads((out / "ledger.json").read_text())["rows"]
    assert {row[5] for row in rows} >= {"masked", "share", "public_key", "ciphertext"}


@pytest.mark.parametrize(
    ("more", "file"),
    [
        ((), "sum.bin"),
        (("aggregation.secure=false", "aggregation.signed=false", "aggregation.dp.noise=1"), "secret.key"),
    ],
)
def test_a_run_between_parties_is_overwritten_whole(go: Go, more: tuple[str, ...], file: str) -> None:
    out = go("model.name=tiny_nobn", "method.rounds=1", *more)
    assert (out / "checkpoint" / file).is_file()
    check_removable(out)
    remove_written(out)
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_a_server_that_invents_parties_gets_nothing(go: Go, said: list[Any]) -> None:
    """One real party among three: without known keys it cannot tell, and is alone in a sum with the server's own."""
    go("aggregation.fewest=3", policy=counting((), parties=3), name="blind")
    said.clear()
    with pytest.raises(VisardError, match=r"house-1: this party knows 0 of 2 neighbours in a secure sum: too few"):
        go("engine.min_replies=1.0", policy=counting(KNOWN[:1], parties=2))
    assert not [reply for request, _, reply in said if request.step in ("local", "secure_agree") and reply], "no vector"


def test_only_known_parties_count(go: Go) -> None:
    """Two of three are known: enough to share secrets with, and too few where the policy wants three."""
    with pytest.raises(VisardError, match=r"wants 3 parties in a sum, at least, and has 2 that it knows"):
        go("engine.min_replies=1.0", "aggregation.threshold=1.0", policy=counting(KNOWN[:2], parties=3))


def test_parties_without_weight_do_not_count(go: Go) -> None:
    """A server that gives the others next to no weight would have one client's update for the sum."""

    def light(request: Request, message: Any) -> tuple[Request, Any]:
        if request.step == "local":
            plan = Plan.parse(request.secure)
            weights = {name: 1.0 if name == HOUSES[0] else 1e-6 for name in plan.weights}
            request = replace(request, secure=replace(plan, weights=weights).text())
        return request, message

    with pytest.raises(VisardError, match=r"house-1: this party wants 3 parties in a sum"):
        go("engine.min_replies=1.0", policy=counting(KNOWN), change=light)


def test_a_run_without_signatures_is_refused_by_a_party_that_counts_keys(go: Go) -> None:
    with pytest.raises(VisardError, match=r"counts only parties that it knows \(known\)"):
        go("aggregation.signed=false", policy=counting(KNOWN))


@pytest.mark.parametrize("step", ["secure_shares", "local"])
def test_keys_that_a_server_puts_in_between_are_refused(go: Go, step: str) -> None:
    own = Member("server", b"s" * 32, b"x").keys

    def between(request: Request, message: Any) -> tuple[Request, Any]:
        if request.client != HOUSES[0] or request.step != step:
            return request, message
        if step == "secure_shares":
            return request, replace(message, keys=message.keys | {HOUSES[1]: own.seal + own.mask})
        plan = Plan.parse(request.secure)
        digest = {HOUSES[1]: digest_of_keys(own)}
        forged = replace(plan, around=plan.around | {HOUSES[1]: own}, members=plan.members | digest)
        return replace(request, secure=forged.text()), message

    with pytest.raises(VisardError, match=r"the keys of house-2 in a secure sum are not the ones that it signed"):
        go("engine.min_replies=1.0", policy=counting(KNOWN), change=between)


def test_keys_and_signatures_of_another_sum_do_not_count(go: Go) -> None:
    """A server may have opened the key that a client had in an earlier sum."""
    first: dict[str, Circle] = {}

    def old(request: Request, message: Any) -> tuple[Request, Any]:
        if request.step == "secure_shares":
            before = first.setdefault(request.client, message)
            message = replace(message, keys=before.keys, signatures=before.signatures)
        return request, message

    with pytest.raises(VisardError, match=r"round 2: .*are not the ones that it signed"):
        go("engine.min_replies=1.0", policy=counting(KNOWN), change=old)


def test_a_sum_is_opened_only_if_others_have_seen_the_same_list(go: Go) -> None:
    """With another list for everyone, a server could have single updates opened piece by piece."""

    def silent(request: Request, message: Any) -> tuple[Request, Any]:
        return request, replace(message, signatures={}) if request.step == "secure_open" else message

    with pytest.raises(VisardError, match="shares of the own mask"):
        go(policy=counting(KNOWN), change=silent)

    def lists(request: Request, message: Any) -> tuple[Request, Any]:
        if request.step in ("secure_agree", "secure_open") and request.client == HOUSES[0]:
            message = replace(message, arrived=HOUSES[:2])
        return request, message

    with pytest.raises(VisardError, match="shares of the own mask"):
        go(policy=counting(KNOWN, parties=2), change=lists, name="lists")


def test_numbers_and_settings_that_differ_give_noise(go: Go) -> None:
    """A server that lets the others learn nothing would have one client's update in the sum."""

    def slow(request: Request, message: Any) -> tuple[Request, Any]:
        return request, replace(message, lr=1e-6) if request.step == "local" and request.client != HOUSES[
            0
        ] else message

    with pytest.raises(VisardError, match="do not cancel: its clients were asked different things"):
        go(change=slow)
    plan = Plan("r s 0 1 1", {}, {"a": "x"}, {"a": 1.0}, ("theta",), 4.0)
    message = Down({"w": torch.zeros(2)}, {}, None, 0.1)
    found = {
        plan.asked(message, {}),
        plan.asked(message, {"method": {"lr": 1}}),
        plan.asked(replace(message, lr=0.2), {}),
        plan.asked(replace(message, theta={"w": torch.ones(2)}), {}),
        replace(plan, members={"a": "y"}).asked(message, {}),
        replace(plan, weights={"a": 0.5}).asked(message, {}),
        replace(plan, context="r s 0 1 2").asked(message, {}),
    }
    assert len(found) == 7


def test_a_sum_has_as_many_clients_as_the_run_says(go: Go) -> None:
    with pytest.raises(VisardError, match=r"aggregation\.fewest"):
        go("aggregation.fewest=4")


def test_signatures_are_bound_to_key_and_statement() -> None:
    one, two = SIGNERS["house-1"], SIGNERS["house-2"]
    signature = one(of_list("c", ("a", "b")))
    assert signed_by(of_list("c", ("b", "a")), signature) == one.fingerprint != two.fingerprint
    for wrong in (signature[:-1], signature[:-1] + bytes([signature[-1] ^ 1]), b"", two(b"x")[:97] + signature[97:]):
        with pytest.raises(PublicError, match="a signature is not one"):
            signed_by(of_list("c", ("a", "b")), wrong)
    with pytest.raises(PublicError):
        signed_by(of_list("c", ("a",)), signature)


# ---- kills -----------------------------------------------------------------------------------------------------------
PHASES = ("secure_keys", "secure_shares", "local", "secure_agree", "secure_open")


def check(said: list[tuple[Request, Any, Any]]) -> None:
    """From all that was said: no mask twice, and one set of shares for each sum."""
    keys: dict[tuple[str, str], PublicKeys] = {}
    vectors: dict[tuple[str, str], bytes] = {}
    opened: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
    for request, message, reply in said:
        client = request.client
        if isinstance(reply, PublicKeys):
            known = keys.setdefault((client, message.context), reply)
            assert (known.seal, known.mask) == (reply.seal, reply.mask)
        if isinstance(reply, Up):
            vector = next(iter(reply.theta.values())).numpy().tobytes()
            context = Plan.parse(request.secure).context
            assert vectors.setdefault((client, context), vector) == vector, "one vector behind the same masks"
        if isinstance(message, Opening):
            context = Plan.parse(message.plan).context
            mine = context, message.arrived
            assert opened.setdefault((client, context.rpartition(" ")[0]), mine) == mine, "one sum for each place"
    masks = [k.mask for k in keys.values()]
    assert len(set(masks)) == len(masks), "every sum has keys of its own"
    assert len(set(vectors.values())) == len(vectors)


@pytest.fixture
def undisturbed(go: Go) -> dict[str, torch.Tensor]:
    return load_file(go(name="undisturbed") / "model.safetensors")


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_killed_in_any_phase_ends_with_the_same_weights(
    go: Go, said: list[Any], undisturbed: dict[str, torch.Tensor], after: bool
) -> None:
    said.clear()
    with pytest.raises(Killed):
        go(name="killed", dies=(PHASES[0], HOUSES[1]), after=after)
    for phase in PHASES[1:]:
        with pytest.raises(Killed):
            go(name="killed", dies=(phase, HOUSES[1]), after=after, resume=True)
    out = go(name="killed", resume=True)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[k], undisturbed[k]) for k in undisturbed)
    check(said)
    attempts = {Plan.parse(r.secure).context.rpartition(" ")[2] for r, _, _ in said if r.secure}
    assert len(attempts) > 1, "masks of an attempt that was not opened are not used again"


def test_after_an_opening_the_same_clients_must_come_back(go: Go, said: list[Any]) -> None:
    with pytest.raises(Killed):
        go(dies=("secure_open", HOUSES[1]), after=True)
    with pytest.raises(VisardError, match=r"round 1: house-3 must come back \(its party is not connected\)"):
        go(there=HOUSES[:2], resume=True)
    go(resume=True)
    check(said)


def test_a_party_opens_a_sum_for_one_set_of_clients(go: Go, tmp_path: Path, said: list[Any]) -> None:
    """Of two sums that differ by one client a server would have that client's update."""
    go()
    request, opening, _ = next(one for one in said if one[0].step == "secure_open" and one[0].client == HOUSES[0])
    at = party(tmp_path, HOUSES[0], ANYTHING)
    for arrived, line in ((HOUSES, ""), (HOUSES[:2], "agreed to open the same secure sum for other clients")):
        answer = unpack(at.do(pack(request), encode(replace(opening, arrived=arrived)))[0], Reply)
        assert (answer.failure or "").endswith(line), answer.failure
        assert bool(answer.failure) == bool(line)


def test_a_party_masks_no_second_reply_from_another_state(go: Go, tmp_path: Path, said: list[Any]) -> None:
    """The message is the same, and so would be the masks: the difference of the replies would be in the clear."""
    go()
    asked, message, _ = next(o for o in said if (o[0].step, o[0].client, o[0].round) == ("local", HOUSES[0], 1))
    at = party(tmp_path, HOUSES[0], ANYTHING)

    def again(number: int, **changes: Any) -> Reply:
        name = f"clients/{HOUSES[0]}-000002-{number}.bin"
        return unpack(at.do(pack(replace(asked, new_state=name, **changes)), encode(message))[0], Reply)

    same = again(77)
    assert same.failure is None
    assert same.state is not None
    assert "has masked another reply for the same secure sum" in str(again(78, state=same.state).failure)


def test_before_an_opening_a_run_goes_on_with_those_that_are_there(go: Go, said: list[Any]) -> None:
    with pytest.raises(Killed):
        go(dies=("secure_agree", HOUSES[0]), name="listed")
    with pytest.raises(Killed):
        go(dies=("local", HOUSES[2]))
    go(there=HOUSES[:2], resume=True)
    check([one for one in said if one[0].run == said[-1][0].run])


def test_a_party_does_not_go_back_to_an_attempt_that_is_over(go: Go, tmp_path: Path, said: list[Any]) -> None:
    with pytest.raises(Killed):
        go(dies=("secure_agree", HOUSES[0]))
    # as if the server had forgotten that it was about to open the sum
    (tmp_path / "run" / "checkpoint" / "sum.bin").unlink()
    first = next((r, m) for r, m, _ in said if r.step == "local" and r.client == HOUSES[0])
    at = party(tmp_path, HOUSES[0], ANYTHING)

    def answer(request: Request, message: Any, number: int) -> str:
        plan = Plan.parse(request.secure)
        context = f"{plan.context.rpartition(' ')[0]} {number}"
        asked = replace(request, secure=replace(plan, context=context).text())
        return unpack(at.do(pack(asked), encode(message))[0], Reply).failure or ""

    assert answer(*first, 1) == "", "the same once more"
    assert answer(*first, 2) == "", "another attempt, for nothing was opened"
    assert "has begun anew since" in answer(*first, 1)
