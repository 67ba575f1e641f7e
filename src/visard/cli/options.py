"""Options that several commands share: plug-ins, and how pictures go into a network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from visard.data.removal import Receipt
    from visard.inference.model import FaceModel

Plugin = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="FILE.py", help="a plug-in: a file or a module (may repeat)")
]
EncryptWith = Annotated[
    Path | None,
    typer.Option("--encrypt-with", metavar="KEYFILE", help="the key that files are encrypted with (visard keys file)"),
]
Device = Annotated[
    str, typer.Option("--device", help="where the network computes: cpu, cuda, cuda:N, xpu, mps, or auto")
]
ReceiptFile = Annotated[
    Path | None,
    typer.Option("--receipt", metavar="FILE", help="where to write the receipt (default: beside the changed data)"),
]
Case = Annotated[str, typer.Option("--case", metavar="TEXT", help="a name for the receipt, such as a case number")]
OpenModel = Callable[[Path], "FaceModel"]


def load_plugins(plugin: list[str] | None) -> None:
    """Import the plug-ins of a command line."""
    if plugin:
        from visard.plugins import load

        load(plugin)


def show_receipt(made: Receipt) -> None:
    """Print a receipt, and the proof that can show later whom it is about."""
    from visard.cli.console import say, table
    from visard.text import listing, plural

    rows = [(one["what"], one["where"], one["found"], one["removed"]) for one in made.looked_at]
    table("What was looked at", ("what", "where", "found", "removed"), rows, text=2)
    for one in made.looked_at:
        if one.get("clients"):
            say(
                f"run {one['where']}: {listing(one['clients'])} had pictures of them, and its models were trained with "
                "these: make it again, with the face set as it is now or without the client (visard run --without)"
            )
    people = plural(made.removed["people"], "person", "people")
    say(f"{people} with {plural(made.removed['pictures'], 'picture')} removed; not reached: copies, backups, models")
    say(f"receipt: {made.path}")
    say(f"proof that it is about them, kept nowhere else: {made.proof.hex()}")


def opens_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command with a parameter `open_model`, which gets the options on pictures and plug-ins."""

    def called(
        *,
        input: Annotated[
            str | None,
            typer.Option(
                help="how pictures go in: arcface, cosface, facenet, imagenet, raw (default: what the file says)"
            ),
        ] = None,
        size: Annotated[
            int | None, typer.Option(help="pixels that the network takes, where its file leaves it open")
        ] = None,
        order: Annotated[str | None, typer.Option(help="channels: rgb or bgr")] = None,
        mean: Annotated[str | None, typer.Option(help="of pixels / 255, one number or three")] = None,
        std: Annotated[str | None, typer.Option(help="of pixels / 255, one number or three")] = None,
        device: Device = "auto",
        plugin: Plugin = None,
        **given: Any,
    ) -> None:
        def open_model(path: Path) -> FaceModel:
            from visard.cli.console import mark
            from visard.inference.model import load_model
            from visard.numerics import compute_on

            compute_on(device)
            found = load_model(path, input=input, size=size, order=order, mean=mean, std=std)
            if input is None and found.assumption and not given.get("as_json"):
                mark("note", found.assumption)
            return found

        load_plugins(plugin)
        command(**given, open_model=open_model)

    both = (p for f in (command, called) for p in inspect.signature(f, eval_str=True).parameters.values())
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in both if p.name not in ("open_model", "given")]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called
