"""`visard cluster`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from visard.cli import options
from visard.cli.console import bar, console, share, table


class By(StrEnum):
    """The clustering methods."""

    cfinch = "cfinch"
    finch = "finch"
    kmeans = "kmeans"
    dbscan = "dbscan"


class Between(StrEnum):
    """Distances between centroids."""

    euclidean = "euclidean"
    chord = "chord"
    cosine = "cosine"


def cluster(
    source: Annotated[str, typer.Argument(metavar="FEATURES_OR_DATASET", help="a .npy file, or a face set")],
    method: Annotated[By, typer.Option(help="how to cluster")] = By.cfinch,
    model: Annotated[Path | None, typer.Option(help="the model that embeds the pictures of a face set")] = None,
    out: Annotated[Path, typer.Option(help="the .csv file to write; a .json report goes beside it")] = Path(
        "labels.csv"
    ),
    d: Annotated[str, typer.Option("--d", help="cfinch, dbscan: the distance, or auto")] = "auto",
    metric: Annotated[Between, typer.Option(help="cfinch, finch: distance between centroids")] = Between.chord,
    centre: Annotated[bool, typer.Option(help="subtract the mean feature first")] = True,
    min_size: Annotated[int, typer.Option(help="pictures of smaller clusters get no label")] = 1,
    partition: Annotated[int, typer.Option(help="finch: 0 = the finest partition, -1 or beyond: the coarsest")] = 0,
    clusters: Annotated[int, typer.Option(help="kmeans: how many; 0 = as many as there are people")] = 0,
    min_samples: Annotated[int, typer.Option(help="dbscan: pictures that make a core")] = 2,
    seed: Annotated[int, typer.Option(help="kmeans")] = 0,
    input: options.Input = None,
    size: options.Size = None,
    order: options.Order = None,
    mean: options.Mean = None,
    std: options.Std = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Group pictures by person without labels: a label for each row, and how good they are where people are known.

    Examples:

      visard cluster features.npy

      visard cluster data/mine --model runs/demo/model.safetensors --method finch --partition 1 --out labels.csv
    """
    from visard.clustering import check_out, label, read_vectors, vectors_of, write_labels
    from visard.errors import UsageError
    from visard.ops.cluster import Clustering

    try:
        distance = d if d == "auto" else float(d)
    except ValueError:
        raise UsageError(f"--d {d}: must be a number or auto") from None
    settings = Clustering(
        method=method.value, metric=metric.value, d=distance, centre=centre, min_size=min_size,  # type: ignore[arg-type]
        partition=partition, clusters=clusters, min_samples=min_samples, seed=seed,
    )  # fmt: skip
    check_out(out, source)
    if source.endswith(".npy"):
        vectors = read_vectors(Path(source))
    elif model is None:
        raise UsageError(f"{source} is no .npy file: a face set needs --model")
    else:
        import numpy as np

        from visard.api import open_data
        from visard.features import pieces

        view = open_data(source)
        loaded = options.open_model(model, input, size, order, mean, std)
        with bar("embedding", len(view)) as shown:
            vectors = vectors_of(np.concatenate(list(pieces(loaded, view, progress=shown.update))), view)
    found, report = label(vectors, settings)
    beside = write_labels(out, found, vectors, report)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    table(f"{method.value} of {source}", ("figure", "value", "note"), rows_of(report), text=1)
    console.print(f"labels: {out} and {beside.name}", highlight=False, soft_wrap=True)


def rows_of(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the table."""
    rows = []
    if report["d"] is not None:
        chosen = "chosen from the features" if report["settings"]["d"] == "auto" else "given"
        paper = ", ".join(f"{name} {value:g}" for name, value in report["d_of_the_paper"].items())
        rows.append(("distance d", f"{report['d']:.3f}", f"{chosen}; the paper: {paper}"))
    if report["oracle"]:
        rows.append(("told", "", f"{report['oracle']}, which nobody knows without labels"))
    if report["levels"]:
        rows.append(("levels", " > ".join(map(str, report["levels"])), "clusters"))
    rows += [(name, str(value), "") for name, value in report["counts"].items()]
    for name, value in (report["quality"] or {}).items():
        rows.append((name.replace("_", " "), share(value) if isinstance(value, float) else str(value), ""))
    return [*rows, ("seconds", f"{report['seconds']:.2f}", "")]
