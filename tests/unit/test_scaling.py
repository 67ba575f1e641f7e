"""Presets on other data: numbers of people and clients follow the people at hand, unless the user says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_joined import make

from visard.config import Settings, load
from visard.errors import UsageError


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    make(tmp_path / "twelve", 12, 6, size=32)
    return tmp_path / "twelve"


def numbers(settings: Settings) -> tuple[int | None, int, int, int]:
    p = settings.partition
    return p.clients, p.public_identities, p.test_identities, p.hold_out


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("fedavg", (4, 0, 3, 0)), ("fedface", (5, 5, 2, 0)), ("fedfr-joint", (3, 4, 2, 0)), ("hf-maml", (4, 0, 3, 1))],
)
def test_shares_of_the_preset_are_kept(preset: str, expected: tuple[int, ...], twelve: Path) -> None:
    found = load(preset, [f"data.source={twelve}"])
    assert numbers(found) == expected
    assert "for 12 people" in found.note
    clients, public, test, _ = expected
    assert public + test + (1 if preset == "fedface" else 2) * clients <= 12


def test_what_the_user_says_stays(twelve: Path) -> None:
    found = load("fedface", [f"data.source={twelve}", "partition.clients=2", "partition.test_identities=4"])
    assert numbers(found) == (2, 5, 4, 0)
    assert "partition.clients" not in found.note


def test_with_enough_people_and_on_its_own_data_a_preset_is_as_it_is(tmp_path: Path) -> None:
    make(tmp_path / "many", 600, 2, size=8)
    assert numbers(load("fedavg", [f"data.source={tmp_path / 'many'}"])) == (20, 0, 120, 0)
    assert load("fedavg", ["data.identities=24"]).note == ""
    assert numbers(load("fedavg")) == (20, 0, 120, 0)


def test_sets_with_roles_take_the_place_of_people_set_aside(tmp_path: Path) -> None:
    for k, name in enumerate(("a", "b", "p", "t")):
        make(tmp_path / name, 6, 4, seed=k)
    roles = {"a": "clients", "b": "clients", "p": "public", "t": "test"}
    listed = ", ".join(f'{{path = "{tmp_path / n}", role = "{r}"}}' for n, r in roles.items())
    found = load("fedfr-joint", [f"data={{sets = [{listed}]}}", "partition.kind=sites"])
    assert found.partition.public_identities == found.partition.test_identities == 0


def test_domains_that_the_data_do_not_have_are_one_line(twelve: Path) -> None:
    with pytest.raises(
        UsageError, match="source and a target domain .north, south., twelve has only: give partition.source"
    ):
        load("fedfr-da", [f"data.source={twelve}"])


def test_a_complete_file_is_never_scaled(twelve: Path, tmp_path: Path) -> None:
    text = load("fedavg", [f"data.source={twelve}"]).to_toml().replace("test_identities = 3", "test_identities = 5")
    (tmp_path / "config.toml").write_text(text)
    assert load(tmp_path / "config.toml").partition.test_identities == 5
