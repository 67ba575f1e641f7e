"""The built documentation site: how many pages, which links lead nowhere, and what would be loaded from elsewhere.

python -m tests.built_site site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ELSEWHERE = re.compile(r"(https?:)?//")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
IN_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")


class Page(HTMLParser):
    """What one page links to, what it loads, and which places in it others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if LOADED.get(tag) in given:
            self.loads.append(given[LOADED[tag]])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


def problems(site: Path) -> list[str]:
    """One line for each link that leads nowhere and each thing that comes from elsewhere, in the order of the files."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    found = set()
    for path, page in pages.items():
        where = path.relative_to(site)
        found |= {f"{where}: loads {target}" for target in page.loads if ELSEWHERE.match(target)}
        for target in {*page.links, *page.loads}:
            if re.match(r"[a-z]+:|//", target):
                continue
            file, _, place = unquote(target).partition("#")
            there = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not there.is_file():
                found.add(f"{where}: no {file}")
            elif place and there in pages and place not in pages[there].places:
                found.add(f"{where}: no #{place} in {there.relative_to(site)}")
    for path in site.rglob("*.css"):
        targets = [a or b for a, b in IN_STYLES.findall(path.read_text())]
        found |= {f"{path.relative_to(site)}: loads {target}" for target in targets if ELSEWHERE.match(target)}
    return sorted(found)


if __name__ == "__main__":
    site = Path(sys.argv[1])
    broken = problems(site)
    print(*broken, sep="\n", end="\n" if broken else "")
    print(f"{site}/index.html: {len(list(site.rglob('*.html'))) - 1} pages, {len(broken)} broken links")
    sys.exit(bool(broken))
