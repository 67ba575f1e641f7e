"""The documentation site: `make site` gives this file to Sphinx, with the whole repository as the source.

Pages stay plain Markdown that a forge shows as well. The navigation is made of the headings and links of
`docs/README.md`, formulas become MathML, which browsers draw without a script, and docstrings are read as Markdown.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

from visard import __version__

project = "visard"
release = version = __version__
copyright = author = "the authors of visard"

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "README"
NAVIGATION = "docs/README.md"
include_patterns = ["*.md", "docs/**", "examples/README.md"]
exclude_patterns = [".*", "*.egg-info", "build", "dist", "htmlcov", "runs", "site", "src", "tests"]

html_theme = "furo"
html_title = "visard"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which browsers refuse where they are files
html_math_renderer = "mathml"
html_theme_options: dict[str, Any] = {"footer_icons": []}

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_digits = False
myst_dmath_allow_space = False
myst_heading_anchors = 6

nb_execution_mode = "force"  # the pages in docs/notebooks
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds for a cell
nb_ipywidgets_js: dict[str, Any] = {}  # scripts from elsewhere
nb_merge_streams = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch are no Markdown
default_role = "code"
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures: most are of other packages, or no extension points


def navigation(text: str) -> dict[str, list[tuple[str, str]]]:
    """The headings of the page of all pages, and under each the links: (title, path from the root)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, rest = part.partition("\n")
        links = re.findall(r"^- \[(.+)\]\((.+)\)$", rest, re.MULTILINE)
        at = posixpath.dirname(NAVIGATION)
        found[heading] = [(title, posixpath.normpath(posixpath.join(at, path))) for title, path in links]
    return found


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """The front page has the lists of pages, which the theme shows at the side of every page."""
    if page != root_doc:
        return
    for heading, links in navigation((Path(app.srcdir) / NAVIGATION).read_text()).items():
        names = {path: posixpath.splitext(path)[0] for _, path in links}
        lines = [f"{title} <{'self' if names[path] == root_doc else '/' + names[path]}>" for title, path in links]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", *lines, "```", ""])


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring in the Markdown that this project writes, as reStructuredText: code, lists, blocks, plain text."""
    made: list[str] = []
    block = item = False  # whether the last line is of a block of code, of an item of a list
    for line in lines:
        before = bool(made and made[-1].strip())
        if line.startswith("    ") and (block or not before) and not item:
            made += [line] if block else ["::", "", line]
            block = True
            continue
        block = block and not line.strip()
        if re.match(r"- |\d+\. ", line):
            made += [""] if before and not item else []
            item = True
        elif line.strip() and not line.startswith("  "):
            made += [""] if before and item else []
            item = False
        pieces = re.split(r"(`[^`]+`)", line if item else line.strip())  # every second one is code
        pieces[::2] = [re.sub(r"([\\*|_])", r"\\\1", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"`{piece}`" for piece in pieces[1::2]]
        made.append("".join(pieces))
    return made


def read_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    own = fields(thing) if what == "class" else []
    lines[:] = as_restructured([*lines, *([""] if own else []), *own])


def fields(thing: type) -> list[str]:
    """The annotated fields of a class as a list, with the comment that stands behind each in the source."""
    source = textwrap.dedent(inspect.getsource(thing))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            declared = re.sub(r" = field\(.*", "", ast.unparse(node))
            comment = re.search(r"  # (.+)$", source.splitlines()[(node.end_lineno or node.lineno) - 1])
            found.append(f"- `{declared}`" + (f": {comment[1]}" if comment else ""))
    return found


def inline_formula(writer: Any, node: nodes.math) -> None:
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_formula(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def copy_front_page(app: Sphinx, error: Exception | None) -> None:
    """A folder is opened at index.html."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("build-finished", copy_front_page)
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
