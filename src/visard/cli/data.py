"""`visard data make | import | export | merge | list | show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from visard.cli import options
from visard.cli.console import bar, list_skipped, mark, say, table
from visard.data.faces import FaceSet, describe, list_sets
from visard.data.sensors import READERS, import_readings
from visard.data.sources import SOURCES
from visard.data.sources.catalog import data_folder, export, find_set
from visard.data.sources.importing import import_faces
from visard.data.synthetic.sets import SyntheticSpec, make
from visard.errors import UsageError
from visard.files import whole
from visard.report.html import contact_sheet
from visard.text import plural
from visard.text import size as size_of

app = typer.Typer(help="Make, import and look at face sets.", no_args_is_help=True)
cache = typer.Typer(help="Stored activations of the frozen parts of networks (model.train).", no_args_is_help=True)
app.add_typer(cache, name="cache")

Out = Annotated[Path | None, typer.Option(help="the folder to write (default: a folder in the data folder)")]


@app.command("make")
def make_set(
    identities: Annotated[int, typer.Option(help="how many people")] = 200,
    images: Annotated[int, typer.Option(help="pictures of each")] = 20,
    size: Annotated[int, typer.Option(help="pixels of a side, 32 to 112 (photographs are imported at 112)")] = 64,
    domains: Annotated[str, typer.Option(help="populations, separated by commas")] = "north",
    seed: Annotated[int, typer.Option(help="the same seed gives the same pixels")] = 0,
    out: Out = None,
) -> None:
    """Draw synthetic faces. No picture of a real person is involved.

    Example: visard data make --identities 500 --domains north,south --out faces
    """
    spec = SyntheticSpec(identities, images, size, tuple(domains.split(",")), seed)
    folder = out or data_folder() / f"synthetic-{identities}x{images}-{size}-{domains.replace(',', '+')}-{seed}"
    with bar("drawing faces", identities * images) as shown:
        made = make(spec, folder, progress=shown.update)
    say(f"face set: {made}")


@app.command("import")
def import_set(
    kind: Annotated[str, typer.Argument(help=", ".join([*SOURCES, *READERS]))],
    source: Annotated[Path, typer.Argument(help="the file, or the folder with the files")],
    out: Out = None,
    size: Annotated[
        int | None,
        typer.Option(help="pixels of a side (default: 112, as face networks take them)", show_default=False),
    ] = None,
    min_images: Annotated[int, typer.Option(help="leave out people with fewer pictures")] = 1,
    limit: Annotated[int | None, typer.Option(help="the largest number of people")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing set")] = False,
    align: Annotated[
        str | None,
        typer.Option(help="none, five, landmarks or haar (default: what suits the source)", show_default=False),
    ] = None,
    detector: Annotated[str | None, typer.Option(help="five: yunet, mtcnn, or a YuNet or SCRFD file")] = None,
    every_face: Annotated[
        bool, typer.Option("--every-face", help="five: all faces of a picture, not only the main one")
    ] = False,
    min_quality: Annotated[float, typer.Option(help="five: leave out faces of less quality, 0 to 1")] = 0.0,
    cascade: Annotated[Path | None, typer.Option(help="haar: another of the cascades of OpenCV")] = None,
    crop: Annotated[int | None, typer.Option(help="celeba, folder, lfw: centre square to keep, in pixels")] = None,
    domains: Annotated[bool, typer.Option("--domains", help="folder: the outer folders are domains")] = False,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="folder: ignore the folders, the pictures have no labels")
    ] = False,
    landmarks: Annotated[Path | None, typer.Option(help="folder, lfw: lines 'file x y x y x y x y x y'")] = None,
    pairs: Annotated[Path | None, typer.Option(help="folder: file_a,file_b,same as CSV; lfw: pairs.txt")] = None,
    image: Annotated[str | None, typer.Option(help="parquet: column of pictures; webdataset: ending")] = None,
    label: Annotated[str | None, typer.Option(help="parquet: column of people; webdataset: ending")] = None,
    split: Annotated[str | None, typer.Option(help="parquet: only the files of this split")] = None,
    by: Annotated[
        str | None, typer.Option(help="widar: domains are by user (of a room), orientation, location or room")
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Import pictures into a face set. Unreadable pictures are skipped, counted and listed.

    Examples:

      visard data import celeba downloads/celeba

      visard data import folder photos --out data/staff

      visard data import bin lfw.bin --out lfw

      visard data import widar downloads/widar3 --by orientation --out widar-orientation
    """
    options.load_plugins(plugin)
    folder = out or data_folder() / (kind if kind != "folder" else source.resolve().name)
    if kind in READERS or by is not None:
        path, count = import_readings(kind, source, folder, overwrite, by)
        say(f"{count} rows of readings: {path}")
        return
    given: dict[str, Any] = {"crop": crop, "domains": domains or None, "landmarks": landmarks, "pairs": pairs}
    given |= {"unlabelled": unlabelled or None, "image": image, "label": label, "split": split}
    with bar(f"importing {kind}", 1) as shown:
        report = import_faces(
            kind, source, folder, size=size, min_images=min_images, limit_identities=limit, align=align,
            detector=detector, every_face=every_face, min_quality=min_quality, cascade=cascade, say=say,
            progress=shown.progress, overwrite=overwrite,
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
    if overwrite:
        from visard.data.activations import forget

        forget(folder)  # of the pictures that were here before
    faces = FaceSet.open(report.path)
    if faces.unlabelled.any():
        say(f"{report.pictures} pictures without labels: there is no folder for each person")
    else:
        people = plural(report.identities, "person", "people")
        say(f"{plural(report.pictures, 'picture')} of {people}, {faces.size} x {faces.size} pixels")
    list_skipped(report.skipped)
    if pairs_kept := whole(faces.info.get("pairs")):
        say(f"{plural(pairs_kept, 'pair')} to compare")
    elif kind == "lfw" and not faces.info.get("pairs_dropped"):
        mark("caution", f"no pairs.txt in {source} or beside it: visard eval --protocol lfw needs pairs (--pairs FILE)")
    say(f"face set: {report.path}")


@app.command("export")
def export_set(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="a folder, or a name in the data folder")],
    file: Annotated[Path, typer.Argument(help="the file to write: .bin (pairs) or .rec (all pictures, with .idx)")],
    pairs: Annotated[int, typer.Option(help=".bin of a set without pairs: how many to draw")] = 6000,
    seed: Annotated[int, typer.Option(help="the same seed draws the same pairs")] = 0,
) -> None:
    """Write a face set as a verification set (.bin) or training set (.rec and .idx) for other tools.

    Example: visard data export faces faces.bin --pairs 600
    """
    count = export(FaceSet.open(find_set(name)), file, pairs=pairs, seed=seed)
    say(f"{count} pictures in {file}")


@app.command("merge")
def merge_sets(
    names: Annotated[list[str], typer.Argument(metavar="DATASET...", help="folders, or names in the data folder")],
    out: Annotated[Path, typer.Option(help="the folder to write")],
    same_names: Annotated[
        bool, typer.Option("--same-names", help="people with the same name in two sets are one person")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing set")] = False,
) -> None:
    """Merge several face sets; each becomes a domain of the new set. A run can also take several sets (--data).

    People of the same name in two sets are different, unless --same-names. Pictures get the size of the largest ones.

    Example: visard data merge hospital campus --out both
    """
    from visard.data.activations import forget
    from visard.data.joined import Joined, merge
    from visard.data.sources.catalog import SetSettings, members

    joined = Joined(members([SetSettings(path=name) for name in names]), same_names)
    if doubt := joined.cut_differently():
        mark("caution", doubt)
    with bar("merging", len(joined)) as shown:
        made = merge(joined, out, overwrite, shown.progress)
    if overwrite:
        forget(out)  # of the pictures that were here before
    people, domains = plural(len(joined.names), "person", "people"), plural(len(joined.domains), "domain")
    say(f"{plural(len(joined), 'picture')} of {people} in {domains}")
    say(f"face set: {made}")


@app.command("list")
def list_all(
    folder: Annotated[Path | None, typer.Argument(help="where to look (default: the data folder)")] = None,
) -> None:
    """List the face sets in a folder.

    Example: visard data list
    """
    where = folder or data_folder()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    sets = [describe(FaceSet.open(path)) for path in list_sets(where)]
    if not sets:
        say(f"no face sets in {where} (make one: visard data make)")
        return
    rows = [(Path(s["path"]).name, s["kind"], s["pictures"], s["identities"], s["size"]) for s in sets]
    table(f"Face sets in {where}", ("name", "kind", "pictures", "people", "size"), rows)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="a folder, or a name in the data folder")],
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    sheet: Annotated[Path | None, typer.Option(help="write a contact sheet (PNG) of some pictures")] = None,
) -> None:
    """Describe a face set, and draw a contact sheet of it.

    Example: visard data show faces --sheet faces.png
    """
    faces = FaceSet.open(find_set(name))
    about = describe(faces)
    if as_json:
        print(json.dumps(about, indent=1))
    else:
        least, median, most = about.pop("pictures_per_identity")
        about |= {"pictures of a person": f"{least} to {most}, median {median:g}", "domains": ", ".join(faces.domains)}
        table(str(name), ("what", "value"), list(about.items()))
    if sheet is not None:
        step = max(1, len(faces) // 60)
        Image.fromarray(contact_sheet(faces.pixels[::step][:60])).save(sheet, format="PNG")
        say(f"contact sheet: {sheet}")


@app.command("remove")
def remove_people_of(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="a folder, or a name in the data folder")],
    people: Annotated[list[str], typer.Argument(metavar="PERSON...", help="the people to remove")],
    runs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="also remove what the runs in this folder keep of them, except models"),
    ] = None,
    receipt: options.ReceiptFile = None,
    case: options.Case = "",
) -> None:
    """Take people out of a face set: pictures, landmarks, quality, pairs, lists of files and stored activations.

    A receipt without names says what was found and removed. Copies, backups and trained models are not changed.

    Example: visard data remove faces north-00003 --runs runs
    """
    from visard.data.removal import Receipt, receipt_path, remove_people
    from visard.runs.replay import forget_rows

    folder = find_set(name).resolve()
    wanted = tuple(dict.fromkeys(people))
    made = Receipt(receipt or receipt_path(folder), "face set", folder.name, wanted, case)
    with bar("writing the face set", 1) as shown:
        also = None if runs is None else lambda faces, rows: forget_rows(runs, faces, rows, made)
        remove_people(folder, wanted, made, also, shown.progress)
    options.show_receipt(made)


@cache.command("list")
def list_stores() -> None:
    """List stored activations. Those whose face set is gone or has other pictures now are removed first.

    Example: visard data cache list
    """
    from visard.data.activations import activations_folder, entries, sweep

    sweep(activations_folder())
    found = entries()
    if not found:
        say(f"no activations in {activations_folder()} (runs with model.train keep some)")
        return
    rows = [
        (e.folder.name[:8], Path(e.about["path"]).name, e.about["trunk"][:8], "x".join(map(str, e.about["shape"])),
         e.about["dtype"], e.complete["plain"], e.complete["mirror"], size_of(e.bytes))
        for e in found
    ]  # fmt: skip
    columns = ("name", "face set", "trunk", "shape", "type", "pictures", "mirrored", "on disk")
    table(f"Activations in {activations_folder()}", columns, rows)


@cache.command("clear")
def clear_stores(
    name: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="only those of this face set: a folder, or a name")
    ] = None,
) -> None:
    """Remove stored activations, of one face set or all. A run computes them again if needed.

    Example: visard data cache clear
    """
    from visard.data.activations import activations_folder, entries, forget, remove, sweep

    sweep(activations_folder())
    found = entries()
    if name is not None:
        gone = forget(find_set(name))
    else:
        gone = len(found)
        for entry in found:
            remove(entry.folder)
    freed = sum(e.bytes for e in found if not e.folder.exists())
    say(f"{gone} removed, {size_of(freed)}")
