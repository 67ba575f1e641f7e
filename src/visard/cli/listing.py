"""`visard methods`, `visard presets`."""

from __future__ import annotations

from visard.cli.console import table
from visard.config import presets as all_presets
from visard.methods import METHODS
from visard.privacy.ledger import KINDS


def methods() -> None:
    """List the methods, their papers, and what leaves a client in each.

    Example: visard methods
    """
    rows = []
    for name, method in METHODS.items():
        leaves = [k.value for k in KINDS if k in method.leaves]
        pooled = [k.value.upper() for k in KINDS if k in method.pools]
        rows.append((name, method.title, method.paper or "-", ", ".join(pooled + leaves)))
    table(
        "Methods (what is pooled in one place stands in capitals)",
        ("name", "what", "paper", "leaves a client"),
        rows,
    )


def presets() -> None:
    """List the presets that `visard run` knows.

    Example: visard presets
    """
    rows = []
    for name, text in all_presets().items():
        lines = text.splitlines()
        rows.append((name, lines[1].lstrip("# ") if len(lines) > 1 else "", lines[0].lstrip("# ")))
    table("Presets", ("name", "what", "command"), rows)
