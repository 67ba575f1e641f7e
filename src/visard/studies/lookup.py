"""Finding a figure in the files of a run by its path."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from visard.errors import VisardError, did_you_mean
from visard.evaluation.generic import flat
from visard.files import read_json
from visard.report.run_folder import number, read_events, rounds, whole
from visard.studies.plan import Column


class NoFigure(VisardError):
    """A path that leads nowhere; the text says where it ends and what is near."""


def look_up(tree: Any, path: str) -> float | None:
    """The number at a dotted path; None where the file says null.

    - A key of an object may itself hold dots: the longest key that fits is taken ("clients.summary.tar@far=0.1.mean").
    - An item of a list of objects is named by the value of its first field: the list `tar` of `{"far": 0.1, "tar":
      0.62, ...}` has "tar.0.1". That alone is the field called like the list; "tar.0.1.threshold" is another field.
    - An item of a list of numbers is named by its place: "fold_accuracy.0".
    - "a.b | c.d": the first of several paths that leads somewhere.
    """
    missing: NoFigure | None = None
    for one in path.split("|"):
        try:
            return _number(_walk(tree, one.strip(), one.strip(), ""), one.strip())
        except NoFigure as error:
            missing = missing or error
    assert missing is not None
    raise missing


def _walk(node: Any, rest: str, path: str, name: str) -> Any:
    if not rest:
        return node
    found: dict[str, Any] = {}
    if isinstance(node, dict):
        found = {str(k): v for k, v in node.items()}
    elif isinstance(node, list) and node and all(isinstance(item, dict) and item for item in node):
        for item in node:
            label = next(iter(item.values()))
            found[f"{label:g}" if isinstance(label, float) else str(label)] = item
    elif isinstance(node, list):
        found = {str(i): item for i, item in enumerate(node)}
    match = _first_key(rest, found, isinstance(node, list))
    if match is None:
        at = path[: len(path) - len(rest)].rstrip(".") or "the file"
        head = rest.split(".")[0] if isinstance(node, dict) else rest
        near = did_you_mean(head, found) if found else " (nothing is there)"
        raise NoFigure(f"no figure {path}: {at} has no {head!r}{near}")
    written, key = match
    inner, left = found[key], rest[len(written) + 1 :]
    if not left and isinstance(node, list) and isinstance(inner, dict):
        left = name
        if name not in inner:
            raise NoFigure(f"no figure {path}: say which field{did_you_mean(name, inner)}")
    return _walk(inner, left, path, key if isinstance(node, dict) else name)


def _first_key(rest: str, found: dict[str, Any], in_list: bool) -> tuple[str, str] | None:
    """The longest beginning of `rest` that is a key, as written and as it is: a list's 0.001 may be written 1e-3."""
    parts = rest.split(".")
    for n in range(len(parts), 0, -1):
        head = ".".join(parts[:n])
        if head in found:
            return head, head
        if in_list:
            for key in found:
                if _float(key) is not None and _float(key) == _float(head):
                    return head, key
    return None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, dict | list):
        keys = list(value)[:8] if isinstance(value, dict) else []
        inside = f" (inside: {', '.join(map(str, keys))})" if keys else ""
        raise NoFigure(f"no figure {path}: it is a {'section' if isinstance(value, dict) else 'list'}{inside}")
    if isinstance(value, bool):
        return float(value)
    if (found := number(value)) is None:
        raise NoFigure(f"no figure {path}: {value!r} is not a number")
    return found


@lru_cache(maxsize=64)
def _metrics(path: Path, stamp: int) -> Any:
    return read_json(path)


def metrics(folder: Path) -> Any:
    """`metrics.json` of a run."""
    path = folder / "metrics.json"
    return _metrics(path, path.stat().st_mtime_ns if path.exists() else 0)


def figure_of(column: Column, folder: Path) -> float | None:
    """The figure of a column in a run folder; `NoFigure` if the path leads nowhere there."""
    if isinstance(column.figure, str):
        return look_up(metrics(folder), column.figure)
    try:
        value = column.figure(folder)
    except VisardError:
        raise
    except Exception as error:  # a bench's own function: its failure is a line, not the end of the bench
        raise NoFigure(f"column {column.title!r}: {type(error).__name__}: {error}") from error
    return None if value is None else number(float(value))


def curve_of(figure: str, folder: Path) -> list[tuple[int, float]]:
    """(round, figure) of every evaluation of a run, the final figures as the last; `NoFigure` if none has it.

    "training.x" is the figure x of the rounds themselves.
    """
    events = read_events(folder / "events.jsonl")
    places: list[tuple[int, dict[str, Any]]]
    places = [((whole(e.get("step")) or 0) + 1, e) for e in events if e["event"] == "evaluation"]
    done, final = rounds(events), metrics(folder)
    if figure.startswith("training."):
        places = [(r.step + 1, {"training": r.figures}) for r in done]
    elif done and (not places or places[-1][0] <= done[-1].step):
        generic = {name: flat(test) for name, test in final.get("generic", {}).items()}
        others = {k: v["summary"] for k, v in final.items() if isinstance(v, dict) and "summary" in v}
        places.append((done[-1].step + 1, {**others, "generic": generic}))
    points, missing = [], None
    for x, tree in places:
        try:
            y = look_up(tree, figure)
        except NoFigure as error:
            missing = missing or error
            continue
        if y is not None:
            points.append((x, y))
    if missing and not points:
        raise missing
    return points


def seconds_of(folder: Path) -> float | None:
    """Wall time of a run, all attempts together."""
    events = read_events(folder / "events.jsonl")
    return number(next((e.get("seconds") for e in reversed(events) if e["event"] == "run_finished"), None))


def digest(folder: Path) -> str:
    """A hash of the figures of a finished run: two runs with the same one gave the same result."""
    content = {k: v for k, v in metrics(folder).items() if k != "name"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# ----------
# Mean, spread and paired differences over seeds; nothing is made up where there are too few.


@dataclass(frozen=True)
class Spread:
    """Some values in two numbers."""

    n: int
    mean: float | None  # None: no value
    std: float | None  # ddof = 1; None: fewer than two values


@dataclass(frozen=True)
class Difference:
    """a - b, paired by seed."""

    n: int
    mean: float | None
    low: float | None  # of the 95 % interval; None: fewer than two pairs
    high: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and standard deviation (ddof = 1) of the values that are there."""
    known = [v for v in values if v is not None]
    if not known:
        return Spread(0, None, None)
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return Spread(1, mean, None)
    return Spread(len(known), mean, math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)))


def paired(a: Mapping[int, float | None], b: Mapping[int, float | None], level: float = 0.95) -> Difference:
    """Mean of a - b over the seeds that both have, with the t interval mean ± t(n - 1) std / sqrt(n)."""
    s = spread([x - y for seed, x in a.items() if x is not None and (y := b.get(seed)) is not None])
    if s.mean is None or s.std is None:
        return Difference(s.n, s.mean, None, None)
    from scipy.special import stdtrit  # quantiles of Student's t

    half = float(stdtrit(s.n - 1, (1 + level) / 2)) * s.std / math.sqrt(s.n)
    return Difference(s.n, s.mean, s.mean - half, s.mean + half)
