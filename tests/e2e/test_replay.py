"""A run made again without a client is, bit for bit, the run that never had it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.smoke import smoke

import visard
from visard.cli import main
from visard.config import load
from visard.data.faces import FaceSet
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.synthetic.sets import SyntheticSpec, make
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.records import Records
from visard.errors import UsageError, VisardError
from visard.report.disclosure import read_evidence
from visard.report.replay import model_digest, read
from visard.report.run_folder import EventLog, read_run
from visard.runs.replay import replay, took_part
from visard.runs.run import resume

FOUR = ("partition.clients=4", "partition.hold_out=1")


Said = tuple[int, str, str]  # exit code, standard output and error


@pytest.fixture
def visard_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    def call(*words: object) -> Said:
        monkeypatch.delenv("VISARD_DEBUG", raising=False)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["visard", "run", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return call


def rows(folder: Path) -> list[str]:
    return (folder / "checkpoint" / "ledger.jsonl").read_text().splitlines()


def final_tests(folder: Path) -> object:
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics["generic"], metrics["clients"], metrics.get("held_out")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", ["method.participation=0.5"]),
        ("fedavg", ["aggregation.secure=true", "outgoing=[{name='compress', to='int8'}]"]),
        ("fedfr-joint", []),
        ("central", []),
    ],
)
def test_it_is_the_run_that_never_had_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, more: list[str]
) -> None:
    settings = load(method, [*smoke(method), *FOUR, *more])
    visard.run(settings, out=tmp_path / "all")
    result = replay(tmp_path / "all", ["client-001"], out=tmp_path / "replayed")

    def never(faces: FaceSet, how: PartitionSettings, seed: int) -> Manifest:
        content = partition(faces, how, seed).content
        clients = {name: rows for name, rows in content.clients.items() if name != "client-001"}
        return Manifest(content.model_copy(update={"clients": clients}))

    monkeypatch.setattr("visard.runs.run.partition", never)
    visard.run(settings, out=tmp_path / "never")
    assert model_digest(tmp_path / "replayed") == model_digest(tmp_path / "never") != model_digest(tmp_path / "all")
    assert final_tests(tmp_path / "replayed") == final_tests(tmp_path / "never")
    assert rows(tmp_path / "replayed") == rows(tmp_path / "never")
    assert not any('"client-001"' in row for row in rows(tmp_path / "replayed"))
    assert result.clients == 2


def test_a_site_that_is_left_out_and_one_that_was_never_given(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c", "t")):
        make(SyntheticSpec(8, 4, 32, ("north",), number), tmp_path / name)

    def sites(names: str) -> list[str]:
        sets = [f"{{path='{tmp_path / n}', role='{'test' if n == 't' else 'clients'}'}}" for n in names]
        kind = ["partition.kind=sites", "partition.test_identities=0"]
        return [*smoke("fedavg"), f"data={{sets=[{', '.join(sets)}]}}", *kind]

    visard.run(load("fedavg", sites("abct")), out=tmp_path / "three")
    visard.run(load("fedavg", sites("abt")), out=tmp_path / "two")
    replay(tmp_path / "three", ["c"], out=tmp_path / "replayed")
    assert model_digest(tmp_path / "replayed") == model_digest(tmp_path / "two") != model_digest(tmp_path / "three")
    assert final_tests(tmp_path / "replayed") == final_tests(tmp_path / "two")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "all"
    visard.run(load("fedavg", [*smoke("fedavg"), *FOUR]), out=folder)
    return folder


def test_workers_give_the_same_bits(origin: Path, tmp_path: Path) -> None:
    replay(origin, ["client-000"], out=tmp_path / "local")
    how = ["engine.kind=pool", "engine.workers=2"]
    replay(origin, ["client-000"], out=tmp_path / "pool", overrides=how)
    assert model_digest(tmp_path / "local") == model_digest(tmp_path / "pool")


def test_who_was_held_out_changes_no_model(origin: Path, tmp_path: Path, visard_run: Callable[..., Said]) -> None:
    code, out, err = visard_run("--without", "client-003", "--from", origin, "--out", tmp_path / "r")
    assert code == 0, err
    assert model_digest(tmp_path / "r") == model_digest(origin)
    assert "the model is the same, bit for bit" in out
    with pytest.raises(UsageError, match="partition.without leaves no client to train"):
        replay(origin, ["client-000", "client-001", "client-002"], out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_changed_is_said_and_is_in_the_report(
    origin: Path, tmp_path: Path, visard_run: Callable[..., Said]
) -> None:
    before = {path: path.read_bytes() for path in origin.rglob("*") if path.is_file()}
    words = ("--without", "client-002", "--from", origin, "--out", tmp_path / "r", "--engine", "local")
    code, out, err = visard_run(*words)
    assert code == 0, err
    assert {path: path.read_bytes() for path in origin.rglob("*") if path.is_file()} == before
    page = (tmp_path / "r" / "report.html").read_text()
    for text in (out, page):
        assert "Without client-002" in text
        for folder in (origin, tmp_path / "r"):
            assert (model_digest(folder) or "")[:16] in text
    record = (tmp_path / "r" / "replay.json").read_text()
    assert record.count("client-002") == 1, "of who is gone only the name is kept"
    again = replay(tmp_path / "r", ["client-000"], out=tmp_path / "two")
    assert (read(again) or {})["without"] == ["client-002", "client-000"]
    both = replay(origin, ["client-000", "client-002"], out=tmp_path / "both")
    assert model_digest(again.folder) == model_digest(both.folder)


def test_it_goes_on_after_a_stop(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(origin, ["client-001"], out=tmp_path / "whole")
    commit = Checkpoint.commit

    def stop(self: Checkpoint, *given: object) -> None:
        commit(self, *given)  # type: ignore[arg-type]
        raise MemoryError("stop")

    with monkeypatch.context() as stopping:
        stopping.setattr(Checkpoint, "commit", stop)
        with pytest.raises(MemoryError):
            replay(origin, ["client-001"], out=tmp_path / "r")
    result = resume(tmp_path / "r")
    assert model_digest(tmp_path / "r") == model_digest(tmp_path / "whole")
    assert "Without client-001" in result.report.read_text()


def test_wrong_use_is_one_line(origin: Path, tmp_path: Path, visard_run: Callable[..., Said]) -> None:
    for words, said in (
        (["--without", "client-001"], "belong together"),
        (["--from", str(origin)], "belong together"),
        (["--without", "client-01", "--from", str(origin)], "no client 'client-01' (did you mean 'client-001'?)"),
        (["fedavg", "--without", "client-001", "--from", str(origin)], "leave out PRESET_OR_TOML"),
        (["--without", "client-001", "--from", str(origin), "--set", "seed=1"], "leave out --set"),
        (["--without", "client-001", "--from", str(origin), "--out", str(origin)], "is the run itself"),
        (["--without", "client-001", "--from", str(tmp_path)], "holds no run"),
    ):
        code, _, err = visard_run(*words)
        assert code == 2
        assert said in err
        assert len(err.splitlines()) == 1


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    make(SyntheticSpec(12, 4, 32, ("north",), 1), tmp_path / "faces")
    data = f"data={{source='{tmp_path / 'faces'}'}}"
    visard.run(load("fedavg", [*smoke("fedavg"), data, "partition.test_identities=4"]), out=tmp_path / "all")
    make(SyntheticSpec(12, 4, 32, ("north",), 2), tmp_path / "others")
    (tmp_path / "faces").rename(tmp_path / "gone")
    (tmp_path / "others").rename(tmp_path / "faces")
    with pytest.raises(VisardError, match="cannot be made again exactly"):
        replay(tmp_path / "all", ["client-001"], out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_of_real_parties_it_says_the_rounds(tmp_path: Path, visard_run: Callable[..., Said]) -> None:
    folder = tmp_path / "ours"
    text = load("fedavg", ["partition.kind=parties", "partition.clients=4"]).to_toml()
    EventLog(folder / "events.jsonl").write("run_started", name="ours")
    (folder / "config.toml").write_text(text)
    (folder / "checkpoint").mkdir()
    ledger = Ledger(folder / "checkpoint" / "ledger.jsonl")
    for round in (0, 1, 2, 4):
        ledger._lines.append(json.dumps(["train", round, "north", "Update", "theta", "weights", 1000, False]))
    ledger._lines.append(json.dumps(["train", 0, "south", "Update", "theta", "weights", 1, False]))
    ledger.received.add("reply", ("north", "train", 3, 1), outcome="refused", parts=[["theta", "weights", 9]])
    ledger.received.add("reply", ("north", "train", 5, 1), outcome="failed", parts=[])
    ledger.flush()
    part = took_part(folder, "north")
    assert part.bytes == 4000
    assert part.refused == (("train", 3),)
    code, out, err = visard_run("--without", "north", "--from", folder, "--out", tmp_path / "r")
    assert code == 1
    assert "north: train: rounds 1 to 3 and 5, 4 kB left it" in out.replace("\xa0", " ")
    assert "replies that did not count: train round 4" in out
    assert "start a new run with the others" in err
    assert not (tmp_path / "r").exists()
    with pytest.raises(UsageError, match="knows no client 'west'"):
        took_part(folder, "west")
    for odd in ({"round": "x"}, {"round": 1e400}, {"client": ["north"]}, {"parts": 5}, {"parts": None}):  # of a liar
        known = {"client": "north", "stage": "train", "round": 5, "outcome": "refused", "parts": [["a", "b", 1]]}
        Records(folder / "checkpoint", "received").append(event="reply", **known | odd)
    assert took_part(folder, "north").rounds == part.rounds
    assert read_evidence(read_run(folder)).others["refused"] == 6
    rows = [["train", "x", "north", "Update", "theta", "weights", 1000, False]]
    for ledger in ({"rows": rows}, {"rows": [5]}, {"rows": 5}, {"columns": ["stage"], "rows": rows}):
        (folder / "ledger.json").write_text(json.dumps(ledger))
        with pytest.raises(VisardError, match=r"ledger\.json: "):
            took_part(folder, "north")
