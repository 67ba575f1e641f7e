"""A run that was repeated without some of its clients: `replay.json` keeps the metrics of the original run, and the
terminal and a section of the report show what changed. Of the removed clients only the names are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visard.errors import VisardError
from visard.evaluation.metrics import brief, describe, order
from visard.files import json_list, mapping, number, read_json, whole
from visard.report.change import points
from visard.report.html import Section, esc, notice, table
from visard.report.run_folder import Run, numbers
from visard.text import NO_VALUE, count, listing, size

FILE, VERSION = "replay.json", 1
SHOWN = 16  # characters of a digest


@dataclass(frozen=True)
class Row:
    """Something with the clients, and without them."""

    what: str
    before: str
    after: str
    change: str = ""


def model_digest(folder: Path) -> str | None:
    """The digest of the weights of the generic model, independent of their order in the file; None if there is none."""
    if not (folder / "model.safetensors").is_file():
        return None
    from visard.models.cut import digest_of
    from visard.models.files import read_model

    return digest_of(read_model(folder / "model.safetensors")[0])


def record(run: Run, without: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """What `replay.json` keeps of a run that is repeated without these clients."""
    traffic = mapping(run.metrics.get("communication"))
    return {
        "version": VERSION,
        "name": run.name,
        "folder": run.folder.resolve().name,
        "without": list(without),
        "finished": run.status[0] == "finished" and bool(run.metrics),
        "clients": run.clients,
        "bytes_up": whole(traffic.get("bytes_up")),
        "bytes_down": whole(traffic.get("bytes_down")),
        "model": model_digest(run.folder),
        "tests": {name: brief(test) for name, test in run.tests.items()},
        "start": _start(run),
        "each": {
            metric: {client: value for client, value in found.items() if client not in without}
            for metric, found in run.client_metrics().items()
        },
        "notes": list(notes),
    }


def _start(run: Run) -> dict[str, dict[str, float | None]]:
    """The metrics of a run's given weights on its test sets."""
    tests = mapping(mapping(run.metrics.get("change")).get("generic"))
    return {
        name: {metric: number(mapping(found).get("before")) for metric, found in mapping(test).items()}
        for name, test in tests.items()
    }


def read(run: Run) -> dict[str, Any] | None:
    """The record of the original run; None if this run is no replay."""
    if not (run.folder / FILE).is_file():
        return None
    kept = mapping(read_json(run.folder / FILE))
    if kept.get("version") != VERSION:
        raise VisardError(f"{run.folder / FILE} has format {kept.get('version')}, this visard reads {VERSION}")
    return kept


def changed(run: Run, kept: dict[str, Any]) -> list[Row]:
    """Clients, bytes, model and metrics of both runs."""
    traffic, digests = mapping(run.metrics.get("communication")), (kept.get("model"), model_digest(run.folder))
    same = "the same" if digests[0] == digests[1] else "another one"
    shown = [NO_VALUE if d is None else str(d)[:SHOWN] for d in digests]
    rows = [
        Row("clients that train", count(whole(kept.get("clients"))), count(run.clients)),
        *(
            Row(f"bytes {way} clients", size(number(kept.get(key))), size(number(traffic.get(key))))
            for way, key in (("from", "bytes_up"), ("to", "bytes_down"))
        ),
        Row("model (SHA-256 of its weights)", shown[0], shown[1], same if None not in digests else ""),
    ]
    for name, test in run.tests.items():
        rows += _metrics(name, numbers(mapping(kept.get("tests")).get(name)), brief(test))
    means: tuple[dict[str, float | None], dict[str, float | None]] = {}, {}
    for metric, now in run.client_metrics().items():
        then = numbers(mapping(kept.get("each")).get(metric))
        both = [(then[c], v) for c, v in now.items() if then.get(c) is not None and v is not None]
        if both:
            for mean, values in zip(means, zip(*both, strict=True), strict=True):
                mean[metric] = sum(v for v in values if v is not None) / len(values)
    return [*rows, *_metrics("mean of the clients that are left", *means)]


def _metrics(where: str, before: dict[str, float | None], after: dict[str, float | None]) -> list[Row]:
    rows = []
    for name in sorted(after, key=order):
        metric, then, now = describe(name), before.get(name), after[name]
        difference = "" if then is None or now is None else points(now - then, metric)
        rows.append(Row(f"{where}: {metric.label}", metric.text(then), metric.text(now), difference))
    return rows


def notes(run: Run, kept: dict[str, Any]) -> list[str]:
    """Notes on the comparison."""
    found = [str(note) for note in json_list(kept.get("notes"))]
    if not kept.get("finished"):
        found.append(f"{kept.get('name')} was not finished, so there is nothing to compare with")
    start = mapping(kept.get("start"))
    if any(numbers(start.get(name)) != test for name, test in _start(run).items() if name in start):
        found.append("the weights that both runs start from are not the same ones: the file has changed")
    if kept.get("model") is not None and kept["model"] == model_digest(run.folder):
        found.append("the model is the same, bit for bit: who is gone had no part in its training")
    return found


def title(kept: dict[str, Any]) -> str:
    """Who is gone."""
    gone = kept.get("without")
    return f"Without {listing([str(name) for name in gone])}" if isinstance(gone, list) else "Without clients"


def section(run: Run) -> Section | None:
    """The section of a replay; None for any other run."""
    kept = read(run)
    if kept is None:
        return None
    origin = f"{esc(kept.get('name'), 60)} ({esc(kept.get('folder'), 60)})"
    body = (
        f'<p class="note">This run repeats {origin} as if {esc(title(kept)[8:], 200)} had never been there: the same '
        "settings, seed and pictures, and every other client with the pictures and random numbers that it had. What "
        "was made of that run before, such as copies of its model, is not changed by this.</p>"
    )
    said = notes(run, kept)
    if said:
        items = "".join(f"<li>{esc(text, 300)}</li>" for text in said)
        body += notice("caution", "About this comparison", f"<ul>{items}</ul>")
    rows = [[esc(r.what, 120), esc(r.before), esc(r.after), esc(r.change)] for r in changed(run, kept)]
    body += table(["", "With", "Without", "Change"], rows, esc(title(kept), 200))
    return Section("replay", title(kept), body, short="Without")
