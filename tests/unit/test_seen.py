"""The page on what the server sees is made from the types of the methods, and covers all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.privacy_page import card, fields_of, page

from visard.core import Disclosure
from visard.methods import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    text = (DOCS / "privacy.md").read_text()
    ours = {name: METHODS[name] for name in METHODS.built_in}  # not the plug-ins of other tests
    assert page(text, ours) == text, "run: make pages"
    assert all(f"[`{name}`](methods/{name}.md#" in text for name in ours)


@pytest.mark.parametrize("name", METHODS)
def test_the_card_says_what_a_hostile_server_can_do(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text()
    assert card(text, METHODS[name]) == text, "run: make pages"


def test_every_kind_is_explained() -> None:
    assert all(kind.what and kind.reveals.endswith(".") for kind in Disclosure)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_declares_what_its_replies_carry(name: str) -> None:
    carried, declared = set(fields_of(METHODS[name])), METHODS[name].discloses
    assert carried <= declared, "the engine would refuse such replies"
    assert carried == declared, "a kind is declared that no reply carries"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card_that_says_what_leaves(name: str) -> None:
    assert "\n## What leaves a client\n" in (DOCS / "methods" / f"{name}.md").read_text()


def test_another_method_changes_the_page() -> None:
    text = (DOCS / "privacy.md").read_text()
    assert page(text, {"fedavg": METHODS["fedavg"]}) != text
