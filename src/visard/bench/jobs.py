"""The runs of a bench: their settings, folders and commands, and what is there of each already."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from visard.bench.figures import digest
from visard.bench.plan import PLACE, Plan, Row, in_order
from visard.config import Settings, load, parse
from visard.errors import UsageError
from visard.files import read_json, write_json
from visard.report.compare import flat

Standing = Literal["new", "unfinished", "finished"]


class OtherSettings(UsageError):
    """A run is there already, but not the one that the bench means."""


@dataclass(frozen=True)
class Job:
    """One run of a bench."""

    row: Row
    seed: int
    runs: Path  # the folder of all runs
    sets: tuple[str, ...] = ()  # overrides for all rows

    @property
    def folder(self) -> Path:
        return self.runs / self.row.name / f"seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.row.name}, seed {self.seed}"

    @property
    def sources(self) -> dict[str, Path]:
        """The run folders that this run starts from, by row."""
        return {name: self.runs / name / f"seed-{self.seed}" for name in self.row.needs()}

    def overrides(self) -> list[str]:
        """All overrides, the last of each key. Run folders as absolute paths, so that a run works from anywhere."""
        folders = {k: str(p.absolute()) for k, p in self.sources.items()}
        own = [PLACE.sub(lambda m: folders[m[1]], text) for text in self.row.set]
        every = [*own, *self.sets, f"seed={self.seed}", f"name={self.row.name}-seed-{self.seed}"]
        last = {text.partition("=")[0].strip(): i for i, text in enumerate(every)}
        return [text for i, text in enumerate(every) if last[text.partition("=")[0].strip()] == i]

    def settings(self) -> Settings:
        """The settings of the run; what is wrong with them names the row."""
        try:
            return load(self.row.preset, self.overrides())
        except UsageError as error:
            raise UsageError(f"row {self.row.name}: {error}") from None

    def command(self) -> str:
        """How to make this run by hand."""
        words = ["visard", "run", self.row.preset]
        words += [part for text in self.overrides() for part in ("--set", text)]
        return shlex.join([*words, "--out", str(self.folder)])

    def portable_command(self) -> str:
        """The same with the runs in `runs/`, wherever they are: for pages that others read."""
        return (
            Job(self.row, self.seed, Path("runs"), self.sets).command().replace(f"{Path('runs').absolute()}/", "runs/")
        )

    def note_sources(self) -> None:
        """Keep, beside the run, which results it starts from."""
        if self.sources:
            self._noted.parent.mkdir(parents=True, exist_ok=True)
            noted = {k: {"folder": str(p.absolute()), "figures": digest(p)} for k, p in self.sources.items()}
            write_json(self._noted, noted)

    @property
    def _noted(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.from.json")

    def standing(self) -> Standing:
        """What is there of this run; `OtherSettings` if it is another one."""
        config = self.folder / "config.toml"
        if not self.folder.exists() or not any(not p.name.startswith(".") for p in self.folder.iterdir()):
            return "new"
        if not config.exists():
            raise UsageError(f"{self.folder} is not empty and is not a run")
        noted = read_json(self._noted) if self.sources and self._noted.exists() else {}
        moved = {noted[k]["folder"]: str(p.absolute()) for k, p in self.sources.items() if k in noted}
        wanted = self.settings()
        try:
            there = parse(_moved(load(config).to_dict(), moved))
        except UsageError as error:
            raise OtherSettings(f"{self.folder} holds a run that this visard cannot read: {error}") from None
        if there.fingerprint() != wanted.fingerprint():
            raise OtherSettings(f"{self.folder} was run with other settings ({_first_difference(there, wanted)})")
        for name, source in self.sources.items():
            if name in noted and (source / "metrics.json").exists() and noted[name]["figures"] != digest(source):
                raise OtherSettings(f"{self.folder} was made from an earlier run of {name}")
        return "finished" if (self.folder / "metrics.json").exists() else "unfinished"


def jobs_of(
    plan: Plan, seeds: Sequence[int], runs: Path, sets: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Job]:
    """The runs, seed by seed, each after those that it starts from."""
    rows = in_order(plan, only)
    return [Job(row, seed, runs, tuple(sets)) for seed in seeds for row in rows]


def _moved(value: Any, places: dict[str, str]) -> Any:
    """The settings with the run folders where they are now: a bench folder may be moved."""
    if isinstance(value, dict):
        return {k: _moved(v, places) for k, v in value.items()}
    if isinstance(value, list):
        return [_moved(v, places) for v in value]
    for old, new in places.items():
        if isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
            return new + value[len(old) :]
    return value


def _first_difference(there: Settings, wanted: Settings) -> str:
    a, b = flat(there.to_dict()), flat(wanted.to_dict())
    keys = [k for k in {**b, **a} if k != "name" and not k.startswith("engine.") and a.get(k) != b.get(k)]
    return f"{keys[0]} = {a.get(keys[0])} there, {b.get(keys[0])} here"
