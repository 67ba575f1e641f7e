"""Repeats a simulated run without some of its clients, lists in which rounds a real party took part, and removes what
runs keep of people who are taken out of a face set.

The random numbers of a client depend only on the seed, the place in the run and the client's name, and the partition is
made as before and then loses the clients (`partition.without`): the result is that of a run which never had them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from visard.config import Settings, load
from visard.data.faces import FaceSet
from visard.data.partition import Manifest, partition
from visard.data.removal import Receipt
from visard.data.sources.catalog import open_faces
from visard.engines.records import files_of, read_records
from visard.engines.watchers import Watcher, Watchers
from visard.errors import UsageError, VisardError, did_you_mean
from visard.files import mapping, only_user, safe_name, whole
from visard.report import replay as kept
from visard.report.disclosure import COLUMNS, add_up
from visard.report.run_folder import Run, read_run
from visard.runs.folder import refuse_links
from visard.runs.run import run

Place = tuple[str, int]  # stage, round from 0
# what a run keeps about single people, beside its models
STATES = (
    "checkpoint/manifest.json",
    "checkpoint/clients/*.pack",
    "checkpoint/server-*.bin",
    "checkpoint/memory-*.bin",
    "class_vectors.safetensors",
)


@dataclass(frozen=True)
class Part:
    """What a client of a run sent, by round."""

    client: str
    rounds: dict[Place, int]  # bytes of accepted replies
    refused: tuple[Place, ...]  # rounds in which replies were not accepted

    @property
    def bytes(self) -> int:
        """Bytes of all accepted replies."""
        return sum(self.rounds.values())


def replay(
    origin: str | Path,
    without: Sequence[str],
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    watcher: Watcher | Iterable[Watcher] | None = None,
    plugins: Sequence[str | Path] = (),
) -> Run:
    """Repeat the run in the folder `origin` as if these clients had never been there, in a new folder.

    `overrides` may change where it computes (`engine.*`) and nothing else; `plugins` are those that the run has.

    >>> from visard.runs.replay import replay
    >>> replay("runs/demo", ["south"], out="runs/demo-without-south")    # doctest: +SKIP
    """
    folder = Path(origin)
    before = settings_of(folder, overrides, plugins)
    if before.real_parties:
        raise VisardError(f"{folder} was made with parties that are elsewhere: only they can run again")
    gone = tuple(dict.fromkeys(without))
    settings = _without(before, gone)
    target = Path(out) if out is not None else Path("runs") / safe_name(settings.name)
    if target.resolve() == folder.resolve():
        raise UsageError(f"{folder} is the run itself: the replay needs a folder of its own (--out)")
    notes = _check_same(folder, before, settings, gone, Watchers(watcher))
    record = kept.record(read_run(folder), settings.partition.without, notes)
    return run(settings, out=target, resume=resume, overwrite=overwrite, watcher=watcher, replay=record)


def settings_of(folder: Path, overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()) -> Settings:
    """The settings of the run in a folder."""
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} holds no run (there is no config.toml)")
    if other := next((o for o in overrides if not o.startswith("engine.")), None):
        raise UsageError(f"--set {other}: a run without a client has the settings of the run that it is made from")
    return load(folder / "config.toml", overrides, plugins)


def _without(before: Settings, gone: tuple[str, ...]) -> Settings:
    if not gone:
        raise UsageError("name the client that is to be left out (--without CLIENT)")
    if again := [name for name in gone if name in before.partition.without]:
        raise UsageError(f"{again[0]} is not in this run: it was left out before")
    part = before.partition.model_copy(update={"without": (*before.partition.without, *gone)})
    parties = {name: stated for name, stated in before.parties.items() if name not in gone}
    name = f"{before.name}-without-{gone[0] if len(gone) == 1 else f'{len(gone)}-clients'}"
    return before.model_copy(update={"name": name, "partition": part, "parties": parties})


def _check_same(
    folder: Path, before: Settings, settings: Settings, gone: tuple[str, ...], watcher: Watcher
) -> list[str]:
    """Refuse data or clients that are not those of the run; returns notes on other differences."""
    was = Manifest.load(folder / "partition.json").content
    if unknown := [name for name in gone if name not in was.clients]:
        raise UsageError(f"{folder} has no client {unknown[0]!r}{did_you_mean(unknown[0], was.clients)}")
    faces = open_faces(before.data, watcher.rendering)
    if faces.fingerprint() != was.faces:
        raise VisardError(
            f"{folder} was made with the face set {was.faces}, and now it is {faces.fingerprint()}: it cannot be made "
            f"again exactly; visard run {folder / 'config.toml'} makes a new run with the pictures that are there now"
        )
    now = partition(faces, settings.partition, settings.seed).content
    left = {name: rows for name, rows in was.clients.items() if name not in gone}
    same = now.clients == left and list(now.clients) == list(left)
    if not same or (now.unseen, now.public) != (was.unseen, was.public):
        raise VisardError(f"{folder}: this visard divides the pictures in another way, the run cannot be made again")
    said = read_run(folder).started
    here = {"visard": version("visard"), "torch": torch.__version__}
    then = {"visard": said.get("version"), "torch": mapping(said.get("machine")).get("torch")}
    return [
        f"the run was made with {name} {then[name]}, its replay with {here[name]}: some of the change may be due to it"
        for name in here
        if then[name] not in (None, here[name])
    ]


def took_part(folder: Path, client: str) -> Part:
    """The rounds in which a client of a run sent something, from the ledger and the record of replies."""
    rounds: dict[Place, int] = {}
    clients: set[str] = set()
    made = read_run(folder)
    add_up(made)  # one clear line where the ledger is damaged
    ledger = made.ledger or {}
    for row in ledger.get("rows", []):
        found = dict(zip(ledger.get("columns", COLUMNS), row, strict=True))
        clients.add(str(found["client"]))
        if found["client"] == client:
            place = str(found["stage"]), int(found["round"])
            rounds[place] = rounds.get(place, 0) + int(found["bytes"])
    refused: dict[Place, None] = {}
    for line in read_records(files_of(folder / "checkpoint", "received")):
        who, place = line.record.get("client"), (str(line.record.get("stage")), whole(line.record.get("round")) or 0)
        if isinstance(who, str) and who and (line.record.get("parts") or line.record["event"] == "unreadable"):
            clients.add(who)
            if who == client and place not in rounds:
                refused[place] = None
    if client not in clients:
        raise UsageError(f"{folder}: its ledger knows no client {client!r}{did_you_mean(client, clients)}")
    return Part(client, rounds, tuple(refused))


def forget_rows(root: Path, faces: FaceSet, rows: npt.NDArray[np.int64], receipt: Receipt) -> None:
    """Remove what runs in a folder keep of these rows of a face set: states of clients and server, with the labels that
    clients gave their pictures, and class vectors. These runs cannot be resumed, since their pictures have changed.

    Models stay; the receipt says which clients of which runs had pictures of these people.
    """
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}")
    found = 0
    for file in sorted(root.rglob("partition.json")):
        folder = file.parent
        try:
            refuse_links(folder)
            first = _first_row(read_run(folder), faces)
            content = Manifest.load(file).content
        except VisardError as problem:
            receipt.look("a run that cannot be read", folder.name, 0, 0, problem=type(problem).__name__)
            continue
        if first is None:
            continue
        found += 1
        theirs = set((rows + first).tolist())
        clients = [n for n, own in content.clients.items() if theirs & {*own.train, *own.val, *own.test}]
        gone = 0
        if clients or theirs & {*content.public}:
            with only_user(folder):
                for kept in [path for pattern in STATES for path in folder.glob(pattern)]:
                    kept.unlink()
                    gone += 1
        receipt.look("states and class vectors of a run", folder.name, gone, gone, clients=clients)
    receipt.look("runs that were made with this face set", root.name, found, 0)


def _first_row(made: Run, faces: FaceSet) -> int | None:
    """The row at which this set begins in the pictures of a run; None if the run did not have it."""
    data, first = mapping(made.started.get("data")), 0
    listed = data.get("sets")
    for member in [mapping(one) for one in listed] if isinstance(listed, list) else [data]:
        if member.get("fingerprint") == faces.fingerprint():
            return first
        first += whole(member.get("pictures")) or 0
    return None
