"""The server's side of a run over a deployment: a Flower run without application code, and a link to its nodes."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.app import Array, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import message_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from visard.core import ClientId
from visard.deployment.certificates import NAME
from visard.deployment.flower.calls import PartsInside
from visard.deployment.flower.handover import FILES, given_to, payload_from, stay
from visard.deployment.flower.link import TYPE, GridLink, confirm, record
from visard.deployment.flower.objects import InFile, Shelf, array, fetched, names_in, puller, push
from visard.deployment.flower.server import SOCKET
from visard.deployment.keys import read_gone, read_parties
from visard.deployment.remote import Link, Parts, PartyLink, on_record, read
from visard.engines.asking import plain
from visard.engines.request import Reply, Request, pack
from visard.errors import UsageError, VisardError
from visard.processes import SHORT, Data, Filed, share_memory_of_threads

HELLO_SECONDS = 600.0  # a party may have to load its data first
HELLO_AGAIN = 10.0  # seconds after which a party without a client is asked once more: it may have been restarted
TELL_EVERY = 30.0
C = TypeVar("C", ControlHttpClient, RuntimeHttpClient)
LOOK_EVERY = 1.0  # seconds between looks for replies without news: of nodes that went away there are none
AT_ONCE = 4  # parts of replies on their way from the server's process
THREADS = 2 * Link.window  # one for each request on its way, and one for each hello: a stalled one holds up no other


class Fetcher:
    """Looks for replies and fetches those that are there, in threads: a slow or malformed one holds up no other.

    `HttpGrid` would wait there for its parts, and an exception over one malformed reply would end the run.
    """

    def __init__(
        self,
        runtime: RuntimeHttpClient,
        run: int,
        part: Callable[[str], bytes],
        news: Callable[[], int] | None = None,
        given: Callable[[list[str]], memoryview | None] = lambda _: None,
    ) -> None:
        """`part` gives a part of a message by its name, `given` a payload by the names of its parts, where it is in a
        file. Where `news` is the same as before, none has come whole."""
        self._runtime, self._run, self._part, self._given = runtime, run, part, given
        self._news = news or itertools.count().__next__
        self._heard, self._look = -1, 0.0  # the last news, and when to look anyway
        self._asked_for: set[str] = set()
        self.folder: Path | None = None  # where long replies wait, in files without a name
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._node = Node(node_id=SUPERLINK_NODE_ID)
        self._threads = ThreadPoolExecutor(THREADS)
        self._coming: dict[str, tuple[Future[Message], threading.Event]] = {}  # and whether it was given up

    def replies(self, numbers: Collection[str], others: Collection[str], limit: float) -> dict[str, Message | str]:
        """Complete replies to the requests `numbers`, or why one cannot be read; `others` are wanted later."""
        asked = [n for n in numbers if n not in self._coming]
        if asked and self._has_news(asked):
            found = self._runtime.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                number = proto.metadata.reply_to_message_id
                if number in asked:
                    over = threading.Event()
                    coming = self._threads.submit(self._fetch, proto.metadata.message_id, tree, limit, over)
                    self._coming[number] = coming, over
        for number in [n for n in self._coming if n not in numbers and n not in others]:
            coming, over = self._coming.pop(number)
            over.set()
            coming.cancel()
        done = [n for n in numbers if n in self._coming and self._coming[n][0].done()]
        return {n: _result(self._coming.pop(n)[0]) for n in done}

    def _has_news(self, asked: list[str]) -> bool:
        """Whether to ask for replies: Flower's answer to that costs much more than the news."""
        news, now, asked_before = self._news(), time.monotonic(), self._asked_for
        self._asked_for = set(asked)
        if news == self._heard and now < self._look and self._asked_for <= asked_before:
            return False
        self._heard, self._look = news, now + LOOK_EVERY
        return True

    def _fetch(self, number: str, tree: ObjectTree, limit: float, over: threading.Event) -> Message:
        def in_turn(name: str) -> bytes:
            with self._turns:
                return self._part(name)

        shelf = Shelf(lambda served: InFile(self.folder), given=self._given)
        message = fetched(number, tree, puller(in_turn, limit, over.is_set), shelf)
        self.confirm(number)
        return message

    def confirm(self, number: str) -> None:
        """Let the server drop a message that was fetched, or one that is not wanted any more."""
        confirm(self._runtime, self._node, self._run, number)

    def close(self) -> None:
        """Stop fetching."""
        for _, over in self._coming.values():
            over.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _result(done: Future[Message]) -> Message | str:
    try:
        return done.result()
    except httpx.HTTPError:
        raise
    except Exception as error:  # whatever a stranger's bytes can cause
        return f"reply refused: {' '.join(str(error).split())[:200] or type(error).__name__}"


# A run needs an application; this one has no code, and no process ever looks for any.
_APP = """
[project]
name = "visard"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "visard"
[tool.flwr.app.components]
serverapp = "visard_none:app"
clientapp = "visard_none:app"
[tool.flwr.app.config]
"""


class DeploymentLink(GridLink, PartyLink):
    """The nodes that are connected to a `visard server` on this machine."""

    poll = 0.1

    def __init__(self, server: Path, wait: float, say: Callable[[str], None]) -> None:
        super().__init__()
        share_memory_of_threads()
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self.where, self.wait, self.say = server, wait, say
        self._hello = Request()
        self._greetings = 0
        self._clients: dict[int, dict[ClientId, dict[str, int]]] = {}  # node -> its clients
        self._pending: dict[str, tuple[int, Request]] = {}  # hello on its way -> node
        self._again: dict[int, float] = {}  # node -> when to ask it once more
        self._said: set[str] = set()  # of nodes that cannot take part
        self._beat: HeartbeatSender | None = None
        self._begun = False
        self._limit = 60.0  # seconds for a reply to come whole
        self._last: tuple[Data | Filed, Array] | None = None  # the payload that was last sent
        if not (server / SOCKET).is_socket():
            raise UsageError(f"no visard server runs with --state {server} (there is no {SOCKET})")
        with self._reporting():
            self._start()

    def _start(self) -> None:
        """Start a Flower run and take its one task, so that this process is what Flower calls the ServerApp."""
        with self._open(ControlHttpClient("http://visard")) as control:
            control.StartRun(StartRunRequest(fab=Fab(content=_bundle())))
        version = RuntimeVersionHttpInterceptor(component_name="flwr-serverapp")
        with self._open(RuntimeHttpClient("http://visard", interceptors=[version])) as runtime:
            task = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        if not task.token:
            raise VisardError("the server gave this run no task")
        token = RuntimeTokenHttpInterceptor(token=task.token)
        self._runtime = self._open(RuntimeHttpClient("http://visard", interceptors=[version, token]))
        given = self._runtime.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = given.task_id
        TaskIdentity.run_id = given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        self.grid: HttpGrid = HttpGrid(token=task.token)
        self.grid._client = self._runtime
        self.grid.set_run(run_from_proto(given.run))
        self._parts = PartsInside(self.where / SOCKET)
        run = given.run.run_id
        self._here = stay(self.where / FILES, run)
        self._fetcher = Fetcher(
            self._runtime, run, lambda name: self._parts.get(run, name), self._parts.news,
            partial(payload_from, self.where / FILES),
        )  # fmt: skip
        self._beat = HeartbeatSender(self._heartbeat)
        self._beat.start()

    def _open(self, client: C) -> C:
        """Send a Flower client's calls through the server's Unix socket."""
        client._client.close()
        client._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.where / SOCKET)), timeout=120.0)
        return client

    def _heartbeat(self) -> bool:
        try:
            return bool(self._runtime.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except (httpx.HTTPError, RuntimeError):
            return False

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise VisardError(f"the server at {self.where} refused: {error.response.status_code}") from None
        except httpx.HTTPError as error:
            raise VisardError(f"the server at {self.where} does not answer ({type(error).__name__})") from None

    def introduce(self, run: str, run_spec: dict[str, Any]) -> None:
        session = self.received.session if self.received else ""
        self._hello = Request(run=run, settings=run_spec, session=session, timeout=HELLO_SECONDS)

    def greetings(self) -> list[int]:
        """A last look for replies to greetings; returns the numbers of those without one."""
        with self._reporting():
            self._hear()
        return [hello.ask for _, hello in self._pending.values()]

    def gather(self, clients: Collection[ClientId], needed: int) -> None:
        """Wait for nodes; at the run's first request for all of them, later only for as many as are needed."""
        self._wait_for(
            lambda: set(clients) <= self._placed() or (self._begun and self._enough(clients, needed)),
            lambda: ", ".join(sorted(set(clients) - self._placed())[:5]),
        )
        if not self._enough(clients, needed):
            missing = sorted(set(clients) - self._placed())
            raise VisardError(
                f"{len(clients) - len(missing)} of {len(clients)} clients are connected, {needed} are needed; "
                f"waited {self.wait:g} s for {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )
        self._begun = True

    def parties(self, count: int) -> dict[ClientId, dict[str, int]]:
        self._wait_for(lambda: len(self._placed()) >= count, lambda: f"{count} parties")
        found = {client: counts for clients in self._clients.values() for client, counts in clients.items()}
        if len(found) != count:
            names = f" ({', '.join(sorted(found))})" if found else ""
            raise VisardError(f"{len(found)} parties are connected{names}, expected {count}")
        return dict(sorted(found.items()))

    def _enough(self, clients: Collection[ClientId], needed: int) -> bool:
        return len(set(clients) & self._placed()) >= needed

    def _placed(self) -> set[ClientId]:
        return {client for clients in self._clients.values() for client in clients}

    def _wait_for(self, met: Callable[[], bool], who: Callable[[], str]) -> None:
        end, tell = time.monotonic() + self.wait, time.monotonic() + 2.0
        with self._reporting():
            while True:
                self._look()
                if met() or time.monotonic() > end:
                    return
                if time.monotonic() > tell:
                    names = ", ".join(sorted(self._placed())) or "none"
                    self.say(f"waiting for {who()}, at most {self.wait:g} s; in the run so far: {names}")
                    tell = time.monotonic() + TELL_EVERY
                time.sleep(0.2)

    def _look(self) -> None:
        """Ask new nodes which clients they are, forget those that went away."""
        online = set(self.grid.get_node_ids())
        self._clients = {node: clients for node, clients in self._clients.items() if node in online}
        self._again = {node: when for node, when in self._again.items() if node in online}
        now = time.monotonic()
        for node in online:
            if not self._clients.get(node) and now >= self._again.get(node, 0.0):
                self._again[node] = now + HELLO_AGAIN
                self._greetings += 1
                hello = replace(self._hello, ask=self._greetings)
                if number := self.push(node, pack(hello), b"", HELLO_SECONDS):
                    self._pending[number] = node, hello
        self._hear(online)
        self.queue = max([1, *(len(clients) for clients in self._clients.values())])

    def _hear(self, online: Collection[int] = ()) -> None:
        """Take the replies to hellos. A node's first one counts; later ones say the same and are only put on record."""
        for number, parts in self.receive(list(self._pending)).items():
            node, hello = self._pending.pop(number)
            reply = read(hello, parts, None)
            own, refused = self._claims(node, reply)
            counts = node in online and not self._clients.get(node)
            if self.received is not None:
                outcome = "refused" if refused and not own else "read" if counts else "repeated"
                on_record(self.received, hello, parts, outcome, replace(reply, roles=own))
                self.received.flush()
            if counts:
                self._clients[node] = own
                if refused:
                    self._left_out(f"{refused[0]}{f' (and {len(refused) - 1} more)' if refused[1:] else ''}")

    def _claims(self, node: int, reply: Reply) -> tuple[dict[ClientId, dict[str, int]], list[str]]:
        """The clients in a node's reply that belong to it, and why others do not, or why it cannot take part."""
        names, assignment = read_parties(self.where)
        name = names.get(node, "an unknown node")
        if reply.failure is not None:
            return {}, [f"{name} cannot take part: {reply.failure or 'no reason given'}"]
        own, refused = {}, []
        for client, counts in reply.roles.items():
            if not NAME.fullmatch(client):
                refused.append(f"refused: {name} claims a role with an impossible name: {client[:100]}")
            elif refusal := assignment.refusal(name, client):
                refused.append(f"refused: {refusal}")
            else:
                own[client] = counts
        return own, refused

    def _left_out(self, why: str) -> None:
        """Say once, however often a node is asked, why it is no client."""
        if (text := plain(why)) not in self._said:
            self._said.add(text)
            self.say(text)

    def read(self, number: str, message: Message | str) -> Parts | str:
        """Header and payload of a reply, or why it has none: of a party whose key is not taken, that."""
        node = self._asked.get(number)
        found = super().read(number, message)
        party = read_parties(self.where)[0].get(node or 0, "") if isinstance(found, str) else ""
        return read_gone(self.where).get(party, found) if party else found

    def node_of(self, client: ClientId) -> int | None:
        return next((node for node, clients in self._clients.items() if client in clients), None)

    def send(self, client: ClientId, header: bytes, payload: Data | Filed, timeout: float) -> str | None:
        self._limit = max(self._limit, timeout * self.queue)
        with self._reporting():
            return super().send(client, header, payload, timeout)

    def push(self, node: int, header: bytes, payload: Data | Filed, timeout: float) -> str | None:
        """Send to a node. Messages with the same payload share its parts, which are hashed and moved once."""
        if self._last is None or self._last[0] is not payload:
            self._last = payload, array(payload)
        message = Message(record(header, self._last[1]), node, TYPE, ttl=timeout * self.queue + 60)
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
        proto = message_to_proto(remove_content_from_message(message))
        answer = self._runtime.PushMessages(PushAppMessagesRequest(messages_list=[proto], message_object_trees=[tree]))
        number = next(iter(answer.message_ids), "")
        if not number:
            return None
        run = self.grid.run.run_id
        session = answer.session_id
        wanted = self._given(run, session, payload, answer.objects_to_push)
        push(objects, wanted, lambda name, content: self._parts.put(run, session, name, content))
        self._asked[number] = node
        return str(number)

    def payload(self, pieces: Sequence[Data]) -> Data | Filed:
        """A long payload is written to a file, which the server gets."""
        if sum(map(len, pieces)) <= SHORT:
            return b"".join(pieces)
        written = InFile(self.folder, mapped=False)
        for piece in pieces:
            written.add(memoryview(piece).cast("B"))
        return written.done()

    def _given(self, run: int, session: str, payload: Data | Filed, wanted: Collection[str]) -> Collection[str]:
        """Hand the server a payload in a file, if it has none of it; returns the parts that it still wants."""
        assert self._last is not None
        names = names_in(self._last[1])
        if not isinstance(payload, Filed) or len(set(names)) < len(names) or not set(names) <= set(wanted):
            return wanted
        taken = given_to(self.where / FILES, run, session, names, payload)
        return set(wanted) - set(names) if taken else wanted

    def all_sent(self) -> None:
        self._last = None

    def forget(self, number: str) -> None:
        with contextlib.suppress(VisardError), self._reporting():
            self._fetcher.confirm(number)

    def pull(self, numbers: Collection[str]) -> Mapping[str, Message | str]:
        self._fetcher.folder = self.folder
        with self._reporting():
            return self._fetcher.replies(numbers, {*self._pending, *self.late}, self._limit)

    def close(self) -> None:
        if self._beat is None:
            return
        if self._beat.is_running:
            self._beat.stop()
        self._beat = None
        self._fetcher.close()
        with contextlib.suppress(httpx.HTTPError):
            self._runtime.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
        self._runtime.close()
        self._parts.close()
        if self._here is not None:
            self._here.close()


def _bundle() -> bytes:
    """A Flower application bundle that holds nothing but its description."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), _APP)
    return data.getvalue()
