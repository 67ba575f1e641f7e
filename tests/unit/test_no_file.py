"""A named pipe, a socket or a device where a file belongs: one clear line, and nothing waits for it.

The fuzzer tries the same with every file of every format (`test_fuzz.py`); here are the commands that are given one by
name, and what visard itself writes and reads again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from tests.toys import noise_faces
from tests.unit.fake_run import write_run

from visard import plugins
from visard.at_rest import Key
from visard.cli import main
from visard.config import load as load_settings
from visard.crypto import paillier
from visard.data.listing import Container
from visard.data.partition import Manifest
from visard.data.partition_kinds import PartitionSettings
from visard.deployment.ledger_check import compare, verify
from visard.deployment.party import OwnStates, own_secret
from visard.deployment.policy import Policy
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.records import Records
from visard.inference.photos import Photos
from visard.models import build
from visard.models.files import save_model
from visard.report.live import Followed
from visard.report.run_folder import EventLog
from visard.runs.run import run_id

PIPE = "it is a named pipe, not a file"


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """What waits for longer than this fails, where it waits."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return path


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """The one line with which a command ends."""
    monkeypatch.setattr(sys, "argv", ["visard", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code in (1, 2)
    assert said.count("\n") == 1
    assert "internal error" not in said
    return said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    spec = {"model": "tiny_nobn", "embedding": "8", "size": "32"}
    save_model(path, build("tiny_nobn", embedding=8, size=32).state_dict(), spec)
    return path


@pytest.mark.parametrize(
    "words",
    [
        "run {pipe}.toml",
        "run --resume --out {folder}",
        "run demo --set partition.exclude={pipe}",
        "run demo --set plugins=[\"{pipe}.py\"]",
        "eval {pipe}.safetensors --data {faces}",
        "eval {pipe}.pth --data {faces}",
        "eval {pipe}.onnx --data {faces}",
        "eval {model} --data {pipe}",
        "eval {model} --data {faces} --protocol lfw --list {pipe}.csv",
        "embed {pipe}.png --model {model} --align none --out {folder}/out.npy",
        "embed {pipe}.zip --model {model} --out {folder}/out.npy",
        "enroll {pipe} --model {model} --gallery {folder}/staff.gallery",
        "identify {pipe}.png --gallery {pipe}.gallery --model {model}",
        "verify {pipe}.png {pipe}.png --model {model}",
        "cluster {pipe}.npy --out {folder}/labels.csv",
        "gallery list {pipe}.gallery --encrypt-with {pipe}",
        "data import folder {pipe} --out {folder}/set",
        "data import recordio {pipe}.rec --out {folder}/set",
        "data show {pipe}",
        "report {pipe}",
        "watch {folder} --token {pipe}",
        "ledger verify {pipe}",
        "ledger compare {pipe} {pipe}",
        "models add {pipe}.onnx --name mine --licence none",
        "keys sign {pipe}.csr --ca {pipe} --keys {pipe} --out {folder}",
        "client --server localhost:9 --keys {pipe} --node 1 --role a --state {folder} --data {faces} --policy {pipe}",
    ],
)  # fmt: skip
def test_a_command_that_is_given_a_pipe_ends_with_one_line(
    words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ending in ("", ".toml", ".py", ".safetensors", ".pth", ".onnx", ".csv", ".png", ".zip", ".gallery", ".npy",
                   ".rec", ".csr"):  # fmt: skip
        pipe(tmp_path / f"pipe{ending}")
    write_run(tmp_path / "folder", clients=2, rounds=1)
    pipe(tmp_path / "folder" / "config.toml")
    noise_faces(tmp_path / "faces", identities=3, images=2)
    places = {"pipe": tmp_path / "pipe", "folder": tmp_path / "folder", "faces": tmp_path / "faces", "model": model}
    refused(capsys, monkeypatch, *(word.format(**places) for word in words.split()))


def test_pictures_that_are_pipes_are_skipped(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1))
    container = Container(tmp_path)
    with pytest.raises(ValueError, match="empty"):
        container.read(pipe(tmp_path / "a.png").name)
    (_, read) = Photos([tmp_path / "a.png"])._files[0]
    with pytest.raises(OSError, match=PIPE):
        read()


def ledgers(folder: Path) -> None:
    pipe(folder / "checkpoint" / "received-000001.jsonl")
    (folder / "checkpoint" / "run.id").write_text("0" * 32)
    list(compare(folder, [folder / "checkpoint"]))


def records(folder: Path) -> None:
    pipe(folder / "ledger-000001.jsonl")
    verify(folder)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: load_settings(pipe(folder / "a.toml")),
        lambda folder: Policy.load(pipe(folder / "policy.toml")),
        lambda folder: Manifest.load(pipe(folder / "partition.json")),
        lambda folder: PartitionSettings(exclude=str(pipe(folder / "names.txt"))),  # type: ignore[arg-type]
        lambda folder: Key.load(pipe(folder / "secret")),
        lambda folder: paillier.load_or_make(pipe(folder / "own.key"), 512, insecure=True),
        lambda folder: plugins.load([str(pipe(folder / "plugin.py"))]),
        lambda folder: own_secret(pipe(folder / "secret")),
        lambda folder: OwnStates(pipe(folder / "digest.key").parent),
        lambda folder: run_id(pipe(folder / "run.id").parent),
        lambda folder: Checkpoint(pipe(folder / "secret.key").parent, "h").secret(),
        lambda folder: Ledger(pipe(folder / "ledger.jsonl")).flush(),
        lambda folder: EventLog(pipe(folder / "events.jsonl")),
        lambda folder: Records(pipe(folder / "ledger-000001.jsonl").parent, "ledger").append("begun"),
        records,
        ledgers,
    ],
)
def test_what_visard_reads_and_writes_is_not_waited_for(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=PIPE):
        read(tmp_path)


def test_a_run_whose_log_is_a_pipe_is_shown_with_the_reason(tmp_path: Path) -> None:
    followed = Followed(pipe(tmp_path / "run" / "events.jsonl").parent)
    followed.state()
    assert PIPE in followed.error
