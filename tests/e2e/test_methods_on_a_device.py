"""Every method on a pretended device (`tests.pretended`), where numbers must be the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import pretended
from tests.e2e.smoke import smoke

import visard
from visard import models, numerics
from visard.methods import METHODS
from visard.models.files import save_model
from visard.report.run_folder import read_events

SHORT = ("method.rounds=1", "evaluation.every=0", "evaluation.bootstrap=0", "evaluation.tuning.draws=1")
LIGHT = {"hf-maml": ["method.training.steps=1"], "encrypted-mmd": ["method.exchanges=1"]}
KEYS = "method.align.key_bits=512 method.align.insecure_keys=true"
BATCHES = "method.align.min_batch=4 method.align.batch_size=4"
MORE = [
    "fedavg method.share_head=true method.regularisation=0.1 method.mu=0.1 evaluation.impostors=all",
    "fedavg method.mu=0.1 method.batch_norm=local evaluation.tuning.batches=2 method.head.kind=softmax",
    "fedavg model.train=tail model.weights=START model.cache_in=memory method.training.augment.flip=false",
    "hf-maml method.training.order=exact method.regularisation=0.1 method.training.clip=1",
    "fedavg method.negatives=class_vectors method.rounds=2 method.training.optimiser=adam",
    "fedface method.training.amount=2",  # one client after the other, not in one pass
    "fedfr-joint method.branch.weight=0 method.personalise.stage=kd method.public.mining=proxies",
    "fedfr-joint method.contrast.first=random method.branch.kind=cosface",
    f"fedfr-da method.source_head=means method.align.weight=0.1 {KEYS} {BATCHES}",
]


def start(folder: Path) -> Path:
    """A network to begin with."""
    torch.manual_seed(0)
    spec = {"model": "tiny", "embedding": "16", "size": "32"}
    save_model(folder / "start.safetensors", models.build_spec(spec, 32).state_dict(), spec)
    return folder / "start.safetensors"


@pytest.mark.parametrize("what", [*METHODS, *MORE])
def test_a_run_gives_the_numbers_of_the_cpu(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *more = what.replace("START", str(start(tmp_path))).split()
    settings = [*smoke(name), *SHORT, *LIGHT.get(name, ()), *more]
    here = visard.run(name, overrides=settings, out=tmp_path / "here")
    assert same_work(here)
    monkeypatch.setattr(numerics, "resolve", lambda name: pretended.DEVICE)
    pretended.done.clear()
    there = visard.run(name, overrides=settings, out=tmp_path / "there")
    assert same_work(there)
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= pretended.done or "mmd" in name
    files = [f for f in here.folder.rglob("*.safetensors") if "checkpoint" not in f.parts]
    assert files
    for file in files:
        one, other = load_file(file), load_file(there.folder / file.relative_to(here.folder))
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.allclose(other[key], rtol=1e-5, atol=1e-6), key
    first, second = (metrics(run) for run in (here, there))
    assert first.keys() == second.keys()
    assert all(first[k] == pytest.approx(second[k], abs=0.02) for k in first)


def same_work(run: visard.Run) -> bool:
    """Whether every client did what it was asked."""
    return not {"refused", "missing"} & {event["event"] for event in read_events(run.folder / "events.jsonl")}


def metrics(run: visard.Run) -> dict[str, float]:
    """All numbers of the last tests."""
    found: dict[str, float] = {}

    def gather(path: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                gather(f"{path}/{key}", inner)
        elif isinstance(value, float):
            found[path] = value

    gather("", {k: run.metrics.get(k) for k in ("generic", "clients", "held_out")})
    return found
