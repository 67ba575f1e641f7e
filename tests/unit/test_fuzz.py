"""The fuzzer: a hundredth of what `make fuzz` reads, and the fuzzer itself notices what it is there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.formats import FORMATS
from tests.fuzz.runner import Inputs, fuzz, plan, plan_every, seeds

pytest.importorskip("pyarrow")
pytest.importorskip("onnx")
CANARIES = (
    "error", "memory caught", "memory", "memory untouched", "sentinel exec", "sentinel process", "sentinel shell",
    "sentinel elsewhere", "sentinel removed", "died", "hang",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeds")
    seeds(made)
    return made


def test_mutated_files_of_every_format_are_read_or_refused_with_one_line(folder: Path, tmp_path: Path) -> None:
    found = fuzz(plan(500), folder, seed=2026, workers=1, keep=tmp_path / "failed")
    assert found.keys() == FORMATS.keys()
    assert [failure for tally in found.values() for failure in tally.failures] == []
    assert sum(tally.refused for tally in found.values()) > 150, "most files are damaged"
    assert sum(tally.read for tally in found.values()) > 50, "not all of them so that nothing can be read"


def test_what_is_no_file_is_neither_waited_for_nor_read_without_an_end(folder: Path, tmp_path: Path) -> None:
    jobs = [job for place in ("named pipe", "endless device") for job in plan_every(folder, place=place)]
    found = fuzz(jobs, folder, seed=0, workers=1, keep=tmp_path / "failed")
    assert [failure for tally in found.values() for failure in tally.failures] == []
    assert len(jobs) == sum(tally.files for tally in found.values()) > 300


def test_the_fuzzer_notices(tmp_path: Path) -> None:
    """Readers that misbehave in every way that counts; and one that behaves."""
    jobs = [(f"canary {name}", 0) for name in (*CANARIES, "refused")]
    found = fuzz(jobs, tmp_path, seed=0, workers=1, say=lambda text: None, seconds=2.0)
    outcomes = {name.removeprefix("canary "): [f["outcome"] for f in tally.failures] for name, tally in found.items()}
    assert outcomes == {name: [name.split()[0]] for name in CANARIES} | {"refused": []}
    assert found["canary refused"].refused == 1


def test_an_input_follows_from_seed_format_and_number(folder: Path, tmp_path: Path) -> None:
    for name in ("settings", "gallery", "recordio"):
        one = Inputs(folder, name, 7).write(3, tmp_path / name / "a")
        assert one == Inputs(folder, name, 7).write(3, tmp_path / name / "b")
        a, b = (
            {
                p.relative_to(tmp_path / name / k): p.read_bytes()
                for p in (tmp_path / name / k).rglob("*")
                if p.is_file()
            }
            for k in "ab"
        )
        assert a == b
