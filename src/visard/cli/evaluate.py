"""`visard eval`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from visard.cli.console import share, table
from visard.config import DataSettings, EvaluationSettings


class Protocol(StrEnum):
    """What can be tested."""

    verification = "verification"
    identification = "identification"
    both = "both"


def evaluate(
    model: Annotated[Path, typer.Argument(help="a model file: runs/demo/model.safetensors")],
    data: Annotated[str, typer.Option(help="a face set: a folder, a name in the data folder, or synthetic")],
    protocol: Annotated[Protocol, typer.Option(help="what to test")] = Protocol.both,
    pairs: Annotated[int, typer.Option(help="balanced pairs for the ten-fold accuracy")] = 6000,
    far: Annotated[str, typer.Option(help="false accept rates, separated by commas")] = "0.1,0.01,0.001",
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    seed: Annotated[int, typer.Option(help="of the pairs and of the confidence intervals")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable, with curves")] = False,
) -> None:
    """Test a model on the people of a face set: 1:1 verification and 1:N identification.

    Examples:

      visard eval runs/demo/model.safetensors --data synthetic

      visard eval runs/demo/model.safetensors --data data/mine --protocol verification --json
    """
    from visard.api import evaluate as run_tests
    from visard.api import load_model, open_data
    from visard.data.locate import open_faces
    from visard.errors import UsageError
    from visard.evaluation.rounds import headline

    try:
        rates = tuple(float(f) for f in far.split(","))
        settings = EvaluationSettings(pairs=pairs, far=rates, flip=flip)
    except ValueError:
        raise UsageError(f"--far {far} --pairs {pairs}: rates must be numbers in (0, 1), pairs at least 20") from None
    loaded = load_model(model)
    faces = open_faces(DataSettings(size=loaded.size)) if data == "synthetic" else open_data(data)
    protocols = ("verification", "identification") if protocol is Protocol.both else (protocol.value,)
    figures = run_tests(loaded, faces, protocols=protocols, settings=settings, seed=seed)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    rows = [(r["figure"], share(r["value"]), r["interval"]) for r in headline(figures) if r["value"] is not None]
    table(f"{model.name} on {data}", ("figure", "value", "95 % interval"), rows)
