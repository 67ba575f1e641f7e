"""Options that several commands share: how pictures go into a network, and plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from visard.inference.model import FaceModel

Input = Annotated[
    str | None,
    typer.Option(
        "--input", help="how pictures go in: arcface, cosface, imagenet or raw (default: what the model file says)"
    ),
]
Size = Annotated[int | None, typer.Option("--size", help="pixels that the network takes; other pictures are resized")]
Order = Annotated[str | None, typer.Option("--order", help="channels: rgb or bgr")]
Mean = Annotated[str | None, typer.Option("--mean", help="of pixels / 255, one number or three")]
Std = Annotated[str | None, typer.Option("--std", help="of pixels / 255, one number or three")]

Plugin = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="FILE.py", help="a plug-in: a file or a module (may repeat)")
]


def load_plugins(plugin: list[str] | None) -> None:
    """Import the plug-ins of a command line."""
    if plugin:
        from visard.plugins import load

        load(plugin)


def open_model(
    path: Path,
    input: str | None,
    size: int | None,
    order: str | None,
    mean: str | None,
    std: str | None,
    plugin: list[str] | None,
) -> FaceModel:
    """The model in a file, with what the options say of its input; plug-ins may bring its network."""
    load_plugins(plugin)
    from visard.inference.model import load_model

    return load_model(path, input=input, size=size, order=order, mean=mean, std=std)
