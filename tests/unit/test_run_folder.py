"""Run folders: nothing that a run did not write is ever removed, and a start that fails leaves nothing behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from tests.e2e.smoke import smoke

import visard
from visard.cli import main
from visard.errors import UsageError, VisardError
from visard.files import only_user
from visard.runs.folder import WRITTEN, check_removable, remove_written

SETTINGS = [*smoke("fedavg"), "method.rounds=1", "evaluation.every=0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with personal models beside the generic one."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    visard.run("local", out=folder, overrides=[*smoke("local"), "method.rounds=1", "evaluation.every=0"])
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_is_overwritten_whole(folder: Path) -> None:
    check_removable(folder)
    remove_written(folder)
    assert [p.name for p in folder.iterdir()] == [".lock"]
    visard.run("fedavg", out=folder, overrides=SETTINGS, overwrite=True)
    assert not (folder / "clients").exists(), "nothing of the earlier run is left"


def test_a_run_with_a_server_optimiser_is_overwritten_whole(tmp_path: Path) -> None:
    visard.run("fedavg", out=tmp_path / "run", overrides=[*SETTINGS, "aggregation.optimiser.name=adam"])
    assert list((tmp_path / "run" / "checkpoint").glob("memory-*.bin"))
    check_removable(tmp_path / "run")
    remove_written(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


def test_what_a_run_with_real_parties_keeps_goes_too(folder: Path) -> None:
    for name in ("secret.key", "sum.bin"):  # behind the noise of its sums; a secure sum that is not finished
        (folder / "checkpoint" / name).write_bytes(b"secret")
    check_removable(folder)
    remove_written(folder)
    assert [p.name for p in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "own",
    ["thesis.docx", "clients/notes.txt", "checkpoint/keep.me", "photos/anna.jpg", "runs/config.toml", ".env", "a.tmp"],
)
def test_a_file_that_no_run_wrote_is_kept_and_named(folder: Path, own: str) -> None:
    (folder / own).parent.mkdir(exist_ok=True)
    (folder / own).write_text("mine")
    before = content(folder)
    with pytest.raises(UsageError, match=own.replace(".", r"\.")):
        visard.run("fedavg", out=folder, overrides=SETTINGS, overwrite=True)
    assert content(folder) == before


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "client-000.safetensors").write_text("mine")
    shutil.rmtree(folder / "clients")
    (folder / "clients").symlink_to(outside)
    with pytest.raises(UsageError, match="clients"):
        visard.run("fedavg", out=folder, overrides=SETTINGS, overwrite=True)
    assert (outside / "client-000.safetensors").read_text() == "mine"


def test_a_config_of_another_program_does_not_make_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[tool]\nname = 'mine'\n")
    (tmp_path / "model.safetensors").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(UsageError, match="is not a run"):
        visard.run("fedavg", out=tmp_path, overrides=SETTINGS, overwrite=True)
    assert {k: v for k, v in content(tmp_path).items() if k != ".lock"} == before


def test_a_run_in_progress_is_not_removed(folder: Path) -> None:
    before = content(folder)
    with only_user(folder), pytest.raises(VisardError, match="is being written by another visard"):
        visard.run("fedavg", out=folder, overrides=SETTINGS, overwrite=True)
    assert content(folder) == before


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    wrong = [*SETTINGS, "partition.clients=1000"]
    with pytest.raises(VisardError):
        visard.run("fedavg", out=tmp_path / "new", overrides=wrong)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(VisardError):
        visard.run("fedavg", out=tmp_path / "empty", overrides=wrong)
    assert [p.name for p in (tmp_path / "empty").iterdir()] == [".lock"]
    visard.run("fedavg", out=tmp_path / "empty", overrides=SETTINGS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--resume", "--set", "seed=9"], "leave out --set"),
        (["--resume", "--engine", "pool"], "leave out --engine"),
        (["fedavg", "--resume", "--overwrite"], "give one of them"),
    ],
)
def test_resume_says_what_it_does_not_take(
    folder: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(folder)
    monkeypatch.setattr(sys, "argv", ["visard", "run", *words, "--out", str(folder)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert says in capsys.readouterr().err
    assert content(folder) == before


def test_every_pattern_is_a_plain_name_below_the_folder() -> None:
    assert all(not p.startswith("/") and ".." not in p and "**" not in p for p in WRITTEN)


def test_files_of_a_tracker_go_with_its_run(tmp_path: Path) -> None:
    tracked = [*SETTINGS, "engine.watchers=['csv']"]
    tracker = Path(__file__).parents[2] / "examples" / "csv_tracker.py"
    for _ in range(2):
        visard.run("fedavg", out=tmp_path / "run", overrides=tracked, overwrite=True, plugins=[tracker])
    lines = (tmp_path / "run" / "progress.csv").read_text().splitlines()
    assert sum(line.startswith("step,") for line in lines) == 1, "the second run began a new file"
    with pytest.raises(UsageError, match=r"progress\.csv"):
        visard.run("fedavg", out=tmp_path / "run", overrides=SETTINGS, overwrite=True)


def test_a_link_in_place_of_the_lock_empties_no_other_file(tmp_path: Path) -> None:
    """`.lock` of a folder from elsewhere may lead anywhere: also a new run, and --overwrite, leave that file alone."""
    (tmp_path / "diary.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "diary.txt")
    for overwrite in (False, True):
        with pytest.raises(VisardError, match=r"cannot write .*\.lock: it is a link"):
            visard.run("fedavg", out=tmp_path / "run", overrides=SETTINGS, overwrite=overwrite)
    assert (tmp_path / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint/ledger.jsonl", "events.jsonl", "checkpoint/chain.jsonl"])
def test_a_run_with_links_in_its_folder_is_not_continued(folder: Path, tmp_path: Path, name: str) -> None:
    """Resumed, it would cut the ledger, mend the last line of events or append to them, wherever a link leads."""
    (tmp_path / "diary.txt").write_text("mine, and no whole line of events")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "diary.txt")
    with pytest.raises(UsageError, match=f"holds the link {name}"):
        visard.run(folder / "config.toml", out=folder, resume=True)
    assert (tmp_path / "diary.txt").read_text() == "mine, and no whole line of events"
