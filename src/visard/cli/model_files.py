"""`visard models`: the files of networks that other commands use."""

from __future__ import annotations

from typing import Annotated

import typer

from visard import downloads
from visard.cli.console import say
from visard.text import size

app = typer.Typer(no_args_is_help=True, help="Fetch files of networks that other commands use.")


@app.callback()
def _() -> None: ...


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help=", ".join(downloads.DOWNLOADS))],
    source: Annotated[
        str | None, typer.Option("--from", help="a path, a folder or another address instead of the official one")
    ] = None,
) -> None:
    """Fetch a file once, check its digest and keep it in the cache.

    Examples:

      visard models get yunet

      visard models get yunet --from downloads/face_detection_yunet_2023mar.onnx
    """
    path = downloads.get(name, source)
    say(f"{path} ({size(path.stat().st_size)}; {downloads.DOWNLOADS[name].licence})")
