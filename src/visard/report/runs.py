"""Reads a run folder: what is there, as far as the run came."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from visard.errors import UsageError, VisardError
from visard.report.events import (
    Evaluation,
    Event,
    Round,
    evaluations,
    mapping,
    number,
    read_events,
    rounds,
    whole,
)

PARTS = ("events.jsonl", "metrics.json")


@dataclass(frozen=True)
class Run:
    """One run folder. What the run did not write is empty."""

    folder: Path
    events: list[Event]
    metrics: dict[str, Any]
    ledger: dict[str, Any] | None
    config: dict[str, Any]
    config_text: str

    @cached_property
    def started(self) -> dict[str, Any]:
        """All that the run said of itself at its start and at each resumption."""
        said: dict[str, Any] = {}
        for event in self.of("run_started"):
            said |= event
        return said

    @cached_property
    def rounds(self) -> list[Round]:
        return rounds(self.events)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        return evaluations(self.events)

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
        """Wall time: as the run said at its end, otherwise the sum over what was done."""
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


def read_run(folder: Path | str) -> Run:
    """Read a run folder; a folder that is none, or a file that is broken, is an error of one line."""
    folder = Path(folder)
    if not folder.exists():
        raise UsageError(f"{folder}: no such run folder")
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a run folder but a file")
    if not any((folder / part).is_file() for part in PARTS):
        raise UsageError(f"{folder}: not a run folder (it has neither {' nor '.join(PARTS)})")
    log = folder / "events.jsonl"
    text = _text(folder / "config.toml") or ""
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise VisardError(f"{folder / 'config.toml'}: not valid TOML: {_one_line(error)}") from None
    return Run(
        folder=folder,
        events=read_events(log) if log.is_file() else [],
        metrics=_object(folder / "metrics.json") or {},
        ledger=_ledger(folder),
        config=config,
        config_text=text,
    )


def _ledger(folder: Path) -> dict[str, Any] | None:
    """`ledger.json`, or the rows that an unfinished run has written so far."""
    rows = folder / "checkpoint" / "ledger.jsonl"
    if (folder / "ledger.json").is_file() or not rows.is_file():
        return _object(folder / "ledger.json")
    lines = (_text(rows) or "").split("\n")[:-1]  # what follows the last line end is unfinished
    try:
        return {"rows": [json.loads(line) for line in lines]}
    except (ValueError, RecursionError) as error:
        raise VisardError(f"{rows}: not valid JSON: {_one_line(error)}") from None


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise VisardError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise VisardError(f"{path}: cannot be read: {error.strerror}") from None


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file."""
    text = _text(path)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise VisardError(f"{path}: not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise VisardError(f"{path}: not a JSON object but a {type(value).__name__}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
