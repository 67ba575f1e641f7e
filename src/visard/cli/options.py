"""Options that several commands share: how pictures go into a network."""

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


def open_model(
    path: Path, input: str | None, size: int | None, order: str | None, mean: str | None, std: str | None
) -> FaceModel:
    """The model in a file, with what the options say of its input."""
    from visard.inference.model import load_model

    return load_model(path, input=input, size=size, order=order, mean=mean, std=std)
