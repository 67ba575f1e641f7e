"""`visard embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visard.cli import options
from visard.cli.console import bar, console


def embed(
    data: Annotated[str, typer.Argument(metavar="DATASET", help="a face set: a folder, or a name in the data folder")],
    model: Annotated[Path, typer.Option(help="a .safetensors, .pth, .pt or .onnx model")],
    out: Annotated[Path, typer.Option(help="the .npy file to write; a .json manifest goes beside it")],
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    unit: Annotated[bool, typer.Option("--unit", help="scale each feature to length one")] = False,
    input: options.Input = None,
    size: options.Size = None,
    order: options.Order = None,
    mean: options.Mean = None,
    std: options.Std = None,
) -> None:
    """Write the features of all pictures of a face set, a row each, in the set's order.

    The manifest has the fingerprints of model and data, the identity of each row and how pictures went in.

    Example: visard embed data/mine --model runs/demo/model.safetensors --out features.npy
    """
    from visard.api import open_data
    from visard.features import manifest_path, write_features

    view = open_data(data)
    loaded = options.open_model(model, input, size, order, mean, std)
    with bar("embedding", len(view)) as shown:
        manifest = write_features(loaded, view, out, flip=flip, unit=unit, progress=shown.update)
    text = f"{manifest['rows']} x {manifest['dimensions']} features: {out} and {manifest_path(out).name}"
    console.print(text, highlight=False, soft_wrap=True)
