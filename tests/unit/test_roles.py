"""Clients that belong to keys."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("cryptography") is None:
    pytest.skip("needs the package cryptography: pip install 'visard[flower]'", allow_module_level=True)

from visard.deployment.keys import FILE, Assignment, read_parties, write_parties
from visard.errors import UsageError, VisardError

pytestmark = pytest.mark.flower  # run by make flower, which installs the package

NONE = "but its key has no role: visard keys bind"
BOUND = Assignment.parse(["1=house-1", "1=pool", "2=house-2"], 3)


@pytest.mark.parametrize(
    ("node", "role", "says"),
    [
        ("node-1", "house-1", None),
        ("node-1", "pool", None),
        ("node-2", "house-1", "node-2 claims to be house-1, which belongs to the key of node-1"),
        ("node-3", "house-1", "node-3 claims to be house-1, which belongs to the key of node-1"),
        ("node-2", "house-9", "node-2 claims to be house-9, but its key is for house-2"),
        (
            "node-3",
            "house-9",
            "node-3 claims to be house-9, but its key has no role: visard keys bind",
        ),
        ("an unknown node", "house-2", "an unknown node claims to be house-2, which belongs to the key of node-2"),
    ],
)
def test_who_may_be_what(node: str, role: str, says: str | None) -> None:
    assert BOUND.refusal(node, role) == says


def test_a_key_without_roles_speaks_for_none() -> None:
    for of in ({}, {"node-1": ()}):
        refusal = Assignment(of).refusal("node-1", "house-1")
        assert refusal == "node-1 claims to be house-1, but its key has no role: visard keys bind"


@pytest.mark.parametrize("text", ["house-1", "0=house-1", "4=house-1", "1=", "1=a/b", "x=house-1", "1=../up"])
def test_malformed_roles_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be NODE=ROLE"):
        Assignment.parse([text], 3)


def test_a_role_has_one_key() -> None:
    with pytest.raises(UsageError, match="house-1 belongs to node-1 and to node-2"):
        Assignment.parse(["1=house-1", "2=house-1"], 2)


def test_files(tmp_path: Path) -> None:
    assert Assignment.load(tmp_path) == Assignment()
    write_parties(tmp_path, {7: "node-1", 2**63: "node-2"}, BOUND)
    assert read_parties(tmp_path) == ({7: "node-1", 2**63: "node-2"}, BOUND)
    (tmp_path / FILE).write_text(json.dumps({"node-1": "house-1"}))
    with pytest.raises(VisardError, match="must say which roles each node has"):
        Assignment.load(tmp_path)
