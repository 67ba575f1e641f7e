"""Files that visard 0.1.0 made (tests/fixtures) still open, and say what they said."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fixtures.make import MODELS, SETTINGS, machine

import visard
from visard.cli import main

OLD = Path(__file__).resolve().parents[1] / "fixtures" / "0.1.0"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())
SAME_MACHINE = machine() == EXPECTED["machine"]  # elsewhere the last bits may differ
FEDAVG, LOCAL = "finished/fedavg/seed-0", "finished/local/seed-0"
MODEL = f"{FEDAVG}/model.safetensors"


@pytest.fixture
def old(here: Path) -> Path:
    """The test runs in a copy of the old files."""
    shutil.copytree(OLD, here, dirs_exist_ok=True)
    for path in here.rglob("*.xz"):
        path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        path.unlink()
    return here


@pytest.fixture
def visard_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must succeed, and give its output."""

    def call(*arguments: str) -> str:
        monkeypatch.delenv("VISARD_DEBUG", raising=False)
        monkeypatch.setattr(sys, "argv", ["visard", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        assert not stop.value.code, said.err
        return said.out

    return call


def assert_close(got: Any, wanted: Any, where: str = "") -> None:
    """The same plain values, numbers but for rounding."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key, value in wanted.items():
            assert_close(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_close(got[number], value, f"{where}[{number}]")
    elif isinstance(wanted, float) and isinstance(got, float):
        assert math.isclose(got, wanted, rel_tol=1e-3, abs_tol=1e-4), f"{where}: {got}, not {wanted}"
    else:
        assert got == wanted, where


def plain(value: Any) -> Any:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value))


def test_a_face_set(old: Path, visard_: Callable[..., str]) -> None:
    told = json.loads(visard_("data", "show", "faces", "--json"))
    assert {k: v for k, v in told.items() if k != "path"} == EXPECTED["faces"]
    visard_("data", "show", "faces", "--sheet", "sheet.png")
    assert (old / "sheet.png").stat().st_size > 0


@pytest.mark.parametrize("path", MODELS)
def test_models_give_the_same_features(old: Path, path: str) -> None:
    expected, model = EXPECTED["models"][path], visard.load_model(path)
    assert model.fingerprint == expected["fingerprint"]
    found = visard.embed(model, "faces")
    assert np.allclose(found[:3], expected["first"], atol=1e-4)
    assert not SAME_MACHINE or hashlib.sha256(found.tobytes()).hexdigest() == expected["digest"]


def test_features_are_those_of_the_model(old: Path, visard_: Callable[..., str]) -> None:
    model = visard.load_model(MODEL)
    assert np.allclose(visard.embed(model, "faces"), np.load("features.npy"), atol=1e-4)
    assert_close(visard.evaluate(model, "faces").to_dict(), EXPECTED["evaluate"])
    assert_close(json.loads(visard_("eval", "features.npy", "--data", "faces", "--json")), EXPECTED["evaluate"])
    visard_("embed", "faces", "--model", MODEL, "--out", "again.npy")
    before, after = (json.loads(Path(name).read_text()) for name in ("features.json", "again.json"))
    assert {k: v for k, v in before.items() if after[k] != v}.keys() <= (set() if SAME_MACHINE else {"sha256"})


def test_a_gallery(old: Path, visard_: Callable[..., str]) -> None:
    asked = [image["image"] for image in EXPECTED["identify"]["images"]]
    known = ("--gallery", "staff.gallery", "--model", MODEL, "--json")
    found = json.loads(visard_("identify", *asked, *known, "--far", "0.1", "--top", "3"))
    assert_close(found, EXPECTED["identify"])
    assert found["images"][0]["matches"][0]["person"] == "person-1"
    assert_close(json.loads(visard_("verify", *asked, *known)), EXPECTED["verify"])
    out = visard_("enroll", "strangers", "--model", MODEL, "--gallery", "staff.gallery", "--add")
    assert "3 pictures of 1 person; the gallery has 6" in " ".join(out.split())
    found = json.loads(visard_("identify", asked[1], *known, "--top", "6"))
    assert {match["person"] for match in found["images"][0]["matches"]} == {f"person-{i}" for i in range(6)}


def test_reports_of_finished_runs(old: Path, visard_: Callable[..., str]) -> None:
    for folder, name in ((FEDAVG, "fedavg-seed-0"), (LOCAL, "local-seed-0"), ("fedfr-joint", "fedfr-joint")):
        visard_("report", folder)
        page = Path(folder, "report.html").read_text()
        assert f"<title>{name}: visard run report</title>" in page
        assert '<span class="pill finished">' in page
    assert "data:image/jpeg;base64," in Path(FEDAVG, "report.html").read_text()  # samples.npy
    visard_("report", "stopped/fedavg", "--out", "stopped.html")
    assert "interrupted" in Path("stopped.html").read_text()
    visard_("report", FEDAVG, LOCAL, "fedfr-joint", "--out", "three.html")
    assert "<title>3 runs: visard comparison</title>" in Path("three.html").read_text()


def test_a_bench_keeps_its_runs(old: Path, visard_: Callable[..., str]) -> None:
    told = Path("bench/results.json").read_text()
    before = json.loads(told.replace("whom nobody trained on", "not seen in training"))  # the titles of today
    asked = (*EXPECTED["bench"], "--set", "model.frozen_norm=false")  # the default then, where weights are given
    assert visard_(*asked, "--out", "bench").count(": kept") == 2
    after = json.loads(Path("bench/results.json").read_text())
    assert after.keys() == before.keys()
    same = [key for key in before if key not in ("date", "versions", "machine", "runs", "command")]
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    runs = [[{k: v for k, v in run.items() if k != "command"} for run in one["runs"]] for one in (before, after)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", EXPECTED["stopped"])
def test_a_stopped_run_goes_on(old: Path, visard_: Callable[..., str], method: str) -> None:
    folder = Path("stopped", method)
    visard_("run", "--resume", "--out", str(folder))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "round"] == [0, 1]  # the first round was not done again
    whole, found = visard.load_model(f"{folder}.whole.safetensors"), visard.load_model(folder / "model.safetensors")
    for name, tensor in whole.network.state_dict().items():
        got = found.network.state_dict()[name]
        assert torch.equal(got, tensor) if SAME_MACHINE else torch.allclose(got, tensor, rtol=1e-2, atol=1e-3), name
    models = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}
    assert list(models) == list(EXPECTED["stopped"][method])
    if SAME_MACHINE and found.spec["visard"] == EXPECTED["version"]:  # which stands in the file
        assert {k: hashlib.sha256(v).hexdigest() for k, v in models.items()} == EXPECTED["stopped"][method]


def test_a_stopped_run_goes_on_from_python_and_the_ledgers_agree(old: Path) -> None:
    result = visard.resume("stopped/fedavg")
    finished = json.loads(Path(FEDAVG, "metrics.json").read_text())
    assert result.metrics["communication"]["rounds"] == finished["communication"]["rounds"]
    assert_close(result.metrics["generic"]["test"]["verification"], finished["generic"]["test"]["verification"])
    now, then = (json.loads(Path(p, "ledger.json").read_text())["rows"] for p in ("stopped/fedavg", FEDAVG))
    first = [row for row in then if row[1] == 0 and row[0] != "final"]
    assert [row for row in now if row[1] == 0 and row[0] != "final"] == first, "rows that were written then stay"
    places = [{tuple(row[:5]) for row in rows} for rows in (now, then)]
    assert places[0] == places[1], "the same fields left"


def test_a_run_starts_from_old_models_and_class_vectors(old: Path) -> None:
    given = ["model.weights=fedfr-joint/model.safetensors", "method.rounds=1", "partition.public_identities=4"]
    given += ["model.class_vectors=fedfr-joint/class_vectors.safetensors", "method.training.lr=1e-9"]
    run = visard.run("fedavg", overrides=[*SETTINGS, *given], out="new")
    before, after = (visard.load_model(p).network.state_dict() for p in (given[0][14:], run.folder / MODEL[-17:]))
    assert all(torch.allclose(before[k], after[k], atol=1e-4) for k in before if k.endswith("weight"))
