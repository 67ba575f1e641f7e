"""How a run and the server on its machine hand each other the files of payloads: over a Unix socket, which carries
open files.

The run sends the names of the parts of the payload as JSON, the server answers with the file, or with nothing where it
has none with these parts. Each question is a connection of its own, which stays open until the run has read the file:
then the server writes the next payload over it. The other way round the run sends the names of the parts of a request
and the file that they are in, and hears whether the server takes it. On one more connection a run sends its number and
nothing else: when that closes, the run has ended, however it did. Like `control.sock`, the socket opens for the account
of the server alone.
"""

from __future__ import annotations

import json
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from visard.engines.frame import ALIGNED, largest_at
from visard.processes import ChildError, Filed, receive, receive_any, send

FILES = "files.sock"  # in the state folder of the server
SECONDS = 60.0  # for a question and its answer
Whole = Callable[[Sequence[str]], tuple[Filed, Callable[[], None]] | None]

Adopt = Callable[[int, str, Sequence[str], Filed], bool]


class Giver:
    """The server's side: answers until it is closed. `ended` is called with the number of a run that has ended."""

    def __init__(self, listening: socket.socket, whole: Whole, ended: Callable[[int], None], adopt: Adopt) -> None:
        self._listening, self._whole, self._ended, self._adopt = listening, whole, ended, adopt
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._answer, args=(channel,), daemon=True).start()

    def _answer(self, channel: socket.socket) -> None:
        with channel, suppress(OSError, ValueError, TypeError, KeyError, ChildError):
            channel.settimeout(SECONDS)
            asked = json.loads(receive(channel) or b"[]")
            if isinstance(asked, int):
                _until_closed(channel)
                self._ended(asked)
            elif isinstance(asked, dict):
                file = receive_any(channel)
                taken = isinstance(file, Filed) and self._adopt(asked["run"], asked["session"], asked["names"], file)
                send(channel, b"taken" if taken else b"")
            elif found := self._whole([str(name) for name in asked]) if asked else None:
                file, free = found
                try:
                    send(channel, file)
                    _until_closed(channel)
                finally:
                    free()
            else:
                send(channel, b"")


def _until_closed(channel: socket.socket) -> None:
    channel.settimeout(None)
    with suppress(OSError):
        channel.recv(1)  # nothing more comes


def stay(path: Path, number: int) -> socket.socket | None:
    """The run's side of the connection that closes when it ends; None where the server has no such socket."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(SECONDS)
        channel.connect(str(path))
        send(channel, json.dumps(number).encode())
    except OSError:
        channel.close()
        return None
    return channel


def given_to(path: Path, run: int, session: str, names: Sequence[str], file: Filed) -> bool:
    """The run's side: whether the server has taken the parts of an upload in the file that they are in."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(SECONDS)
            channel.connect(str(path))
            send(channel, json.dumps({"run": run, "session": session, "names": list(names)}).encode())
            send(channel, file)
            return bool(receive(channel))
    except OSError:
        return False


def payload_from(path: Path, names: Sequence[str]) -> memoryview | None:
    """The run's side: the payload with these parts, mapped, in which tensors lie as they are in memory; None if there
    is no file of it. Until the memory is let go the file is the run's."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(SECONDS)
        channel.connect(str(path))
        send(channel, json.dumps(list(names)).encode())
        found = receive_any(channel)
        if isinstance(found, Filed) and len(found) and _aligned(found):
            mapped = found.map()
            weakref.finalize(mapped.obj, channel.close)
            return mapped
    except OSError:
        pass
    channel.close()
    return None


def _aligned(found: Filed) -> bool:
    return (found.start + largest_at(found.read(0, min(len(found), 2**22)))) % ALIGNED == 0
