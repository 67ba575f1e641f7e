"""How a run gets the file of a payload from the server on its machine: over a Unix socket, which carries open files.

The run sends the names of the parts of the payload as JSON, the server answers with the file, or with nothing where it
has none with these parts. Each question is a connection of its own. On one more connection a run sends its number and
nothing else: when that closes, the run has ended, however it did. Like `control.sock`, the socket opens for the account
of the server alone.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from visard.engines.frame import ALIGNED, largest_at
from visard.processes import ChildError, Filed, receive, receive_any, send

FILES = "files.sock"  # in the state folder of the server
SECONDS = 60.0  # for a question and its answer
Whole = Callable[[Sequence[str]], Filed | None]


class Giver:
    """The server's side: answers until it is closed. `ended` is called with the number of a run that has ended."""

    def __init__(self, listening: socket.socket, whole: Whole, ended: Callable[[int], None]) -> None:
        self._listening, self._whole, self._ended = listening, whole, ended
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
        with channel, suppress(OSError, ValueError, TypeError, ChildError):
            channel.settimeout(SECONDS)
            asked = json.loads(receive(channel) or b"[]")
            if isinstance(asked, int):
                channel.settimeout(None)
                with suppress(OSError):
                    channel.recv(1)  # nothing more comes, until it closes
                self._ended(asked)
            elif asked:
                send(channel, self._whole([str(name) for name in asked]) or b"")


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


def file_from(path: Path, names: Sequence[str]) -> Filed | None:
    """The run's side: the file with these parts, in which tensors lie as they are in memory; None if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(SECONDS)
            channel.connect(str(path))
            send(channel, json.dumps(list(names)).encode())
            found = receive_any(channel)
    except OSError:
        return None
    if not isinstance(found, Filed) or (found.start + largest_at(found.read(0, min(len(found), 2**22)))) % ALIGNED:
        return None
    return found
