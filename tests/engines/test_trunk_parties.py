"""A deployment with a frozen trunk: parties get it once, keep it by digest, and send and keep what they should."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.smoke import SMOKE
from tests.engines.test_parties import HOUSES, Heard, OwnLink
from tests.policies import ANYTHING
from tests.toys import noise_faces

import visard
from visard import models
from visard.at_rest import Key
from visard.data.activations import entries
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import Basis, OwnStates, Party
from visard.deployment.policy import Policy, Start
from visard.engines.codec import encode, size_of
from visard.engines.request import LACKS, Reply, Request, WireError, check_names, pack, unpack
from visard.errors import PublicError, VisardError
from visard.models.cut import digest_of
from visard.models.files import save_model

SLOW = "method.training.lr=0.02"  # two parties alone are warned of where an update is longer than all factors
SPEC = {"model": "tiny", "embedding": "16", "size": "32"}


class Counted(OwnLink):
    """Counts requests that are about the trunk, by client, and those of them with weights."""

    asked: dict[str, list[int]]

    def send(self, client: str, header: bytes, payload: bytes, timeout: float) -> str | None:
        request = unpack(header, Request)
        if request.trunk:
            self.asked.setdefault(client, []).append(len(payload))
        self.last = header
        return super().send(client, header, payload, timeout)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    network = models.build("tiny", embedding=16, size=32).train()
    for _ in range(20):
        network(torch.randn(16, 3, 32, 32) / 2)
    save_model(tmp_path / "start.safetensors", network.state_dict(), SPEC)
    return tmp_path / "start.safetensors"


Go = Callable[..., tuple[Path, Counted, dict[str, Party]]]


@pytest.fixture
def go(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    for seed, name in enumerate((*HOUSES, "public")):
        noise_faces(tmp_path / "homes" / name, 12, 8, seed)

    def run(
        method: str, *more: str, name: str = "run", trunk: Path | None = None, policy: Policy = ANYTHING
    ) -> tuple[Path, Counted, dict[str, Party]]:
        file = str(trunk) if trunk else None
        at = {
            role: Party(
                partial(world_of_party, data=str(tmp_path / "homes" / role), file=None, clients=[role], trunk=file),
                OwnStates(tmp_path / role / "states"), Guard(tmp_path / role, policy),
                models=tmp_path / role / "models", trunks=tmp_path / role / "trunks",
            )
            for role in HOUSES
        }  # fmt: skip
        link = Counted(at)
        link.asked = {}
        monkeypatch.setattr("visard.runs.run.connect", lambda *_: link)
        own = ("partition.kind=parties", "partition.clients=2", "partition.test_identities=0", "engine.kind=flower")
        mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine."))]
        sets = [*mine, *own, "engine.server=x", f"data.source={tmp_path / 'homes' / 'public'}", "evaluation.every=0"]
        sets += [f"model.weights={start}", "model.train=from:layer3", *more]
        heard = Heard()
        visard.run(method, out=tmp_path / name, overrides=sets, watcher=heard)
        assert heard.problems == []
        return tmp_path / name, link, at

    return run


def test_a_party_gets_the_trunk_once_and_keeps_it_private(go: Go, tmp_path: Path, start: Path) -> None:
    out, link, _ = go("fedavg")
    assert {client: len(sizes) for client, sizes in link.asked.items()} == dict.fromkeys(HOUSES, 2)
    trunk = {k: v for k, v in load_file(start).items() if k.split(".")[0] not in ("layer3", "fc", "features")}
    for house in HOUSES:
        (file,) = (tmp_path / house / "trunks").iterdir()
        assert file.name == f"{digest_of(trunk)}.bin"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert link.asked[house][0] < 200 < link.asked[house][1]
    _, again, _ = go("fedavg", name="again")
    assert all(len(sizes) == 1 for sizes in again.asked.values()), "the second run finds it there"
    for file in ("model.safetensors", "ledger.json"):
        assert (out / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    down, later = (
        json.loads((f / "metrics.json").read_text())["communication"]["bytes_down"] for f in (out, out.parent / "again")
    )
    assert down - later == pytest.approx(len(HOUSES) * size_of(Basis(trunk)), abs=100), "the first run sent it to each"
    size = sum(v.nbytes for v in load_file(start).values()) - sum(v.nbytes for v in trunk.values())
    rows = json.loads((out / "ledger.json").read_text())["rows"]
    for house in HOUSES:
        left = sum(r[6] for r in rows if r[2] == house and r[4].startswith("theta"))
        assert 2 * size <= left < 2 * (size + 5000), "two rounds of the tail alone"
    assert {Path(entry.about["path"]).name for entry in entries(tmp_path / "cache" / "activations")} >= {*HOUSES}


def test_stored_and_live_agree_at_parties_too(go: Go, tmp_path: Path) -> None:
    stored, _, _ = go("fedavg", "method.rounds=1")
    live, _, _ = go("fedavg", "method.rounds=1", "model.cache=off", name="live")
    memory, _, _ = go("fedavg", "method.rounds=1", "model.cache_in=memory", name="memory")
    a, b = (load_file(folder / "model.safetensors") for folder in (stored, live))
    assert all(torch.allclose(a[k], b[k], rtol=1e-5, atol=1e-5) for k in a)
    assert (stored / "model.safetensors").read_bytes() == (memory / "model.safetensors").read_bytes()


def test_a_party_with_a_key_leaves_no_activations_on_disk(go: Go, tmp_path: Path) -> None:
    """The run says where activations are; the key of the party is its own."""
    key, house = str(Key.make(tmp_path / "my.key").path), HOUSES[0]
    for more in ("model.cache_in=disk", "model.cache_in=memory", "model.cache=off"):
        _, link, _ = go("fedavg", "method.rounds=1", more, name=more)
        run = unpack(link.last, Request).settings
        make = partial(world_of_party, run, ANYTHING, str(tmp_path / "homes" / house), None, [house])
        assert make()[0].clients.keys() == make(encrypt_with=None)[0].clients.keys() == {house}
        if more == "model.cache_in=disk":
            with pytest.raises(PublicError, match="does not protect activations on disk.*model.cache_in=memory"):
                make(encrypt_with=key)
        else:
            assert make(encrypt_with=key)[0].clients.keys() == {house}


def test_a_model_that_a_party_keeps_is_whole(go: Go, tmp_path: Path, start: Path) -> None:
    go("local", "evaluation.client_benchmarks=false")
    for house in HOUSES:
        (file,) = (tmp_path / house / "models").iterdir()
        before, after = load_file(start), load_file(file)
        changed = {k.split(".")[0] for k in before if not torch.equal(before[k], after[k])}
        assert changed == {"layer3", "fc"}
        assert visard.load_model(file).spec["trained"] == "from:layer3"


def test_factors_are_measured_by_what_they_make_of_the_network(go: Go) -> None:
    """They begin at 0: by their own length a round of honest training is far."""

    def within(distance: float) -> Policy:
        return ANYTHING.model_copy(update={"bounds": ANYTHING.bounds.model_copy(update={"distance": distance})})

    settings = ("model.train=lora:2", "method.training.lr=0.05")
    go("fedavg", *settings, policy=within(0.2))
    with pytest.raises(VisardError, match="bounds.distance"):
        go("fedavg", *settings, policy=within(0.001), name="near")


def test_factors_alone_travel_and_merge_at_the_party_too(go: Go, tmp_path: Path, start: Path) -> None:
    out, link, _ = go("local", "evaluation.client_benchmarks=false", "model.train=lora:2", "method.rounds=1", SLOW)
    assert all(len(sizes) == 2 for sizes in link.asked.values()), "the network is asked for and sent once"
    before = load_file(start)
    for house in HOUSES:
        assert (tmp_path / house / "trunks" / f"{digest_of(before)}.bin").is_file()
        (file,) = (tmp_path / house / "models").iterdir()
        after = load_file(file)
        assert after.keys() == before.keys()
        changed = {k for k in before if not torch.equal(before[k], after[k])}
        assert changed
        assert all(before[k].ndim > 1 for k in changed)
        assert visard.load_model(file).spec["trained"] == "lora:2"
    out, link, _ = go("fedavg", "model.train=lora:2", "method.rounds=1", SLOW, name="second")
    assert all(len(sizes) == 1 for sizes in link.asked.values()), "the next run finds it there"
    rows = json.loads((out / "ledger.json").read_text())["rows"]
    sizes = [2 * 4 * (len(v) + v[0].numel()) for v in before.values() if v.ndim > 1]
    for house in HOUSES:
        left = sum(r[6] for r in rows if r[2] == house and r[4].startswith("theta"))
        assert 0 < left < sum(sizes) + 5000 < sum(v.nbytes for v in before.values()) / 4, "factors alone"
        assert "statistic" not in {r[5] for r in rows if r[2] == house}


@pytest.mark.parametrize("how", ["from:layer3", "lora:2"])
def test_a_party_takes_the_trunk_from_its_own_file(
    go: Go, tmp_path: Path, start: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (f"model.train={how}", "method.rounds=1", SLOW)
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(start.read_bytes())
    out, link, _ = go("fedavg", *settings, trunk=mine)
    assert all(len(sizes) == 1 for sizes in link.asked.values()), "nothing was sent"
    assert not any((tmp_path / house / "trunks").exists() for house in HOUSES)
    other = load_file(start)
    other["conv.weight"] += 1
    save_model(mine, other, SPEC)
    capfd.readouterr()
    again, link, _ = go("fedavg", *settings, trunk=mine, name="again")
    assert all(len(sizes) == 2 for sizes in link.asked.values()), "another network is no use"
    assert "mine.safetensors is not what the run freezes" in capfd.readouterr().err
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    save_model(mine, {"w": torch.zeros(2)}, SPEC)
    _, link, _ = go("fedavg", *settings, trunk=mine, name="third")
    assert all(len(sizes) == 1 for sizes in link.asked.values()), "the server's is here now"


@pytest.mark.parametrize("how", ["from:layer3", "lora:2"])
def test_pinned_weights_are_those_of_the_whole_network(go: Go, start: Path, how: str) -> None:
    pinned = ANYTHING.model_copy(update={"weights": Start(start=(digest_of(load_file(start)),))})
    go("fedavg", f"model.train={how}", "method.rounds=1", SLOW, policy=pinned)
    other = ANYTHING.model_copy(update={"weights": Start(start=("0" * 64,))})
    with pytest.raises(VisardError, match="has not pinned"):
        go("fedavg", f"model.train={how}", "method.rounds=1", SLOW, policy=other, name="other")


def test_a_damaged_trunk_is_sent_again(go: Go, tmp_path: Path) -> None:
    go("fedavg", "method.rounds=1")
    (file,) = (tmp_path / HOUSES[0] / "trunks").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    _, link, _ = go("fedavg", "method.rounds=1", name="again")
    assert {client: len(sizes) for client, sizes in link.asked.items()} == {HOUSES[0]: 2, HOUSES[1]: 1}


def answer(party: Party, header: bytes, theta: dict[str, torch.Tensor] | None, **changes: Any) -> str:
    request = replace(unpack(header, Request), **changes)
    return unpack(party.do(pack(request), encode(Basis(theta)))[0], Reply).failure or ""


def test_a_server_cannot_plant_another_trunk(go: Go, tmp_path: Path, start: Path) -> None:
    _, link, at = go("fedavg", "method.rounds=1")
    house = unpack(link.last, Request).client
    (file,) = (tmp_path / house / "trunks").iterdir()
    kept, digest = file.read_bytes(), file.stem
    whole = load_file(start)
    trunk = {k: v for k, v in whole.items() if k.split(".")[0] not in ("layer3", "fc", "features")}
    other = {k: v + 1 for k, v in trunk.items()}
    assert answer(at[house], link.last, other, trunk=digest)
    assert "no such frozen part" in answer(at[house], link.last, other, trunk=digest_of(other))
    assert not answer(at[house], link.last, None, trunk=digest)
    assert [*(tmp_path / house / "trunks").iterdir()] == [file]
    assert file.read_bytes() == kept
    file.unlink()
    assert answer(at[house], link.last, None, trunk=digest) == LACKS
    with pytest.raises(WireError, match="digest"):
        check_names(replace(unpack(link.last, Request), trunk="../../etc/passwd"))
