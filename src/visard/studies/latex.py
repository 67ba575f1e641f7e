r"""`results.tex`: the tables of a bench for a paper, in the style of booktabs.

\usepackage{booktabs}
\input{results.tex}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from visard.studies.page import differences, machine_line, seeds_line, table_grid
from visard.studies.results import Results
from visard.text import NBSP, NO_VALUE

WORDS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "−": r"$-$", "×": r"$\times$", NO_VALUE: "--", NBSP: "~",
}  # fmt: skip


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(WORDS.get(c, c) for c in " ".join(text.split()))


def latex(results: Results) -> str:
    """All tables and the paired differences of each."""
    head = [results.title, results.command, machine_line(results), seeds_line(results)]
    parts = ["\n".join("% " + " ".join(text.split()) for text in head)]
    for i, one in enumerate(results.tables):
        parts.append(_table(one.title, f"tab:{_label(results.title)}-{i + 1}", *table_grid(one), text=1))
        if one.compared:
            title = f"{one.title}: differences, paired by seed, with 95 % t intervals"
            parts.append(_table(title, f"tab:{_label(results.title)}-{i + 1}-pairs", *differences(one), text=2))
    return "\n\n".join(parts) + "\n"


def _label(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40]


def _table(title: str, label: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: int) -> str:
    """A table whose first `text` columns are words and whose others are numbers."""

    def line(cells: Sequence[str]) -> str:
        return "    " + " & ".join(map(escaped, cells)) + r" \\"

    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escaped(title)}}}",
            rf"  \label{{{label}}}",
            rf"  \begin{{tabular}}{{{'l' * text}{'r' * (len(head) - text)}}}",
            r"    \toprule",
            line(head),
            r"    \midrule",
            *map(line, rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
    )
