"""FedAvg on real faces: imported, federated, tested; features become better than raw pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import visard
from visard.data.sources.importing import import_faces
from visard.evaluation.verification import verify_all
from visard.inference.model import open_data


@pytest.mark.shared
def test_fedavg_learns_from_celeba(shared_data: Path, here: Path) -> None:
    report = import_faces(
        "celeba", shared_data / "celeba", here / "celeba", size=64, min_images=20, limit_identities=160
    )
    assert report.identities == 160
    run = visard.run(
        "celeba-fedavg",
        overrides=[
            f"data.source={here / 'celeba'}", "partition.clients=4", "partition.identities=120",
            "partition.test_identities=40", "method.rounds=5", "evaluation.bootstrap=0",
        ],
        out="run",
    )  # fmt: skip
    figures = run.metrics["generic"]["test"]["verification"]
    view = open_data(here / "celeba")
    pixels = view.batch(np.arange(len(view))).reshape(len(view), -1).astype(np.float32)
    raw = verify_all(pixels - pixels.mean(0), view.identity, far=(0.1,))
    assert figures["auc"] > raw.auc + 0.03
    assert not (run.folder / "samples.npy").exists(), "no picture of a real person in a run folder"
    shown = '<figure class="sheet"' in run.report.read_text()  # not the text itself: a failure would print it
    assert not shown
