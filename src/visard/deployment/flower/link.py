"""Requests and replies as Flower messages: header and payload as their content, and a link over a Flower grid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.serverapp import Grid

from visard.core import ClientId
from visard.deployment.flower.objects import names_in
from visard.deployment.remote import Link, Parts
from visard.errors import PublicError, VisardError
from visard.processes import Data, Filed

TYPE = "query"  # of all messages: what is asked stands in the header


def record(header: bytes, payload: Data | Filed | Array) -> RecordDict:
    """The content of a message; the payload travels as an array, which Flower cuts into chunks."""
    if not isinstance(payload, Array):
        data = bytes(payload.map() if isinstance(payload, Filed) else payload)
        payload = Array("uint8", (len(payload),), "visard", data)
    arrays = ArrayRecord()
    arrays["payload"] = payload  # as it is; the constructor would make another one
    return RecordDict({"header": ConfigRecord({"header": header}), "payload": arrays})


def parts(message: Message) -> tuple[bytes, Data | Filed]:
    """Header and payload of a message that may come from anyone."""
    try:
        header = message.content.config_records["header"]["header"]
        payload = message.content.array_records["payload"]["payload"].data
    except (KeyError, ValueError, AttributeError, TypeError):
        raise PublicError("a message without header and payload") from None
    if not isinstance(header, bytes) or not isinstance(payload, bytes | bytearray | memoryview | Filed):
        raise PublicError("a message whose header or payload is not bytes")
    return header, payload


def confirm(service: Any, node: Node, run: int, number: str) -> None:
    """Let a service of Flower drop a message that was fetched."""
    service.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=number))


class GridLink(Link):
    """A link over a grid; subclasses say which node a client is at."""

    grid: Grid

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}  # message -> node

    @abstractmethod
    def node_of(self, client: ClientId) -> int | None:
        """The Flower node of a client, or None if it is not connected."""

    def send(self, client: ClientId, header: bytes, payload: Data | Filed, timeout: float) -> str | None:
        node = self.node_of(client)
        return None if node is None else self.push(node, header, payload, timeout)

    def push(self, node: int, header: bytes, payload: Data | Filed, timeout: float) -> str | None:
        """Send to a node; None if the message was not taken."""
        message = Message(record(header, payload), node, TYPE, ttl=timeout * self.queue + 60)
        number = next(iter(self.grid.push_messages([message])), None)
        if number:
            self._asked[number] = node
        return number or None

    def receive(self, numbers: Collection[str]) -> dict[str, Parts | str]:
        if not numbers:
            return {}
        return {n: self.read(n, m) for n, m in self.pull(numbers).items() if n in numbers}

    def pull(self, numbers: Collection[str]) -> Mapping[str, Message | str]:
        """Replies that have come, by the number of their request."""
        return {m.metadata.reply_to_message_id: m for m in self.grid.pull_messages(list(numbers))}

    def read(self, number: str, message: Message | str) -> Parts | str:
        """Header and payload of a reply, or why it has none."""
        node = self._asked.pop(number, None)
        if isinstance(message, str):
            return message
        if message.has_error():  # from Flower itself: a node that went away, a client app that raised
            reason = (message.error.reason or "no reason given").strip().splitlines()[-1]
            return f"Flower says: {reason}"
        if message.metadata.src_node_id != node:
            return "reply refused: it came from another node"
        try:
            header, payload = parts(message)
            names = names_in(message.content.array_records["payload"]["payload"])
            return header, payload.map() if isinstance(payload, Filed) else payload, names
        except VisardError as error:
            return f"reply refused: {error}"
