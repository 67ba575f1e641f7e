"""`visard report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visard.cli.console import console
from visard.report.html import build_report


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="one or more run folders")],
    out: Annotated[Path | None, typer.Option(help="the HTML file to write")] = None,
) -> None:
    """Write one HTML page about a run, or about several side by side. It opens offline.

    Examples:

      visard report runs/demo

      visard report runs/fedavg runs/local runs/central --out comparison.html
    """
    console.print(f"report: {build_report(runs, out)}", highlight=False, soft_wrap=True)
