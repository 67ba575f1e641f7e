"""Counters by party in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.unit.fake_run import write_run

from visard.report import charts
from visard.report import page as single
from visard.report import page as tables
from visard.report.cards import headline_cards
from visard.report.run_folder import read_run
from visard.text import NBSP, count


def test_samples_of_classes_are_not_called_faces(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=3))
    data = {"kind": "widar", "name": "rooms", "pictures": 1440, "identities": 6, "size": 48}
    figures = {"balanced_accuracy": 0.391, "weighted_f1": 0.402, "lr": 0.1}
    changed = [
        e | ({"data": data} if e["event"] == "run_started" else {"figures": figures} if e["event"] == "round" else {})
        for e in run.events
        if e["event"] != "evaluation"
    ]
    bare = replace(run, events=changed, metrics={})
    assert f"on {count(1440)} samples of 6 classes (rooms)" in single.summary(bare)
    shown = {card.metric.label: card.text for card in headline_cards(bare, None)}
    assert shown["Balanced accuracy"].startswith("39.1")
    assert shown["Weighted F1"].startswith("40.2")


def test_operations_and_time_of_every_party(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=3))
    assert not tables.party_table(run), "losses are not added up"
    counted = {
        f"c{i}": {"encryptions": 10.0 * i, "decryptions": 1.0, "multiplications": 0.0, "seconds": 60.0}
        for i in range(1, 5)
    }
    figures = {"encryptions": 100.0, "decryptions": 4.0}
    changed = [
        e | {"clients": counted, "figures": figures | {"encryptions": 100.0 + e["step"]}}
        if e["event"] == "round"
        else e
        for e in run.events
    ]
    shown = replace(run, events=changed)
    page = tables.party_table(shown)
    n = len(shown.rounds)
    assert "encryptions" in page
    assert "multiplications" not in page, "nothing but zeros"
    for text in (">c3<", f">{30 * n}<", f">{n}{NBSP}min"):
        assert text in page, page
    (chart,) = (c for c in charts.training(shown) if "ncryptions" in c.title)
    assert len(chart.data) == 1, "a sum over parties has no band of single ones"


def test_a_deployment_is_no_one_machine_and_its_pictures_are_not_the_servers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=3, clients=3))
    text = single.summary(replace(run, config=run.config | {"partition": {"kind": "parties"}}))
    assert "with 3 parties, each on its own pictures, and tested it on" in text.replace(NBSP, " ")
    assert "; the server's machine: " in text
    assert "one machine" not in text
    simulated = single.summary(replace(run, config=run.config | {"engine": {"server": "state"}}))
    assert "with 3 clients on" in simulated.replace(NBSP, " ")
    assert "one machine" not in simulated


def test_a_single_test_has_no_curve_over_the_rounds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds=30))
    assert any(chart.id == "evaluation" for chart in charts.evaluation(run))
    last = [e for e in run.events if e["event"] == "evaluation"][-1]
    events = [e for e in run.events if e["event"] != "evaluation"]
    bare = replace(run, events=[*events, last | {"step": max(r.step for r in run.rounds)}])
    assert not charts.evaluation(bare)
