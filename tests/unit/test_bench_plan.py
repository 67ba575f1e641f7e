"""Plans, paths to figures, statistics over seeds."""

from __future__ import annotations

import json
import statistics as standard
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from visard import studies
from visard.config import load
from visard.errors import UsageError
from visard.presets import presets
from visard.report.run_folder import EventLog
from visard.studies.execute import digest
from visard.studies.plan import SCALES, Column, Curves, Figure, Plan, Row, Table, check, in_order
from visard.studies.results import NoMetric, curve_of, look_up, metric_of, paired, spread

METRICS: dict[str, Any] = {
    "generic": {
        "test": {
            "verification": {
                "tar": [{"far": 0.1, "tar": 0.6, "threshold": 0.2}, {"far": 0.001, "tar": None, "threshold": 0.5}],
                "fold_accuracy": [0.7, 0.8],
                "rule": "conservative",
            },
            "identification": {"rank": {"1": 0.25, "10": 0.5}},
        }
    },
    "clients": {"summary": {"tar@far=0.1": {"mean": 0.4}, "tar@far=0.01": {"mean": 0.3}, "test/auc": {"mean": 0.9}}},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("generic.test.verification.tar.0.1", 0.6),
        ("generic.test.verification.tar.0.1.threshold", 0.2),
        ("generic.test.verification.tar.1e-3.threshold", 0.5),
        ("generic.test.verification.tar.0.001", None),
        ("generic.test.verification.fold_accuracy.1", 0.8),
        ("generic.test.identification.rank.10", 0.5),
        ("clients.summary.tar@far=0.1.mean", 0.4),
        ("clients.summary.tar@far=0.01.mean", 0.3),
        ("generic.other.auc | clients.summary.test/auc.mean", 0.9),
    ],
)
def test_paths_lead_to_metrics(path: str, value: float | None) -> None:
    assert look_up(METRICS, path) == value


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("generic.tset.verification", "generic has no 'tset' (did you mean 'test'?)"),
        ("generic.test.verification.tar.0.01", "generic.test.verification.tar has no '0.01' (did you mean '0.001'?)"),
        ("generic.test.verification.tar.0.1.treshold", "did you mean 'threshold'?"),
        ("generic.test.identification", "it is a section (inside: rank)"),
        ("generic.test.verification.rule", "'conservative' is not a number"),
        ("clients.summary.rank1.mean", "clients.summary has no 'rank1'"),
        ("generic.test.identification.rank.1.mean", "(nothing is there)"),
        ("a.b | generik.test", "the file has no 'a'"),
    ],
)
def test_a_wrong_path_names_what_is_near(path: str, says: str) -> None:
    with pytest.raises(NoMetric) as error:
        look_up(METRICS, path)
    assert says in str(error.value)


def test_a_column_may_be_a_function_of_the_run_folder(tmp_path: Path) -> None:
    def size(folder: Path) -> float:
        return float(len(list(folder.iterdir())))

    assert metric_of(Column("files", size, percent=False), tmp_path) == 0.0
    assert metric_of(Column("nothing", lambda _: None), tmp_path) is None
    with pytest.raises(NoMetric, match="column 'broken': ZeroDivisionError"):
        metric_of(Column("broken", lambda _: 1 / 0), tmp_path)


def test_curves_end_with_the_final_metrics(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("run_started", resumed=False)
    for step in range(4):
        log.write("round", stage="train", round=step, step=step, figures={})
        if step == 1:
            test = {"auc": 0.5, "tar@far=0.1": 0.3}
            log.write("evaluation", stage="train", round=step, step=step, generic={"test": test}, clients={})
    final = {"generic": {"test": {"verification": {"auc": 0.8, "tar": [{"far": 0.1, "tar": 0.6}]}}}}
    (tmp_path / "metrics.json").write_text(json.dumps(final | {"clients": {"summary": {"rank1": {"mean": 0.7}}}}))
    assert curve_of("generic.test.auc", tmp_path) == [(2, 0.5), (4, 0.8)]
    assert curve_of("generic.test.tar@far=0.1", tmp_path) == [(2, 0.3), (4, 0.6)]
    assert curve_of("clients.rank1.mean", tmp_path) == [(4, 0.7)]
    with pytest.raises(NoMetric, match="did you mean 'auc'"):
        curve_of("generic.test.aucc", tmp_path)


def test_the_digest_is_of_the_metrics_and_not_of_the_name(tmp_path: Path) -> None:
    found = []
    for i, content in enumerate(({"name": "a", "x": 1}, {"x": 1, "name": "b"}, {"name": "a", "x": 2})):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "metrics.json").write_text(json.dumps(content))
        found.append(digest(folder))
    assert found[0] == found[1] != found[2]


# --- statistics -----------------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3)


@given(st.lists(numbers, min_size=2, max_size=8))
def test_spread_is_that_of_the_standard_library(values: list[float]) -> None:
    s = spread([*values, None])
    assert s.n == len(values)
    assert s.mean == pytest.approx(standard.fmean(values), abs=1e-9)
    assert s.std == pytest.approx(standard.stdev(values), abs=1e-6)


def test_too_few_values_give_no_numbers() -> None:
    assert spread([]) == spread([None, None])
    assert (spread([None]).mean, spread([0.5]).mean, spread([0.5]).std) == (None, 0.5, None)
    one = paired({0: 0.5, 1: None}, {0: 0.25, 1: 0.5, 2: 0.5})
    assert (one.n, one.mean, one.low, one.high) == (1, 0.25, None, None)
    assert paired({0: 1.0}, {1: 1.0}).mean is None


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_paired_intervals_are_those_of_a_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    each = [a - b for a, b in pairs]
    d = paired({i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)})
    if len(set(each)) > 1 and standard.stdev(each) > 1e-6:
        low, high = stats.t.interval(0.95, len(each) - 1, standard.fmean(each), stats.sem(each))
        assert d.low == pytest.approx(low, abs=1e-6)
        assert d.high == pytest.approx(high, abs=1e-6)


def test_the_interval_of_three_known_differences() -> None:
    d = paired({0: 3.0, 1: 5.0, 2: 7.0}, {0: 2.0, 1: 3.0, 2: 4.0})  # 1, 2, 3: std 1, t(2) = 4.302653
    assert d.mean == 2.0
    assert d.low == pytest.approx(2.0 - 4.302653 / 3**0.5, abs=1e-6)


# --- plans ----------------------------------------------------------------------------------------------------

COLUMN = Column("AUC", "generic.test.verification.auc")


def test_rows_come_after_those_they_need() -> None:
    plan = Plan("t", (Row("c", "fedavg", ("model.weights={b}/m",)), Row("b", "fedavg", ("x={a}",)), Row("a", "fedavg")))
    check(plan)
    assert [r.name for r in in_order(plan)] == ["a", "b", "c"]
    assert [r.name for r in in_order(plan, ["b"])] == ["a", "b"]
    with pytest.raises(UsageError, match="no row 'd' in this bench"):
        in_order(plan, ["d"])


def table(rows: tuple[str, ...] = ("a",), **more: Any) -> Plan:
    return Plan("t", (Row("a", "fedavg"),), (Table("T", rows, (COLUMN,), **more),))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (lambda: Plan("t", (Row("a", "p"), Row("a", "p"))), "two rows are called 'a'"),
        (lambda: Plan("t", (Row("../a", "p"),)), "not a name for a folder"),
        (lambda: Plan("t", (Row("a", "p", ("x={pretrian}/w",)), Row("pretrain", "p"))), "did you mean 'pretrain'"),
        (lambda: Plan("t", (Row("a", "p", ("x={b}",)), Row("b", "p", ("x={a}",)))), "a -> b -> a"),
        (lambda: table(("b",)), "table 'T': there is no row 'b'"),
        (lambda: table(compare=(("a", "b"),)), "table 'T': there is no row 'b'"),
        (lambda: table(paper={"a": {"AUX": 90.0}}), "no column 'AUX' (did you mean 'AUC'?)"),
        (lambda: table(paper={"a": {"AUC": 0.9}}), "write per cent"),
        (lambda: Plan("t", (Row("a", "p"),), figures=(Figure("F", "x", COLUMN, {"s": ((1.0, "z"),)}),)), "'z'"),
        (lambda: Plan("t", (Row("a", "p"),), curves=(Curves("C", ("z",), "a"),)), "curves 'C': there is no row 'z'"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(plan: Callable[[], Plan], says: str) -> None:
    with pytest.raises(UsageError) as error:
        check(plan())
    assert says in str(error.value)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", studies.BENCHES)
def test_every_bench_has_a_plan_for_every_scale(name: str, scale: str) -> None:
    plan = studies.find(name, scale)
    assert plan.tables or plan.figures
    assert studies.BENCHES[name]
    known = presets()
    for row in plan.rows:
        assert row.preset in known, f"{row.name}: no preset {row.preset}"
        load(row.preset, [s.replace("{", "").replace("}", "") for s in row.set])
    if scale == "smoke":
        for row in plan.rows:
            source = load(row.preset, [s.replace("{", "").replace("}", "") for s in row.set]).data.source
            assert source in ("synthetic", "sensors"), f"{row.name}: smoke must work without data"


def test_unknown_bench_and_scale() -> None:
    with pytest.raises(UsageError, match="did you mean 'baselines'"):
        studies.find("baseline", "smoke")
    with pytest.raises(UsageError, match="--scale large: must be one of smoke, small, paper"):
        studies.find("baselines", "large")
