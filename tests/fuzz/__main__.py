"""`python -m tests.fuzz --files 50000 --seed 0 --keep fuzz-failures`: a table, and exit code 1 if any file failed."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.runner import Tally, fuzz, plan, plan_every, seeds
from visard.processes import cores


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=5000, help="how many files, over all formats")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file of each format, to go on later")
    parser.add_argument("--only", action="append", help="a format (may repeat; default: all)")
    parser.add_argument("--every", action="store_true", help="first each file missing, cut, in another's place, ...")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where files go that fail")
    parser.add_argument("--workers", type=int, default=cores(), help="processes")
    parser.add_argument("--json", type=Path, help="write the counts there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="visard-fuzz-") as folder:
        seeds(Path(folder), given.only)
        one_by_one = plan_every(Path(folder), given.only) if given.every else []
        jobs = [*one_by_one, *plan(given.files, given.only, given.first)]
        found = fuzz(jobs, Path(folder), given.seed, given.workers, given.keep)
    show(found)
    if given.json:
        given.json.write_text(json.dumps({name: asdict(tally) for name, tally in found.items()}, indent=1))
    return int(any(tally.failures for tally in found.values()))


def show(found: dict[str, Tally]) -> None:
    """The counts of each format."""
    every = Tally()
    print(f"{'format':28}{'files':>8}{'read':>8}{'refused':>9}{'failed':>8}{'most MB':>9}{'longest s':>11}")
    for name, t in sorted(found.items()):
        print_row(name, t)
        every.files, every.read, every.refused = every.files + t.files, every.read + t.read, every.refused + t.refused
        every.memory, every.seconds = max(every.memory, t.memory), max(every.seconds, t.seconds)
        every.failures += t.failures
    print_row("all", every)


def print_row(name: str, t: Tally) -> None:
    failed, memory = len(t.failures), t.memory / 1e6
    print(f"{name:28}{t.files:8}{t.read:8}{t.refused:9}{failed:8}{memory:9.0f}{t.seconds:11.2f}")


if __name__ == "__main__":
    sys.exit(main())
