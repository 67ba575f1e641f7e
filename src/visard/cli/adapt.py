"""`visard adapt`: from a recogniser and several sites to a better recogniser and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from visard.cli import options
from visard.cli.console import RunWatcher, mark, say, table
from visard.errors import UsageError
from visard.text import duration, listing, percent, share, size

if TYPE_CHECKING:
    from visard.evaluation.paired import Change
    from visard.runs.adapt import Adapted


def adapt(
    model: Annotated[
        Path, typer.Option(help="the recogniser: an .onnx, .pth or .safetensors file, or a name (visard models add)")
    ],
    sites: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER...", help="the sites: folders of pictures, zip files or face sets"),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]...", hidden=True)] = None,
    source: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="labelled people whom it should not forget, a folder each")
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="people to test on, a folder each, who are at no site")
    ] = None,
    out: Annotated[Path, typer.Option(help="where everything goes")] = Path("runs/adapted"),
    method: Annotated[
        str | None,
        typer.Option(help="fedfr-da (needs no names), fedavg or fedfr-joint (default: what the names allow)"),
    ] = None,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="ignore the folders of the sites: the pictures have no labels")
    ] = False,
    far: Annotated[str, typer.Option(help="false accept rates to report and to choose thresholds for")] = "0.01,0.001",
    fold: Annotated[str, typer.Option(help="without --test: which part of the labelled people to test on")] = "1/5",
    seed: Annotated[int, typer.Option(help="the same seed gives the same bits")] = 0,
    server: Annotated[
        Path | None, typer.Option(help="the sites are parties: the state folder of a running visard server")
    ] = None,
    parties: Annotated[int | None, typer.Option(help="with --server: how many parties take part")] = None,
    source_party: Annotated[
        bool, typer.Option("--source-party", help="with --server: one of the parties is called source and has labels")
    ] = False,
    input: Annotated[
        str | None,
        typer.Option(help="how pictures go in: arcface, cosface, facenet, imagenet or raw (default: see the file)"),
    ] = None,
    order: Annotated[str | None, typer.Option(help="channels: rgb or bgr")] = None,
    mean: Annotated[str | None, typer.Option(help="of pixels / 255, one number or three")] = None,
    std: Annotated[str | None, typer.Option(help="of pixels / 255, one number or three")] = None,
    align: Annotated[
        str | None, typer.Option(help="how faces are cropped: five, none or haar (default: as the model expects)")
    ] = None,
    detector: Annotated[str | None, typer.Option(help="five: yunet, mtcnn, or a YuNet or SCRFD file")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="change a setting: --set method.rounds=20")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier adaptation in the folder")] = False,
    plugin: options.Plugin = None,
) -> None:
    """Adapt a recogniser to the people of several sites, whose pictures stay there, and test it before and after.

    Faces are found and aligned, pictures without names are grouped, and the last part of the network is trained at
    the sites. If it was stopped, the same command continues. The results are adapted.onnx and report.html.

    Examples:

      visard adapt --model w600k_mbf.onnx --sites north south west --out runs/mine

      visard adapt --model w600k_mbf.onnx --sites north south --source known --test visitors --out runs/mine

      visard adapt --model mbf --sites north south --out runs/mine       (after visard models add --name mbf)
    """
    from visard.runs.adapt import adapt as run_adapt

    options.load_plugins(plugin)
    watcher = RunWatcher()
    try:
        done = run_adapt(
            model, [*(sites or ()), *(more or ())], source=source, test=test, out=out, method=method,
            far=_rates(far), fold=_part(fold), seed=seed, server=server, parties=parties, source_party=source_party,
            unlabelled=unlabelled, input=input, order=order, mean=mean, std=std, align=align, detector=detector,
            overrides=sets or (), overwrite=overwrite, watcher=watcher, progress=watcher.show, say=say,
        )  # fmt: skip
    finally:
        watcher.close()
    show(done)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--far {text}: give rates like 0.01,0.001") from None


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isascii() and part.isdecimal() and parts.isascii() and parts.isdecimal()):
        raise UsageError(f"--fold {text}: must look like 1/5")
    return int(part), int(parts)


def _interval(change: Change) -> str:
    if change.low is None or change.high is None:
        return ""
    return f" ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def show(done: Adapted) -> None:
    """The table at the end, and what it says."""
    from visard.report.adaptation import KEEP
    from visard.runs.before_after import SOURCE

    rows = [
        (
            test.name + (" (estimate)" if test.estimate else ""),
            share(change.far),
            f"{percent(change.before)} → {percent(change.after)}",
            f"{100 * change.difference:+.1f}" + _interval(change),
            f"{change.threshold_before:.4f} → {change.threshold_after:.4f}",
        )
        for test in done.tests
        for change in test.changes
    ]
    table("Before and after", ("tested on", "FAR", "TAR", "points (95 % interval)", "threshold"), rows)
    if any(test.estimate for test in done.tests):
        mark("estimate", "groups of pictures stand for people: give --test FOLDER to measure it")
    for test in done.tests:
        worse = [share(change.far) for change in test.changes if change.direction < 0]
        if worse and test.name != SOURCE:
            mark("worse", f"{test.name}, FAR {listing(worse)}, beyond chance: {KEEP}", "red")
    cost, seconds = done.record["cost"], done.record["seconds"]
    say(f"{duration(seconds['all'])}, {size(cost.get('bytes_up'))} left the sites, memory {size(cost['peak_bytes'])}")
    say(f"model: {done.onnx}")
    say(f"report: {done.report}")
