"""What watching costs: a run with and without `visard watch` beside it and a client that asks as the page does.

The same run, a process of its own with one thread, is made in turns bare and watched. Of the watched ones: CPU seconds
of the serving process from its first answer on, as per cent of one core over the run. Of both: wall time and CPU
seconds of the run, as a ratio of medians. A browser is not counted, so there is none here; --shots takes pictures of
the page in headless Chromium at the start, in the middle and at the end of one more run, and fails if its console shows
an error.

    python -m benchmarks.watching [--minutes 10] [--repeats 2] [--clients 10] [--shots FOLDER]
    python -m benchmarks.watching --minutes 0.3 --repeats 1     a trial of about a minute

The machine should do nothing else: a ratio of one per cent is asked for.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from tests.unit.chromium import Browser

from visard.cli.watch import EVERY
from visard.report.run_folder import read_run

VISARD = (sys.executable, "-c", "from visard.cli import main; main()")
TRIAL = 12  # rounds from which the length of a round is taken


@dataclass(frozen=True)
class Taken:
    """What a run took, and beside it the process that showed it."""

    wall: float  # seconds
    cpu: float
    serving: float | None = None  # CPU seconds
    answers: int = 0

    @property
    def percent(self) -> float:
        """Of one core, for serving."""
        return 100 * (self.serving or 0.0) / self.wall

    @property
    def text(self) -> str:
        run = f"{self.wall:.1f} s, CPU {self.cpu:.1f} s"
        if self.serving is None:
            return run
        return f"{run}, serving {self.serving:.2f} s in {self.answers} answers: {self.percent:.2f} % of a core"


def command(folder: Path, rounds: int, clients: int, steps: int = 20) -> list[str]:
    settings = {
        "method.rounds": rounds, "method.training.amount": steps, "method.training.unit": "iterations",
        "data.identities": 6 * clients, "data.images_per_identity": 10, "data.size": 32, "partition.clients": clients,
        "partition.test_identities": clients, "evaluation.every": 5, "evaluation.bootstrap": 20,
        "engine.kind": "local", "numerics.threads_per_step": 1,
    }  # fmt: skip
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [*VISARD, "run", "fedavg", "--out", str(folder), "--overwrite", *words]


class Serving:
    """`visard watch` in a process of its own, for a run that is about to begin."""

    def __init__(self, folder: Path) -> None:
        words = [*VISARD, "watch", str(folder), "--wait"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            raise RuntimeError("visard watch gave no address")
        self.address = found[0]

    def cpu(self) -> float:
        """CPU seconds so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self.process.terminate()  # in the background of a shell it would not hear SIGINT
        self.process.communicate(timeout=10)


class Page:
    """Asks as the page does: every two seconds, for what has changed."""

    def __init__(self, address: str) -> None:
        self._parts, self.answers, self.changed, self._tag = urlsplit(address), 0, 0, ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def ask(self, what: str = "state.json") -> None:
        headers = {"If-None-Match": self._tag} if self._tag and what else {}
        with closing(http.client.HTTPConnection(self._parts.netloc, timeout=10)) as link:
            link.request("GET", f"{self._parts.path}{what}", headers=headers)
            answer = link.getresponse()
            answer.read()
        if answer.status not in (200, 304):
            raise RuntimeError(f"the page got {answer.status}")
        self._tag = answer.headers.get("ETag", self._tag)
        self.answers, self.changed = self.answers + 1, self.changed + (answer.status == 200)

    def __enter__(self) -> Page:
        self.ask("")
        self.ask()
        self._thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(EVERY):
            self.ask()


def timed(words: Sequence[str]) -> Taken:
    """A process from its start to its end: seconds, and CPU seconds of it and of what it started."""
    begun = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return Taken(time.perf_counter() - begun, used.ru_utime + used.ru_stime)


def watched(folder: Path, words: Sequence[str]) -> Taken:
    """The same, with somebody watching."""
    serving = Serving(folder)
    try:
        with Page(serving.address) as page:
            before = serving.cpu()
            taken = timed(words)
            used = serving.cpu() - before
    finally:
        serving.close()
    return Taken(taken.wall, taken.cpu, used, page.answers)


def shots(folder: Path, words: Sequence[str], rounds: int, out: Path) -> list[Path]:
    """Pictures of the page at the start, in the middle and at the end of a run; an error in its console is ours."""
    out.mkdir(parents=True, exist_ok=True)
    done = "Number(document.querySelector('.value').textContent.split(' ')[0].replace(',', ''))"
    moments = {
        "start": f"{done} >= 1",
        "middle": f"{done} >= {rounds // 2}",
        "end": "document.querySelector('.pill.finished')",
    }
    serving, found = Serving(folder), []
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
            browser.visit(serving.address, "document.documentElement?.dataset.shown")
            for name, until in moments.items():
                while run.poll() is None and not browser.evaluate(f"Boolean({until})"):
                    time.sleep(0.2)
                browser.wait(until)
                browser.screenshot(out / f"{name}.png")
                found.append(out / f"{name}.png")
            if browser.errors:
                raise RuntimeError(f"the console of the page shows: {browser.errors[:5]}")
            elsewhere = {r for r in browser.requests if not r.startswith((serving.address, "data:", "about:"))}
            if elsewhere:
                raise RuntimeError(f"the page asked elsewhere: {sorted(elsewhere)[:5]}")
        if run.wait():
            raise RuntimeError(f"the run ended with {run.returncode}")
    finally:
        run.kill()
        run.wait()
        serving.close()
    if len({path.read_bytes() for path in found}) < len(moments):
        raise RuntimeError("the page did not change while the run went on")
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--shots", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "run"
        timed(command(folder, TRIAL, chosen.clients))  # also draws the faces
        each = statistics.median(r.seconds or 0.0 for r in read_run(folder).rounds)
        rounds = max(TRIAL, round(60 * chosen.minutes / (each * 1.1)))  # a tenth for tests between the rounds
        words = command(folder, rounds, chosen.clients)
        print(f"{rounds} rounds of {each:.2f} s, {chosen.clients} clients")
        found: dict[str, list[Taken]] = {"bare": [], "watched": []}
        for repeat in range(chosen.repeats):
            order = ("bare", "watched") if repeat % 2 == 0 else ("watched", "bare")
            for way in order:
                shutil.rmtree(folder)  # a page would show the run before this one first
                taken = timed(words) if way == "bare" else watched(folder, words)
                found[way].append(taken)
                print(f"{way}: {taken.text}", flush=True)
        for what in ("wall", "cpu"):
            bare, beside = (statistics.median(getattr(t, what) for t in found[way]) for way in ("bare", "watched"))
            print(f"{what} watched / bare: {beside / bare:.4f}")
        print(f"serving: {statistics.median(t.percent for t in found['watched']):.2f} % of one core")
        if chosen.shots is not None:
            shutil.rmtree(folder)
            for path in shots(folder, words, rounds, chosen.shots):
                print(path)


if __name__ == "__main__":
    main()
