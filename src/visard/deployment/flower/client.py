"""A party's side of Flower's fleet protocol: take messages, hand them to the supervisor, send its replies.

It stands where Flower's SuperNode stands, with two differences: it runs no code that comes from the server, and it
starts no process for a message.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_MIN_INTERVAL,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from visard.crypto.signatures import Signer
from visard.deployment.client_hello import party_context
from visard.deployment.flower import CALL_KEY, FLEET, MAC, PROCESS, REFUSAL, SIGNED, VERSION, mac, statement
from visard.deployment.flower.answers import BadAnswer, bound
from visard.deployment.flower.calls import Calls, content_of, outside
from visard.deployment.flower.link import confirm, parts, record
from visard.deployment.flower.objects import InFile, Shelf, array, fetched, names_in, puller, push
from visard.deployment.flower.part import OVER, Part
from visard.deployment.flower.room import FULL
from visard.deployment.health import own_version
from visard.deployment.party_ledger import PartyLedger
from visard.engines.request import Reply, pack
from visard.errors import PublicError, VisardError
from visard.processes import Data, Filed, settle, share_memory_of_threads
from visard.text import line

ANSWER_SECONDS = 60.0  # without a byte of an answer
BEAT = 3.0  # seconds between signs of life, at least; of a node that looks for work less often, as many as that
UPLOAD_SECONDS = 600.0  # for a request to come whole: Flower shows it before the server has uploaded all
SOON, QUIET = 0.05, 0.03  # seconds between looks for work: at least, and for each second without any
KEY_LOOK = 2.0  # seconds between looks for a new key
PATIENCE = 120.0  # seconds without a connection in the middle of a message; after that it begins anew
AGAIN = 0.2, 5.0  # seconds between attempts to go on with a message: at first, and at most
TELL_EVERY = 10.0  # seconds between lines about that
KEEP = 60.0  # seconds that the payload of the last message is kept: the next one often has the same, for another role
ACTIVATE = f"{FLEET}activate-node"
T = TypeVar("T")
Do = Callable[[bytes, Data | Filed], tuple[bytes, Data | Filed]]
Say = Callable[[str], None]


class Refused(VisardError):
    """The server does not know this key, or is not the one that the CA vouches for."""


class SigningInterceptor:
    """Says in each call which process of the party it comes from, and signs its path, time and body.

    Calls for parts of messages carry a MAC instead, whose key the call with which the party connects hands over.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, process: str, calls: Calls) -> None:
        self._sign, self._process, self._calls = Signer(key), process, calls
        self._public = b64encode(public_key_to_bytes(key.public_key())).decode("ascii")
        self._call_key = secrets.token_hex(32)
        self.heard = -1e9  # when the server last took a call

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        request, process = context.request, self._process
        if request.url.path == ACTIVATE:
            request.headers[CALL_KEY] = self._call_key
            process = f"{process} {self._call_key}"
        said = statement(request.url.path, request.headers[TIMESTAMP_HEADER], process, request.read())
        request.headers[PROCESS] = self._process
        request.headers[VERSION] = own_version()
        request.headers[SIGNED] = self._sign(said).hex()
        return self._noted(call_next(context))

    def call(self, part: Part, content: Sequence[Data]) -> httpx.Response:
        """Send or fetch a part of a message: its name is the digest of the body, so nothing is hashed for this."""
        path, said = part.path(FLEET), now().isoformat()
        code = mac(self._call_key, statement(path, said, self._process, b"", part.digest))
        headers = {FLEET_HTTP_PUBLIC_KEY_HEADER: self._public, TIMESTAMP_HEADER: said, MAC: code}
        headers |= {PROCESS: self._process, VERSION: own_version()}
        return self._noted(self._calls.post(path, content, headers))

    def close(self) -> None:
        """Let go of the connections for parts."""
        self._calls.close()

    def _noted(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            self.heard = time.monotonic()
        return answer


class NoRoom(ObjectPushError):
    """The server does not take a part now."""


class Fleet:
    """A connection to the server. `renewed` gives a new key of the party, once, when there is one."""

    def __init__(
        self,
        server: str,
        ca: Path,
        key: ec.EllipticCurvePrivateKey,
        say: Say,
        renewed: Callable[[], ec.EllipticCurvePrivateKey | None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        """Long messages wait in files of `folder` that have no names."""
        logging.getLogger("flwr").setLevel(logging.ERROR)
        share_memory_of_threads()
        self.server, self.say, self._ca, self._renewed = server, say, ca, renewed
        self._process = secrets.token_hex(16)
        self._client, self._public = self._open(key), key.public_key()
        self._coming: ec.EllipticCurvePrivateKey | None = None  # a new key, until the server takes it
        self._look = 0.0  # when to look for a new key, or try one, again
        self._sent: PartyLedger | None = None
        self._shelf = Shelf(partial(InFile, folder, False))  # what is here of the last message,
        self._used = 0.0  # and since when
        self._told = -1e9  # when it was last said that a connection broke
        self._node = Node()
        self._beat = BEAT
        self._stop = threading.Event()

    def _open(self, key: ec.EllipticCurvePrivateKey) -> FleetHttpClient:
        calls = outside(self.server, partial(party_context, self._ca, key), ANSWER_SECONDS)
        self._signing = SigningInterceptor(key, self._process, calls)
        client = FleetHttpClient(
            f"https://{self.server}",
            interceptors=[
                RuntimeVersionHttpInterceptor("SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
                self._signing,
            ],
            verify=party_context(self._ca, key),
            timeout=ANSWER_SECONDS,
        )
        bound(client._client)
        return client

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the server took a call lately."""
        age = time.monotonic() - self._signing.heard
        well = age < 10 * self._beat
        return well, {"connected": well, "seconds_since_contact": round(age) if age < 1e6 else None}

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to leave."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Leave after the message at hand."""
        self._stop.set()

    def serve(self, do: Do, poll: float, sent: PartyLedger | None = None) -> None:
        """Answer messages until stopped, waiting for a server that goes away; idle, look every `poll` seconds.

        Every reply is put on record in `sent` before it leaves.
        """
        self._sent = sent
        settle()
        try:
            self._serve(do, poll)
            with suppress(httpx.HTTPError):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        finally:
            self._close()

    def _close(self) -> None:
        self._client.close()
        self._signing.close()

    def _serve(self, do: Do, poll: float) -> None:
        begun, pause = False, 1.0
        self._beat = max(BEAT, poll)
        while not self._stop.is_set():
            try:
                if not self._switch():
                    self._activate(first=not begun)
                self.say(f"{'connected again' if begun else 'connected'} to {self.server}")
                begun, pause = True, 1.0
                with self._beating():
                    self._answer(do, poll)
                continue  # there is a new key, or it is over
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 409:
                    raise Refused(f"another process with this node's key has connected to {self.server}") from None
                why = reason(error.response)
                if error.response.status_code == 403:
                    raise Refused(f"{self.server} does not accept this node's key: {why or 403}") from None
                self.say(f"the server refused a call ({why or error.response.status_code}); connecting anew")
            except httpx.HTTPError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    why = re.sub(r".*verify failed:\s*|\s*\(_ssl\.c:\d+\)", "", str(error))
                    raise Refused(f"{self.server} is not the server that ca.crt vouches for: {why}") from None
                why = str(error) if isinstance(error, BadAnswer) else type(error).__name__
                self.say(f"no connection to {self.server} ({why}); trying again")
            self._stop.wait(pause)
            pause = min(pause * 1.5, 15.0)

    def _answer(self, do: Do, poll: float) -> None:
        last = -1e9  # when there was a message
        while not self._stop.is_set():
            if self._has_new_key():
                return
            if self._turn(do):
                last = time.monotonic()
            else:  # the next request often follows at once, or when the other parties have answered
                self._stop.wait(min(max(SOON, QUIET * (time.monotonic() - last)), poll))

    def _activate(self, first: bool) -> None:
        request = ActivateNodeRequest(public_key=public_key_to_bytes(self._public), heartbeat_interval=self._interval)
        try:
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            if first and 400 <= error.response.status_code < 500:
                said = reason(error.response) or clocks(error.response.headers.get("date", ""))
                why = said or "is it registered there?"
                raise Refused(f"{self.server} does not accept this node's key: {why}") from None
            raise

    def _has_new_key(self) -> bool:
        """Whether there is a new key to try, between two messages."""
        if time.monotonic() < self._look:
            return False
        self._look = time.monotonic() + KEY_LOOK
        if (found := self._renewed()) is not None:
            self._coming = found
        return self._coming is not None

    def _switch(self) -> bool:
        """Connect with a new key, if there is one and the server takes it; else the old one goes on."""
        if self._coming is None:
            return False
        before = self._client, self._public, self._signing
        self._client, self._public = self._open(self._coming), self._coming.public_key()
        try:
            self._activate(first=False)
        except httpx.HTTPError as error:
            self._close()
            self._client, self._public, self._signing = before
            self._look = time.monotonic() + 5 * KEY_LOOK
            if isinstance(error, httpx.HTTPStatusError):
                why = reason(error.response) or error.response.status_code
                self.say(f"the server does not take this node's new key yet ({why}); going on with the old one")
            return False
        before[0].close()
        before[2].close()
        self._coming = None
        self.say("this node's new key is in use")
        return True

    @property
    def _interval(self) -> float:
        """What the server learns: after twice as many seconds without a sign this node is gone."""
        return max(HEARTBEAT_MIN_INTERVAL, 3 * self._beat)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Signs of life from a thread, also while a step runs."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self._beat):
                with suppress(httpx.HTTPError):  # the main loop meets the same trouble and deals with it
                    self._client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=self._interval)
                    )

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _turn(self, do: Do) -> bool:
        """Take one message and answer it; False if there is none."""
        taken = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not taken.messages_list:
            if time.monotonic() > self._used + KEEP:
                self._shelf.keep(())
            return False
        run = taken.messages_list[0].metadata.run_id
        try:
            message = self._pull(taken.messages_list[0].metadata.message_id, taken.message_object_trees[0], run)
        except httpx.HTTPError:
            raise
        except Exception as error:  # withdrawn by the server, or malformed: either way it is not for us
            self.say(f"a message could not be read: {' '.join(str(error).split())[:200]}")
            return True
        begun, header = time.monotonic(), b""
        try:
            header, payload = parts(message)
            answer = do(header, payload)
        except Exception as error:  # whatever a request asks for, this node goes on, and the run does not wait
            why = str(error) if isinstance(error, PublicError) else type(error).__name__
            self.say(f"a request was refused: {error}")
            answer = pack(Reply(failure=f"request refused: {why}")), b""
        payload_of_answer = array(answer[1])
        if self._sent is not None:
            self._sent.record(header, *answer, names_in(payload_of_answer))
        try:
            content = record(answer[0], payload_of_answer)
            self._push(Message(content, reply_to=message), run, time.monotonic() - begun)
            # Only now: if this process dies before, the server still has the message for the next one.
            self._patiently(lambda: confirm(self._client, self._node, run, message.metadata.message_id))
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 404, 409):
                raise
            self.say("the run is over: an answer was not taken")
        return True

    def _pull(self, number: str, tree: ObjectTree, run: int) -> Message:
        pull = puller(lambda name: self._part(Part(run, "", name)), UPLOAD_SECONDS)
        message = fetched(number, tree, lambda name: self._patiently(lambda: pull(name)), self._shelf)
        message.metadata.__dict__["_message_id"] = number
        self._used = time.monotonic()
        return message

    def _push(self, reply: Message, run: int, seconds: float) -> None:
        """Upload a reply; where the connection breaks, announce it again and go on with the parts that are missing."""
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects, tree, attempts = get_all_nested_objects(reply), get_object_tree(reply), 0

            def upload() -> None:
                nonlocal attempts
                attempts += 1
                answer = self._announce(reply, tree, seconds)
                if not answer.objects_to_push:
                    if attempts == 1 and self._sent is not None:  # later: it is there, or not wanted any more
                        self._sent.after(taken=False)
                    return
                session = answer.session_id
                push(objects, answer.objects_to_push, partial(self._send, run, session))
                if self._sent is not None:
                    self._sent.after(taken=True)

            self._patiently(upload)

    def _send(self, run: int, session: str, name: str, content: Sequence[Data]) -> None:
        self._part(Part(run, session, name), content)

    def _part(self, part: Part, content: Sequence[Data] = ()) -> bytes:
        """Send a part of a message, or fetch one."""
        answer = self._signing.call(part, content)
        if answer.status_code == FULL and part.session:
            raise NoRoom(part.name, part.run, part.session)
        if answer.status_code == OVER and not part.session and not reason(answer):
            raise ObjectPullError(part.name, "its run is over")
        return content_of(answer, part)

    def _announce(self, reply: Message, tree: ObjectTree, seconds: float) -> PushMessagesResponse:
        """Say that there is a reply; one that the server does not want stays here."""
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        try:
            return self._client.PushMessages(request)
        except httpx.HTTPStatusError:
            if self._sent is not None:
                self._sent.after(taken=False)
            raise

    def _patiently(self, act: Callable[[], T]) -> T:
        """Do a part of a message, again where the connection breaks: what is there by then stays there."""
        begun, (wait, most) = time.monotonic(), AGAIN
        while True:
            try:
                return act()
            except (httpx.TransportError, ObjectPushError) as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise
                if time.monotonic() > max(begun, self._signing.heard) + PATIENCE or self._stop.wait(wait):
                    raise
                if time.monotonic() > self._told + TELL_EVERY:
                    self._told = time.monotonic()
                    why = f"the connection broke in a message ({type(error).__name__})"
                    why = "the server has no room for a reply now" if isinstance(error, NoRoom) else why
                    self.say(f"{why}; going on with the rest")
                wait = min(2 * wait, most)


def reason(answer: httpx.Response) -> str:
    """Why a server does not take this node's key, as it says."""
    return line(answer.headers.get(REFUSAL, ""), 300)


def clocks(date: str) -> str:
    """What is wrong if the time in a server's answer is not the time here: signatures count for a short time."""
    try:
        ahead = time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return ""
    if -TIMESTAMP_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE:
        return ""
    return f"the clock here is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
