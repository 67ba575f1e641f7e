"""From pre-training to a file to adaptation: the whole head goes along, biases included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.e2e.smoke import SMOKE

import visard
from visard.engines.checkpoint import Checkpoint
from visard.models.files import read_model, save_model

DATA = (*SMOKE, 'data.domains=["north","south"]', "data.identities=24", "partition.kind=domains",
        "partition.source_domain=north", "partition.target_domain=south", "partition.clients=2",
        "partition.test_identities=2", "partition.public_identities=0", "evaluation.clients=false")  # fmt: skip


@pytest.mark.parametrize("kind", ["softmax", "sphereface2"])
def test_biases_go_from_run_to_run(kind: str, tmp_path: Path) -> None:
    head = f"method.head.kind={kind}"
    first = visard.run("pretrain", overrides=[*DATA, head, "method.at=source"], out=tmp_path / "first")
    file = first.folder / "class_vectors.safetensors"
    held, spec = read_model(file)
    held["biases"] += 0.5
    save_model(file, held, spec)
    given = (f"model.weights={first.folder / 'model.safetensors'}", f"model.class_vectors={file}")
    for preset, client in (("fedfr-da", "source"), ("dan", "pool")):
        more = ("method.rounds=1", "method.training.lr=1e-9", "method.training.weight_decay=0")
        more += ("method.pretrain_rounds=0",) if preset == "fedfr-da" else ()
        run = visard.run(preset, overrides=[*DATA, head, *given, *more], out=tmp_path / preset)
        run_hash = json.loads((run.folder / "checkpoint" / "manifest.json").read_text())["run"]
        states = Checkpoint(run.folder / "checkpoint", run_hash)
        assert states.resume()
        kept = states.client_state(client)["head"]
        assert torch.allclose(kept["weight"], held["class_vectors"], atol=1e-5)
        assert torch.allclose(kept["bias"], held["biases"], atol=1e-5)
