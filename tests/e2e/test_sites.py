"""Runs over several face sets: every method, every engine, kill and resume, sites without labels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.e2e.smoke import smoke
from tests.e2e.test_methods import assert_same_results

import visard
from visard.cli import main
from visard.data.faces import FaceSet, FaceSetWriter
from visard.data.sources.importing import import_faces
from visard.data.synthetic.sets import SyntheticSpec, make
from visard.errors import UsageError
from visard.report.run_folder import Run

# site -> seed, size, people
SITES = {"a": (1, 32, 8), "b": (2, 32, 7), "c": (3, 40, 7), "p": (4, 32, 6), "s": (5, 32, 8), "t": (6, 32, 8)}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for name, (seed, size, people) in SITES.items():
        make(SyntheticSpec(people, 6, size, ("north",), seed), folder / name)
    loose = folder / "loose"
    loose.mkdir()
    for k, picture in enumerate(FaceSet.open(folder / "c").pixels):
        Image.fromarray(np.asarray(picture)).save(loose / f"{k}.png")
    import_faces("folder", loose, folder / "bare", align="none", size=40)
    return folder


def sites(sets: Path, *given: str) -> list[str]:
    """Settings with these sets, each as role=name."""
    listed = [f'{{role = "{role}", path = "{sets / name}"}}' for role, name in (text.split("=") for text in given)]
    return [f"data={{sets = [{', '.join(listed)}]}}", "partition.kind=sites"]


def run(method: str, out: str, sets: Path, given: tuple[str, ...], *more: str) -> Run:
    usual = [*smoke(method), "partition.test_identities=0", "partition.public_identities=0", "partition.hold_out=0"]
    usual = [text for text in usual if not text.startswith("data.")]
    return visard.run(method, out=out, overrides=[*usual, *sites(sets, *given), *more])


THREE = ("clients=a", "clients=b", "clients=c", "test=t")
OF_METHODS = {
    "fedavg": THREE, "hf-maml": (*THREE, "clients=s"), "fedface": ("clients=a", "clients=b", "public=p", "test=t"),
    "fedfr-joint": ("clients=a", "clients=b", "public=p", "test=t"),
    "fedfr-da": ("clients=a", "clients=b", "source=s", "test=t"),
    "encrypted-mmd": ("clients=a", "source=s", "test=t"),
    "central": THREE, "local": THREE, "finetune": ("clients=a", "source=s", "test=t"),
    "dan": ("clients=a", "source=s", "test=t"), "pretrain": ("clients=a", "clients=b", "public=p", "test=t"),
}  # fmt: skip


@pytest.mark.parametrize("method", OF_METHODS)
def test_every_method_takes_sites(method: str, sets: Path, here: Path) -> None:
    more = ["partition.split=[0.7,0.0,0.3]", *(["partition.hold_out=1"] if method == "hf-maml" else [])]
    done = run(method, "run", sets, OF_METHODS[method], *more)
    wanted = {text.split("=")[1] for text in OF_METHODS[method] if text.startswith("clients")}
    content = json.loads((done.folder / "partition.json").read_text())
    assert {c for c in content["clients"] if c != "source"} == wanted
    assert ("source" in content["clients"]) == any(text.startswith("source") for text in OF_METHODS[method])
    assert list(content["unseen"]) == ["t"]
    assert [s["role"] for s in done.started["data"]["sets"]] == [t.split("=")[0] for t in OF_METHODS[method]]
    if method != "local":
        assert set(done.metrics["generic"]) == {"t"}


@pytest.fixture(scope="module")
def tail(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that trains the last part on the activations of each set, and its settings."""
    folder = tmp_path_factory.mktemp("tail")
    start = run("central", str(folder / "start"), sets, THREE, "evaluation.every=0")
    cut = [f"model.weights={start.folder / 'model.safetensors'}", "model.train=from:layer3"]
    return run("fedavg", str(folder / "local"), sets, THREE, *cut).folder, cut


def test_engines_agree_on_sites_and_their_activations(sets: Path, tail: tuple[Path, list[str]], here: Path) -> None:
    pool = run("fedavg", "pool", sets, THREE, *tail[1], "engine.kind=pool", "engine.workers=2")
    assert_same_results(tail[0], pool.folder)


@pytest.mark.flower
def test_flower_agrees_on_sites(sets: Path, tail: tuple[Path, list[str]], here: Path, ray: dict[str, str]) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    settings = (tail[0] / "config.toml").read_text().replace('kind = "local"', 'kind = "flower"\nworkers = 2')
    Path("flower.toml").write_text(settings)
    code = "from visard.cli import main; main()"  # in a process of its own: Ray leaves warnings behind
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "run", "flower.toml", "--out", "flower"],
        capture_output=True, text=True, timeout=300, env=os.environ | ray,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same_results(tail[0], Path("flower"))


def test_sites_without_labels_are_adapted_to(sets: Path, here: Path) -> None:
    done = run("fedfr-da", "run", sets, ("clients=a", "clients=bare", "source=s", "test=t"))
    bare = next(s for s in done.started["data"]["sets"] if s["name"] == "bare")
    assert bare["labels"] is False
    content = json.loads((done.folder / "partition.json").read_text())
    assert not content["clients"]["bare"]["test"]
    assert len(content["clients"]["bare"]["train"]) == 42
    scored = done.metrics["clients"]["figures"]
    assert scored.get("bare", {}) == {}
    assert scored["a"]
    with pytest.raises(UsageError, match="fedavg needs labels, and the pictures of bare have none"):
        run("fedavg", "refused", sets, ("clients=a", "clients=bare", "test=t"))


def test_a_run_goes_on_with_its_sets_and_not_with_others(sets: Path, here: Path) -> None:
    run("fedavg", "whole", sets, THREE, "method.rounds=3", "method.training.schedule=constant")
    run("fedavg", "part", sets, THREE, "method.rounds=2", "method.training.schedule=constant")
    more = visard.resume("part", overrides=["method.rounds=3"])
    ours, theirs = ((Path(f) / "model.safetensors").read_bytes() for f in ("whole", more.folder))
    assert ours == theirs
    config = Path("part/config.toml")
    config.write_text(config.read_text().replace(str(sets / "b"), str(sets / "s")))
    with pytest.raises(visard.VisardError):
        visard.resume("part", overrides=["method.rounds=4"])


def test_sets_from_the_command_line(
    sets: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["visard", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code

    small = [part for text in smoke("fedavg") if not text.startswith("data.") for part in ("--set", text)]
    given = [part for text in THREE for part in ("--data", text.replace("=", f"={sets}/"))]
    assert not command("run", "fedavg", *small, "--set", "partition.test_identities=0", *given, "--out", "r")
    assert 'kind = "sites"' in Path("r/config.toml").read_text()
    assert command("run", "fedavg", "--data", "a") == 2
    assert "must look like clients=SET" in capsys.readouterr().err


def test_what_a_reader_should_know_of_the_sets_is_said(sets: Path, here: Path) -> None:
    faces = FaceSet.open(sets / "t")
    with FaceSetWriter(
        Path("namesakes"), count=len(faces), size=faces.size, names=faces.names, domains=["x"], attributes=[],
        info={"align": "five"},
    ) as w:  # fmt: skip
        w.write(
            0, faces.pixels[::-1].copy(), faces.identity, faces.domain * 0, np.zeros((len(faces), 0)), [""] * len(faces)
        )
    done = run(
        "fedavg", "run", sets, ("clients=a", "clients=b", f"test={Path('namesakes').absolute()}"), "method.rounds=1"
    )
    said = " ".join(str(e["text"]) for e in done.of("warning"))
    assert "faces are cut differently (a none, b none, namesakes five)" in said
    assert "of people to test on are in other sets too" in said
