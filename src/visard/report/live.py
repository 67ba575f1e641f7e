"""`visard watch`: a web page that follows runs in progress, served to this machine only.

The address holds a random token; other addresses, and requests that a page from elsewhere makes, get nothing. The page
asks for `state.json` every two seconds; only new lines of each event log are read.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from visard.errors import UsageError, VisardError
from visard.evaluation.metrics import describe
from visard.files import mapping, number, open_file, parse_toml, read_bytes, read_json, read_text
from visard.report.html import esc, filled, page_file, policy, version
from visard.report.run_folder import (
    Event,
    Round,
    Run,
    absences,
    latest,
    parse_event,
    read_run,
    round_of,
    warnings_of,
)
from visard.text import count, duration, line, size

POINTS = 400  # of a curve that are sent
ROWS = 200  # clients and messages that are sent
QUIET = 60.0  # seconds without an event, and five times a usual round, after which a run may have been killed
STOPPED = 30.0  # seconds without news from the server about its parties
MOST = 64 * 2**20  # bytes of a log that are read at a time
HOSTS = ("127.0.0.1", "localhost")
# A report lies in a run folder, which may come from anywhere: it may draw, and neither ask this server nor anyone else.
APART = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)

Json = dict[str, Any]


class Followed:
    """A run folder whose event log grows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.error = folder, ""
        self._log = folder / "events.jsonl"
        self._forget()

    def _forget(self) -> None:
        self._events: list[Event] = []
        self._rounds: dict[int, Round] = {}  # by the id of their event, which stays in the list
        self._place, self._file, self._rest, self._state = 0, 0, b"", Json()
        self._run, self._drawn = Run(self.folder, [], {}, {}, ""), Json()

    def state(self) -> Json:
        """The state of a run for the page. Only new events are read: the page asks often, and runs have many rounds."""
        if self._refresh() or not self._drawn:
            self._look()
        elif self._run.status[0] == "finished" and not self._state["report"] and (_age(self._run) or 0.0) < QUIET:
            self._look()  # its metrics and its report were on their way
        elif self._state["state"] not in ("running", "quiet", "waiting"):
            return self._state
        self._state = self._described()
        return self._state

    def _look(self) -> None:
        """Compute the parts of the state that change only with events."""
        run = Run(self.folder, latest(self._events), {}, {}, "")
        events = [event for event in run.events if event["event"] == "round"]
        self._rounds |= {id(event): round_of(event) for event in events if id(event) not in self._rounds}
        run.__dict__["rounds"] = sorted((self._rounds[id(event)] for event in events), key=lambda r: r.step)
        if run.status[0] == "finished":
            with suppress(VisardError):  # its metrics may be on their way
                run = read_run(self.folder)
        self._run = run
        self._drawn = {"curves": _curves(run), "clients": _clients(run), "messages": _messages(run)}

    def _refresh(self) -> bool:
        """Read new events; returns whether there were any. A log that was replaced is read from its beginning."""
        try:
            about = self._log.stat()
            if about.st_size < self._place or (self._file and about.st_ino != self._file):
                self._forget()
            self._file = about.st_ino
            with open_file(self._log) as file:
                file.seek(self._place)
                data = file.read(MOST)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.error = f"{self._log}: {error.strerror}"
            return True
        was, self.error = self.error, ""
        self._place += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._events += [event for text in lines if (event := parse_event(text)) is not None]
        return bool(data or was)

    def _settings(self, section: str) -> Json:
        """A section of the run's settings."""
        config = self.folder / "config.toml"
        text = read_text(config) if config.is_file() else ""
        return mapping(parse_toml(text, "config.toml").get(section))

    def _budget(self) -> str:
        """The budget of differential privacy in words, if there is one."""
        with suppress(OSError, ValueError, VisardError):
            if (most := number(mapping(self._settings("aggregation").get("dp")).get("epsilon"))) is not None:
                return f" of {most:g}"
        return ""

    def _sites(self, run: Run) -> list[Json]:
        """The parties of a deployment on this machine's server; none where there is no deployment."""
        try:
            engine = self._settings("engine")
            if not engine.get("server"):
                return []
            path = Path(str(engine["server"])) / "sites.json"
            if not path.is_file():
                return []
            listed, stopped = mapping(read_json(path)), time.time() - path.stat().st_mtime > STOPPED
        except (OSError, ValueError, VisardError):
            return []
        round_of = {c: r.step + 1 for r in run.rounds for c in r.slowest}
        return [_site_row(name, mapping(about), round_of, stopped) for name, about in sorted(listed.items())][:ROWS]

    def _described(self) -> Json:
        run = self._run
        state, words = _state_of(run)
        facts = _facts(run, state)
        spent = [r.figures["epsilon"] for r in run.rounds if r.figures.get("epsilon") is not None]
        if spent:
            facts.append(("Privacy spent", f"epsilon {spent[-1]:.3g}{self._budget()}"))
        return {
            "name": line(run.name if self._events else self.folder.name, 80),
            "folder": line(self.folder, 200),
            "method": line(run.method, 60),
            "state": "stopped" if self.error else state,
            "words": line(self.error or words, 300),
            "done": len(run.rounds),
            "planned": run.planned,
            "facts": facts,
            "sites": self._sites(run),
            "report": run.report.is_file(),
            **self._drawn,
        }


def named(states: Sequence[Json]) -> list[Json]:
    """The states of several runs; those with the same name get as much of their folder as tells them apart."""
    found = list(states)
    for parts in (1, 2):
        names = Counter(state["name"] for state in found)
        for i, state in enumerate(found):
            if names[state["name"]] > 1:
                found[i] = state | {"name": line("/".join(Path(state["folder"]).parts[-parts:]), 80)}
    return found


def _site_row(name: str, about: Json, round_of: dict[str, int], stopped: bool) -> Json:
    """A party of a deployment, as its server last wrote it down before it `stopped`."""
    roles = [str(role) for role in about.get("roles") or ()]
    seen = about.get("seen")
    age = max(0.0, time.time() - seen) if isinstance(seen, int | float) and seen > 0 else None
    rounds = [round_of[role] for role in roles if role in round_of]
    why = "the server does not run" if stopped else line(about.get("refused", ""), 200)
    there = about.get("connected") is True and not stopped
    return {
        "name": line(name, 60),
        "roles": line(", ".join(roles), 200),
        "state": "connected" if there else "refused" if why and not stopped else "away",
        "seen": "never" if age is None else f"{duration(age)} ago",
        "round": max(rounds, default=None),
        "version": line(about.get("version", ""), 40),
        "reason": why,
    }


def _state_of(run: Run) -> tuple[str, str]:
    if not run.events:
        return "waiting", "Waiting for the first event"
    state, words = run.status
    if state != "unfinished":
        return state, words
    age, usual = _age(run), _usual(run)
    stage = run.rounds[-1].stage if run.rounds else ""
    if age is not None and age > max(QUIET, 5 * (usual or 0)):
        return "quiet", f"Nothing new for {duration(age)}: it may have been killed"
    return "running", f"Running{f': {stage}' if stage else ''}"


def _age(run: Run) -> float | None:
    """Seconds since the last event."""
    try:
        last = datetime.fromisoformat(str(run.events[-1].get("time")).replace("Z", "+00:00"))
        return max(0.0, (datetime.now(UTC) - last).total_seconds())
    except (ValueError, TypeError):
        return None


def _usual(run: Run) -> float | None:
    """Seconds of a round as the last ones took them, tests between them included."""
    rounds = [r.seconds for r in run.rounds[-9:] if r.seconds is not None]
    if not rounds:
        return None
    tests = sum(e.seconds or 0.0 for e in run.evaluations if e.step >= 0) / max(1, len(run.rounds))
    return statistics.median(rounds) + tests


def _facts(run: Run, state: str) -> list[tuple[str, str]]:
    found = [("Method", line(run.method, 60)), ("Clients", count(run.clients)), ("Time", duration(run.seconds))]
    usual = _usual(run)
    if state == "running" and usual is not None and run.planned:
        left = max(0, run.planned - len(run.rounds))
        found.append(("Time left", f"about {duration(usual * left)}"))
    found.append(("Sent up", size(sum(r.bytes_up or 0 for r in run.rounds))))
    found.append(("Sent down", size(sum(r.bytes_down or 0 for r in run.rounds))))
    return found


def _curves(run: Run) -> list[Json]:
    """Curves of losses, of the tests, of the method's other metrics, of time and of bytes."""
    known = cache(describe)  # for this call: plug-ins may add metrics
    losses = {name: known(name) for r in run.rounds for name in r.figures if "loss" in name}
    found: dict[tuple[str, bool], list[tuple[int, float | None]]] = {
        (metric.label, metric.is_share): [] for metric in losses.values()
    }
    for test in run.measured:
        for name, values in test.generic.items():
            for key, value in values.items():
                metric = known(key)
                found.setdefault((f"{metric.label} ({name})", metric.is_share), []).append((test.step + 1, value))
    for r in run.rounds:
        for name, value in r.figures.items():
            metric = known(name)
            found.setdefault((metric.label, metric.is_share), []).append((r.step + 1, value))
        found.setdefault(("Seconds of a round", False), []).append((r.step + 1, r.seconds))
        sent = None if r.bytes_up is None else r.bytes_up / 1e6
        found.setdefault(("Megabytes sent up in a round", False), []).append((r.step + 1, sent))
    return [
        {"label": line(label, 80), "percent": share, "points": _fewer([p for p in points if p[1] is not None])}
        for (label, share), points in found.items()
    ]


def _fewer(points: list[Any]) -> list[Any]:
    """At most POINTS of a curve, the last one always."""
    every = -(-len(points) // POINTS) if points else 1
    kept = points[::every]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _clients(run: Run) -> list[Json]:
    """Clients that took part recently: seconds of the last step, and which are slow, missing or refused."""
    lost: dict[str, list[Event]] = {}
    now: dict[str, str] = {}  # problems of the last round that ended, and of the one after it
    place = (run.rounds[-1].stage, run.rounds[-1].round) if run.rounds else None
    for event in run.events:
        client = str(event.get("client"))
        if event["event"] in ("missing", "refused", "far"):
            lost.setdefault(client, []).append(event)
            now[client] = str(event["event"])
        elif event["event"] == "round" and (event.get("stage"), event.get("round")) != place:
            now.clear()
    seen = {client: (r.step + 1, seconds) for r in run.rounds[-50:] for client, seconds in r.slowest.items()}
    times = [seconds for _, seconds in seen.values() if seconds is not None]
    slow = 3 * statistics.median(times) if times else float("inf")
    rows: list[Json] = []
    for client in sorted(seen.keys() | lost.keys()):
        problems, (step, seconds) = lost.get(client, []), seen.get(client, (None, None))
        state = now.get(client) or ("slow" if (seconds or 0.0) > max(slow, 1.0) else "there")
        rows.append(
            {
                "name": line(client, 60),
                "state": state,
                "seconds": duration(seconds),
                "round": step,
                "problems": len(problems),
                "reason": line(problems[-1].get("reason", ""), 200) if problems else "",
            }
        )
    rows.sort(key=lambda row: bool(row["state"] == "there"))
    return rows[:ROWS]


def _messages(run: Run) -> list[str]:
    """Refused replies, clients without a reply, and warnings, newest first."""
    said = [line(e.get("text", ""), 300) for e in run.of("warning")]
    return [line(text, 300) for text in (*warnings_of(run.events), *absences(run.events), *reversed(said))][:ROWS]


class LiveView:
    """The server of the page; `address` is where it is."""

    def __init__(self, folders: Sequence[Path], port: int = 0, token: str = "") -> None:
        self.runs = [Followed(folder) for folder in folders]
        self.token = token or secrets.token_urlsafe(16)
        self.lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer((HOSTS[0], port), _handler(self))
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.address = f"http://{HOSTS[0]}:{self.port}/{self.token}/"

    def state(self) -> bytes:
        """All runs as JSON."""
        with self.lock:
            states = named([run.state() for run in self.runs])
        return json.dumps({"runs": states}, allow_nan=False, separators=(",", ":")).encode()

    def metrics(self) -> bytes:
        """The last values of all runs, for Prometheus."""
        try:
            from prometheus_client import CollectorRegistry, Gauge, generate_latest
        except ImportError:
            return b"# pip install 'visard[prometheus]'\n"
        registry = CollectorRegistry()

        def gauge(name: str, about: str, *more: str) -> Any:
            return Gauge(f"visard_{name}", about, ["run", *more], registry=registry)

        rounds, planned = gauge("rounds_done", "rounds that are done"), gauge("rounds_planned", "rounds of the plan")
        running, lost = gauge("running", "1 while it goes on"), gauge("clients_missing", "clients without a good reply")
        values = gauge("value", "the last value of a curve", "curve")
        with self.lock:
            states = [(str(run.folder), run.state()) for run in self.runs]
        for name, state in states:
            rounds.labels(name).set(state["done"])
            planned.labels(name).set(state["planned"] or 0)
            running.labels(name).set(state["state"] == "running")
            lost.labels(name).set(sum(c["state"] in ("missing", "refused") for c in state["clients"]))
            for curve in state["curves"]:
                if curve["points"]:
                    values.labels(name, curve["label"]).set(curve["points"][-1][1])
        return bytes(generate_latest(registry))

    def page(self) -> bytes:
        script = page_file("live.js")
        fetching = f"{policy(script)}; connect-src 'self'"
        parts = {"policy": fetching, "version": esc(version()), "style": page_file("style.css"), "script": script}
        return filled("live.html", parts).encode()

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.5)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(view: LiveView) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a request to come whole
        server_version, sys_version = "visard", ""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            _, token, *rest = [*urlsplit(self.path).path.split("/"), ""][:4]
            if host not in HOSTS or not secrets.compare_digest(token.encode(), view.token.encode()):
                return self._send(404, b"not found", "text/plain")
            what = "/".join(rest).strip("/")
            if what == "":
                return self._send(200, view.page(), "text/html; charset=utf-8")
            if what == "state.json":
                return self._state()
            if what == "metrics":
                return self._send(200, view.metrics(), "text/plain; version=0.0.4; charset=utf-8")
            if what.startswith("report-") and what[7:].isdecimal() and int(what[7:]) < len(view.runs):
                report = view.runs[int(what[7:])].folder / "report.html"
                with suppress(OSError):
                    if report.is_file():
                        return self._send(200, read_bytes(report), "text/html; charset=utf-8", rules=APART)
            return self._send(404, b"not found", "text/plain")

        def _state(self) -> None:
            body = view.state()
            tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            if self.headers.get("If-None-Match") == tag:
                return self._send(304, b"", "application/json", tag)
            return self._send(200, body, "application/json", tag)

        def _send(self, status: int, body: bytes, kind: str, tag: str = "", rules: str = "") -> None:
            with suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                headers = {
                    "Content-Type": kind,
                    "Content-Length": str(len(body)),
                    "Cache-Control": "no-cache",
                    "Referrer-Policy": "no-referrer",
                    "X-Content-Type-Options": "nosniff",
                    "X-Frame-Options": "DENY",
                    "Cross-Origin-Resource-Policy": "same-origin",
                }
                for name, value in (headers | {"ETag": tag, "Content-Security-Policy": rules}).items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent: the terminal belongs to the user."""

    return Handler
