"""Public pictures, a network that starts from a pre-trained one, held-out clients, and tests against everybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE, smoke

import visard
from visard.errors import UsageError


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> visard.Run:
    return visard.run("pretrain", overrides=smoke("pretrain"), out=tmp_path_factory.mktemp("public") / "pretrain")


def test_only_the_public_party_trains(pretrained: visard.Run) -> None:
    ledger = json.loads((pretrained.folder / "ledger.json").read_text())
    assert {row[2] for row in ledger["rows"] if row[5] == "weights"} == {"public"}
    vectors = load_file(pretrained.folder / "class_vectors.safetensors")["class_vectors"]
    assert vectors.shape == (6, 16)


def test_public_and_test_people_do_not_depend_on_the_clients(pretrained: visard.Run, tmp_path: Path) -> None:
    settings = [*smoke("pretrain"), "partition.clients=4", "partition.hold_out=1", "method.rounds=1"]
    other = visard.run("pretrain", overrides=settings, out=tmp_path / "run")
    first, second = (json.loads((run.folder / "partition.json").read_text()) for run in (pretrained, other))
    assert first["public"] == second["public"]
    assert first["unseen"] == second["unseen"]
    assert first["clients"] != second["clients"]


def test_a_run_starts_from_it_and_tests_held_out_clients(pretrained: visard.Run, tmp_path: Path) -> None:
    settings = [*SMOKE, "partition.public_identities=6", "partition.hold_out=1", "evaluation.impostors=all"]
    settings += [f"model.weights={pretrained.folder / 'model.safetensors'}", "method.training.lr=1e-9"]
    settings += [f"model.class_vectors={pretrained.folder / 'class_vectors.safetensors'}", "method.batch_norm=local"]
    run = visard.run("fedavg", overrides=settings, out=tmp_path / "run")
    assert set(run.metrics["clients"]["figures"]) == {"client-000", "client-001"}
    assert set(run.metrics["held_out"]["figures"]) == {"client-002"}
    before = load_file(pretrained.folder / "model.safetensors")
    after = load_file(run.folder / "clients" / "client-000.safetensors")
    assert all(abs(after[k] - before[k]).max() < 1e-4 for k in before if k.endswith("weight"))


def test_class_vectors_of_another_length_are_refused(pretrained: visard.Run, tmp_path: Path) -> None:
    file = pretrained.folder / "class_vectors.safetensors"
    with pytest.raises(UsageError, match="class vectors of length 8"):
        visard.run(
            "fedavg",
            overrides=[*SMOKE, f"model.class_vectors={file}", "model.embedding=8"],
            out=tmp_path / "run",
        )


def test_the_pool_takes_public_pictures_only_if_told(pretrained: visard.Run, tmp_path: Path) -> None:
    settings = [*SMOKE, "partition.public_identities=6", "method.rounds=1", "evaluation.every=0"]
    alone = visard.run("central", overrides=settings, out=tmp_path / "alone")
    both = visard.run("central", overrides=[*settings, "method.with_public=true"], out=tmp_path / "both")
    assert both.metrics["communication"] == alone.metrics["communication"], "public pictures leave nobody"
    assert (both.folder / "model.safetensors").read_bytes() != (alone.folder / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="public_identities"):
        visard.run("central", overrides=[*SMOKE, "method.with_public=true"], out=tmp_path / "none")


def test_too_many_public_identities_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="public_identities = 19"):
        visard.run("pretrain", overrides=[*SMOKE, "partition.public_identities=19"], out=tmp_path / "run")
