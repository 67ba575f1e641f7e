"""Every metric of many runs as one table, one number in each row, for other tools."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from visard.errors import UsageError, VisardError
from visard.evaluation.metrics import values
from visard.files import SHARED, write_atomically
from visard.report.run_folder import Run, read_run
from visard.text import line

# what: round (logged by the method), evaluation (a test between rounds), final (with its interval), client
COLUMNS = ("run", "method", "seed", "what", "stage", "step", "test", "client", "metric", "value", "low", "high")
TYPES = {"seed": "int64", "step": "int64", "value": "float64", "low": "float64", "high": "float64"}

Row = dict[str, Any]


def write_table(folders: Sequence[Path], path: Path) -> int:
    """Write the metrics of runs to a .csv or .parquet file; returns how many rows there are."""
    found = [row for folder in folders for row in rows_of(read_run(folder))]
    match path.suffix:
        case ".csv":
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: _cell(v) for k, v in row.items()} for row in found)
            data = text.getvalue().encode()
        case ".parquet":
            data = _parquet(found)
        case _:
            raise UsageError(f"--table {path}: a name that ends in .csv or .parquet is needed")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, SHARED)
    except OSError as error:
        raise VisardError(f"cannot write {path}: {error.strerror or error}") from None
    return len(found)


def rows_of(run: Run) -> Iterator[Row]:
    """The rows of one run, in the order of COLUMNS; columns that do not apply are empty."""
    about = {"run": str(run.folder), "method": run.method}
    seed = run.started.get("seed", run.metrics.get("seed"))
    if isinstance(seed, int):
        about["seed"] = seed  # type: ignore[assignment]
    for r in run.rounds:
        here = about | {"what": "round", "stage": r.stage, "step": r.step + 1}
        sent = {"seconds": r.seconds, "bytes_up": r.bytes_up, "bytes_down": r.bytes_down, "replied": r.replied}
        for name, value in (r.figures | sent).items():
            if value is not None:
                yield here | {"metric": name, "value": float(value)}
    for test in run.evaluations:
        here = about | {"what": "evaluation", "step": test.step + 1}
        for name, metrics in test.generic.items():
            for metric, value in metrics.items():
                if value is not None:
                    yield here | {"test": name, "metric": metric, "value": value}
    for name, final in run.tests.items():
        for one in values(final):
            if one.value is not None:
                row = about | {"what": "final", "test": name, "metric": one.name, "value": one.value}
                yield row if one.low is None else row | {"low": one.low, "high": one.high}
    for metric, clients in run.client_metrics().items():
        for client, value in clients.items():
            if value is not None:
                yield about | {"what": "client", "client": client, "metric": metric, "value": value}


def _cell(value: Any) -> Any:
    """Names come from parties: every character shows, and what a spreadsheet would take for a formula is marked."""
    if not isinstance(value, str):
        return value
    return f"'{line(value)}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else line(value)


def _parquet(found: list[Row]) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("--table FILE.parquet: pip install 'visard[parquet]'") from None
    schema = pa.schema([(name, TYPES.get(name, "string")) for name in COLUMNS])
    table = pa.table({name: [row.get(name) for row in found] for name in COLUMNS}, schema=schema)
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()
