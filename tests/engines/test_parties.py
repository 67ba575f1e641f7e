"""Runs on parties that bring their own pictures, without any transport: what leaves a party, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.smoke import SMOKE
from tests.engines.test_remote import DictLink
from tests.policies import ANYTHING
from tests.toys import noise_faces

import visard
from visard.config import load
from visard.deployment.guard import Guard
from visard.deployment.join import world_of_party
from visard.deployment.party import OwnStates, Party
from visard.deployment.policy import Policy
from visard.deployment.remote import PartyLink
from visard.engines.codec import decode, encode
from visard.engines.request import Reply, Request, pack, unpack
from visard.engines.watchers import Watcher
from visard.errors import UsageError, VisardError
from visard.methods.scoring import Scores

HOUSES = ("house-1", "house-2")


class OwnLink(DictLink, PartyLink):
    """Parties in this process, asked for what they bring when a run begins."""

    counts: dict[str, int] | None = None  # what they say of their data instead of the truth

    def introduce(self, run: str, told: dict[str, Any]) -> None:
        self.hello = pack(Request(run, told))

    def parties(self, count: int) -> dict[str, dict[str, int]]:  # type: ignore[override]
        found: dict[str, dict[str, int]] = {}
        for party in self.at.values():
            answer = unpack(party.do(self.hello, b"")[0], Reply)
            if answer.failure:
                raise VisardError(answer.failure)
            found |= answer.roles
        return {role: self.counts or counts for role, counts in found.items()}


class Heard(Watcher):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("homes")
    for seed, name in enumerate((*HOUSES, "public")):
        noise_faces(folder / name, 12, 8, seed)
    return folder


def living(houses: Sequence[str], homes: Path, folder: Path, policy: Policy | None = ANYTHING) -> dict[str, Party]:
    """A party in each house, with the pictures that it has there."""
    return {
        house: Party(
            partial(world_of_party, data=str(homes / house), file=None, clients=[house]),
            OwnStates(folder / house / "states"),
            Guard(folder / house, policy),
            models=folder / house / "models",
        )
        for house in houses
    }


@pytest.fixture
def go(homes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, Heard]]:
    """Runs a method over both houses."""
    own = ("partition.kind=parties", "partition.clients=2", "partition.test_identities=0", "engine.kind=flower")
    mine = [s for s in SMOKE if not s.startswith(("data.", "partition.", "engine."))]

    def run(
        method: str, *more: str, link: type[OwnLink] = OwnLink, forge: Any = None, policy: Policy | None = ANYTHING
    ) -> tuple[Path, Heard]:
        at = living(HOUSES, homes, tmp_path, policy)
        monkeypatch.setattr("visard.runs.run.connect", lambda *_: link(at, forge))
        sets = [*mine, *own, "engine.server=x", f"data.source={homes / 'public'}", "evaluation.every=0", *more]
        heard = Heard()
        visard.run(method, out=tmp_path / "run", overrides=sets, watcher=heard)
        return tmp_path / "run", heard

    return run


def test_every_house_is_tested_and_keeps_its_model(go: Callable[..., Any], tmp_path: Path) -> None:
    out, heard = go("local", "evaluation.client_benchmarks=false", "name='our run'")
    assert heard.problems == []
    figures = json.loads((out / "metrics.json").read_text())["clients"]["figures"]
    assert sorted(figures) == list(HOUSES)
    assert all(len(list((tmp_path / h / "models").glob(f"our%20run-*-{h}.safetensors"))) == 1 for h in HOUSES)


@pytest.mark.parametrize("setting", ["client_benchmarks=true", "impostors=all"])
def test_tests_on_pictures_of_others_are_refused(go: Callable[..., Any], setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(UsageError, match=f"evaluation.{name}: parties that keep their pictures"):
        go("fedavg", f"evaluation.{setting}")


def forged(change: Callable[[Scores], Scores]) -> Any:
    """Changes what the second house says in its final test."""

    def forge(request: Request, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        if (request.stage, request.client, request.keep) != ("final", HOUSES[1], ""):
            return header, payload
        return header, encode(change(decode(payload, Scores)))

    return forge


def test_who_fails_the_final_test_is_named(go: Callable[..., Any]) -> None:
    out, heard = go("fedavg", forge=forged(lambda s: replace(s, pictures=-1)))
    assert heard.problems == [
        "final test: house-2: reply refused (pictures): holds an integer that is negative or too large"
    ]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["client"], e["stage"]) for e in events if e["event"] == "refused"] == [("house-2", "final")]
    assert sorted(json.loads((out / "metrics.json").read_text())["clients"]["figures"]) == ["house-1"]


def test_a_figure_that_is_no_number_is_left_out(go: Callable[..., Any]) -> None:
    bad = {"auc": float("nan"), "rank1": float("inf"), "eer": 0.25}
    out, heard = go("fedavg", forge=forged(lambda s: replace(s, figures=bad)))
    assert heard.problems == []
    assert json.loads((out / "metrics.json").read_text())["clients"]["figures"]["house-2"] == {"eer": 0.25}


@pytest.mark.parametrize(
    "counts", [{"identities": 3}, {"identities": 0, "pictures": 9}, {"identities": 9, "pictures": 10**12}, {"x": 1}]
)
def test_a_party_that_says_impossible_things_of_its_data_is_named(
    go: Callable[..., Any], counts: dict[str, int]
) -> None:
    class Liar(OwnLink):
        pass

    Liar.counts = counts
    with pytest.raises(VisardError, match="house-1 says of its pictures what cannot be"):
        go("fedavg", link=Liar)


def test_a_party_weighs_no_more_than_it_said_at_first(go: Callable[..., Any]) -> None:
    class Modest(OwnLink):
        counts = {"identities": 12, "pictures": 20}

    with pytest.raises(VisardError, match=r"house-1: reply refused: Up.n is \d\d, but the client has 20 pictures"):
        go("fedavg", link=Modest)


def answer(faces: str, /, side: object = 32, **changes: Any) -> str:
    """What a party says to the first request of a run on pictures of so many pixels."""
    settings = load("fedavg", ["partition.kind=parties", "partition.clients=2"]).to_dict()
    told = {k: v for k, v in settings.items() if k not in ("name", "engine")} | changes
    run = {"settings": told, "partition": "", "own": True, "spec": {"model": "tiny", "embedding": 16, "size": 32}}
    run["pictures"] = side
    party = Party(
        partial(world_of_party, data=faces, file=None, clients=["house-1"]),
        OwnStates(Path(faces).parent / "at"),
        Guard(Path(faces).parent, ANYTHING),
    )
    return unpack(party.do(pack(Request("ab" * 16, run)), b"")[0], Reply).failure or ""


def test_no_path_of_a_party_reaches_the_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "ward-7" / "faces"
    assert answer(str(there)) == "UsageError: the party's log says more"
    assert str(there) in capfd.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"data": {"source": "/somebody/elses"}}, {"model": {"weights": "/a/file"}}, {"model": {"class_vectors": "/x"}}],
)
def test_a_server_cannot_name_what_a_party_opens(homes: Path, changes: dict[str, Any]) -> None:
    assert answer(str(homes / "house-1"), **changes) == "the run names a file or a face set for this party to open"


@pytest.mark.parametrize("side", [64, 10**300, float("inf"), float("nan"), "32", None, [32]])
def test_a_run_on_pictures_of_another_size_is_refused_in_a_line(homes: Path, side: object) -> None:
    said = answer(str(homes / "house-1"), side)
    assert re.fullmatch(r"the run is on pictures of .{1,20} pixels, this party has 32", said), said


def test_settings_that_a_party_does_not_know_are_told(homes: Path) -> None:
    assert "unknown setting seeed" in answer(str(homes / "house-1"), seeed=1)
