"""What a party insists on: read, applied and checked before anything leaves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from visard.cli import deploy
from visard.config import load
from visard.deployment.join import run_spec, settings_of, world_of_party
from visard.deployment.party import OwnStates, Party
from visard.deployment.requirements import Requirements
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import PublicError, UsageError
from visard.processes import Recipe

FILE = """
[require.method]
name = { one_of = ["encrypted-mmd", "fedfr-da"] }
noise = { at_least = 2.0, at_most = 50 }
min_batch = { at_least = 64 }
insecure_keys = false

[require.method.training]
batch_size = 64

[local.method]
keys = "own/keys"
pins = { target = "0123456789abcdef" }
"""
FITS = {"method.noise": "3", "method.min_batch": "64", "method.key_bits": "3072", "method.insecure_keys": "false"}


class _Partition:
    hash = "h"


def required(tmp_path: Path, text: str = FILE) -> Requirements:
    path = tmp_path / "require.toml"
    path.write_text(text)
    return Requirements.load(path)


def run(**changes: str) -> dict[str, Any]:
    """What the server tells of a run."""
    settings = load("encrypted-mmd-sensors", [f"{k}={v}" for k, v in (FITS | changes).items()])
    plain = run_spec(settings, _Partition(), 48, 16)  # type: ignore[arg-type]
    plain["settings"]["data"] = {}
    return plain


def test_a_run_that_fits_goes_on_with_what_is_local(tmp_path: Path) -> None:
    method: Any = settings_of(run(), required(tmp_path)).method
    assert method.keys == "own/keys"
    assert method.pins == {"target": "0123456789abcdef"}
    assert method.noise == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method.noise": "0"}, r"this party requires method.noise at least 2.0, the run has 0.0"),
        ({"method.noise": "100"}, r"this party requires method.noise at most 50, the run has 100.0"),
        ({"method.min_batch": "32"}, r"this party requires method.min_batch at least 64, the run has 32"),
        ({"method.insecure_keys": "true"}, r"this party requires method.insecure_keys = False, the run has True"),
        (
            {"method.training.batch_size": "128"},
            r"this party requires method.training.batch_size = 64, the run has 128",
        ),
    ],
)
def test_a_run_that_differs_is_refused(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(PublicError, match=words):
        settings_of(run(**changes), required(tmp_path))
    settings_of(run(**changes), Requirements(require={"method": {"insecure_keys": {"one_of": [True, False]}}}))


def test_keys_that_can_be_broken_need_the_word_of_the_party(tmp_path: Path) -> None:
    weak = run(**{"method.insecure_keys": "true", "method.key_bits": "512"})
    with pytest.raises(PublicError, match="the run sets method.insecure_keys: this party does not allow"):
        settings_of(weak, Requirements())
    with pytest.raises(PublicError, match="the run sets method.insecure_keys"):
        settings_of(weak, required(tmp_path, "[require.method]\nname = 'encrypted-mmd'"))
    for table, other in (("require", "local"), ("local", "require")):
        text = f"[{table}.method]\ninsecure_keys = true\n[{other}.method]\nmin_batch = 64"
        method: Any = settings_of(weak, required(tmp_path, text)).method
        assert method.key_bits == 512


def test_a_setting_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    for text in ("[require.method]\nnoize = 3", "[require.method.noise]\nsigma = 3"):
        with pytest.raises(PublicError, match="requirements for method.noi.*, which the run does not have"):
            settings_of(run(), required(tmp_path, text))
    with pytest.raises(UsageError, match="method.noize"):  # stays in the party's log: it may quote what is local
        settings_of(run(), required(tmp_path, "[local.method]\nnoize = 3"))


def test_no_server_chooses_a_folder_of_a_party() -> None:
    """Neither one that says so in the settings, nor one that makes up what it tells."""
    said = run(**{"method.keys": "/somewhere"})
    assert "keys" not in said["settings"]["method"]
    said["settings"]["method"]["keys"] = "/somewhere"
    method: Any = settings_of(said, Requirements()).method
    assert method.keys == ""
    aligned = load("fedfr-da", ["method.align.keys=/somewhere"])
    assert "keys" not in run_spec(aligned, _Partition(), 32, 64)["settings"]["method"]["align"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[required.method]\nnoise = 3", "required: there are only the tables"),
        ("require = 3", "require: there are only the tables"),
        ("[require.method]\nnoise = { at_least = '3' }", "method.noise: at_least = '3'"),
        ("[require.method]\nname = { one_of = 'x' }", "method.name: one_of = 'x'"),
        ("[require", "Expected"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        required(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Requirements.load(tmp_path / "none.toml")


@pytest.mark.flower
def test_the_client_hands_it_to_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    recipes: list[Recipe] = []
    monkeypatch.setattr(deploy, "take_part", lambda server, keys, node, recipe, *_: recipes.append(recipe))
    path = tmp_path / "require.toml"
    path.write_text(FILE)
    deploy.client("h:1", tmp_path, "1", ["a"], tmp_path / "mine", "synthetic", require=path)
    given = recipes[0].arguments["required"]
    assert Requirements(**given) == Requirements.load(path)


def test_a_party_refuses_before_it_says_anything(tmp_path: Path) -> None:
    """Not even how many pictures it has."""
    floors = {"require": {"method": {"noise": {"at_least": 2.0}}}}
    make = partial(world_of_party, data="synthetic", file=None, clients=["user-1"], required=floors)
    party = Party(make, OwnStates(tmp_path))
    header, payload = party.do(pack(Request("0" * 32, run(**{"method.noise": "0"}))), b"")
    answer = unpack(header, Reply)
    assert answer.failure == "this party requires method.noise at least 2.0, the run has 0.0"
    assert not answer.roles
    assert payload == b""
