"""Every package that is installed from the locks has a licence that is known and allowed, and stands in the bill."""

from __future__ import annotations

import json
import re
from email.message import Message
from importlib import metadata

import pytest
from tests.lock import ROOT
from tests.sbom import ALLOWED_IN_TESTS, PLOTLY, allowed, bill, licence_of, packages, page


def test_every_licence_is_allowed() -> None:
    found = {p.name: p.licence for p in packages()}
    assert len(found) > 80
    assert not {n: e for n, e in found.items() if not allowed(e) and ALLOWED_IN_TESTS.get(n) != e}


def test_what_only_tests_may_use_is_not_imported_by_visard() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for module in ALLOWED_IN_TESTS:
            assert not re.search(rf"^\s*(import|from) {module}\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize(
    ("expression", "fine"),
    [("MIT", True), ("GPL-3.0-only", False), ("MIT OR GPL-3.0-only", True), ("MIT AND GPL-3.0-only", False),
     ("", False), ("Apache-2.0 WITH LLVM-exception", True)],
)  # fmt: skip
def test_alternatives_and_what_holds_together(expression: str, fine: bool) -> None:
    assert allowed(expression) is fine


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [("License-Expression", "MIT", "MIT"), ("License", "Apache 2.0", "Apache-2.0"), ("License", "ask the author", ""),
     ("Classifier", "License :: OSI Approved :: MIT License", "MIT"), ("Summary", "no word", "")],
)  # fmt: skip
def test_unknown_licences_are_unknown(field: str, text: str, expected: str) -> None:
    class Made(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            message = Message()
            message["Name"] = "made"
            message[field] = text
            return message.as_string() if filename == "METADATA" else None

        def locate_file(self, path: object) -> object:  # type: ignore[override]
            return path

    assert licence_of(Made()) == expected


def test_the_bill_of_materials() -> None:
    made = json.loads(bill())
    parts = {part["name"]: part for part in made["components"]}
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert parts.keys() == {p.name for p in packages()} | {PLOTLY}
    assert all(part.get("hashes") for name, part in parts.items() if name != "torch")
    assert all(part["licenses"] for part in parts.values())
    needs = {row["ref"]: set(row.get("dependsOn", ())) for row in made["dependencies"]}
    assert {"torch", "pillow", "cryptography"} <= needs["visard"]
    assert "sympy" in needs["torch"]


@pytest.mark.flower  # where all that is locked is installed
def test_the_page_is_up_to_date() -> None:
    pytest.importorskip("flwr")
    assert (ROOT / "docs" / "licences.md").read_text() == page(), "make pages"
