"""`visard models`: where networks can be cut, and the files of networks that other commands use."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from visard import downloads
from visard.cli import options
from visard.cli.console import say, table
from visard.text import size
from visard.text import size as size_text

app = typer.Typer(
    no_args_is_help=True, help="Where networks can be cut, and files of networks that other commands use."
)


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


@app.command("cuts")
def list_cuts(
    name: Annotated[str, typer.Argument(help="a network, as model.name has it")],
    size: Annotated[
        int, typer.Option(help="side of its pictures; of sensor networks how many numbers a row has")
    ] = 112,
    embedding: Annotated[int | None, typer.Option(help="length of its features (default: its own)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    plugin: options.Plugin = None,
) -> None:
    """List where a network can be cut: model.train = "from:LAYER" trains from there on and freezes what is before.

    Example: visard models cuts mobilefacenet --embedding 128
    """
    from visard.models import SENSORS, build
    from visard.models.cut import choose, cuts
    from visard.models.sensors import SIDE

    options.load_plugins(plugin)
    network = build(name, embedding=embedding, size=size)
    shape = (3, size, size)
    if name in SENSORS:
        shape = (size // SIDE**2, SIDE, SIDE) if name == "cnn_gru" else (size,)  # type: ignore[assignment]
    found, chosen = cuts(network, shape), choose(network, "tail", shape)
    if as_json:
        print(json.dumps([dataclasses.asdict(cut) | {"tail": cut.layer == chosen} for cut in found], indent=1))
        return
    rows = [
        (cut.layer, f"last:{len(found) - i}", f"{cut.parameters:,}", f"{100 * cut.share:.0f} %",
         "x".join(map(str, cut.shape)), size_text(2 * cut.numbers), "tail" if cut.layer == chosen else "")
        for i, cut in enumerate(found)
    ]  # fmt: skip
    columns = ("from:LAYER", "or", "parameters that train", "share", "activation", "in fp16", "")
    table(f"Where {name} can be cut", columns, rows)
