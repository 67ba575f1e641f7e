"""Header and payload as the content of a Flower message, and back."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from visard.errors import Told


def record(header: bytes, payload: bytes) -> RecordDict:
    """The content of a message; the payload travels as an array, which Flower cuts into chunks."""
    array = Array("uint8", (len(payload),), "visard", payload)
    return RecordDict({"header": ConfigRecord({"header": header}), "payload": ArrayRecord({"payload": array})})


def parts(message: Message) -> tuple[bytes, bytes]:
    """Header and payload of a message that may come from anyone."""
    try:
        header = message.content.config_records["header"]["header"]
        payload = message.content.array_records["payload"]["payload"].data
    except (KeyError, ValueError, AttributeError, TypeError):
        raise Told("a message without header and payload") from None
    if not isinstance(header, bytes) or not isinstance(payload, bytes):
        raise Told("a message whose header or payload is not bytes")
    return header, payload
