"""Replies of a deployment, fetched in threads: one that comes slowly, never, or malformed holds up no other.

Flower shows a reply as soon as its sender begins to upload it. `HttpGrid` would wait there for its parts, and an
exception over one malformed reply would end the run.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.runtime import RuntimeHttpClient

from visard.engines.remote import Link
from visard.errors import VisardError

THREADS = 2 * Link.window  # one for each request on its way, and one for each hello: nobody waits for a stalled one
MOST_PARTS = 500  # of a message: more than the longest one has


class Fetcher:
    """Looks for replies and fetches those that are there."""

    def __init__(self, runtime: RuntimeHttpClient, run: int) -> None:
        self._runtime, self._run = runtime, run
        self._node = Node(node_id=SUPERLINK_NODE_ID)
        self._threads = ThreadPoolExecutor(THREADS)
        self._coming: dict[str, tuple[Future[Message], threading.Event]] = {}  # and whether it was given up

    def replies(self, numbers: Collection[str], others: Collection[str], limit: float) -> dict[str, Message | str]:
        """Complete replies to the requests `numbers`, or why one cannot be read; `others` are wanted later."""
        if asked := [n for n in numbers if n not in self._coming]:
            found = self._runtime.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                number = proto.metadata.reply_to_message_id
                if number in asked:
                    over = threading.Event()
                    fetch = self._threads.submit(self._fetch, proto.metadata.message_id, tree, limit, over)
                    self._coming[number] = fetch, over
        for number in [n for n in self._coming if n not in numbers and n not in others]:
            fetch, over = self._coming.pop(number)
            over.set()
            fetch.cancel()
        done = [n for n in numbers if n in self._coming and self._coming[n][0].done()]
        return {n: _result(self._coming.pop(n)[0]) for n in done}

    def _fetch(self, number: str, tree: ObjectTree, limit: float, over: threading.Event) -> Message:
        part = make_pull_object_fn_protobuf(self._runtime.PullObject, self._node, self._run)
        names = [t.object_id for t in iterate_object_tree(tree)]
        if len(names) > MOST_PARTS:
            raise VisardError(f"it has {len(names)} parts, more than {MOST_PARTS}")

        def pull(name: str) -> bytes:
            if over.is_set():
                raise VisardError("it was given up")
            return part(name)

        contents = pull_objects(
            names, pull, max_time=limit, max_tries_per_object=None, initial_backoff=0.05, backoff_cap=1.0
        )
        self._runtime.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=number)
        )
        message = inflate_object_from_contents(number, contents)
        if not isinstance(message, Message):
            raise VisardError("it is not a message")
        return message

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
