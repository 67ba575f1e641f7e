"""A run folder: its event log, written and read, and its other files as far as they exist.

The log has one JSON object a line; it is append-only and readable after a kill at any moment.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from visard.errors import UsageError, VisardError, one_line
from visard.evaluation.arrays import structured
from visard.evaluation.metrics import brief, describe
from visard.files import (
    APPENDING,
    SHARED,
    json_list,
    mapping,
    number,
    open_handle,
    parse_toml,
    plain,
    private,
    read_bytes,
    read_text,
    whole,
)
from visard.text import NBSP, at_round, plural

if TYPE_CHECKING:
    from visard.evaluation.groups import GroupErrors
    from visard.evaluation.results import Evaluated

Event = dict[str, Any]
T = TypeVar("T")
PARTS = ("events.jsonl", "metrics.json")  # at least one of them makes a folder a run


class EventLog:
    """Appends events to a file; each line reaches the operating system before `write` returns."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Non-finite numbers become null; numpy and torch scalars become numbers."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        content = plain({"time": now, **fields, "event": event})
        line = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
        # One write to a file opened for appending: a line is never interleaved with another one.
        with os.fdopen(open_handle(self.path, APPENDING, SHARED), "ab", buffering=0) as file:
            file.write(line.encode())


def _mend_last_line(path: Path) -> None:
    """Make the file end in a whole line, so that a resumed run does not write onto an unfinished one."""
    if not path.exists():
        return
    with open(path, "r+b", opener=private) as file:
        data = file.read()
        if not data or data.endswith(b"\n"):
            return
        start = data.rfind(b"\n") + 1
        if parse_event(data[start:]) is None:
            file.truncate(start)
        else:
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def parse_event(line: bytes) -> Event | None:
    """The event in a line, or None if the line holds none."""
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def read_events(path: Path | str) -> list[Event]:
    """The events of a log, in order, as the run finally went.

    An unfinished last line is ignored. Events of a killed attempt at a round that was repeated later are left out,
    and of several events about the same thing the last one counts.
    """
    path = Path(path)
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise VisardError(f"{path}: cannot read the events: {error.strerror}") from None
    events = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        event = parse_event(line)
        if event is not None:
            events.append(event)
        elif i < len(lines):
            raise VisardError(f"{path}: line {i} is not an event (a JSON object with a name)")
    return latest(events)


def latest(events: Sequence[Event]) -> list[Event]:
    """Drop lines that later lines replace."""
    attempt, attempts = 0, []
    reached: dict[tuple[Any, Any], int] = {}  # (stage, round) -> the last attempt that got there
    first = 0
    for i, event in enumerate(events):
        if event["event"] == "run_started":
            attempt += 1
            if not event.get("resumed"):
                first = i
        attempts.append(attempt)
        if "round" in event:
            reached[_place(event)] = attempt
    winners: dict[tuple[Any, ...], int] = {}
    for i, event in enumerate(events):
        if i >= first and ("round" not in event or reached[_place(event)] == attempts[i]):
            winners[_identity(event, i)] = i
    return [events[i] for i in sorted(winners.values())]


def _place(event: Event) -> tuple[str, str]:
    return str(event.get("stage")), str(event.get("round"))


def _identity(event: Event, position: int) -> tuple[Any, ...]:
    """The key by which two lines are about the same thing."""
    kind = event["event"]
    if "round" in event:
        return kind, *_place(event), *(str(event.get(key)) for key in ("client", "message", "field"))
    if kind == "stage_started":
        return kind, str(event.get("stage"))
    return kind, position


@dataclass(frozen=True)
class Round:
    """One round as it went."""

    stage: str
    round: int  # 0-based, in its stage
    step: int  # 0-based, over all stages
    seconds: float | None
    bytes_up: int | None
    bytes_down: int | None
    asked: int | None
    replied: int | None
    figures: dict[str, float | None]
    clients: dict[str, dict[str, float | None]]
    slowest: dict[str, float | None]  # seconds of the clients that took longest


@dataclass(frozen=True)
class Evaluation:
    """One evaluation during a run, or its final one."""

    step: int
    seconds: float | None
    generic: dict[str, dict[str, float | None]]  # test set -> metric -> value
    clients: dict[str, dict[str, Any]]  # metric -> mean, std, worst, worst_client, ...
    content: dict[str, Any]  # all of it, as an event has it


def rounds(events: Sequence[Event]) -> list[Round]:
    """The rounds of a run, by step."""
    return sorted((round_of(e) for e in events if e["event"] == "round"), key=lambda r: r.step)


def round_of(event: Event) -> Round:
    """The round that an event tells of."""
    return Round(
        stage=str(event.get("stage", "")),
        round=whole(event.get("round")) or 0,
        step=_step(event),
        seconds=number(event.get("seconds")),
        bytes_up=whole(event.get("bytes_up")),
        bytes_down=whole(event.get("bytes_down")),
        asked=_count(event.get("asked")),
        replied=_count(event.get("replied")),
        figures=numbers(event.get("figures")),
        clients={k: numbers(v) for k, v in mapping(event.get("clients")).items()},
        slowest=numbers(event.get("slowest")),
    )


def evaluations(events: Sequence[Event]) -> list[Evaluation]:
    """The evaluations of a run, by step."""
    found = [
        Evaluation(
            step=_step(e),
            seconds=number(e.get("seconds")),
            generic={k: numbers(v) for k, v in mapping(e.get("generic")).items()},
            clients={k: mapping(v) for k, v in mapping(e.get("clients")).items()},
            content=e,
        )
        for e in events
        if e["event"] == "evaluation"
    ]
    return sorted(found, key=lambda e: e.step)


def warnings_of(events: Sequence[Event]) -> list[str]:
    """A line for each client whose replies were refused or far from the others', and for each such field."""
    found: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        if event["event"] in ("refused", "far"):
            key = (event["event"], str(event.get("client")), str(event.get("field") or "reply"))
            found.setdefault(key, []).append(event)
    lines = []
    for (kind, client, name), named in found.items():
        worst = max(named, key=lambda e: number(e.get("norm")) or 0.0)
        times = f"in {plural(len(named), 'round')}" if kind == "far" else plural(len(named), "time")
        what = f"an update of {name} far from the others'" if kind == "far" else f"{name} refused"
        where = at_round(worst.get("stage"), worst.get("round"))
        lines.append(f"{client}: {what} {times}; {where}: it {worst.get('reason')}")
    return lines


def absences(events: Sequence[Event]) -> list[str]:
    """A line for each client that sent no reply: how often, when last, and why then."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if event["event"] == "missing":
            found.setdefault(str(event.get("client")), []).append(event)
    return [
        f"{client}: no reply {plural(len(lost), 'time')}, last in "
        f"{at_round(lost[-1].get('stage'), lost[-1].get('round'))}: {lost[-1].get('reason')}"
        for client, lost in found.items()
    ]


def _step(event: Event) -> int:
    step = whole(event.get("step"))
    return step if step is not None else whole(event.get("round")) or 0


def _count(value: Any) -> int | None:
    """A count given as a number or as the list of those counted."""
    return len(value) if isinstance(value, list | dict) else whole(value)


def numbers(value: Any) -> dict[str, float | None]:
    """The numbers of a JSON object; other values become None."""
    return {k: number(v) for k, v in mapping(value).items()}


@dataclass(frozen=True, repr=False)
class Run:
    """One run folder. Parts that the run did not write are empty."""

    folder: Path
    events: list[Event]
    metrics: dict[str, Any]
    config: dict[str, Any]
    config_text: str

    def __repr__(self) -> str:
        done = plural(len(self.rounds), "round")
        lines = [f"Run {self.name} ({self.method}) in {self.folder}: {self.status[1]}, {done}"]
        for name, test in self.tests.items():
            found = [(describe(key), value) for key, value in brief(test).items()]
            lines.append(f"  {name}: " + ", ".join(f"{m.label} {m.text(v)}" for m, v in found if v is not None))
        return "\n".join(lines).replace(NBSP, " ")

    def _repr_html_(self) -> str:
        from visard.report.notebook import show  # needs the pages' parts

        said = f"({self.method}): {self.status[1]}, {plural(len(self.rounds), 'round')}"
        return show(self.name, said, self.folder, self.tests, self.curves())

    def curves(self) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """The loss of each stage and the first metric of each test over the rounds: (metric, where) -> points."""
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for done in self.rounds:
            if (loss := done.figures.get("loss")) is not None:
                found.setdefault(("loss", done.stage), []).append((done.step + 1, loss))
        for tested in self.measured:
            for name, values in tested.generic.items():
                for key, value in [(k, v) for k, v in values.items() if v is not None][:1]:
                    found.setdefault((key, name), []).append((tested.step + 1, value))
        return found

    @cached_property
    def started(self) -> dict[str, Any]:
        """The events of the run's start and of each resumption."""
        said: dict[str, Any] = {}
        for event in self.of("run_started"):
            said |= event
        return said

    def domains(self, side: Literal["source", "target"]) -> list[str]:
        """The domains whose people the source, or the other clients (target), have; empty where settings do not say."""
        found = mapping(self.config.get("partition")).get(f"{side}_domain")
        listed = [found] if isinstance(found, str) else json_list(found)
        return [name for name in listed if isinstance(name, str)][:9]

    @cached_property
    def ledger(self) -> dict[str, Any] | None:
        """`ledger.json`, or the rows that an unfinished run has written so far; None if there are none."""
        found = _read(self.folder / "ledger.json", _object)
        return _read(self.folder / "checkpoint" / "ledger.jsonl", _rows) if found is None else found

    @cached_property
    def rounds(self) -> list[Round]:
        return rounds(self.events)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        return evaluations(self.events)

    @cached_property
    def measured(self) -> list[Evaluation]:
        """The evaluations, and the final metrics as the last of them."""
        found, last = self.evaluations, self.rounds[-1] if self.rounds else None
        if last is None or not self.metrics or (found and found[-1].step >= last.step):
            return found
        generic = {name: brief(test) for name, test in self.tests.items()}
        groups = {who: self.client_summary(who) for who, part in self.metrics.items() if "summary" in mapping(part)}
        content = {**groups, "generic": generic}
        return [*found, Evaluation(last.step, None, generic, self.client_summary(), content)]

    @cached_property
    def tested_on(self) -> str | None:
        """A digest of the pictures that the run was tested on; None if it is not known."""
        if said := mapping(self.started.get("data")).get("tested"):
            return str(said)
        kept = _read(self.folder / "partition.json", _object)  # of a run from before it was said
        return None if kept is None else digest_of_tests(str(kept.get("faces")), mapping(kept.get("unseen")))

    @property
    def tests(self) -> dict[str, dict[str, Any]]:
        """The final tests of the generic model: test set -> {"verification": ..., "identification": ...}."""
        return {name: mapping(test) for name, test in mapping(self.metrics.get("generic")).items()}

    @cached_property
    def results(self) -> dict[str, Evaluated]:
        """The final tests of the generic model as typed results: `run.results["test"].verification.auc`."""
        from visard.evaluation.results import Evaluated  # which loads torch

        return {name: Evaluated.from_dict(test) for name, test in self.tests.items()}

    @cached_property
    def groups(self) -> dict[str, GroupErrors]:
        """Errors by group over the people of all test sets, by domain or attribute."""
        from visard.evaluation.groups import GroupErrors

        known = mapping(self.metrics.get("groups"))
        return {by: structured(GroupErrors, record) for by, record in known.items() if mapping(record).get("groups")}

    def client_metrics(self, who: str = "clients") -> dict[str, dict[str, float | None]]:
        """metric -> client -> value, of the clients that trained or of those that were `held_out`."""
        by_client = {c: numbers(f) for c, f in mapping(mapping(self.metrics.get(who)).get("figures")).items()}
        names = list(dict.fromkeys(n for f in by_client.values() for n in f))
        return {n: {c: f[n] for c, f in by_client.items() if n in f} for n in names}

    def client_summary(self, who: str = "clients") -> dict[str, dict[str, Any]]:
        """metric -> mean, std, worst, worst_client, ..."""
        summary = mapping(mapping(self.metrics.get(who)).get("summary"))
        return {name: s for name, s in summary.items() if isinstance(s, dict)}

    @property
    def report(self) -> Path:
        """The HTML page of the run."""
        return self.folder / "report.html"

    def of(self, name: str) -> list[Event]:
        """The events with this name."""
        return [e for e in self.events if e["event"] == name]

    @property
    def name(self) -> str:
        return str(self.started.get("name") or self.metrics.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        said = (
            self.started.get("method") or self.metrics.get("method") or mapping(self.config.get("method")).get("name")
        )
        return str(said or "unknown method")

    @property
    def synthetic(self) -> bool:
        return self.started.get("synthetic") is True

    @property
    def clients(self) -> int | None:
        said = whole(self.started.get("clients"))
        return said if said is not None else len(mapping(mapping(self.metrics.get("clients")).get("figures"))) or None

    @cached_property
    def stages(self) -> list[tuple[str, int, int | None]]:
        """(name, first step, planned rounds) of each stage."""
        plan = self.started.get("stages")
        if isinstance(plan, list) and plan:
            rows = [(str(mapping(s).get("name", "")), whole(mapping(s).get("rounds")) or 0) for s in plan]
            firsts = [sum(n for _, n in rows[:i]) for i in range(len(rows))]
            return [(name, first, n) for (name, n), first in zip(rows, firsts, strict=True)]
        seen: dict[str, int] = {}
        for r in self.rounds:
            seen.setdefault(r.stage, r.step)
        return [(name, first, None) for name, first in seen.items()]

    @property
    def planned(self) -> int | None:
        """Rounds of the whole plan, if the run said so."""
        planned = [n for _, _, n in self.stages]
        return sum(n for n in planned if n is not None) if planned and None not in planned else None

    @property
    def seconds(self) -> float | None:
        """Wall time: from the end of the run, otherwise the sum over rounds and tests."""
        ends = [number(e.get("seconds")) for e in self.of("run_finished")]
        if ends and ends[-1] is not None and len(self.of("run_started")) == 1:  # else only of the last attempt
            return ends[-1]
        parts = [r.seconds for r in self.rounds] + [e.seconds for e in self.evaluations]
        known = [p for p in parts if p is not None]
        return sum(known) if known else None

    @property
    def status(self) -> tuple[str, str]:
        """(finished | stopped | unfinished, the words for it)."""
        last = [e for e in self.events if e["event"] in ("run_started", "run_finished", "run_stopped")]
        if (last and last[-1]["event"] == "run_finished") or (not self.events and self.metrics):
            return "finished", "Finished"
        done = len(self.rounds)
        of = f" of {self.planned:,}" if self.planned else ""
        where = f"after round {done:,}{of}" if done else "before the first round ended"
        if last and last[-1]["event"] == "run_stopped":
            reason = last[-1].get("reason")
            return "stopped", f"Stopped {where}" + (f": {reason}" if reason else "")
        return "unfinished", f"Unfinished: the log ends {where}"


def digest_of_tests(faces: str, unseen: dict[str, Any]) -> str:
    """The digest of the fingerprint of a face set and the rows of each test set."""
    return hashlib.sha256(json.dumps([faces, unseen], sort_keys=True).encode()).hexdigest()[:16]


def runs_inside(folder: Path) -> str:
    """Names a run in a folder that is none itself, for a message; empty if there is none."""
    found = sorted(file.parent for part in PARTS for file in folder.glob(f"*/{part}"))
    return f"; there are runs inside: {found[0]}, or all of them: {folder}/*" if found else ""


def read_run(folder: Path | str) -> Run:
    """Read a run folder; anything else, or a broken file, is an error of one line."""
    folder = Path(folder)
    if not folder.exists():
        raise UsageError(f"{folder}: no such run folder")
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a run folder but a file")
    if not any((folder / part).is_file() for part in PARTS):
        raise UsageError(f"{folder}: not a run folder (it has neither {' nor '.join(PARTS)}){runs_inside(folder)}")
    log, config = folder / "events.jsonl", folder / "config.toml"
    return Run(
        folder=folder,
        events=read_events(log) if log.is_file() else [],
        metrics=_read(folder / "metrics.json", _object) or {},
        config=_read(config, partial(parse_toml, where=config)) or {},
        config_text=_read(config, str) or "",
    )


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    """The parsed text of a file; None if there is no file. One that is broken is an error of one line."""
    if not path.is_file():
        return None
    try:
        return parse(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise VisardError(f"{path}: cannot be read: {one_line(error)}") from None


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_constant=lambda _: None)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but a {type(value).__name__}")
    return value


def _rows(text: str) -> dict[str, Any]:
    """The rows of a ledger, one a line; an unfinished last line is ignored."""
    return {"rows": [json.loads(line) for line in text.split("\n")[:-1]]}
