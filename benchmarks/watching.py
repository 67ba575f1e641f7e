"""What watching costs: one run that is watched in some blocks of its rounds and not in others.

The run is a process of its own with one thread, on a core of its own where there are several; `visard watch` and the
benchmark itself take the others. The rounds go in pairs of blocks, one watched
and one bare; which of the two comes first changes from pair to pair. In a watched block a client asks as the page does,
every two seconds for what has changed. In a bare block nobody asks, and the serving process is stopped. All blocks have
the same number of rounds, and of tests between the rounds.

The figures: how much longer the watched blocks took (by the times in the event log), and how much more CPU time the run
used in them. Each is a geometric mean over the pairs, with an interval of 95 % (Student's t on the logarithms). Whole
blocks are compared and not medians of rounds, for an answer falls on few of the rounds. Of the serving process: CPU
seconds in the watched blocks, as per cent of one core.

No browser is measured: the client throws the answers away. The first answer of a watched block reads what a bare block
has left, so serving costs a little more here than in a run that is watched all the time. One pair says nothing, for
blocks differ by some per cent by themselves; and the machine should do nothing else.

With --shots, Chromium takes pictures of the page at the start, in the middle and at the end of the same run, outside
the blocks: during these it shows an empty page. An error in its console, a request to elsewhere or a page that stands
still is an error here.

    python -m benchmarks.watching [--minutes 10] [--block 6] [--clients 10] [--shots FOLDER]
    python -m benchmarks.watching --minutes 1 --block 4     a trial
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from scipy import stats
from tests.unit.chromium import Browser

from visard.cli.watch import EVERY
from visard.report.run_folder import parse_event

VISARD = (sys.executable, "-c", "from visard.cli import main; main()")
TRIAL = 12  # rounds from which the length of a round is taken
CYCLE = 5  # rounds from one test to the next
LOOK = 0.01  # seconds between two looks at the event log
DONE = "Number(document.querySelector('.value').textContent.split(' ')[0].replace(',', ''))"  # rounds, on the page
ENDED = "document.querySelector('.pill.finished')"


@dataclass(frozen=True)
class Block:
    """What some rounds took, and beside them the process that showed them."""

    wall: float  # seconds
    cpu: float  # seconds of the run
    serving: float  # CPU seconds
    answers: int


@dataclass(frozen=True)
class Pair:
    """Two blocks next to each other."""

    bare: Block
    watched: Block


@dataclass(frozen=True)
class More:
    """How much more something was in the watched blocks, in per cent of the bare ones."""

    mean: float
    low: float  # of an interval of 95 %
    high: float

    @property
    def text(self) -> str:
        return f"{self.mean:+.2f} % (95 %: {self.low:+.2f} to {self.high:+.2f})"


def more(pairs: Sequence[Pair], what: str) -> More:
    """Of the wall time or the CPU time of the pairs."""
    ratios = [math.log(getattr(pair.watched, what) / getattr(pair.bare, what)) for pair in pairs]
    mean = sum(ratios) / len(ratios)
    variance = sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1)
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * math.sqrt(variance / len(ratios))
    return More(*(100 * math.expm1(value) for value in (mean, mean - half, mean + half)))


def command(folder: Path, rounds: int, clients: int, steps: int = 20, cycle: int = CYCLE) -> list[str]:
    settings = {
        "method.rounds": rounds, "method.training.amount": steps, "method.training.unit": "iterations",
        "data.identities": 6 * clients, "data.images_per_identity": 10, "data.size": 32, "partition.clients": clients,
        "partition.test_identities": clients, "evaluation.every": cycle, "evaluation.bootstrap": 20,
        "engine.kind": "local", "numerics.threads_per_step": 1,
    }  # fmt: skip
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [*VISARD, "run", "fedavg", "--out", str(folder), "--overwrite", *words]


class Running:
    """A run in a process of its own, followed by its event log."""

    def __init__(self, folder: Path, words: Sequence[str], own_core: int | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
        if own_core is not None:
            os.sched_setaffinity(self.process.pid, {own_core})
        self.times: list[float] = []  # of the ends of the rounds, in seconds
        self._log, self._place, self._rest = folder / "events.jsonl", 0, b""

    @property
    def done(self) -> int:
        """Rounds."""
        return len(self.times)

    def look(self) -> None:
        """Read what is new in the event log."""
        if not self._log.exists() or self._log.stat().st_size == self._place:
            return
        with self._log.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in map(parse_event, lines):
            if event is not None and event["event"] == "round":
                self.times.append(datetime.fromisoformat(event["time"]).timestamp())

    def reach(self, rounds: int) -> None:
        """Wait until so many rounds are done."""
        while self.done < rounds:
            ended = self.process.poll() is not None
            self.look()
            if ended and self.done < rounds:
                raise RuntimeError(f"the run ended with {self.process.returncode} after {self.done} rounds")
            if self.done < rounds:
                time.sleep(LOOK)

    def end(self) -> None:
        """Wait until the run has ended well."""
        if self.process.wait():
            raise RuntimeError(f"the run ended with {self.process.returncode}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


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

    def stand(self, still: bool) -> None:
        """Stop the process, or let it go on."""
        self.process.send_signal(signal.SIGSTOP if still else signal.SIGCONT)

    def close(self) -> None:
        self.process.terminate()  # in the background of a shell it would not hear SIGINT
        self.stand(still=False)
        self.process.communicate(timeout=10)


class Page:
    """Asks as the page does: every two seconds, for what has changed."""

    def __init__(self, address: str) -> None:
        self._parts, self.answers, self._tag = urlsplit(address), 0, ""
        self._end, self._thread = threading.Event(), threading.Thread()
        self._error: Exception | None = None

    def ask(self, what: str = "state.json") -> None:
        headers = {"If-None-Match": self._tag} if self._tag and what else {}
        with closing(http.client.HTTPConnection(self._parts.netloc, timeout=10)) as link:
            link.request("GET", f"{self._parts.path}{what}", headers=headers)
            answer = link.getresponse()
            answer.read()
        if answer.status not in (200, 304):
            raise RuntimeError(f"the page got {answer.status}")
        self._tag = answer.headers.get("ETag", self._tag)
        self.answers += 1

    def begin(self) -> None:
        """Ask from now on."""
        self._end.clear()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask no more."""
        self._end.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        try:
            wait = EVERY / 2  # so that a block has as many answers as such a time has in a long look
            while not self._end.wait(wait):
                self.ask()
                wait = EVERY
        except Exception as error:
            self._error = error


class Pictures:
    """Chromium, which takes pictures of the page and shows an empty one in between."""

    def __init__(self, out: Path, address: str, profile: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._address, self.browser, self.taken = out, address, Browser(profile), list[Path]()

    def take(self, name: str, run: Running, until: str = "") -> None:
        """When something is so on the page, or the next round is there: the page has to come to it by itself."""
        self.browser.visit(self._address, "document.documentElement?.dataset.shown")
        until = until or f"{DONE} > {self.browser.evaluate(DONE)} || {ENDED}"
        while run.process.poll() is None and not self.browser.evaluate(f"Boolean({until})"):
            time.sleep(0.2)
        self.browser.wait(until)
        self.browser.screenshot(self._out / f"{name}.png")
        self.taken.append(self._out / f"{name}.png")
        self.browser.visit("about:blank", "location.href == 'about:blank'")
        if self.browser.errors:
            raise RuntimeError(f"the console of the page shows: {self.browser.errors[:5]}")
        elsewhere = {r for r in self.browser.requests if not r.startswith((self._address, "data:", "about:"))}
        if elsewhere:
            raise RuntimeError(f"the page asked elsewhere: {sorted(elsewhere)[:5]}")
        if len({path.read_bytes() for path in self.taken}) < len(self.taken):
            raise RuntimeError("the page did not change while the run went on")


def block(run: Running, serving: Serving, page: Page, rounds: int, watched: bool) -> Block:
    """The next rounds, from the end of one that was just seen."""
    processes = [psutil.Process(process.pid) for process in (run.process, serving.process)]
    first, answers = run.done, page.answers
    before = [process.cpu_times() for process in processes]
    if watched:
        serving.stand(still=False)
        page.begin()
    try:
        run.reach(first + rounds)
        after = [process.cpu_times() for process in processes]
    finally:
        if watched:
            page.end()
            serving.stand(still=True)
    used = ((b.user + b.system) - (a.user + a.system) for a, b in zip(before, after, strict=True))
    return Block(run.times[first + rounds - 1] - run.times[first - 1], *used, page.answers - answers)


def keep_a_core() -> int | None:
    """Leave one core to the run: its number. This process and those that it starts take the others."""
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return None
    os.sched_setaffinity(0, others)
    return own


def measure(
    folder: Path,
    words: Sequence[str],
    rounds: int,
    length: int,
    shots: Path | None = None,
    cycle: int = CYCLE,
    own_core: int | None = None,
) -> list[Pair]:
    """One run of so many rounds, in pairs of blocks of `length` of them; with pictures where a folder is given."""
    pairs: list[Pair] = []
    with ExitStack() as ending:
        serving = Serving(folder)
        ending.callback(serving.close)
        page, pictures = Page(serving.address), None
        if shots is not None:
            profile = ending.enter_context(tempfile.TemporaryDirectory())
            pictures = Pictures(shots, serving.address, Path(profile))
            ending.callback(pictures.browser.close)
        run = Running(folder, words, own_core)
        ending.callback(run.close)
        run.reach(1)
        page.ask("")
        page.ask()
        if pictures is not None:
            pictures.take("start", run)
        last = rounds - (cycle if pictures is not None else 0)  # the page is to see the run end
        begun = False  # just now, with the end of a round
        while True:
            if pictures is not None and len(pictures.taken) == 1 and run.done >= rounds // 2:
                serving.stand(still=False)
                pictures.take("middle", run)
                begun = False
            serving.stand(still=True)
            run.look()
            first = run.done if begun else (run.done // cycle + 1) * cycle
            if first + 2 * length > last:
                break
            run.reach(first)
            two = {way: block(run, serving, page, length, way) for way in (bool(len(pairs) % 2), not len(pairs) % 2)}
            pairs.append(Pair(two[False], two[True]))
            begun = True
        serving.stand(still=False)
        if pictures is not None:
            pictures.take("end", run, ENDED)
        run.end()
    return pairs


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--block", type=float, default=6.0, help="seconds")
    options.add_argument("--clients", type=int, default=10)
    options.add_argument("--shots", type=Path)
    chosen = options.parse_args()
    own_core = keep_a_core()
    with tempfile.TemporaryDirectory() as text:
        trial = Running(Path(text) / "trial", command(Path(text) / "trial", TRIAL, chosen.clients), own_core)
        trial.reach(TRIAL)  # also draws the faces
        trial.end()
        each = (trial.times[-1] - trial.times[0]) / (TRIAL - 1)
        length = CYCLE * max(1, round(chosen.block / each / CYCLE))
        rounds = round(60 * chosen.minutes / each)
        print(f"{rounds} rounds of {each:.2f} s, {chosen.clients} clients; blocks of {length} rounds", flush=True)
        if rounds < 6 * length:
            raise SystemExit("too short for pairs: more --minutes or a shorter --block")
        folder = Path(text) / "run"
        words = command(folder, rounds, chosen.clients)
        pairs = measure(folder, words, rounds, length, chosen.shots, own_core=own_core)
    for pair in pairs:
        print(", ".join(
            f"{name} {found.wall:.2f} s, CPU {found.cpu:.2f} s, serving {found.serving:.2f} s, {found.answers} answers"
            for name, found in (("bare", pair.bare), ("watched", pair.watched))
        ))  # fmt: skip
    watched = [pair.watched for pair in pairs]
    served = 100 * sum(b.serving for b in watched) / sum(b.wall for b in watched)
    print(f"{len(pairs)} pairs. Watched, the rounds take")
    print(f"  {more(pairs, 'wall').text} of wall time (asked: less than +1 %)")
    print(f"  {more(pairs, 'cpu').text} of CPU time")
    asked = sum(b.answers for b in watched)
    print(f"serving: {served:.2f} % of one core in {asked} answers (asked: below 2 %)")


if __name__ == "__main__":
    main()
