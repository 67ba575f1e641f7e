"""`model.frozen_norm`: batch norm keeps the statistics that it came with, in every method, and nothing else stays."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import smoke
from torch import Tensor, nn

import visard
from visard import models
from visard.config import HEADING, Settings, load, parse
from visard.errors import UsageError
from visard.learning.objective import still_statistics
from visard.learning.train import keep_statistics
from visard.models.files import save_model

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AVERAGING = ("fedavg", "hf-maml", "fedfr-da", "fedfr-joint", "central", "finetune", "dan", "encrypted-mmd")


def warmed(size: int = 32, embedding: int = 16) -> nn.Module:
    """A network whose statistics are those of some batches."""
    torch.manual_seed(0)
    network = models.build("tiny", embedding=embedding, size=size).train()
    for _ in range(30):
        network(torch.randn(16, 3, size, size))
    return network


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("start") / "start.safetensors"
    spec = {"model": "tiny", "embedding": "16", "size": "32"}
    save_model(file, warmed().state_dict(), spec)
    vectors = {"class_vectors": torch.randn(24, 16)}
    save_model(file.with_name("vectors.safetensors"), vectors, spec)
    return file


def moved(before: dict[str, Tensor], after: dict[str, Tensor], statistics: bool) -> set[str]:
    names = [k for k in before if k.endswith(STATISTICS) == statistics]
    return {k for k in names if not torch.equal(before[k], after[k])}


def test_a_frozen_network_trains_on_its_running_statistics() -> None:
    network = warmed()
    other = copy.deepcopy(network)
    keep_statistics(network)
    assert list(network.state_dict()) == list(other.state_dict())
    x = torch.randn(8, 3, 32, 32)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    for part in (network, copy.deepcopy(network)):
        part.train()
        assert part.training
        assert torch.equal(part(x), other.eval()(x)), "in training it computes what it computes in evaluation"
        with still_statistics(part):
            assert torch.equal(part(x), other(x))
    network(x).square().mean().backward()
    assert not moved(before, network.state_dict(), statistics=True)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert all(m.weight.grad is not None for m in norms), "scale and shift still train"


@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_keeps_the_statistics_it_was_given(name: str, start: Path, tmp_path: Path) -> None:
    given = [f"model.weights={start}", "method.rounds=1", "evaluation.every=0", "evaluation.clients=false"]
    if name in ("fedfr-da", "finetune", "encrypted-mmd"):
        given += ["method.pretrain_rounds=0"]
    if name == "fedfr-da":
        given += ["method.source_head=random", "method.clustering.method=kmeans"]
    if name == "encrypted-mmd":
        given += ["method.rounds=2"]
    run = visard.run(name, out=tmp_path / "run", overrides=[*smoke(name), *given])
    before = load_file(start)
    after = [load_file(f) for f in (*run.folder.glob("model.safetensors"), *run.folder.glob("clients/*.safetensors"))]
    assert not any(moved(before, one, statistics=True) for one in after)
    assert any(moved(before, one, statistics=False) for one in after), "the rest trains"
    assert run.started["frozen_norm"] is True
    assert "statistics frozen" in (run.folder / "report.html").read_text()


def test_statistics_follow_the_batches_where_that_is_asked_for(start: Path, tmp_path: Path) -> None:
    given = [f"model.weights={start}", "method.rounds=1", "evaluation.every=0", "model.frozen_norm=false"]
    run = visard.run("fedavg", out=tmp_path / "run", overrides=[*smoke("fedavg"), *given])
    assert moved(load_file(start), load_file(run.folder / "model.safetensors"), statistics=True)


def settings(*overrides: str, method: str = "fedavg") -> Settings:
    return load(method, overrides)


@pytest.mark.parametrize(
    ("method", "overrides", "frozen"),
    [
        ("fedavg", (), False),
        ("fedavg", ("model.weights=w.safetensors",), True),
        ("fedavg", ("model.weights=w.safetensors", "model.frozen_norm=false"), False),
        ("fedavg", ("model.weights=w.safetensors", "method.batch_norm=local"), False),
        ("fedavg", ("model.weights=w.safetensors", "method.batch_norm=local", "model.frozen_norm=true"), True),
        ("fedface", ("model.weights=w.safetensors",), True),
        ("fedface", ("model.weights=w.safetensors", "method.batch_norm=train"), False),
        ("celeba-fedfr-joint", ("model.weights=w.safetensors",), False),
    ],
)
def test_who_is_frozen(method: str, overrides: tuple[str, ...], frozen: bool) -> None:
    found = settings(*overrides, method=method)
    assert found.frozen_norm is frozen
    again = parse(tomllib.loads(found.to_toml()))
    assert again.frozen_norm is frozen
    assert again.fingerprint() == found.fingerprint()


def test_a_complete_file_of_an_older_visard_keeps_its_meaning_and_its_fingerprint(tmp_path: Path) -> None:
    new = settings("model.weights=w.safetensors", "model.frozen_norm=false")
    old = "\n".join(line for line in new.to_toml().splitlines() if "frozen_norm" not in line)
    assert old.startswith(HEADING)
    (tmp_path / "config.toml").write_text(old)
    assert load(tmp_path / "config.toml").frozen_norm is False
    assert load(tmp_path / "config.toml", ["name='fedavg'"]).fingerprint() == new.fingerprint()
    assert settings("model.weights=w.safetensors").fingerprint() != new.fingerprint()


def test_an_untrained_network_has_no_statistics_to_keep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give model.weights"):
        visard.run("fedavg", out=tmp_path / "run", overrides=[*smoke("fedavg"), "model.frozen_norm=true"])
    assert not (tmp_path / "run").exists()
