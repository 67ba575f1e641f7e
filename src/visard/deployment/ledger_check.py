"""Checks the records of replies: each one by itself, and what parties sent against what the server received.

    checked = verify(Path("runs/ours"))
    found = compare(Path("runs/ours"), [Path("mine")])
    assert found.agree, found.differences

A reply is the same on both sides if run, session, client, stage, round, ask and the digest of its bytes are equal. A
reply that the party sent and the server has not recorded is `open`, and no difference, only in these cases: the party
does not know whether it arrived (it was stopped, its connection broke, or the server turned it away); the run had
stopped waiting for it; or the server's process was stopped, and it is the last reply of that client to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visard.deployment.party_ledger import DELIVERED, NAME, NOT_TAKEN, UNKNOWN
from visard.engines.records import NAME as FILE_NAME
from visard.engines.records import Line, files_of, read_records
from visard.errors import UsageError, VisardError
from visard.files import open_text, read_json, read_text
from visard.text import plural

RECEIVED = "received"
Key = tuple[str, str, str, int, int]  # session, client, stage, round, ask


@dataclass(frozen=True)
class Checked:
    """A chain that is intact."""

    files: list[Path]
    records: int
    head: str  # digest of the last record; noted down, it shows later whether the end was cut off
    replies: Counter[str]  # by outcome; those that a party sent have none

    @property
    def text(self) -> str:
        first = f"{self.files[0]}{'' if len(self.files) == 1 else f' and {len(self.files) - 1} more'}"
        return f"{first}: {plural(self.records, 'record')}, the chain is whole; digest of the last one {self.head}"


@dataclass(frozen=True)
class Entry:
    """A reply on record."""

    where: str
    session: str
    client: str
    stage: str
    round: int
    ask: int
    digest: str
    bytes: tuple[int, int]  # header, payload
    message: str
    parts: tuple[tuple[str, str, int], ...]
    clients: tuple[str, ...]  # in the reply to a greeting
    outcome: str = ""
    fate: str = UNKNOWN

    @property
    def key(self) -> Key:
        return self.session, self.client, self.stage, self.round, self.ask

    @property
    def text(self) -> str:
        place = f"{self.client}, {self.stage} round {self.round}, ask {self.ask}"
        who = place if self.client else f"greeting {self.ask}"
        return f"{who}: {plural(sum(self.bytes), 'byte')}, {self.digest[:12]} ({self.where})"


@dataclass
class Comparison:
    """The result of comparing the two sides of a run."""

    same: int = 0  # replies
    differences: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # sent, but not on the server's record, with the explanation
    unchecked: Counter[str] = field(default_factory=Counter)  # clients for which no party's record was given

    @property
    def agree(self) -> bool:
        """Whether there is no difference."""
        return not self.differences


def chain_of(path: Path) -> list[Path]:
    """The files of the record in a run folder, in a party's state folder, or to which a file belongs."""
    if path.is_file():
        named = FILE_NAME.fullmatch(path.name)
        first = path.with_name(f"{named[1]}-000001.jsonl") if named else path
        return files_of(path.parent, named[1]) if named and first.exists() else [path]
    for folder, name in ((path / "checkpoint", RECEIVED), (path, RECEIVED), (path, NAME)):
        if found := files_of(folder, name):
            return found
    raise UsageError(f"{path} holds no record of replies")


def verify(path: Path) -> Checked:
    """Follow a chain from its first record to its last; a `VisardError` names the first line that breaks it."""
    files, count, last, replies = chain_of(path), 0, "", Counter[str]()
    for line in read_records(files):
        count, last = count + 1, line.digest
        if line.record["event"] in ("reply", "refused", "late"):
            replies[str(line.record.get("outcome", line.record["event"]))] += 1
    return Checked(files, count, last, replies)


def compare(run: Path, ledgers: Sequence[Path]) -> Comparison:
    """Check what parties sent against what the server of a run received."""
    identity = run / "checkpoint" / "run.id"
    if not identity.is_file():
        raise UsageError(f"{run} is not a run with parties (there is no {identity})")
    server, found = _Server.read(run), Comparison()
    for path in ledgers:
        _compare_party(server, path, read_text(identity, errors="replace").strip(), found)
    for entries in server.left.values():
        for entry in entries:
            found.unchecked.update([entry.client] if entry.client else entry.clients)
    found.differences += _unfounded(run, server)
    return found


@dataclass
class _Server:
    """The server's record, with the replies that no party's record has matched yet."""

    left: dict[Key, list[Entry]]
    ended: set[str]  # sessions that ended in order
    given_up: set[Key]
    carried: set[tuple[Any, ...]]  # stage, round, client, message, field, kind, bytes of replies that could be read

    @classmethod
    def read(cls, run: Path) -> _Server:
        server = cls({}, set(), set(), set())
        for line in read_records(files_of(run / "checkpoint", RECEIVED)):
            record, session = line.record, str(line.record.get("session", ""))
            if record["event"] == "end":
                server.ended.add(session)
                server.given_up |= set(_places(line, session))
            elif record["event"] == "given up":
                server.given_up.add(_entry(line).key)
            elif record["event"] == "reply":
                entry = _entry(line)
                server.left.setdefault(entry.key, []).append(entry)
                place = (entry.stage, entry.round, entry.client, entry.message)
                server.carried |= {(*place, *part) for part in entry.parts}
        return server


def _compare_party(server: _Server, path: Path, run: str, found: Comparison) -> None:
    files = chain_of(path)
    mine, strays = list(_sent(files, run)), {e.digest for e in _sent(files, "")}  # replies to malformed requests
    if not mine:
        found.differences.append(f"{path}: has no reply of this run")
        return
    missing = []
    for entry in sorted(
        mine, key=lambda e: e.fate != DELIVERED
    ):  # of two equal replies, sent again after a kill, the delivered one first
        here = server.left.get(entry.key, [])
        twin = next((e for e in here if e.digest == entry.digest), None)
        if twin is None:
            missing.append(entry)
            continue
        here.remove(twin)
        if twin.bytes != entry.bytes or (twin.parts and entry.parts and twin.parts != entry.parts):
            found.differences.append(f"the same reply with other sizes: sent {entry.text}; received {twin.text}")
        else:
            found.same += 1
    last = {(entry.session, entry.client): entry for entry in mine}
    for entry in missing:
        if why := _open(server, entry, last[entry.session, entry.client]):
            found.open.append(f"{entry.text}: {why}")
        elif others := server.left.get(entry.key):
            found.differences.append(f"sent: {entry.text}; received: {others.pop().text}")
        else:
            found.differences.append(f"sent, but the server has no record of it: {entry.text}")
    own = {client for entry in mine for client in (entry.client, *entry.clients) if client}
    for entries in server.left.values():
        for entry in [e for e in entries if own & {e.client, *e.clients}]:
            entries.remove(entry)
            if entry.digest in strays:
                found.same += 1
                continue
            found.differences.append(f"received, but {path} has no record of it: {entry.text}")


def _open(server: _Server, entry: Entry, last: Entry) -> str:
    """Why a reply may be missing at the server; empty if nothing explains it."""
    if entry.fate == NOT_TAKEN:
        return "the server turned it away before its content was sent"
    if entry.fate == UNKNOWN:
        return "the party does not know that it arrived: it was stopped, or its connection broke"
    if entry.key in server.given_up:
        return "the run had stopped waiting for it"
    if entry.session not in server.ended and (entry is last or not entry.client):
        return "the server's process was stopped before it put it on record"
    return ""


def _sent(files: list[Path], run: str) -> Iterator[Entry]:
    """The replies of one run in a party's record, each with what became of it."""
    waiting: Line | None = None
    for line in read_records(files):
        if waiting is not None:
            yield _entry(waiting, str(line.record.get("before", UNKNOWN)))
            waiting = None
        if line.record["event"] == "reply" and line.record.get("run") == run:
            waiting = line
    if waiting is not None:
        yield _entry(waiting)


def _entry(line: Line, fate: str = UNKNOWN) -> Entry:
    record = line.record
    try:
        return Entry(
            where=f"{line.path.name}, line {line.place}",
            session=str(record.get("session", "")),
            client=str(record["client"]),
            stage=str(record["stage"]),
            round=int(record["round"]),
            ask=int(record["ask"]),
            digest=str(record.get("digest", "")),
            bytes=(int(record.get("header", 0)), int(record.get("payload", 0))),
            message=str(record.get("message", "")),
            parts=tuple((str(f), str(k), int(b)) for f, k, b in record.get("parts", [])),
            clients=tuple(map(str, record.get("clients", ()))),
            outcome=str(record.get("outcome", "")),
            fate=fate if fate in (DELIVERED, NOT_TAKEN) else UNKNOWN,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise VisardError(f"{line.path}, line {line.place}: is not the record of a reply") from None


def _places(line: Line, session: str) -> list[Key]:
    """The requests that a session had stopped waiting for when it ended."""
    try:
        return [(session, str(c), str(s), int(r), int(a)) for c, s, r, a in line.record["open"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise VisardError(f"{line.path}, line {line.place}: is not the record of an end") from None


def _unfounded(run: Path, server: _Server) -> Iterator[str]:
    """Rows of the ledger of accepted replies that no reply on record carries."""
    final, lines = run / "ledger.json", run / "checkpoint" / "ledger.jsonl"
    try:
        for row in read_json(final)["rows"] if final.is_file() else _rows(lines):
            stage, round, client, message, name, kind, size = row[:7]
            found = (stage, round, client, message, name, kind, size) in server.carried
            if stage not in ("join", "pool") and not found:
                where = f"{client}, {stage} round {round}: {message}.{name}"
                yield f"the ledger has {where}, which no reply on record carries"
    except (KeyError, TypeError, ValueError, RecursionError):
        raise VisardError(f"{final if final.is_file() else lines}: a row is damaged") from None


def _rows(path: Path) -> Iterator[list[Any]]:
    if path.is_file():
        with open_text(path, errors="replace") as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))
