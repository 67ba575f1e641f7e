"""`visard eval`, `embed`, `cluster`, `export` and `audit`: commands that use a model or its features."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visard.cli import options
from visard.cli.console import bar, list_skipped, mark, say, share, table
from visard.errors import UsageError
from visard.evaluation.metrics import FAR, doubts
from visard.text import size

if TYPE_CHECKING:
    from visard.data.sources.catalog import DataSettings

Rows = list[tuple[str, str, str]]


class Protocol(StrEnum):
    """The protocols of `visard eval`."""

    verification = "verification"
    identification = "identification"
    both = "both"
    lfw = "lfw"
    rfw = "rfw"
    ijb = "ijb"


@options.opens_a_model
def evaluate(
    open_model: options.OpenModel,
    model: Annotated[
        Path | None,
        typer.Argument(help="a .safetensors, .pth, .pt or .onnx model, or features (.npy); with --run: its own"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="a face set: a folder, a name in the data folder, or synthetic")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="a run folder: repeat its test on the people that no client has")
    ] = None,
    protocol: Annotated[Protocol, typer.Option(help="what to test")] = Protocol.both,
    pairs: Annotated[int, typer.Option(help="balanced pairs for the ten-fold accuracy")] = 6000,
    listed: Annotated[
        Path | None, typer.Option("--list", help="your own pairs: a CSV file with file_a,file_b,same")
    ] = None,
    far: Annotated[str, typer.Option(help="false accept rates, separated by commas")] = ",".join(map(str, FAR)),
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="ATTRIBUTE|domain", help="errors of each group at one threshold for all (may repeat)"),
    ] = None,
    fmr: Annotated[
        float, typer.Option(help="with --by: the false match rate over all people that sets the threshold")
    ] = 0.001,
    switches: Annotated[str, typer.Option(help="ijb: keep norms, detector scores, mirror images")] = "N1D1F1",
    seed: Annotated[int, typer.Option(help="of the pairs and of the confidence intervals")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable, with curves")] = False,
) -> None:
    """Test a model on the people of a face set.

    verification and identification work with any set. lfw: ten folds over the pairs of the set (lfw, cfp, agedb
    and other .bin files, or --list). rfw: the same for each of its domains. ijb: templates, 1:1 and 1:N.

    Examples:

      visard eval runs/demo/model.safetensors --data synthetic

      visard eval r50.onnx --data lfw --protocol lfw --input arcface

      visard eval other.onnx --run runs/demo

      visard eval runs/demo/model.safetensors --data data/mine --protocol verification --json

      visard eval r50.onnx --data celeba --input arcface --by Male --by Young --fmr 0.001
    """
    if run is not None and data is None:
        return evaluate_on_run(open_model, model, run, as_json)
    if model is None or data is None or run is not None:
        raise UsageError("give a model and --data DATASET, or --run RUN to test on the held-out people of a run")
    from visard.cli.groups import show_groups
    from visard.config import EvaluationSettings
    from visard.data.sources.catalog import open_faces
    from visard.inference.features import read_features
    from visard.inference.model import evaluate as run_tests
    from visard.inference.model import open_data

    try:
        rates = tuple(float(f) for f in far.split(","))
        settings = EvaluationSettings(pairs=pairs, far=rates, flip=flip, by=tuple(by or ()), fmr=fmr)
    except ValueError:
        what = f"--far {far} --pairs {pairs} --fmr {fmr:g}"
        raise UsageError(f"{what}: rates must be numbers in (0, 1), pairs at least 20") from None
    if model.suffix == ".npy":
        faces = open_data(data)
        tested: Any = read_features(model, faces)
    else:
        tested = open_model(model)
        faces = open_faces(drawn(tested.size)) if data == "synthetic" else open_data(data)  # type: ignore[assignment]
        if not as_json:
            say(f"pictures go in as {tested.contract}")
            view = open_data(faces)
            for line in filter(None, (tested.misaligned(view.faces), tested.resizes(view))):
                mark("note", line)
    protocols = ("verification", "identification") if protocol is Protocol.both else (protocol.value,)
    with nullcontext() if as_json else bar("embedding", 1) as shown:
        result = run_tests(
            tested, faces, protocols=protocols, settings=settings, seed=seed, pairs=listed, switches=switches,
            progress=shown.progress if shown is not None else None,
        )  # fmt: skip
    metrics = result.to_dict()
    if as_json:
        print(json.dumps(metrics, indent=1))
        return
    title = f"{model.name} on {data}"
    if protocol in (Protocol.lfw, Protocol.rfw, Protocol.ijb):
        show = {Protocol.lfw: lfw_rows, Protocol.rfw: rfw_rows, Protocol.ijb: ijb_rows}[protocol]
        table(f"{title}: {protocol.value}", ("metric", "value", "note"), show(metrics[protocol.value]))
    else:
        from visard.runs.evaluation import headline

        rows = [(r["figure"], share(r["value"]), r["interval"]) for r in headline(metrics) if r["value"] is not None]
        table(title, ("metric", "value", "95 % interval"), rows)
    for errors in metrics.get("groups", {}).values():
        show_groups(errors)
    for text in (*doubts(metrics), str(result.left)):
        if text:
            mark("caution", text)


def drawn(side: int, **how: int) -> DataSettings:
    """Synthetic faces of the network's input size, as far as possible: they have 32 to 112 pixels."""
    from visard.data.sources.catalog import DataSettings

    return DataSettings(size=min(112, max(32, side)), **how)


def evaluate_on_run(open_model: options.OpenModel, model: Path | None, run: Path, as_json: bool) -> None:
    """Test a model, by default the run's own, on the people that no client has, with the run's settings."""
    from visard.inference.model import evaluate as run_tests
    from visard.report.run_folder import read_run
    from visard.runs.evaluation import headline, held_out_people, seed_of_test

    settings, views = held_out_people(run)
    file = model or run / "model.safetensors"
    if model is None and not file.is_file():
        raise UsageError(f"no model at {file}: the run is not finished, or has no common model")
    opened, how = open_model(file), settings.evaluation.model_copy(update={"by": ()})
    found = {
        name: run_tests(opened, view, settings=how, seed=seed_of_test(settings, name)).to_dict()
        for name, view in views.items()
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for line in filter(None, {opened.resizes(view) for view in views.values()}):
        mark("note", line)
    own = read_run(run).tests
    for name, metrics in found.items():
        known = {r["figure"]: r["value"] for r in headline(own.get(name, {}))}
        rows = [
            (r["figure"], share(r["value"]), r["interval"], share(known.get(r["figure"])))
            for r in headline(metrics)
            if r["value"] is not None
        ]
        table(f"{file.name} on {name} of {run.name}", ("metric", "value", "95 % interval", "model of the run"), rows)


def lfw_rows(metrics: dict[str, Any]) -> Rows:
    """The lines of a table of ten folds."""
    roc = metrics["roc"]
    rows = [
        ("accuracy", share(metrics["accuracy"]), f"± {share(metrics['accuracy_std'])}, {metrics['pairs']} pairs"),
        (f"TAR, folds at FAR {metrics['far_target']:g}", share(metrics["tar"]), f"FAR {metrics['far']:.2g}"),
    ]
    rows += [(f"TAR at FAR {p['far']:g}", share(p["tar"]), _doubt(p)) for p in roc["tar"]]
    return [*rows, ("EER", share(roc["eer"]), ""), ("AUC", share(roc["auc"]), "")]


def rfw_rows(metrics: dict[str, Any]) -> Rows:
    """The lines of a table of groups."""
    rows = [
        (f"accuracy {name}", share(group["accuracy"]), f"± {share(group['accuracy_std'])}, {group['pairs']} pairs")
        for name, group in metrics["groups"].items()
    ]
    rows += [
        ("mean", share(metrics["mean"]), ""),
        ("standard deviation", share(metrics["std"]), "over groups"),
        ("skewed error ratio", share(metrics["skewed_error_ratio"]), "largest error / smallest error"),
    ]
    for point in metrics["shared"]:
        for name, rate in point["fmr"].items():
            text = f"FNMR {share(point['fnmr'][name])}, threshold {share(point['threshold'])}"
            rows.append((f"FMR {name} (all: {point['fmr_target']:g})", share(rate), text))
    return rows


def ijb_rows(metrics: dict[str, Any]) -> Rows:
    """The lines of a table of templates."""
    on = "".join(f"{name}{int(value)}" for name, value in metrics["switches"].items())
    rows = [
        (name, share(value), f"± {share(metrics['std'][name])}" if metrics["std"][name] is not None else on)
        for name, value in metrics["mean"].items()
    ]
    for old in [search["legacy"] for search in metrics["identification"][:1] if search["legacy"]]:
        rows += [(f"tpir@fpir={p['fpir']:g}", share(p["tpir"]), old["rule"]) for p in old["tpir"]]
    return rows


def _doubt(point: dict[str, Any]) -> str:
    return "fewer than ten impostors" if point["unreliable"] else ""


@options.opens_a_model
def embed(
    open_model: options.OpenModel,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET|FOLDER|FILE...",
            help="a face set (folder or name), a folder or zip of photographs, picture files, or an array (.npy)",
        ),
    ],
    model: Annotated[Path, typer.Option(help="a .safetensors, .pth, .pt or .onnx model")],
    out: Annotated[Path, typer.Option(help="the .npy file to write; a .json manifest goes beside it")],
    align: Annotated[
        str | None,
        typer.Option(
            help="photographs: five (by the landmarks of the face), none (centre) or haar (default: as the model)"
        ),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    unit: Annotated[bool, typer.Option("--unit", help="scale each feature to length one")] = False,
) -> None:
    """Write the features of pictures, one row each, in the order of the set, the file names or the arguments.

    The manifest has the fingerprint of the model, its input settings, and for each row the identity (face sets) or the
    file (photographs). Photographs without a face and unreadable files are skipped and listed.

    Examples:

      visard embed data/mine --model runs/demo/model.safetensors --out features.npy

      visard embed photos --model MobileFaceNet.onnx --input imagenet --out features.npy

      visard embed ann.jpg bob.jpg --model runs/demo/model.safetensors --out two.npy
    """
    from visard.inference.features import manifest_path, write_features

    loaded = open_model(model)
    with bar("embedding", 1) as shown:
        manifest = write_features(
            loaded, source if len(source) > 1 else source[0], out, align=align, flip=flip, unit=unit, say=say,
            progress=shown.progress,
        )  # fmt: skip
    list_skipped([(file, reason) for file, reason in manifest["data"].get("skipped", ())])
    say(f"{manifest['rows']} x {manifest['dimensions']} features: {out} and {manifest_path(out).name}")


class Between(StrEnum):
    """Distances between centroids."""

    euclidean = "euclidean"
    chord = "chord"
    cosine = "cosine"


@options.opens_a_model
def cluster(
    open_model: options.OpenModel,
    source: Annotated[str, typer.Argument(metavar="FEATURES_OR_DATASET", help="a .npy file, or a face set")],
    method: Annotated[str, typer.Option(help="how to cluster: cfinch, finch, kmeans, dbscan, or a plug-in")] = "cfinch",
    model: Annotated[Path | None, typer.Option(help="the model that embeds the pictures of a face set")] = None,
    out: Annotated[Path, typer.Option(help="the .csv file to write; a .json report goes beside it")] = Path(
        "labels.csv"
    ),
    d: Annotated[
        str, typer.Option("--d", help="cfinch, dbscan: the distance; auto or stable: chosen from the features")
    ] = "auto",
    metric: Annotated[Between, typer.Option(help="cfinch, finch: distance between centroids")] = Between.chord,
    centre: Annotated[bool, typer.Option(help="subtract the mean feature first")] = True,
    min_size: Annotated[int, typer.Option(help="pictures of smaller clusters get no label")] = 1,
    partition: Annotated[int, typer.Option(help="finch: 0 = the finest partition, -1 or beyond: the coarsest")] = 0,
    clusters: Annotated[int, typer.Option(help="kmeans: number of clusters; 0 = the number of people")] = 0,
    min_samples: Annotated[int, typer.Option(help="dbscan: pictures that make a core")] = 2,
    seed: Annotated[int, typer.Option(help="kmeans")] = 0,
    min_quality: Annotated[float, typer.Option(help="pictures of less quality, 0 to 1, get no label")] = 0.0,
    min_separation: Annotated[
        float, typer.Option(help="pictures that are nearly as close to another group get no label")
    ] = -1.0,
    apart: Annotated[float, typer.Option(help="cfinch: distance added between faces of one photograph")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Group unlabelled pictures by person: one label each, and how good the labels are where people are known.

    Examples:

      visard cluster features.npy

      visard cluster data/mine --model runs/demo/model.safetensors --method finch --partition 1 --out labels.csv

      visard cluster data/parties --model runs/demo/model.safetensors --apart 0.5 --min-quality 0.6
    """
    from visard.clustering.cluster import Clustering
    from visard.config import checked
    from visard.inference.features import check_out, label, read_vectors, vectors_of, write_labels

    try:
        distance = d if d in ("auto", "stable") else float(d)
    except ValueError:
        raise UsageError(f"--d {d}: must be a number, auto or stable") from None
    given = {
        "method": method, "metric": metric.value, "d": distance, "centre": centre, "min_size": min_size,
        "partition": partition, "clusters": clusters, "min_samples": min_samples, "seed": seed,
        "min_quality": min_quality, "min_separation": min_separation, "apart": apart,
    }  # fmt: skip
    settings = checked(Clustering, given, "", "visard cluster")
    check_out(out, source)
    if source.endswith(".npy"):
        vectors = read_vectors(Path(source))
    elif model is None:
        raise UsageError(f"{source} is no .npy file: a face set needs --model")
    else:
        from visard.inference.model import open_data

        view = open_data(source)
        loaded = open_model(model)
        with bar("embedding", len(view)) as shown:
            vectors = vectors_of(loaded.embed(view, say=say, progress=shown.progress).features, view)
    found, report = label(vectors, settings)
    beside = write_labels(out, found, vectors, report)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    table(f"{method} of {source}", ("metric", "value", "note"), rows_of(report), text=1)
    say(f"labels: {out} and {beside.name}")


def rows_of(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the table."""
    rows = []
    if report["d"] is not None:
        chosen = "chosen from the features" if report["settings"]["d"] in ("auto", "stable") else "given"
        rows.append(("distance d", f"{report['d']:.3f}", chosen))
    if report["oracle"]:
        rows.append(("given", "", f"{report['oracle']}, which is unknown without labels"))
    if report["levels"]:
        rows.append(("levels", " > ".join(map(str, report["levels"])), "clusters"))
    rows += [(name, str(value), "") for name, value in report["counts"].items()]
    for name, value in (report["quality"] or {}).items():
        rows.append((name.replace("_", " "), share(value) if isinstance(value, float) else str(value), ""))
    return [*rows, ("seconds", f"{report['seconds']:.2f}", "")]


@options.opens_a_model
def export(
    open_model: options.OpenModel,
    model: Annotated[Path, typer.Argument(help="a .safetensors, .pth or .pt model (with --int8 also .onnx)")],
    onnx: Annotated[Path, typer.Option(help="the file to write")],
    int8: Annotated[
        bool, typer.Option("--int8", help="8-bit integers; the loss of accuracy is measured and shown")
    ] = False,
    data: Annotated[str, typer.Option(help="int8: the face set that the loss is measured on")] = "synthetic",
    static: Annotated[
        bool, typer.Option("--static", help="int8: fix ranges on every second person of --data (faster)")
    ] = False,
    fixed_batch: Annotated[bool, typer.Option("--batch-1", help="one picture at a time, for simple runtimes")] = False,
    opset: Annotated[int, typer.Option(help="version of the operators")] = 18,
) -> None:
    """Write a model as ONNX, checked against PyTorch on random pictures.

    Input "pictures" (batch, 3, size, size), output "features". Size, order, mean and std are in the metadata.

    Examples:

      visard export runs/demo/model.safetensors --onnx model.onnx

      visard export runs/demo/model.safetensors --onnx small.onnx --int8 --data data/mine
    """
    from visard.data.sources.catalog import open_faces
    from visard.inference.export import export as write
    from visard.inference.model import open_data

    if onnx.suffix != ".onnx":
        raise UsageError(f"{onnx}: the name must end in .onnx")
    if static and data == "synthetic":
        raise UsageError("--static needs --data: its ranges are found on pictures like those to come")
    loaded = open_model(model)
    faces = None
    if int8:
        small = drawn(loaded.size, identities=50, images_per_identity=8)
        faces = open_faces(small) if data == "synthetic" else open_data(data)
    made, loss = write(
        loaded, onnx, int8=int8, data=faces, static=static, dynamic_batch=not fixed_batch, opset=opset
    )  # fmt: skip
    say(f"{made.path}: {size(made.bytes)}")
    if loss is None:
        say(f"largest difference from PyTorch: {made.difference:.1e}")
        return
    rows = [(k, share(v), share(loss.after[k])) for k, v in loss.before.items() if v is not None]
    table(f"On {loss.pictures} pictures of {data}", ("metric", "before", "int8"), rows)
    say(f"mean cosine of features before and after: {loss.cosine:.4f}")


SOME = 10.0  # an epsilon above this is no protection


class Audit(StrEnum):
    """The methods that can be audited."""

    encrypted_mmd = "encrypted-mmd"


def audit(
    method: Annotated[Audit, typer.Argument(help="the method to attack")],
    samples: Annotated[int, typer.Option(help="n, of a batch")] = 64,
    length: Annotated[int, typer.Option(help="L, of a feature")] = 16,
    peers: Annotated[int, typer.Option(help="parties whose replies are summed")] = 1,
    noise: Annotated[float, typer.Option(help="method.noise")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the random features")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Attack a method on random features and report what leaks: encryption does not hide what a result implies.

    Examples:

      visard audit encrypted-mmd

      visard audit encrypted-mmd --samples 64 --length 128

      visard audit encrypted-mmd --peers 3 --noise 5
    """
    from visard.crypto.audit import audit as attack

    report = attack(samples, length, peers, noise, seed)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    title = f"From what it decrypts for one batch (n = {samples}, L = {length}), a party computes of {peers} other(s)"
    table(title, ("what", "dimensions determined", "relative error of the guess"), lines(report))
    say(verdict(report))


def lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of the table."""
    rows = {
        "mean feature of the nearest single party": ("the_mean", "a_peer_s_mean"),
        "mean feature, average over the parties": ("the_mean", "the_average_mean"),
        "second moments, average over the parties": ("the_second_moments", "the_second_moments"),
    }
    return [
        (words, _percent(report[f"determined_of_{share}"]), f"{report[f'error_of_{error}']:.2g}")
        for words, (share, error) in rows.items()
    ]


def verdict(report: dict[str, Any]) -> str:
    """The conclusion in one sentence."""
    eps, mean, second = (
        report[k] for k in ("epsilon_of_one_batch", "determined_of_the_mean", "determined_of_the_second_moments")
    )
    if eps is not None:
        words = "" if eps <= SOME else ", which is hardly any protection"
        return f"The noise makes one batch, for a given network, ({eps:.2g}, 1e-5)-differentially private{words}."
    if second < 1:
        of = " of the average over the parties" if report["peers"] > 1 else ""
        return f"{_percent(mean)} of the mean and {_percent(second)} of the second moments{of} are revealed."
    if report["peers"] > 1:
        return "The average over the parties is revealed exactly; the parts of single parties are not."
    return "The moments are revealed exactly: use more peers with method.sums, method.noise, or n well below L."


def _percent(share: float) -> str:
    """In per cent, rounded down: 100 % means all of it."""
    return f"{math.floor(100 * share)} %"
