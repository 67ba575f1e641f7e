"""`visard models`: keep recognisers under names, list where networks can be cut, fetch files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from visard import downloads
from visard.cli import options
from visard.cli.console import say, table
from visard.errors import UsageError, VisardError
from visard.files import file_digest
from visard.text import size
from visard.text import size as size_text

ENDINGS = (".safetensors", ".pth", ".pt", ".onnx")
app = typer.Typer(
    no_args_is_help=True,
    help="Keep recognisers under names, list where networks can be cut, fetch files.",
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


@app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="an .onnx recogniser, .pth, .pt or .safetensors weights")],
    name: Annotated[str, typer.Option(help="the name to keep it under")],
    input: Annotated[
        str | None,
        typer.Option(help="how pictures go in: arcface, cosface, facenet, imagenet, raw, or MEAN,STD of 0..255"),
    ] = None,
    size: Annotated[int | None, typer.Option(help="side of its pictures, where the file leaves it open")] = None,
    bgr: Annotated[bool, typer.Option("--bgr", help="blue comes first")] = False,
    align: Annotated[
        str | None,
        typer.Option(
            help="how faces must be cropped: five (points), haar or none (default: as the file says, or five)"
        ),
    ] = None,
    licence: Annotated[str, typer.Option(help="a note on its licence")] = "",
    network: Annotated[str | None, typer.Option(help="package.module:factory, for weights of your own network")] = None,
    plugin: options.Plugin = None,
) -> None:
    """Keep a recogniser under a name, with its input, its output and its licence.

    The name can then replace the file in eval, embed, enroll, export, adapt and run --set model.weights=NAME.
    A file that visard can read but not train is kept too, and a line says why it cannot be trained.

    Examples:

      visard models add w600k_mbf.onnx --name mbf --input arcface --licence "non-commercial research"

      visard models add MobileFaceNet.onnx --name foamliu --input imagenet --licence Apache-2.0

      visard models add mine.onnx --name mine --input 127.5,128 --size 112 --bgr
    """
    from visard.inference.model import FaceModel
    from visard.models import catalogue
    from visard.models.files import open_model, start

    options.load_plugins(plugin)
    if not catalogue.NAME.fullmatch(name) or name.lower().endswith(ENDINGS) or len(licence) > 500:
        raise UsageError(f"--name {name}: letters, digits and _-. (up to 64), and no file ending")
    if align not in (None, "five", "haar", "none"):
        raise UsageError(f"--align {align}: must be five, haar or none")
    kind, mean, std = _input(input)
    made, spec = open_model(
        file, name=kind, size=size, order="bgr" if bgr else None, mean=mean, std=std, network=network
    )  # fmt: skip
    kept = {key: spec.get(key, "") for key in ("model", "embedding", "size", "order", "mean", "std")}
    entry = catalogue.Entry(
        name, f"model{file.suffix.lower()}", file_digest(file), **kept,
        align=align or FaceModel(made, spec).align, licence=licence or spec.get("licence", ""),
    )  # fmt: skip
    catalogue.add(file, entry)
    say(f"{name}: {FaceModel(made, spec | entry.contract).contract}")
    try:
        spec, weights = start(name, entry.model, None, int(entry.size))
        say(f"it trains: {sum(w.numel() for w in weights.values()):,} numbers (visard models cuts {name})")
    except VisardError as error:
        say(f"it can be used, but not trained: {error}")


def _input(text: str | None) -> tuple[str | None, str | None, str | None]:
    """A preset, or mean and deviation of pixels in 0..255: two numbers, or six."""
    if text is None or not text[:1].isdigit():
        return text, None, None
    try:
        values = [float(v) / 255 for v in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (2, 6):
        raise UsageError(f"--input {text}: give a name, MEAN,STD, or three means and three deviations")
    half = len(values) // 2
    mean, std = (",".join(f"{v:.10g}" for v in part) for part in (values[:half], values[half:]))
    return None, mean, std


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False) -> None:
    """List the recognisers that are kept, with their input and licence.

    Example: visard models list
    """
    from visard.data.pictures import CUTS
    from visard.models import catalogue
    from visard.models.inputs import Inputs, preset_of, words

    found = catalogue.entries()
    if as_json:
        print(json.dumps([dataclasses.asdict(entry) for entry in found], indent=1))
        return
    if not found:
        say(f"no models in {catalogue.folder()} (visard models add FILE --name N)")
        return
    rows = []
    for entry in found:
        taken = Inputs.of_spec(entry.contract, entry.name)
        pictures = f"{entry.size} {entry.order}, {CUTS.get(entry.align, entry.align)}"
        how = preset_of(taken) or words(taken)
        rows.append((entry.name, entry.model, pictures, how, entry.embedding, entry.licence))
    columns = ("name", "network", "pictures", "input", "numbers", "licence")
    table(f"Models in {catalogue.folder()}", columns, rows, text=4)


@app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="as visard models list shows it")]) -> None:
    """Remove a recogniser from the cache.

    Example: visard models remove mbf
    """
    from visard.models import catalogue

    catalogue.remove(name)
    say(f"removed {name}")


@app.command("cuts")
def list_cuts(
    name: Annotated[str, typer.Argument(help="a network, as model.name has it, or a model file or its name")],
    size: Annotated[
        int | None, typer.Option(help="side of its pictures (112); for sensor networks the length of a row")
    ] = None,
    embedding: Annotated[int | None, typer.Option(help="length of its features (default: its own)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    plugin: options.Plugin = None,
) -> None:
    """List where a network can be cut: model.train = "from:LAYER" trains from there on and freezes the rest.

    Examples:

      visard models cuts mobilefacenet --embedding 128

      visard models cuts w600k_mbf.onnx
    """
    from visard.models import SENSORS, build, build_spec
    from visard.models.catalogue import locate
    from visard.models.cut import choose, cuts
    from visard.models.files import start
    from visard.models.sensors import SIDE

    options.load_plugins(plugin)
    if name.lower().endswith(ENDINGS) or locate(name)[1] is not None:
        spec, _ = start(name, "tiny", embedding, size or 112, check=False)
        network, size, name = build_spec(spec), int(spec["size"]), Path(name).name
    else:
        size = size or 112
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
