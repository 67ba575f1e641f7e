"""Trackers: what their own readers find of a run, and of one that was resumed."""

from __future__ import annotations

import csv
import http.client
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.smoke import SMOKE
from tests.unit.fake_run import write_run

import visard
from visard.engines.watchers import Watcher
from visard.errors import Interrupted, UsageError
from visard.report.live import LiveView
from visard.report.run_folder import Run
from visard.report.table import COLUMNS, write_table
from visard.runs.run import resume
from visard.runs.trackers.tensorboard import TensorBoard

WATCHED = ("method.rounds=3", "evaluation.every=1")


class Interrupt(Watcher):
    """After the tracker has heard of the second round, and before that round is committed."""

    tests = 0

    def evaluation(self, figures: dict[str, Any]) -> None:
        self.tests += 1
        if self.tests == 2:
            raise Interrupted("stop")


def resumed(folder: Path, tracker: str) -> Run:
    """A run that was stopped in its second round, and went on."""
    changes = (*SMOKE, *WATCHED, f'engine.watchers=["{tracker}"]')
    with pytest.raises(Interrupted):
        visard.run("fedavg", out=folder, overrides=changes, watcher=Interrupt())
    return resume(folder)


def test_tensorboard_reads_each_round_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = resumed(tmp_path / "run", "tensorboard")
    found = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    loss = found.Scalars("federate/loss")
    assert [event.step for event in loss] == [1, 2, 3]
    assert [event.value for event in loss] == pytest.approx([r.figures["loss"] for r in run.rounds])
    tests = found.Scalars("test/accuracy")
    assert tests[-1].value == pytest.approx(run.results["test"].verification.accuracy)  # type: ignore[union-attr]
    assert [event.step for event in tests] == [1, 2, 3]
    resume(run.folder)  # which has ended: nothing is lost, and the last test is of the last round
    found = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("federate/loss")] == [1, 2, 3]
    assert [event.step for event in found.Scalars("test/accuracy")] == [1, 2, 3, 3]


def test_tensorboard_keeps_what_was_before_a_problem_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = TensorBoard(tmp_path), TensorBoard(tmp_path)
    for step in (1, 2):
        first.round("federate", step, 3, {"loss": 1.0})
    first.ended(False)  # round 2 was not committed
    second.resumed(1)
    second.problem("waiting for 3 parties")
    for step in (2, 3):
        second.round("federate", step, 3, {"loss": 0.5})
    second.ended(True)
    loss = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("federate/loss")
    assert [(event.step, event.value) for event in loss] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_mlflow_reads_settings_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = resumed(tmp_path / "run", "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("visard")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["method.rounds"] == "3"
    history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "federate/loss")}
    assert history == pytest.approx({r.step + 1: r.figures["loss"] for r in run.rounds})
    resume(run.folder)
    history = client.get_metric_history(found.info.run_id, "test/accuracy")
    assert [m.step for m in history] == [1, 2, 3, 3]  # the end was tested again
    assert found.data.metrics["test/accuracy"] == pytest.approx(run.results["test"].verification.accuracy)  # type: ignore[union-attr]


def test_wandb_reads_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example plug-in, where the package is installed; read back by its own reader."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    plugin = Path(__file__).parents[2] / "examples" / "wandb_tracker.py"
    changes = (*SMOKE, *WATCHED, 'engine.watchers=["wandb"]')
    run = visard.run("fedavg", out=tmp_path / "run", overrides=changes, plugins=[plugin])
    (file,) = (run.folder / "wandb").glob("offline-run-*/*.wandb")
    store, losses = DataStore(), []
    store.open_for_scan(str(file))
    while data := store.scan_data():
        record = Record()
        record.ParseFromString(data)
        losses += [float(i.value_json) for i in record.history.item if list(i.nested_key) == ["federate/loss"]]
    store.close()
    assert losses == pytest.approx([r.figures["loss"] for r in run.rounds])


def test_prometheus_reads_the_last_values(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    run = visard.run("fedavg", out=tmp_path / "run", overrides=(*SMOKE, *WATCHED))
    view = LiveView([run.folder], token="a-token-of-one-s-own")
    serving = threading.Thread(target=view.serve)
    serving.start()
    with closing(http.client.HTTPConnection("127.0.0.1", view.port, timeout=10)) as link:
        link.request("GET", "/a-token-of-one-s-own/metrics")
        text = link.getresponse().read().decode()
    view.close()
    serving.join(10)
    samples = {
        (s.name, s.labels.get("curve", "")): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert samples["visard_rounds_done", ""] == 3
    assert samples["visard_running", ""] == 0
    assert samples["visard_value", "Training loss"] == pytest.approx(run.rounds[-1].figures["loss"])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_all_metrics_of_many_runs_in_one_table(tmp_path: Path, ending: str) -> None:
    runs = [
        visard.run("fedavg", out=tmp_path / name, overrides=(*SMOKE, *WATCHED, f"seed={seed}"))
        for seed, name in enumerate(("a", "b"))
    ]
    count = write_table([run.folder for run in runs], tmp_path / f"all.{ending}")
    if ending == "csv":
        with (tmp_path / "all.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        rows = [{k: v or None for k, v in row.items()} for row in rows]
    else:
        import pyarrow.parquet as pq

        rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert len(rows) == count
    assert tuple(rows[0]) == COLUMNS
    for run, seed in zip(runs, (0, 1), strict=True):
        own = [row for row in rows if row["run"] == str(run.folder)]
        assert {int(row["seed"]) for row in own} == {seed}
        loss = [float(row["value"]) for row in own if row["what"] == "round" and row["metric"] == "loss"]
        assert loss == pytest.approx([r.figures["loss"] for r in run.rounds])
        final = next(row for row in own if row["what"] == "final" and row["metric"] == "accuracy")
        test = run.results["test"].verification
        assert test is not None
        assert float(final["value"]) == pytest.approx(test.accuracy)
    with pytest.raises(UsageError, match=r"ends in \.csv or \.parquet"):
        write_table([runs[0].folder], tmp_path / "all.txt")


def test_names_are_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visard.run("fedavg", out="=1+1", overrides=SMOKE)
    write_table([Path("=1+1")], tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_text().splitlines()[1].startswith("'=1+1,")


def test_a_table_holds_nothing_that_acts_on_a_terminal(tmp_path: Path) -> None:
    """Names of metrics in a folder from elsewhere, shown with cat."""
    folder = write_run(tmp_path / "run", rounds=2)
    log = folder / "events.jsonl"
    log.write_text(log.read_text().replace('"loss"', '"loss\\u001b]0;x\\u0007"'))
    write_table([folder], tmp_path / "all.csv")
    text = (tmp_path / "all.csv").read_text()
    assert "loss\N{REPLACEMENT CHARACTER}]0;x" in text
    assert not {"\x1b", "\x07"} & set(text)
