"""`visard watch`: follow runs on a local web page or in the terminal."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli.console import RunWatcher, mark, say
from visard.errors import UsageError
from visard.files import read_text
from visard.text import line, percent, plain

if TYPE_CHECKING:
    import socket

    from rich.console import RenderableType

    from visard.processes import Child

TOKEN = re.compile(r"[\w-]{16,200}", re.ASCII)
EVERY = 2.0  # seconds between two looks
MOST = 12  # rows of a table in the terminal, below that of the runs
SPENT = "Privacy spent"


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port of the page; 0: any free one")] = 0,
    text: Annotated[bool, typer.Option("--text", help="in the terminal instead of on a web page")] = False,
    browser: Annotated[bool, typer.Option("--browser", help="open the page in the browser")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="wait for runs whose folders do not exist yet")] = False,
    token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a file with the token of the address (default: a new token)")
    ] = None,
) -> None:
    """Follow runs in progress: time left, curves, clients in trouble, bytes, privacy budget, sites of a deployment.

    The page can be opened on this machine only, at an address with a random token, and loads nothing from elsewhere.

    Examples:

      visard watch runs/short

      visard watch runs/one runs/two --browser

      visard watch runs/short --text

      visard watch runs/short --port 9464 --token token.txt    (Prometheus reads /TOKEN/metrics)
    """
    from visard.report.live import LiveView
    from visard.report.run_folder import PARTS, runs_inside

    for folder in runs:
        if not wait and not any((folder / part).is_file() for part in PARTS):
            raise UsageError(f"{folder}: no run is there (--wait waits for one){runs_inside(folder)}")
    if text:
        follow(runs)
        return
    view = LiveView(runs, port, _token(token))
    say(f"watching at {view.address} (Ctrl-C ends)")
    if browser:
        import webbrowser

        webbrowser.open(view.address)
    with suppress(KeyboardInterrupt):
        view.serve()


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        found = read_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token {path}: {getattr(error, 'strerror', None) or error}") from None
    if not TOKEN.fullmatch(found):
        raise UsageError(f"--token {path}: must hold 16 to 200 letters, digits, - or _")
    return found


def follow(runs: Sequence[Path]) -> None:
    """A table in the terminal until all runs have ended; where there is no terminal, a line for each change."""
    from rich.live import Live

    from visard.report.live import Followed, named

    followed = [Followed(folder) for folder in runs]
    shown: dict[int, str] = {}
    table = Live(refresh_per_second=4) if sys.stdout.isatty() else None
    try:
        if table is not None:
            table.start()
        while True:
            states = named([run.state() for run in followed])
            if table is not None:
                table.update(_tables(states), refresh=True)
            for number, state in enumerate(states if table is None else ()):
                said = _words(state)
                if shown.get(number) != said:
                    shown[number] = said
                    say(said)
            if all(state["state"] in ("finished", "stopped") for state in states):
                return
            time.sleep(EVERY)
    except KeyboardInterrupt:
        return
    finally:
        if table is not None:
            table.stop()


def _words(state: dict[str, Any]) -> str:
    of = f" of {state['planned']}" if state["planned"] else ""
    facts = dict(state["facts"])
    left = f", {facts['Time left']} left" if "Time left" in facts else ""
    lost = [c["name"] for c in state["clients"] if c["state"] in ("missing", "refused")]
    away = f"; without {', '.join(lost[:5])}" if lost else ""
    if gone := [s["name"] for s in state["sites"] if s["state"] != "connected"]:
        away += f"; not connected: {', '.join(gone[:5])}"
    spent = [f"privacy spent: {facts[SPENT]}"] if SPENT in facts else []
    values = ", ".join(spent + _latest(state))
    return f"{state['name']}: {state['words']}, {state['done']}{of} rounds{left}{away}. {values}".strip()


def _latest(state: dict[str, Any]) -> list[str]:
    """The last value of each curve but those of time and bytes."""
    found = []
    for curve in state["curves"]:
        if curve["points"] and not curve["label"].startswith(("Seconds", "Megabytes")):
            value = curve["points"][-1][1]
            found.append(f"{curve['label']} {percent(value) if curve['percent'] else plain(value)}")
    return found[:6]


def _tables(states: Sequence[dict[str, Any]]) -> RenderableType:
    """The runs, and below them clients in trouble and the sites of deployments, where there are any."""
    from rich.console import Group

    runs = []
    for state in states:
        facts = dict(state["facts"])
        rounds = f"{state['done']} of {state['planned']}" if state["planned"] else str(state["done"])
        times = [facts.get("Time", ""), *([f"{facts['Time left']} left"] if "Time left" in facts else [])]
        sent = f"{facts['Sent up']} up\n{facts['Sent down']} down"
        values = "\n".join(_latest(state)[: 6 if len(states) < 4 else 2])
        runs.append((state["name"], state["words"], rounds, "\n".join(times), sent, facts.get(SPENT, ""), values))
    lost = [
        (s["name"], c["name"], c["state"], c["seconds"], str(c["problems"]), c["reason"])
        for s in states
        for c in s["clients"]
        if c["state"] != "there"
    ][:MOST]
    sites = [
        (s["name"], p["name"], p["state"], p["roles"], p["seen"], str(p["round"] or ""), p["version"], p["reason"])
        for s in states
        for p in s["sites"]
    ][:MOST]
    several = len(states) > 1
    shown = [_table(("run", "state", "rounds", "time", "sent", "privacy spent", "last values"), runs, True)]
    if lost:
        shown.append(_table(("run", "client", "state", "last step", "problems", "last problem"), lost, several))
    if sites:
        columns = ("run", "site", "state", "roles", "last seen", "last round", "version", "why")
        shown.append(_table(columns, sites, several))
    return Group(*shown)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], named: bool) -> RenderableType:
    """Columns in which there is something; that of the run only if `named`."""
    from rich.table import Table
    from rich.text import Text

    kept = [i for i in range(len(columns)) if any(row[i] for row in rows) and (i or named)]
    found = Table(*(columns[i] for i in kept))
    for row in rows:
        found.add_row(*(Text("\n".join(line(part) for part in row[i].split("\n"))) for i in kept))
    return found


class PageWatcher(RunWatcher):
    """Shows a run in the terminal, and on a page served by a separate process."""

    def __init__(self) -> None:
        super().__init__()
        self._child: Child | None = None

    def begun(self, folder: Path) -> None:
        from visard.processes import Child, ChildError

        self._child = Child("visard.cli.watch:serve_beside", quiet=True, folder=str(folder.absolute()))
        try:
            say(f"watching at {self._child.receive().decode()}")
        except ChildError as error:
            mark("warning", f"there is no page to watch the run on: {error}")

    def close(self) -> None:
        super().close()
        if self._child is not None:
            time.sleep(EVERY + 0.5)  # for the page to ask for the last state
            self._child.kill()
        self._child = None


def serve_beside(channel: socket.socket, folder: str) -> None:
    """A child process: says its address, and serves until its parent is gone."""
    from visard.processes import receive, send
    from visard.report.live import LiveView

    view = LiveView([Path(folder)])
    threading.Thread(target=view.serve, daemon=True).start()
    send(channel, view.address.encode())
    while receive(channel) is not None:
        pass
    view.close()
