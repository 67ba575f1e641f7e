"""The state folder of a party: what it keeps of the runs that it took part in, and how it forgets them.

    states/RUN/run.json     when it began and was last seen, how often it asked, digests of what may not change
    states/RUN/kept.json    which states were committed (`party.OwnStates`), which lie beside it in clients/
    states/RUN/seen-*.bin   the weights of the last request to a client, to measure the next ones by
    consents/RUN.toml       the policy that was agreed to at the terminal, where no policy file was given
    spent.json              the privacy budget that each client has spent, over all runs (`protect.dp_epsilon`)
    models/*-RUN-*          the models that the party keeps; forgetting a run leaves them unless asked to remove them

Of a forgotten run only its id, the date and its privacy budget remain, so that it cannot be resumed. This file imports
no torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visard.engines.request import RUN_ID
from visard.errors import PublicError, UsageError
from visard.files import PRIVATE, mapping, number, read_json, whole, write_atomically

DAY = 86400.0


@dataclass
class RunRecord:
    """What a party remembers of a run beside its states."""

    method: str = ""
    settings: str = ""  # digest of the settings of the first request, without the number of rounds
    begun: float = 0.0  # seconds since 1970
    used: float = 0.0
    requests: int = 0
    frozen: dict[str, dict[str, str]] = field(default_factory=dict)  # client -> digests of entries that must not change
    forgotten: float = 0.0  # when it was forgotten; 0: it was not
    sums: dict[str, dict[str, str]] = field(default_factory=dict)  # secure sum -> digests of what was masked and opened
    shown: dict[str, str] = field(default_factory=dict)  # client -> digest of the one request for noisy class vectors

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        tree = mapping(read_json(path)) if path.exists() else {}
        return cls(
            str(tree.get("method", "")), str(tree.get("settings", "")), number(tree.get("begun")) or 0.0,
            number(tree.get("used")) or 0.0, whole(tree.get("requests")) or 0,
            {str(k): mapping(v) for k, v in mapping(tree.get("frozen")).items()}, number(tree.get("forgotten")) or 0.0,
            {str(k): mapping(v) for k, v in mapping(tree.get("sums")).items()},
            {str(k): str(v) for k, v in mapping(tree.get("shown")).items()},
        )  # fmt: skip


class StateFolder:
    """The state folder of a party."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.states, self.consents, self.models = home / "states", home / "consents", home / "models"

    def record(self, run: str) -> RunRecord:
        """The record of a run; an empty one if it is new."""
        return RunRecord.read(self.states / run / "run.json")

    def write(self, run: str, record: RunRecord) -> None:
        """Keep a record."""
        path = self.states / run / "run.json"
        write_atomically(path, json.dumps(vars(record), indent=1) + "\n", PRIVATE, parents=True)

    def spent(self) -> dict[str, tuple[float, str]]:
        """For each client: the sum of 1 / noise^2 over all its sums, and the digest of the last one."""
        path = self.home / "spent.json"
        tree = mapping(read_json(path)) if path.exists() else {}
        try:
            return {str(client): (float(total), str(last)) for client, (total, last) in tree.items()}
        except (TypeError, ValueError, OverflowError):
            raise PublicError("this party's record of what it has spent is damaged") from None

    def spend(self, client: str, total: float, last: str) -> None:
        """Note what a client has spent with its next sum, durably."""
        spent = self.spent() | {client: (total, last)}
        write_atomically(self.home / "spent.json", json.dumps(spent, indent=1) + "\n", PRIVATE, parents=True)

    def runs(self) -> dict[str, RunRecord]:
        """Runs that are not forgotten, the oldest first."""
        found = {p.name: self.record(p.name) for p in self.states.glob("*") if RUN_ID.fullmatch(p.name)}
        return {k: r for k, r in sorted(found.items(), key=lambda item: item[1].begun) if not r.forgotten}

    def find(self, start: str) -> str:
        """The one run whose id begins with `start`."""
        found = [run for run in self.runs() if start and run.startswith(start)]
        if len(found) != 1:
            what = "several runs begin" if found else "no run begins"
            raise UsageError(f"{what} with {start!r} in {self.home} (visard client runs --state {self.home})")
        return found[0]

    def admit(self, run: str, method: str, settings: dict[str, Any], most_requests: int, most_runs: int) -> RunRecord:
        """Count a request; refuse one of a run that was forgotten, has changed its settings or has asked too often."""
        record, digest, now = self.record(run), digest_of_settings(settings), time.time()
        if record.forgotten:
            raise PublicError("this party has forgotten the run and does not take it up again")
        if record.settings and record.settings != digest:
            raise PublicError("the run has other settings than at its first request")
        if record.requests >= most_requests:
            raise PublicError(f"the run has asked {record.requests} times, this party's bound (bounds.requests)")
        if not record.settings and len(self.runs()) >= most_runs:
            raise PublicError(f"this party remembers {most_runs} runs, its bound (bounds.runs; visard client forget)")
        record.method, record.settings = method, digest
        record.begun, record.used, record.requests = record.begun or now, now, record.requests + 1
        self.write(run, record)
        return record

    def forget(self, run: str, models: bool = False) -> dict[str, int]:
        """Remove what is kept of a run; returns how many files of each kind were removed."""
        folder = self.states / run
        kinds = {"states": list((folder / "clients").glob("*.bin")), "weights": list(folder.glob("seen-*.bin"))}
        kinds["agreements"] = list(self.consents.glob(f"{run}.toml"))
        kinds["models"] = self.models_of(run) if models else []
        counts = {kind: len(files) for kind, files in kinds.items()}
        self.write(run, RunRecord(forgotten=time.time()))  # first: nothing comes back if this is interrupted
        for file in (*(f for files in kinds.values() for f in files), *folder.glob(".seen-*.tmp")):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder / "clients", ignore_errors=True)
        (folder / "kept.json").unlink(missing_ok=True)
        return counts

    def models_of(self, run: str) -> list[Path]:
        """The models of a run that this party keeps."""
        return sorted(self.models.glob(f"*-{run}-*.safetensors"))

    def quiet_for(self, days: float) -> list[str]:
        """Runs without a request for this many days."""
        now = time.time()
        return [run for run, record in self.runs().items() if record.used and now - record.used > days * DAY]


def digest_of_settings(settings: dict[str, Any]) -> str:
    """The digest of a run's settings, without the number of rounds, which may grow within the policy's bounds."""
    tree = json.loads(json.dumps(settings))
    method = mapping(mapping(tree.get("settings")).get("method"))
    method.pop("rounds", None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
