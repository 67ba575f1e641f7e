"""Room at the server for what parties send: how many bytes of one party may wait there, and how much of the disk stays
free. Where there is none a part is refused with a reason, and its sender tries again later."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from visard.deployment.listener import Limits

FULL = 507  # the answer where there is no room
SMALL = 2**16  # bytes of a part that needs no disk
MANY = 1000  # parts that are counted before it is looked which of them are gone


class Room:
    """Counts what waits of each party, until the run has fetched it or is over.

    `is_here` says whether the server holds a part, `folder` is on the disk that is watched, `shrink` gives back what
    the server can do without. Several threads call this.
    """

    def __init__(
        self,
        limits: Limits,
        folder: Path | None = None,
        is_here: Callable[[str], bool] = lambda name: False,
        shrink: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits, self._folder, self._is_here, self._shrink = limits, folder, is_here, shrink
        self._lock = threading.Lock()
        self._coming: Counter[str] = Counter()  # party -> bytes that are being taken
        self._held: defaultdict[str, dict[str, int]] = defaultdict(dict)  # party -> its parts -> their bytes
        self._sums: Counter[str] = Counter()  # party -> bytes of these
        self._many: defaultdict[str, int] = defaultdict(lambda: MANY)  # party -> how many it may be until it is looked

    @contextmanager
    def taking(self, party: str, name: str, size: int) -> Iterator[str]:
        """Within this a part is taken, unless there is no room for it: then the reason, else an empty text."""
        with self._lock:
            if not (why := self._why_not(party, size)):
                self._coming[party] += size
        if why:
            yield why
            return
        try:
            yield ""
        finally:
            with self._lock:
                self._coming[party] -= size
                before = self._held[party].get(name, 0)
                if size > before and self._is_here(name):  # less under the same name is another content: refused
                    self._held[party][name] = size
                    self._sums[party] += size - before

    def _why_not(self, party: str, size: int) -> str:
        if self._too_many(party, size) or len(self._held[party]) > self._many[party]:
            here = {name: bytes_ for name, bytes_ in self._held[party].items() if self._is_here(name)}
            self._held[party], self._sums[party], self._many[party] = here, sum(here.values()), MANY + 2 * len(here)
        if self._too_many(party, size):
            return f"no room for a part of {party}: {self._limits.party_bytes} of its bytes wait here (--party-bytes)"
        if size >= SMALL and self._short_of_disk(size):
            self._shrink()
            if self._short_of_disk(size):
                least = self._limits.free_bytes
                return f"no room for a part of {party}: less than {least} bytes of the disk are free (--free-bytes)"
        return ""

    def _short_of_disk(self, size: int) -> bool:
        return self._folder is not None and _free(self._folder) - size < self._limits.free_bytes

    def _too_many(self, party: str, size: int) -> bool:
        return self._coming[party] + self._sums[party] + size > self._limits.party_bytes


def _free(folder: Path) -> int:
    """Bytes that this account may still write to the disk of a folder."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize
