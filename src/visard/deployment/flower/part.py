"""Parts of messages on their way through the server, each as the body of a call and nothing around it.

    POST .../part/RUN/SESSION/NAME    takes a part of an upload that was announced
    POST .../part/RUN/-/NAME          gives one

The name of a part is the digest of its content, so a signature of the path is one of the content too: it can be checked
before the content is read, and hashing the content once serves the check of both. Flower's own calls for the same put a
part into a message, copy it several times and hash it twice, one after the other behind one lock.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

INSIDE = "/visard/"  # before the path of a part, behind the Unix socket
NEWS = "/visard/news"  # there: how many messages have come whole so far
PATH = re.compile(r"part/(\d{1,20})/(-|[0-9a-f-]{36})/([0-9a-f]{64})")
MOST_PARTS = 500  # of a message: more than the longest one has
NOTHING = hashlib.sha256().hexdigest()
TAKEN, GIVEN, REFUSED, OVER, GONE, NOT_YET = 204, 200, 400, 403, 410, 425  # answers


class Part(NamedTuple):
    """What the path of a call names."""

    run: int
    session: str  # of an upload; empty: the part is asked for
    name: str

    @classmethod
    def at(cls, path: str, prefix: str) -> Part | None:
        """The part that a path names, or None where it names none."""
        found = PATH.fullmatch(path[len(prefix) :]) if path.startswith(prefix) else None
        return found and cls(int(found[1]), found[2].strip("-"), found[3])

    def path(self, prefix: str) -> str:
        """The path of the call."""
        return f"{prefix}part/{self.run}/{self.session or '-'}/{self.name}"

    @property
    def digest(self) -> str:
        """Of the body that the call must have."""
        return self.name if self.session else NOTHING
