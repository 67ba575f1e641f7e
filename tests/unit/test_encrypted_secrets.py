"""Where private keys lie on disk: in key files, or in states that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.sealed_wire import BITS, method, start, wire

pytest.importorskip("gmpy2", reason="needs the extra crypto")

from visard.crypto.paillier import generate, key_to_bytes, load_key, save_key
from visard.crypto.session import Session
from visard.deployment.party import OwnStates
from visard.engines.checkpoint import Packs
from visard.engines.codec import encode
from visard.engines.request import Request
from visard.errors import UsageError, VisardError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_state_names_the_key_file_and_does_not_hold_the_key(tmp_path: Path) -> None:
    net, how = wire(1, 4), method(keys=str(tmp_path), exchanges=2)
    states: list[bytes] = []

    def before(step: str, client: str, message: Any) -> Any:
        states.append(encode(net.parties[client].state))
        return message

    net.before = before
    how.round(start(how, net), net)
    states += [encode(p.state) for p in net.parties.values()]
    for c in net.clients:
        key = load_key(tmp_path / f"{c}.key", BITS)
        assert mode(tmp_path / f"{c}.key") == 0o600
        for part in (key_to_bytes(key), f"{int(key.p):x}".encode(), f"{int(key.q):x}".encode()):
            assert not any(part in state for state in states)
        assert Session.from_state(net.parties[c].state["session"]).private == key
    (tmp_path / "t.key").unlink()
    with pytest.raises(UsageError, match=r"t.key cannot be read"):
        Session.from_state(net.parties["t"].state["session"])
    save_key(tmp_path / "t.key", generate(BITS, insecure=True))
    with pytest.raises(VisardError, match="not the one that the session began with"):
        Session.from_state(net.parties["t"].state["session"])


def test_states_on_disk_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "clients").mkdir()
        packs = Packs(tmp_path)
        first, *_ = [packs.write("clients/1-a", {"key": c}, None) for c in ("a", "b", "c")]
        assert first is not None
        packs.compact({"a": first}, "clients/2-b")
        own = OwnStates(tmp_path / "party")
        request = Request("run", {}, "a", "hello", new_state="clients/a-1-x")
        own.write(request, {"key": b"secret"})
    finally:
        os.umask(before)
    found = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(found) == 4
    assert {mode(p) for p in found} == {0o600}
