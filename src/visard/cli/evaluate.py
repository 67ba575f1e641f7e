"""`visard eval`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from visard.cli import options
from visard.cli.console import share, table
from visard.config import DataSettings, EvaluationSettings

Rows = list[tuple[str, str, str]]


class Protocol(StrEnum):
    """What can be tested."""

    verification = "verification"
    identification = "identification"
    both = "both"
    lfw = "lfw"
    rfw = "rfw"
    ijb = "ijb"


def evaluate(
    model: Annotated[Path, typer.Argument(help="a .safetensors, .pth, .pt or .onnx model, or features (.npy)")],
    data: Annotated[str, typer.Option(help="a face set: a folder, a name in the data folder, or synthetic")],
    protocol: Annotated[Protocol, typer.Option(help="what to test")] = Protocol.both,
    pairs: Annotated[int, typer.Option(help="balanced pairs for the ten-fold accuracy")] = 6000,
    listed: Annotated[
        Path | None, typer.Option("--list", help="your own pairs: a CSV file with file_a,file_b,same")
    ] = None,
    far: Annotated[str, typer.Option(help="false accept rates, separated by commas")] = "0.1,0.01,0.001",
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    switches: Annotated[str, typer.Option(help="ijb: keep norms, detector scores, mirror images")] = "N1D1F1",
    seed: Annotated[int, typer.Option(help="of the pairs and of the confidence intervals")] = 0,
    input: options.Input = None,
    size: options.Size = None,
    order: options.Order = None,
    mean: options.Mean = None,
    std: options.Std = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable, with curves")] = False,
) -> None:
    """Test a model on the people of a face set.

    verification and identification take any set. lfw: ten folds over the pairs that came with the set (lfw, cfp, agedb
    and other .bin files, or --list). rfw: the same for each of its domains. ijb: templates, 1:1 and 1:N.

    Examples:

      visard eval runs/demo/model.safetensors --data synthetic

      visard eval r50.onnx --data lfw --protocol lfw --input arcface

      visard eval runs/demo/model.safetensors --data data/mine --protocol verification --json
    """
    from visard.api import evaluate as run_tests
    from visard.api import open_data
    from visard.data.locate import open_faces
    from visard.errors import UsageError
    from visard.features import read_features

    try:
        rates = tuple(float(f) for f in far.split(","))
        settings = EvaluationSettings(pairs=pairs, far=rates, flip=flip)
    except ValueError:
        raise UsageError(f"--far {far} --pairs {pairs}: rates must be numbers in (0, 1), pairs at least 20") from None
    if model.suffix == ".npy":
        faces = open_data(data)
        tested: Any = read_features(model, faces)
    else:
        tested = options.open_model(model, input, size, order, mean, std)
        faces = open_faces(DataSettings(size=tested.size)) if data == "synthetic" else open_data(data)  # type: ignore[assignment]
    protocols = ("verification", "identification") if protocol is Protocol.both else (protocol.value,)
    figures = run_tests(
        tested, faces, protocols=protocols, settings=settings, seed=seed, pairs=listed, switches=switches
    )  # fmt: skip
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    title = f"{model.name} on {data}"
    if protocol in (Protocol.lfw, Protocol.rfw, Protocol.ijb):
        show = {Protocol.lfw: lfw_rows, Protocol.rfw: rfw_rows, Protocol.ijb: ijb_rows}[protocol]
        table(f"{title}: {protocol.value}", ("figure", "value", "note"), show(figures[protocol.value]))
        return
    from visard.evaluation.rounds import headline

    rows = [(r["figure"], share(r["value"]), r["interval"]) for r in headline(figures) if r["value"] is not None]
    table(title, ("figure", "value", "95 % interval"), rows)


def lfw_rows(figures: dict[str, Any]) -> Rows:
    """The lines of a table of ten folds."""
    roc = figures["roc"]
    rows = [
        ("accuracy", share(figures["accuracy"]), f"± {share(figures['accuracy_std'])}, {figures['pairs']} pairs"),
        (f"TAR, folds at FAR {figures['far_target']:g}", share(figures["tar"]), f"FAR {figures['far']:.2g}"),
    ]
    rows += [(f"TAR at FAR {p['far']:g}", share(p["tar"]), _doubt(p)) for p in roc["tar"]]
    return [*rows, ("EER", share(roc["eer"]), ""), ("AUC", share(roc["auc"]), "")]


def rfw_rows(figures: dict[str, Any]) -> Rows:
    """The lines of a table of groups."""
    rows = [
        (f"accuracy {name}", share(group["accuracy"]), f"± {share(group['accuracy_std'])}, {group['pairs']} pairs")
        for name, group in figures["groups"].items()
    ]
    rows += [
        ("mean", share(figures["mean"]), ""),
        ("standard deviation", share(figures["std"]), "over groups"),
        ("skewed error ratio", share(figures["skewed_error_ratio"]), "largest error / smallest error"),
    ]
    for point in figures["shared"]:
        for name, rate in point["fmr"].items():
            text = f"FNMR {share(point['fnmr'][name])}, threshold {share(point['threshold'])}"
            rows.append((f"FMR {name} (all: {point['fmr_target']:g})", share(rate), text))
    return rows


def ijb_rows(figures: dict[str, Any]) -> Rows:
    """The lines of a table of templates."""
    on = "".join(f"{name}{int(value)}" for name, value in figures["switches"].items())
    rows = [
        (name, share(value), f"± {share(figures['std'][name])}" if figures["std"][name] is not None else on)
        for name, value in figures["mean"].items()
    ]
    for old in [search["legacy"] for search in figures["identification"][:1] if search["legacy"]]:
        rows += [(f"tpir@fpir={p['fpir']:g}", share(p["tpir"]), old["rule"]) for p in old["tpir"]]
    return rows


def _doubt(point: dict[str, Any]) -> str:
    return "fewer than ten impostors" if point["unreliable"] else ""
