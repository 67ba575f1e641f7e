"""`visard export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visard.cli import options
from visard.cli.console import console, share, size, table
from visard.errors import UsageError


def export(
    model: Annotated[Path, typer.Argument(help="a .safetensors, .pth or .pt model (with --int8 also .onnx)")],
    onnx: Annotated[Path, typer.Option(help="the file to write")],
    int8: Annotated[bool, typer.Option("--int8", help="8-bit integers; the loss is measured and shown")] = False,
    data: Annotated[str, typer.Option(help="int8: the face set that the loss is measured on")] = "synthetic",
    static: Annotated[
        bool, typer.Option("--static", help="int8: fix ranges on every second person of --data (faster)")
    ] = False,
    fixed_batch: Annotated[bool, typer.Option("--batch-1", help="one picture at a time, for simple runtimes")] = False,
    opset: Annotated[int, typer.Option(help="version of the operators")] = 18,
    input: options.Input = None,
    picture_size: options.Size = None,
    order: options.Order = None,
    mean: options.Mean = None,
    std: options.Std = None,
) -> None:
    """Write a model as ONNX, checked against PyTorch on random pictures.

    Input "pictures" (batch, 3, size, size), output "features". Size, order, mean and std are in the metadata.

    Examples:

      visard export runs/demo/model.safetensors --onnx model.onnx

      visard export runs/demo/model.safetensors --onnx small.onnx --int8 --data data/mine
    """
    from visard.api import open_data
    from visard.config import DataSettings
    from visard.data.locate import open_faces
    from visard.exporting import export as write

    if onnx.suffix != ".onnx":
        raise UsageError(f"{onnx}: the name must end in .onnx")
    if static and data == "synthetic":
        raise UsageError("--static needs --data: its ranges are found on pictures like those to come")
    loaded = options.open_model(model, input, picture_size, order, mean, std)
    faces = None
    if int8:
        small = DataSettings(size=min(112, max(32, loaded.size)), identities=50, images_per_identity=8)
        faces = open_faces(small) if data == "synthetic" else open_data(data)
        if data == "synthetic" and faces.size != loaded.size:  # type: ignore[union-attr]
            raise UsageError(f"synthetic faces have 32 to 112 pixels, the model takes {loaded.size}: name --data")
    made, loss = write(
        loaded, onnx, int8=int8, data=faces, static=static, dynamic_batch=not fixed_batch, opset=opset
    )  # fmt: skip
    console.print(f"{made.path}: {size(made.bytes)}", highlight=False, soft_wrap=True)
    if loss is None:
        console.print(f"largest difference from PyTorch: {made.difference:.1e}", highlight=False)
        return
    rows = [(k, share(v), share(loss.after[k])) for k, v in loss.before.items() if v is not None]
    table(f"On {loss.pictures} pictures of {data}", ("figure", "before", "int8"), rows)
    console.print(f"mean cosine of features before and after: {loss.cosine:.4f}", highlight=False)
