"""Links between the Markdown pages lead somewhere, and every page of the documentation stands in `docs/README.md`.

Without Sphinx: `make site` builds the same pages and checks the links of the result.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.built_site import problems

import visard
from visard import core
from visard.aggregation.registries import POSTPROCESSORS, RULES
from visard.learning.heads import HEADS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.rst"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMED = re.compile(r"^\.\. auto(\w+):: (visard[\w.]*)$", re.MULTILINE)


def prose(text: str) -> str:
    """A page without its blocks of code and comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What links may name in a page: its headings, as forges and the site write them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures that are not addresses elsewhere."""
    targets = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere: no such file, a folder, or no such heading."""
    found = []
    for target in links(page.read_text()):
        path, _, anchor = unquote(target).partition("#")
        there = page.parent / path if path else page
        known = there.is_file() and (not anchor or there.suffix != ".md" or anchor in anchors(there.read_text()))
        if not known:
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "folder").mkdir()
    page.write_text(
        "# A `page`, twice\n# A page, twice\n[a](#a-page-twice) [b](page.md#a-page-twice-1) [web](https://a.b)\n"
        "[c](#a-page-twice-2) [d](absent.md) [e](folder) ![f](absent.png) `[g](absent)`\n"
        "```\n[h](absent)\n# i\n```\n"
    )
    assert broken(page) == ["#a-page-twice-2", "absent.md", "folder", "absent.png"]


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)), "a page is listed twice"
    assert {(DOCS / path).resolve() for path in listed} == {*PAGES, *REFERENCE}


@pytest.mark.parametrize("page", REFERENCE, ids=lambda p: p.stem)
def test_what_the_reference_names_is_there_and_described(page: Path) -> None:
    named = NAMED.findall(page.read_text())
    assert named
    for kind, name in named:
        module, _, last = name.rpartition(".")
        thing = importlib.import_module(name) if kind == "module" else getattr(importlib.import_module(module), last)
        assert thing.__doc__, name


def test_the_reference_has_every_public_name() -> None:
    text = {page.stem: {name for _, name in NAMED.findall(page.read_text())} for page in REFERENCE}
    assert text["python"] == {f"visard.{name}" for name in visard.__all__ if name != "__version__"}
    values = {"PUBLIC", "ClientId", "M", "R", "State", "Weights"}  # names of types, and a constant
    assert {f"visard.core.{name}" for name in set(core.__all__) - values} <= text["core"]
    for page, registry in (("heads", HEADS), ("aggregation", RULES), ("aggregation", POSTPROCESSORS)):
        kinds = registry.built_in.values()
        assert {f"{kind.__module__}.{kind.__name__}" for kind in kinds} <= text[page]


def test_a_built_page_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">b</a><a href="#x">x</a><a href="https://a.b">elsewhere</a><img src="data:,">'
    )
    (tmp_path / "b.html").write_text('<script src="https://cdn.example/a.js"></script><a href="c.html">c</a>')
    (tmp_path / "a.css").write_text("@import url(https://fonts.example/a.css); b {background: url('data:,')}")
    assert problems(tmp_path) == [
        "a.css: loads https://fonts.example/a.css",
        "a.html: no #y in b.html",
        "b.html: loads https://cdn.example/a.js",
        "b.html: no c.html",
    ]
