"""The folder of a run: created, resumed or overwritten. Files that no run wrote are never changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visard.config import HEADING, Settings, load
from visard.errors import UsageError
from visard.files import SHARED, only_user, read_bytes, write_atomically

# all that a run writes, as patterns relative to its folder
WRITTEN = (
    "config.toml", "partition.json", "events.jsonl", "metrics.json", "ledger.json", "samples.npy", "report.html",
    "replay.json", "model.safetensors", "class_vectors.safetensors", "clients/*.safetensors", ".lock",
    "checkpoint/manifest.json", "checkpoint/chain.jsonl", "checkpoint/ledger.jsonl", "checkpoint/received-*.jsonl",
    "checkpoint/server-*.bin", "checkpoint/memory-*.bin", "checkpoint/sum.bin", "checkpoint/secret.key",
    "checkpoint/run.id", "checkpoint/parties.json", "checkpoint/clients/*.pack", "checkpoint/before.json", ".*.tmp",
    "checkpoint/.*.tmp",
)  # fmt: skip


@contextmanager
def run_folder(
    folder: Path, settings: Settings, resume: bool, overwrite: bool, more: Sequence[str] = ()
) -> Iterator[None]:
    """Lock the folder of a run for this process; a start that fails leaves nothing behind.

    `more` are names of files that watchers of the run write beside its own.
    """
    written = (*WRITTEN, *more)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder for a run")
    if resume:
        changed = _check_same(folder, settings)
        refuse_links(folder)
        with only_user(folder):
            if changed:
                write_atomically(folder / "config.toml", settings.to_toml(), SHARED)
            yield
        return
    existed = folder.exists()
    if existed and _is_used(folder) and not overwrite:
        raise UsageError(f"{folder} is not empty: use --resume to continue it, --overwrite, or another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None
    with only_user(folder):  # before anything is removed: another process may be writing here
        if _is_used(folder):
            check_removable(folder, written)
            remove_written(folder, written)
        try:
            write_atomically(folder / "config.toml", settings.to_toml(), SHARED)
            yield
        except BaseException:
            if not (folder / "events.jsonl").exists():  # it did not begin
                remove_written(folder, written)
                if not existed and [path.name for path in folder.iterdir()] == [".lock"]:
                    (folder / ".lock").unlink()
                    folder.rmdir()
            raise


def _is_used(folder: Path) -> bool:
    return any(not path.name.startswith(".") for path in folder.iterdir())


def _check_same(folder: Path, settings: Settings) -> bool:
    """Refuse settings that differ from the run's own; returns whether rounds or the key's path are new."""
    config = folder / "config.toml"
    if not config.exists():
        raise UsageError(f"{folder} holds no run to resume (there is no config.toml)")
    before = load(config)
    key, moved = before.engine.encrypt_with, settings.engine.encrypt_with
    if (key is None) != (moved is None):
        how = "not encrypted: resume it without" if key is None else f"encrypted with {key}: resume it with"
        raise UsageError(f"the states of {folder} are {how} --encrypt-with")
    if before.fingerprint() == settings.fingerprint():
        return moved != key
    old, new = before.method, settings.method
    rounds: Any = getattr(old, "rounds", None)
    if rounds is None or type(old) is not type(new) or not _same_but_for_rounds(before, settings):
        raise UsageError(f"{folder} was run with other settings: resume it with its own {config}")
    if getattr(new, "rounds", 0) < rounds:
        raise UsageError(f"{folder}: a run of {rounds} rounds can get more, not fewer")
    reason = new.fixed_length()
    stages = [[(stage.name, stage.rounds) for stage in method.stages()] for method in (old, new)]
    if not reason and (stages[0][:-1] != stages[1][:-1] or stages[0][-1][0] != stages[1][-1][0]):
        reason = "another stage follows its rounds"
    if reason:
        raise UsageError(f"{folder}: {new.name} cannot be given more rounds: {reason}")
    return True


def _same_but_for_rounds(before: Settings, settings: Settings) -> bool:
    method = dataclasses.replace(settings.method, rounds=before.method.rounds)  # type: ignore[type-var,attr-defined]
    return settings.model_copy(update={"method": method}).fingerprint() == before.fingerprint()


def refuse_links(folder: Path) -> None:
    """Refuse a folder with links in it: a run that goes on there would write to where they lead."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise UsageError(
                f"{folder} holds the link {path.relative_to(folder)}, which no run wrote: put the file there"
            )


def check_removable(folder: Path, written: Sequence[str] = WRITTEN) -> None:
    """Refuse a folder that is not a run, or that holds a file which no run wrote."""
    config = folder / "config.toml"
    if not config.is_file() or not read_bytes(config).startswith(HEADING.encode()):
        raise UsageError(f"{folder} is not empty and is not a run: it is not overwritten")
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and not _is_written(path.relative_to(folder), written)):
            raise UsageError(f"{folder} holds {path.relative_to(folder)}, which no run wrote: it is not overwritten")


def remove_written(folder: Path, written: Sequence[str] = WRITTEN) -> None:
    """Remove what a run wrote, except the lock, and folders that are then empty."""
    for path in sorted(folder.rglob("*"), reverse=True):  # the content of a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if path.relative_to(folder).parts[0] in ("clients", "checkpoint") and not any(path.iterdir()):
                path.rmdir()
        elif path.name != ".lock" and not path.is_symlink() and _is_written(path.relative_to(folder), written):
            path.unlink()


def _is_written(name: Path, written: Sequence[str]) -> bool:
    return any(name.match(pattern) and len(name.parts) == pattern.count("/") + 1 for pattern in written)
