"""Messages in parts: each is moved once, also when the connection breaks; the memory of the server has a bound."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed: pip install 'visard[flower]'", allow_module_level=True)

import httpx
from flwr.app import Array, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents
from flwr.supercore.object_store import NoObjectInStoreError
from tests.engines.deployed import until

from visard.deployment.flower import REFUSAL, client, objects, server
from visard.deployment.flower import store as store_of_server
from visard.deployment.flower.client import Fleet
from visard.deployment.flower.handover import FILES, Giver, given_to, payload_from, stay
from visard.deployment.flower.link import parts, record
from visard.deployment.flower.objects import InFile, Shelf, array, fetched, in_order
from visard.deployment.flower.part import GONE, OVER, TAKEN, Part
from visard.deployment.flower.parts import Parts
from visard.deployment.flower.store import SMALL, Lent, Store, name_of_object
from visard.deployment.remote import set_aside
from visard.engines.codec import decode, encode
from visard.engines.frame import ALIGNED, largest_at
from visard.engines.records import PART as CHUNK
from visard.engines.records import head_of, name_of
from visard.errors import VisardError
from visard.processes import Filed

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of flwr

RANDOM = os.urandom(2 * CHUNK + 1000)
ZEROS = bytes(3 * CHUNK + 5)


@pytest.fixture(autouse=True)
def identified(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Sent:
    """A message as its sender has it; which parts were pulled."""

    def __init__(self, payload: bytes, header: bytes = b"header", parts: Callable[[bytes], Any] = array) -> None:
        self.message = Message(record(header, parts(payload)), 1, "query")
        with no_object_id_recompute():
            self.message.metadata.__dict__["_message_id"] = self.message.object_id
            self.objects, self.tree = get_all_nested_objects(self.message), get_object_tree(self.message)
        self.number, self.pulled = self.message.object_id, list[str]()

    def pull(self, name: str) -> bytes:
        self.pulled.append(name)
        return self.objects[name].deflate()

    @property
    def chunks(self) -> list[str]:
        return [name for name, found in self.objects.items() if isinstance(found, ArrayChunk)]


@pytest.mark.parametrize("payload", [b"", b"short", RANDOM, ZEROS], ids=["empty", "short", "random", "zeros"])
def test_parts_are_those_of_flower_and_are_moved_once(payload: bytes) -> None:
    sent, theirs = Sent(payload), Sent(payload, parts=lambda data: Array("uint8", (len(data),), "visard", data))
    assert [sent.objects[name].deflate() for name in sent.chunks] == [
        theirs.objects[name].deflate() for name in theirs.chunks
    ]
    assert sent.chunks == [name_of_object([sent.objects[name].deflate()]) for name in sent.chunks], "by our digest"
    assert all(
        name_of_object([found.deflate()]) == name for name, found in theirs.objects.items() if name not in theirs.chunks
    )
    shelf = Shelf()
    assert parts(fetched(sent.number, sent.tree, sent.pull, shelf)) == (b"header", payload)
    assert sorted(sent.pulled) == sorted(sent.objects), "every part once"
    contents = {name: found.deflate() for name, found in sent.objects.items()}
    again = inflate_object_from_contents(sent.number, contents)
    assert isinstance(again, Message)
    assert parts(again) == (b"header", payload), "Flower puts it together as we do"


def test_a_payload_that_is_here_is_not_moved_again() -> None:
    one, other, shelf = Sent(RANDOM, b"for one"), Sent(RANDOM, b"for another"), Shelf()
    fetched(one.number, one.tree, one.pull, shelf)
    assert parts(fetched(other.number, other.tree, other.pull, shelf)) == (b"for another", RANDOM)
    assert len(other.pulled) == 4, "message, contents, header and list of arrays"
    third = Sent(b"another payload")
    fetched(third.number, third.tree, third.pull, shelf)
    assert list(shelf.whole.values()) == [b"another payload"], "what is not part of the last message is let go"


@pytest.mark.parametrize("where", [lambda _: InFile(), lambda _: objects.InMemory()])
def test_what_came_before_the_connection_broke_is_not_moved_again(where: Any) -> None:
    sent, shelf = Sent(RANDOM), Shelf(where)

    def broken(name: str) -> bytes:
        if name == sent.chunks[-1]:
            raise httpx.ReadError("reset")
        return sent.pull(name)

    with pytest.raises(httpx.ReadError):
        fetched(sent.number, sent.tree, broken, shelf)
    assert {*sent.pulled} >= {*sent.chunks[:-1]}
    sent.pulled = []
    assert parts(fetched(sent.number, sent.tree, sent.pull, shelf)) == (b"header", RANDOM)
    assert [name for name in sent.pulled if name in sent.chunks] == sent.chunks[-1:]


def test_an_array_that_repeats_a_part_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(ZEROS)
    monkeypatch.setattr(objects, "MAX_BYTES", 2 * CHUNK)
    with pytest.raises(VisardError, match="its payload is longer than"):
        fetched(sent.number, sent.tree, sent.pull, Shelf())


def test_no_more_parts_are_held_than_are_on_their_way() -> None:
    begun: list[int] = []
    found = in_order(lambda n: begun.append(n) or n, range(100), at_once=2)  # type: ignore[func-returns-value]
    assert next(found) == 0
    time.sleep(0.1)
    assert max(begun) <= 2
    assert list(found) == list(range(1, 100))


def test_nothing_holds_on_to_a_payload_that_is_done_with() -> None:
    sent, shelf = Sent(RANDOM), Shelf()
    held = weakref.ref(shelf)
    gc.disable()
    try:
        fetched(sent.number, sent.tree, sent.pull, shelf)
        del shelf
        assert held() is None, "only the collector of garbage would find it"
    finally:
        gc.enable()


# Replies that wait in a file


def test_a_long_reply_waits_in_a_file_and_is_decoded_without_a_copy(tmp_path: Path) -> None:
    weights = {"a": torch.randn(1_500_000), "b": torch.arange(7), "c": torch.randn(3)}
    data = encode(weights)
    buffer = InFile(tmp_path)
    for start in range(0, len(data), 999_999):
        buffer.add(memoryview(data)[start : start + 999_999])
    payload = buffer.done()
    assert isinstance(payload, memoryview)
    assert payload == data
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    found = decode(payload, dict)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    place = torch.frombuffer(payload, dtype=torch.uint8).data_ptr()
    assert place <= found["a"].data_ptr() < place + len(payload), "in the file"
    set_aside((b"", payload))
    assert torch.equal(found["a"], weights["a"]), "it is read again where its memory was let go"


def test_a_request_is_written_over_the_file_of_the_last_one(tmp_path: Path) -> None:
    shelf = Shelf(partial(InFile, tmp_path, False))
    files, held = list[tuple[int, int]](), list[Filed]()
    for data in (RANDOM, RANDOM[::-1], RANDOM[: CHUNK + 1], RANDOM):
        sent = Sent(data)
        payload = parts(fetched(sent.number, sent.tree, sent.pull, shelf))[1]
        assert isinstance(payload, Filed)
        assert bytes(payload.map()) == data, "all of it, and nothing of the one before"
        files.append((os.fstat(payload.handle).st_ino, payload.serial))
        held.append(payload)
    assert len({inode for inode, _ in files}) == 1
    assert len({serial for _, serial in files}) == 4, "other bytes"
    shelf.keep(())
    assert shelf.served is None


def test_a_short_reply_stays_in_memory(tmp_path: Path) -> None:
    buffer = InFile(tmp_path)
    buffer.add(memoryview(b"abc"))
    buffer.again(1, 2)
    assert buffer.done() == b"abcbc"


# What the server holds


def test_the_memory_of_the_server_has_a_bound(tmp_path: Path) -> None:
    store, sent = Store(tmp_path, most=CHUNK + 100_000), Sent(RANDOM)
    store.preregister(1, sent.tree)
    for name, found in sent.objects.items():
        store.put(name, found.deflate())
    assert CHUNK < store.held <= CHUNK + 100_000
    assert store.in_file >= len(RANDOM) - CHUNK - 100_000
    assert list(tmp_path.iterdir()) == []
    assert parts(fetched(sent.number, sent.tree, lambda n: store.get(n) or b"", Shelf())) == (b"header", RANDOM)
    other = Sent(os.urandom(2 * CHUNK))
    store.preregister(1, other.tree)
    for name, found in other.objects.items():
        store.put(name, found.deflate())
    store.delete(other.number)
    third = Sent(os.urandom(2 * CHUNK))  # goes where the other one was, and nowhere else
    store.preregister(1, third.tree)
    for name, found in third.objects.items():
        store.put(name, found.deflate())
    for there in (sent, third):
        again = fetched(there.number, there.tree, lambda n: store.get(n) or b"", Shelf())
        assert parts(again) == parts(there.message)
    store.delete(third.number)
    store.delete(sent.number)
    assert (store.held, store.in_file, len(store)) == (0, 0, 0)
    assert store._file is not None
    assert os.fstat(store._file.fileno()).st_size == 0
    store.close()


def test_a_full_disk_leaves_no_damaged_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written did not come: it is asked for again, and nothing else is given in its place."""
    store, first, second = Store(tmp_path, most=0), Sent(os.urandom(CHUNK)), Sent(os.urandom(CHUNK))
    said = list[str]()
    store.say = said.append
    store.preregister(1, first.tree)
    for name, found in first.objects.items():
        store.put(name, found.deflate())
    store.preregister(1, second.tree)
    name, found = max(second.objects.items(), key=lambda item: len(item[1].deflate()))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            store.put(name, found.deflate())
    assert said == ["a part of a message cannot be kept: No space left on device"]
    assert not store.get(name)
    assert name in store.preregister(1, second.tree), "it is missing"
    for name, found in second.objects.items():
        store.put(name, found.deflate())
    for there in (first, second):
        again = fetched(there.number, there.tree, lambda n: store.get(n) or b"", Shelf())
        assert parts(again) == parts(there.message)
    store.close()


def test_a_tree_that_doubles_at_every_level_is_refused(tmp_path: Path) -> None:
    """A few kilobytes of names would become a tree of 2^60 parts when the run asks for the message."""
    names = [name_of(str(k).encode()) for k in range(60)]
    tree = ObjectTree(object_id=names[0])
    for below, name in itertools.pairwise(names):
        tree = ObjectTree(object_id=name, children=[tree, ObjectTree(object_id=below)])
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="a message has more than 500 parts"):
        store.preregister(1, tree)
    step = names[1:9]  # also in several messages, each of which is small
    for count in range(2, 9):
        small = ObjectTree(object_id=names[0])
        for below, name in itertools.pairwise(names[:count]):
            small = ObjectTree(object_id=name, children=[small, ObjectTree(object_id=below)])
        store.preregister(1, small)
    assert sum(1 for _ in objects.iterate_object_tree(store.get_object_tree(step[6]))) == 255
    known = ObjectTree(object_id=step[6])
    with pytest.raises(ValueError, match="a message has more than 500 parts"):
        store.preregister(1, ObjectTree(object_id=names[50], children=[known, known]))
    with pytest.raises(ValueError, match="a message has more than 500 parts"):
        store.preregister(1, ObjectTree(object_id=names[51], children=[ObjectTree(object_id=n) for n in names * 9]))


# Long payloads in files, which a run gets


def filed_at(store: Store, sent: Sent, leave: Collection[str] = ()) -> None:
    """Take the parts of a message as from a party, the last ones first but for the very first."""
    store.preregister(1, sent.tree)
    for name in [sent.chunks[0], *reversed(sent.objects)]:
        content = sent.objects[name].deflate()
        if name not in leave:
            with store.coming(name, [content[:7], content[7:99], content[99:]], filed=True):
                store.put(name, b"")


def read_of(found: Lent | None) -> bytes:
    assert found is not None
    file, free = found
    free()
    return bytes(file.map())


def inode_of(found: Lent | None) -> int:
    assert found is not None
    file, free = found
    free()
    return os.fstat(file.handle).st_ino


def test_a_long_payload_of_a_party_is_a_file_that_a_run_gets(tmp_path: Path) -> None:
    weights = {"a": torch.randn(CHUNK), "b": torch.arange(7)}
    store, sent = Store(tmp_path), Sent(encode(weights))
    filed_at(store, sent)
    assert store.held < 100_000, "next to nothing is in memory"
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    contents = {name: found.deflate() for name, found in sent.objects.items()}
    assert {name: store.get(name) for name in sent.objects} == contents, "parts are there too"
    listening = server._inside_socket(tmp_path / FILES)
    ended: list[int] = []
    giver = Giver(listening, store.whole, ended.append, lambda *_: False)
    pulled: list[str] = []

    def pull(name: str) -> bytes:
        pulled.append(name)
        return store.get(name) or b""

    shelf = Shelf(given=lambda names: payload_from(tmp_path / FILES, names))
    _, payload = parts(fetched(sent.number, sent.tree, pull, shelf))
    assert not {*pulled} & {*sent.chunks}, "none of its parts was moved"
    assert isinstance(payload, memoryview)
    store.delete(sent.number)
    assert (len(store), store._filed, store._payloads._files, store._payloads._turns) == (0, set(), {}, {})
    found = decode(payload, dict)
    assert torch.equal(found["a"], weights["a"]), "a run has the file when the server has let go of it"
    place = torch.frombuffer(payload, dtype=torch.uint8).data_ptr()
    assert place <= found["a"].data_ptr() < place + len(payload), "and decodes it without a copy"
    assert payload_from(tmp_path / FILES, sent.chunks) is None, "it is gone"
    here = stay(tmp_path / FILES, 17)
    assert here is not None
    assert payload_from(tmp_path / FILES, sent.chunks) is None, "others are answered meanwhile"
    assert ended == []
    here.close()
    until(lambda: ended == [17], "the server to know of the end of a run")
    giver.close()
    assert payload_from(tmp_path / FILES, sent.chunks) is None, "nobody answers"


def test_a_file_is_given_only_when_all_of_its_parts_are_there(tmp_path: Path) -> None:
    store, sent = Store(tmp_path), Sent(os.urandom(3 * CHUNK + 5))
    filed_at(store, sent, sent.chunks[2:3])
    assert store.whole(sent.chunks) is None
    filed_at(store, sent)
    assert read_of(store.whole(sent.chunks)) == sent.message.content.array_records["payload"]["payload"].data
    assert store.whole([sent.chunks[0], sent.chunks[2], sent.chunks[1], sent.chunks[3]]) is None, "another order"
    assert store.whole(["0" * 64, *sent.chunks]) is None


def test_a_file_serves_the_next_payload_when_the_run_has_read_it(tmp_path: Path) -> None:
    data = [os.urandom(size) for size in (3 * CHUNK, 2 * CHUNK + 9, 2 * CHUNK)]
    store, sent = Store(tmp_path), [Sent(payload) for payload in data]
    giver = Giver(server._inside_socket(tmp_path / FILES), store.whole, lambda number: None, lambda *_: False)
    filed_at(store, sent[0])
    inode, payload = inode_of(store.whole(sent[0].chunks)), payload_from(tmp_path / FILES, sent[0].chunks)
    time.sleep(0.3)  # for a server that takes it back too soon
    store.delete(sent[0].number)
    filed_at(store, sent[1])
    assert inode_of(store.whole(sent[1].chunks)) != inode, "the run has not let go of it"
    assert payload == data[0]
    del payload
    until(lambda: bool(store._payloads._spare), "the server to have its file back")
    filed_at(store, sent[2])
    assert inode_of(store.whole(sent[2].chunks)) == inode
    assert read_of(store.whole(sent[2].chunks)) == data[2], "shorter than what was there"
    assert read_of(store.whole(sent[1].chunks)) == data[1]
    store.delete(sent[2].number)
    assert len(store._payloads._spare) == 1
    store.shrink()
    assert store._payloads._spare == [], "when a run ends, the disk has its room back"
    giver.close()


def test_a_file_that_has_served_is_still_open(tmp_path: Path) -> None:
    store, path = Store(tmp_path), tmp_path / "served"
    path.write_bytes(b"an earlier payload")
    store._payloads._spare.append(Filed(os.open(path, os.O_RDWR), 18))
    filed_at(store, sent := Sent(RANDOM))
    assert inode_of(store.whole(sent.chunks)) == path.stat().st_ino


def test_a_file_serves_no_other_payload_while_a_part_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party goes on with the upload of a reply whose run has ended meanwhile."""
    store, one = Store(tmp_path), Sent(os.urandom(2 * CHUNK))
    write, seen = store_of_server.Payload.write, list[int]()

    def slow(payload: store_of_server.Payload, number: int, pieces: Sequence[memoryview]) -> None:
        if number == 1:
            store.delete(one.number)
            seen.append(len(store._payloads._spare))
        write(payload, number, pieces)

    monkeypatch.setattr(store_of_server.Payload, "write", slow)
    with suppress(NoObjectInStoreError):
        filed_at(store, one)
    assert seen == [0]
    assert len(store._payloads._spare) == 1, "afterwards it does"


def test_a_part_in_memory_is_a_copy_of_what_the_next_body_is_written_over(tmp_path: Path) -> None:
    store, sent = Store(tmp_path), Sent(b"payload")
    store.preregister(1, sent.tree)
    for name, found in sent.objects.items():
        memory = bytearray(content := found.deflate())
        with store.coming(name, [memoryview(memory)[:5], memoryview(memory)[5:]], filed=True):
            store.put(name, b"")
        memory[:] = bytes(len(memory))
        assert store.get(name) == content


def test_a_part_whose_file_is_gone_meanwhile_is_kept_as_a_copy(tmp_path: Path) -> None:
    """Its message is given up and announced again while it is written."""
    store, sent = Store(tmp_path), Sent(RANDOM)
    store.preregister(1, sent.tree)
    name = sent.chunks[0]
    memory = bytearray(content := sent.objects[name].deflate())
    with store.coming(name, [memoryview(memory)], filed=True):
        store.delete(sent.number)
        store.preregister(1, sent.tree)
        store.put(name, b"")
    memory[:] = bytes(len(memory))
    assert store.get(name) == content
    with store.adopted(sent.chunks[1]), pytest.raises(NoObjectInStoreError, match="is gone"):
        store.put(sent.chunks[1], b"")


def test_a_run_hands_the_server_the_file_of_a_request(tmp_path: Path) -> None:
    store, sent, stored = Store(tmp_path), Sent(RANDOM), list[str]()
    link = SimpleNamespace(store_object=lambda run, session, name, _: (stored.append(name), store.put(name, b"")))
    parts_of_server = Parts(link, store)  # type: ignore[arg-type]
    giver = Giver(server._inside_socket(tmp_path / FILES), store.whole, lambda number: None, parts_of_server.adopt)
    written = InFile(tmp_path, mapped=False)
    written.add(memoryview(RANDOM))
    file = written.done()
    assert isinstance(file, Filed)
    assert not given_to(tmp_path / FILES, 1, "session", sent.chunks, file), "it was not announced"
    store.preregister(1, sent.tree)
    assert not given_to(tmp_path / FILES, 1, "session", sent.chunks[::-1], file), "in another order"
    assert given_to(tmp_path / FILES, 1, "session", sent.chunks, file)
    assert stored == sent.chunks
    assert {name: store.get(name) for name in sent.chunks} == {n: sent.objects[n].deflate() for n in sent.chunks}
    assert store.held == 0
    store.delete(sent.number)
    assert store._payloads._spare == [], "the run may still read its file"
    giver.close()
    assert not given_to(tmp_path / FILES, 1, "session", sent.chunks, file)


@pytest.mark.parametrize("askew", [0, 1, 8])
def test_a_file_in_which_numbers_do_not_lie_as_in_memory_is_not_taken(tmp_path: Path, askew: int) -> None:
    data = bytes(encode({"a": torch.randn(1000)}))
    start = -largest_at(data) % ALIGNED + askew
    (tmp_path / "payload").write_bytes(bytes(start) + data)

    def whole(names: Sequence[str]) -> Lent:
        return Filed(os.open(tmp_path / "payload", os.O_RDONLY), len(data), start), lambda: None

    giver = Giver(server._inside_socket(tmp_path / FILES), whole, lambda number: None, lambda *_: False)
    found = payload_from(tmp_path / FILES, ["a part"])
    giver.close()
    assert (found is None) == (askew > 0)


def test_a_payload_with_a_short_part_in_its_middle_is_no_file(tmp_path: Path) -> None:
    """A party may cut its payload as it likes: there would be a hole after the short part."""
    store, cut = Store(tmp_path), [os.urandom(size) for size in (CHUNK, SMALL, CHUNK)]
    contents = [head_of(len(data)) + data for data in cut]
    names = [get_object_id(content) for content in contents]
    store.preregister(1, ObjectTree(object_id="f" * 64, children=[ObjectTree(object_id=name) for name in names]))
    for name, content in zip(names, contents, strict=True):
        with store.coming(name, [content], filed=True):
            store.put(name, b"")
    assert store.whole(names) is None
    assert [store.get(name) for name in names] == contents


def test_a_part_that_cannot_be_written_to_its_file_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent = Store(tmp_path), Sent(RANDOM)
    monkeypatch.setattr(os, "pwritev", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    filed_at(store, sent)
    assert {name: store.get(name) for name in sent.objects} == {n: f.deflate() for n, f in sent.objects.items()}
    assert not any(store._payloads.has(name) for name in sent.objects), "a place that is empty"


def test_a_part_that_two_payloads_have_is_in_both_files(tmp_path: Path) -> None:
    store, same = Store(tmp_path), os.urandom(CHUNK)
    payloads = [os.urandom(CHUNK) + same + os.urandom(CHUNK) for _ in range(2)]
    for payload in payloads:
        filed_at(store, Sent(payload))
    one, other = (Sent(payload) for payload in payloads)
    assert read_of(store.whole(other.chunks)) == payloads[1]
    assert read_of(store.whole(one.chunks)) == payloads[0]
    zeros = Sent(ZEROS)
    filed_at(store, zeros)
    assert read_of(store.whole([zeros.chunks[0]] * 3 + [zeros.chunks[1]])) == ZEROS, "or several times in one"


def test_no_payload_is_written_over_the_parts_of_another(tmp_path: Path) -> None:
    """Whoever announces parts of others as its own, or in another order than it says later, changes nothing there."""
    store, honest = Store(tmp_path), Sent(RANDOM)
    first, wrong = Sent(os.urandom(CHUNK) + RANDOM[CHUNK : 2 * CHUNK]), Sent(os.urandom(2 * CHUNK))
    filed_at(store, first)  # it has the second part of the honest one in its file
    filed_at(store, honest)
    filed_at(store, wrong)
    assert store.whole([first.chunks[0], wrong.chunks[1]]) is None, "that place is taken"
    assert read_of(store.whole(honest.chunks)) == RANDOM
    for sent in (first, honest, wrong):
        assert {name: store.get(name) for name in sent.objects} == {n: f.deflate() for n, f in sent.objects.items()}


def test_parts_find_room_elsewhere_when_there_are_files_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_of_server, "MOST_FILES", 1)
    store, one, other = Store(tmp_path), Sent(RANDOM), Sent(os.urandom(2 * CHUNK))
    filed_at(store, one)
    filed_at(store, other)
    assert (store.whole(other.chunks), store.held >= 2 * CHUNK) == (None, True)
    assert read_of(store.whole(one.chunks)) == RANDOM
    assert {name: store.get(name) for name in other.objects} == {n: f.deflate() for n, f in other.objects.items()}


def test_a_party_tells_a_run_that_is_over_from_a_key_that_is_refused() -> None:
    """Of the one it drops the message and goes on, of the other it hears why."""
    party = object.__new__(Fleet)
    answer = httpx.Response(OVER, request=httpx.Request("POST", "https://server"))
    party._client, party._signing = None, SimpleNamespace(call=lambda *_: answer)  # type: ignore[assignment]
    with pytest.raises(ObjectPullError, match="its run is over"):
        party._part(Part(1, "", "0" * 64))
    with pytest.raises(httpx.HTTPStatusError):
        party._part(Part(1, "session", "0" * 64), [b"a reply"])
    answer.headers[REFUSAL] = "the key of node-1 was revoked on Monday"
    with pytest.raises(httpx.HTTPStatusError):
        party._part(Part(1, "", "0" * 64))


def test_a_party_whose_new_key_is_not_taken_goes_on_with_the_old_one_in_every_call() -> None:
    party: Any = object.__new__(Fleet)
    old = SimpleNamespace(close=Mock()), "public", SimpleNamespace(close=Mock())
    party._client, party._public, party._signing = old
    party._coming, party.say = SimpleNamespace(public_key=lambda: "new"), lambda text: None

    def opened(key: Any) -> Any:
        party._signing = SimpleNamespace(close=Mock())
        return SimpleNamespace(close=Mock())

    party._open, party._activate = opened, Mock(side_effect=httpx.ConnectError("no"))
    assert not party._switch()
    assert (party._client, party._public, party._signing) == old
    assert not old[0].close.called
    assert not old[2].close.called
    party._activate = Mock()
    assert party._switch()
    assert party._signing is not old[2], "the new one is in use"
    assert old[0].close.called
    assert old[2].close.called


# A party whose connection breaks


class Shaky(Fleet):
    """A party with a server that keeps parts, over a connection that breaks when the test says so."""

    def __init__(self, breaks: Callable[[str, int], bool]) -> None:
        self.said: list[str] = []
        self.say, self._stop, self._node, self._sent = self.said.append, threading.Event(), Node(), None  # type: ignore[assignment]
        self._signing = SimpleNamespace(heard=0.0, call=self.call)  # type: ignore[assignment]
        self._told, self._shelf = -1e9, Shelf()
        self.breaks, self.calls, self.moved = breaks, 0, dict[str, int]()
        self.there: set[str] = set()
        self.wanted: list[str] = []
        self._client = SimpleNamespace(PushMessages=self.push_messages)  # type: ignore[assignment]

    def push_messages(self, request: Any) -> Any:
        names = [node.object_id for node in objects.iterate_object_tree(request.message_object_trees[0])]
        self.wanted = [name for name in names if name not in self.there]
        return SimpleNamespace(objects_to_push=self.wanted, session_id="session")

    def call(self, part: Part, content: Sequence[bytes]) -> httpx.Response:
        assert name_of_object(content) == part.name
        self.calls += 1
        self.moved[part.name] = self.moved.get(part.name, 0) + 1
        if self.breaks("before", self.calls):
            raise httpx.WriteError("reset")
        stored = part.name not in self.there
        self.there.add(part.name)
        if self.breaks("after", self.calls):
            raise httpx.ReadError("reset")
        return httpx.Response(TAKEN if stored else GONE, request=httpx.Request("POST", "https://server"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_goes_on_with_the_parts_that_are_missing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN", (0.001, 0.01))
    party = Shaky(lambda which, call: which == when and call in (2, 4, 5))
    sent = Sent(os.urandom(4 * CHUNK), parts=array)
    party._push(sent.message, 1, 1.0)
    assert party.there == {*sent.objects}
    extra = sum(party.moved.values()) - len(sent.objects)
    assert extra == (3 if when == "before" else 0), "a part whose answer was lost is there and is not sent again"
    assert len(party.said) == 1, "said once"


def test_a_party_that_is_stopped_waits_for_no_connection() -> None:
    party = Shaky(lambda which, _: which == "before")
    party._stop.set()
    with pytest.raises(httpx.WriteError):
        party._push(Sent(b"payload").message, 1, 1.0)
