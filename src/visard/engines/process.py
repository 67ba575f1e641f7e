"""Frames over a socket between two processes of one machine: a length, then so many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


def send(channel: socket.socket, frame: bytes) -> None:
    """Send one frame."""
    channel.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(channel: socket.socket) -> bytes | None:
    """The next frame, or None when the other side is gone."""
    head = _exactly(channel, _LENGTH.size)
    return None if head is None else _exactly(channel, _LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
