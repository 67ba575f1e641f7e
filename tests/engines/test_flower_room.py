"""What waits at the server has a bound for each party, and a part of the disk stays free."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

import httpx
from flwr.proto.message_pb2 import ObjectTree
from tests.engines.test_flower_objects import Sent, Shaky, identified  # noqa: F401 (a fixture)
from tests.engines.test_flower_part_connections import Served, connected, of_part
from tests.engines.test_flower_parts import PUSH, Caller, known, signed

from visard.deployment.flower import FLEET, REFUSAL, client, room
from visard.deployment.flower.objects import array
from visard.deployment.flower.part import GIVEN, REFUSED, TAKEN, Part
from visard.deployment.flower.parts import Parts
from visard.deployment.flower.room import FULL, MANY, Room
from visard.deployment.flower.store import Store, name_of_object
from visard.deployment.listener import Limits
from visard.engines.records import head_of

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr
BODY = 100_000
SIZE = len(head_of(BODY)) + BODY


class Linked:
    """As much of Flower's state as parts need: every part that was announced is taken."""

    def __init__(self, store: Store) -> None:
        self.store, self._object_push_sessions = store, dict[str, Any]()

    def store_object(self, run: int, session: str, name: str, content: bytes) -> bool:
        self.store.put(name, content)
        return True

    def store_traffic(self, run: int, bytes_sent: int, bytes_recv: int) -> None: ...


class Door:
    """The port for parties, and what it says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        monkeypatch.setattr("visard.deployment.flower.parts.check_abort", lambda *_: False)
        self.said: list[str] = []
        self.store = Store(folder)
        self.served = Served(
            connected(callers=known(self.said.append)), Parts(Linked(self.store), self.store), **limits
        )  # type: ignore[arg-type]
        self.served.direct._room = Room(Limits(**limits), folder, self.store.is_here, self.store.shrink)  # type: ignore[arg-type]

    def send(self, content: bytes, name: str = "") -> int:
        """Send a part of node-1 with a session of its own; the answer."""
        part = Part(17, "0f" * 18, name or name_of_object([content]))
        if part.name not in self.store.store:
            self.store.preregister(17, ObjectTree(object_id=part.name))
        answer = self.served.call(part, of_part(part), content)
        if answer.status_code == FULL:
            assert answer.headers[REFUSAL].startswith("no room for a part of node-1: ")
        return answer.status_code

    def ask(self, name: str) -> int:
        part = Part(17, "", name)
        return self.served.call(part, of_part(part)).status_code


def part_of(size: int) -> bytes:
    """A part with so many bytes that there was not before."""
    return head_of(size) + os.urandom(size)


def test_a_party_has_a_bounded_number_of_bytes_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(tmp_path, monkeypatch, party_bytes=(most := 3 * SIZE + 100), free_bytes=0)
    parts = [part_of(BODY) for _ in range(5)]
    assert [door.send(part) for part in parts] == [TAKEN, TAKEN, TAKEN, FULL, FULL]
    assert door.send(parts[0]) == FULL, "as any other that comes once more"
    assert door.said == [f"no room for a part of node-1: {most} of its bytes wait here (--party-bytes)"], "once"
    assert door.send(part_of(10)) == TAKEN, "what fits is taken"
    held = name_of_object([parts[0]])
    assert door.ask(held) == GIVEN, "asking for parts is not bounded, and does not change what is counted"
    assert door.send(b"", held) == REFUSED, "nor does another content under the name of a part"
    assert door.send(parts[3]) == FULL
    door.store.delete(held)  # the run has fetched it
    assert [door.send(parts[3]), door.send(parts[4])] == [TAKEN, FULL]


def test_parts_that_are_not_taken_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(tmp_path, monkeypatch, party_bytes=SIZE, free_bytes=0)
    for _ in range(5):
        assert door.send(bytes(SIZE), name=sha256(os.urandom(8)).hexdigest()) == REFUSED
    assert door.send(part_of(BODY)) == TAKEN


def test_a_part_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Door(tmp_path, monkeypatch, free_bytes=10**18).send(part_of(BODY)) == FULL, "no disk is as large"
    door = Door(tmp_path, monkeypatch, free_bytes=10**9)
    free = [10**9 + SIZE - 1]
    monkeypatch.setattr(room, "_free", lambda folder: free[0])
    part = part_of(BODY)
    assert door.send(part) == FULL
    assert door.said == ["no room for a part of node-1: less than 1000000000 bytes of the disk are free (--free-bytes)"]
    assert door.send(part_of(1000)) == TAKEN, "short parts are in memory"
    free[0] += 1
    assert door.send(part) == TAKEN


def test_the_room_of_one_party_is_not_that_of_another() -> None:
    here = set[str]()
    counted = Room(Limits(party_bytes=100), None, here.__contains__)

    def take(party: str, name: str, size: int, comes: Callable[[str], None] = here.add) -> str:
        with counted.taking(party, name, size) as why:
            if not why:
                comes(name)
        return why

    assert take("a", "1", 60) == ""
    assert take("a", "2", 60) != ""
    assert take("b", "3", 60) == ""
    with counted.taking("b", "4", 40) as why:
        assert why == ""
        assert take("b", "5", 1) != "", "what is being taken counts"
    assert take("b", "5", 40) == "", "it did not come"


def test_what_is_counted_is_forgotten_when_it_is_gone() -> None:
    counted, here = Room(Limits(), None, lambda name: name in here), set[str]()
    for number in range(5 * MANY):
        with counted.taking("a", str(number), 1):
            here = {str(number)}
    assert len(counted._held["a"]) <= MANY + 2


def test_parts_come_by_the_path_of_parts_alone() -> None:
    """Where they are counted; Flower has another call for the same."""
    path = f"{FLEET}push-object"
    assert path != PUSH
    caller = Caller(path, signed(path, b"part"), [b"part"])
    assert (caller.call(), caller.through) == (404, None)


def test_a_party_tries_again_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN", (0.001, 0.01))
    party, call = Shaky(lambda *_: False), Shaky.call
    full = httpx.Response(FULL, request=httpx.Request("POST", "https://server"))
    refusals = [2, 3, 5]

    def answer(part: Part, content: Sequence[bytes]) -> httpx.Response:
        if party.calls + 1 in refusals:
            refusals.remove(party.calls + 1)
            return full
        return call(party, part, content)

    party._signing.call = answer  # type: ignore[method-assign]
    sent = Sent(os.urandom(100), parts=array)
    party._push(sent.message, 1, 1.0)
    assert party.there == {*sent.objects}
    assert refusals == []
    assert party.said == ["the server has no room for a reply now; going on with the rest"]


def test_files_that_have_served_are_given_back_before_a_part_is_refused(tmp_path: Path) -> None:
    given_back = list[int]()
    short = Room(Limits(free_bytes=2**62), tmp_path, shrink=lambda: given_back.append(1))
    with short.taking("node-1", "part", room.SMALL) as why:
        assert why.startswith("no room for a part of node-1")
    assert given_back == [1]
    with Room(Limits(free_bytes=0), tmp_path, shrink=lambda: given_back.append(1)).taking(
        "node-1", "part", 10**6
    ) as why:
        assert not why
    assert given_back == [1], "not where there is room"
