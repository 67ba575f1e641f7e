"""`visard enroll | identify | verify`, and `visard gallery`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from visard.cli import options
from visard.cli.console import bar, list_skipped, say, table
from visard.errors import UsageError
from visard.text import plural

if TYPE_CHECKING:
    from visard.inference.gallery import Threshold

Model = Annotated[Path | None, typer.Option(help="the model (default: the model of the gallery)")]
Far = Annotated[float, typer.Option(help="share of comparisons with strangers that may reach the threshold")]
Given = Annotated[float | None, typer.Option("--threshold", help="accept scores from this value on, instead of a rate")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable")]


@options.opens_a_model
def enroll(
    open_model: options.OpenModel,
    folder: Annotated[Path, typer.Argument(help="a folder for each person, or pictures anna_1.jpg, anna_2.jpg")],
    model: Annotated[Path, typer.Option(help="a .safetensors, .pth, .pt or .onnx model")],
    gallery: Annotated[Path, typer.Option(help="the file to write")],
    add: Annotated[bool, typer.Option("--add", help="add people to an existing gallery")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing gallery")] = False,
    align: Annotated[
        str | None,
        typer.Option(
            help="five (by the landmarks of the face), none (the centre square) or haar (default: as the model)"
        ),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="add the features of the mirrored picture")] = False,
    min_norm: Annotated[
        float, typer.Option(help="leave out pictures with a shorter feature, in which the network recognises little")
    ] = 0.0,
    encrypt_with: options.EncryptWith = None,
) -> None:
    """Enrol the people of a folder in a gallery, to find them later. Unreadable pictures are skipped and listed.

    Examples:

      visard enroll photos --model runs/demo/model.safetensors --gallery staff.gallery

      visard enroll photos --model MobileFaceNet.onnx --input imagenet --gallery staff.gallery --min-norm 13
    """
    from visard.at_rest import Key
    from visard.inference.gallery import Gallery, enrol_folder

    key = Key.load(encrypt_with)
    if gallery.exists() and not add and not overwrite:
        raise UsageError(f"{gallery} exists: use --add to add people, --overwrite to replace it")
    if gallery.exists():
        before = Gallery.load(gallery, key)  # never overwrite what is no gallery
    elif add:
        raise UsageError(f"no gallery at {gallery} to add people to")
    loaded = open_model(model)
    with bar("enrolling", 1) as shown:
        made, skipped = enrol_folder(
            folder, loaded, align=align, flip=flip, min_norm=min_norm, say=say, progress=shown.progress
        )
    whole = before.with_more(made) if add else made
    whole.save(gallery, key)
    list_skipped(skipped)
    pictures, people = plural(int(made.pictures.sum()), "picture"), plural(len(made), "person", "people")
    say(f"{pictures} of {people}; the gallery has {len(whole)}: {gallery}")


def identify(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="one picture or more")],
    gallery: Annotated[Path, typer.Option(help="the file that visard enroll wrote")],
    model: Model = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="how many people to list")] = 5,
    far: Far = 0.001,
    fpir: Annotated[
        float | None, typer.Option(help="share of searches for strangers that may return a name, instead of --far")
    ] = None,
    threshold: Given = None,
    encrypt_with: options.EncryptWith = None,
    plugin: options.Plugin = None,
    device: options.Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find who is in a picture: the most similar people of a gallery, and whether the score reaches the threshold.

    The threshold comes from the gallery's own pictures, each compared with the other people enrolled.

    Example: visard identify photos/person-3/0.png --gallery staff.gallery
    """
    from visard.at_rest import Key
    from visard.inference.gallery import Gallery, features_of
    from visard.numerics import compute_on

    options.load_plugins(plugin)
    compute_on(device)
    known = Gallery.load(gallery, Key.load(encrypt_with))
    if threshold is not None:
        limit = _given(threshold)
    else:
        limit = known.comparison_threshold(far) if fpir is None else known.search_threshold(fpir)
    align, flip = known.about["align"], known.about["flip"] == "1"
    features = features_of(images, known.load_model(model), align=align, flip=flip, say=_quiet if as_json else say)
    found = known.identify(features, top)
    if as_json:
        answer = [
            {
                "image": str(image),
                "person": matches[0].name if matches[0].score >= limit.value else None,
                "matches": [{"person": m.name, "score": m.score} for m in matches],
            }
            for image, matches in zip(images, found, strict=True)
        ]
        print(json.dumps({"threshold": limit._asdict(), "images": answer}, indent=1))
        return
    for image, matches in zip(images, found, strict=True):
        rows = [(m.name, f"{m.score:.4f}", "yes" if m.score >= limit.value else "no") for m in matches]
        table(str(image), ("person", "score", "accepted"), rows)
    _say(limit)


def _quiet(text: str) -> None:
    """In the place of `say`, where only JSON is wanted."""


@options.opens_a_model
def verify(
    open_model: options.OpenModel,
    a: Annotated[Path, typer.Argument(help="a picture")],
    b: Annotated[Path, typer.Argument(help="another picture")],
    model: Model = None,
    gallery: Annotated[Path | None, typer.Option(help="a gallery from which to compute the threshold")] = None,
    far: Far = 0.001,
    threshold: Given = None,
    encrypt_with: options.EncryptWith = None,
    as_json: AsJson = False,
) -> None:
    """Compare two pictures: the cosine of their features, and whether it reaches the threshold for one person.

    Example: visard verify a.png b.png --model runs/demo/model.safetensors --threshold 0.4
    """
    from visard.at_rest import Key
    from visard.evaluation.arrays import unit_rows
    from visard.inference.gallery import Gallery, features_of

    if gallery is None and model is None:
        raise UsageError("name a model (--model) or a gallery (--gallery)")
    align, flip = None, False
    limit = None if threshold is None else _given(threshold)
    if gallery is not None:
        known = Gallery.load(gallery, Key.load(encrypt_with))
        align, flip = known.about["align"], known.about["flip"] == "1"
        limit = limit or known.pair_threshold(far)
        loaded = known.load_model(model)
    else:
        assert model is not None
        loaded = open_model(model)
    one, two = unit_rows(features_of([a, b], loaded, align=align, flip=flip, say=_quiet if as_json else say)).astype(
        "float64"
    )
    score = float(one @ two)
    same = None if limit is None else score >= limit.value
    if as_json:
        threshold_used = limit._asdict() if limit else None
        print(json.dumps({"score": score, "same": same, "threshold": threshold_used}, indent=1))
        return
    verdict = {None: "", True: "the same person", False: "different people"}[same]
    say(f"score {score:.4f} {verdict}".rstrip())
    if limit is None:
        say("no decision without a threshold: --threshold, or --gallery and --far")
    else:
        _say(limit)


app = typer.Typer(help="List or remove the people of a gallery, or encrypt it.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="the file that visard enroll wrote")]


@app.command("list")
def list_people(gallery: File, encrypt_with: options.EncryptWith = None, as_json: AsJson = False) -> None:
    """List who is enrolled, and with how many pictures.

    Example: visard gallery list staff.gallery
    """
    from visard.at_rest import Key
    from visard.inference.gallery import Gallery

    known = Gallery.load(gallery, Key.load(encrypt_with))
    people = list(zip(known.names, known.pictures.tolist(), strict=True))
    if as_json:
        print(json.dumps([{"person": name, "pictures": count} for name, count in people], indent=1))
        return
    table(str(gallery), ("person", "pictures"), [(name, str(count)) for name, count in people])


@app.command("remove")
def remove(
    gallery: File,
    people: Annotated[list[str], typer.Argument(metavar="PERSON...", help="the people to remove")],
    receipt: options.ReceiptFile = None,
    case: options.Case = "",
    encrypt_with: options.EncryptWith = None,
) -> None:
    """Remove people from a gallery completely. A receipt without names says what was removed.

    Example: visard gallery remove staff.gallery anna
    """
    from visard.at_rest import Key
    from visard.data.removal import Receipt, receipt_path
    from visard.inference.gallery import remove_people

    wanted = tuple(dict.fromkeys(people))
    made = Receipt(receipt or receipt_path(gallery), "gallery", gallery.name, wanted, case)
    left = remove_people(gallery, wanted, made, Key.load(encrypt_with))
    say(f"{len(wanted)} removed; the gallery has {left}: {gallery}")
    options.show_receipt(made)


@app.command("encrypt")
def encrypt(
    gallery: File,
    encrypt_with: Annotated[Path, typer.Option("--encrypt-with", metavar="KEYFILE", help="the key (visard keys file)")],
) -> None:
    """Encrypt an existing gallery; the unencrypted file is replaced.

    Example: visard gallery encrypt staff.gallery --encrypt-with my.key
    """
    from visard.at_rest import Key
    from visard.inference.gallery import Gallery

    key = Key.load(encrypt_with)
    Gallery.load(gallery).save(gallery, key)
    say(f"encrypted with {encrypt_with}, without which it is lost: {gallery}")


def _given(value: float) -> Threshold:
    from visard.inference.gallery import Threshold

    if not -1 <= value <= 1:
        raise UsageError(f"threshold {value}: a score lies between -1 and 1")
    return Threshold(value, None, 0, False)


def _say(limit: Threshold) -> None:
    text = f"threshold {limit.value:.4f}"
    if limit.comparisons:
        text += f", reached by at most {limit.rate:g} of {limit.comparisons} comparisons with strangers"
    if limit.unreliable:
        text += " (too few for this rate: enrol more people, or allow a larger one)"
    say(text)
