"""The event log, and the page without a browser: what it says, what it refuses, what it escapes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import write_run

from visard.core import Disclosure
from visard.engines.records import Records
from visard.errors import UsageError, VisardError
from visard.evaluation.identification import identify
from visard.evaluation.metrics import METRICS, Metric, brief, describe, order, summarise, values
from visard.evaluation.verification import verify_all, verify_pairs
from visard.report import adaptation, charts
from visard.report.charts import line, thin
from visard.report.compare import flat, labels
from visard.report.disclosure import HARMLESS, PRIVATE, add_up, judge
from visard.report.html import PLOTLY_VERSION, contact_sheet, esc, script_json
from visard.report.page import build_report
from visard.report.run_folder import EventLog, Run, evaluations, read_events, read_run, rounds
from visard.runs.evaluation import headline
from visard.text import duration, percent, plain, share, size, visible

PROMISE = "By the declared types, no pictures, features or labels left a client"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\"'"


class Page(HTMLParser):
    """The text, the scripts, the tags and the tables of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.charts: list[dict[str, Any]] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    def chart(self, id: str) -> dict[str, Any]:
        return next(c for c in self.charts if c["id"] == id)

    def ids(self) -> list[str]:
        return [c["id"] for c in self.charts]


def page_of(folder: Path, **options: Any) -> Page:
    return Page(build_report([folder], **options))


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.fixture(autouse=True)
def _small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The megabyte of plotly.js only in the pages of module fixtures and in the browser's tests: parsing it is slow."""
    monkeypatch.setattr("visard.report.html.plotly", lambda: "/* plotly.js */")


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fed"
    return write_run(folder, sets=("unseen", "other"), stages=("pretrain", "federate"))


@pytest.fixture(scope="module")
def fed_page(fed: Path) -> Page:
    return page_of(fed)


# --- events ---------------------------------------------------------------------------------------------------


def test_event_log_writes_canonical_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events.jsonl")
    log.write("round", step=np.int64(3), loss=float("nan"), b=[float("inf"), 1.5], a=np.float32(0.5), names=("x",))
    text = (tmp_path / "new" / "events.jsonl").read_text()
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    assert re.search(r'"time":"\d{4}-\d\d-\d\dT[\d:.]+Z"', text)
    event = json.loads(text)
    assert list(event) == sorted(event)
    assert " " not in text
    del event["time"]
    assert event == {"event": "round", "step": 3, "loss": None, "b": [None, 1.5], "a": 0.5, "names": ["x"]}


def test_event_log_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        EventLog(tmp_path / "events.jsonl").write("x", thing=object())


@pytest.mark.parametrize(
    "rest", ['{"event":"rou', '{"event":"round","x":"é'.encode()[:-1].decode("latin-1"), "\x00\x00"]
)
def test_unfinished_last_line_is_ignored_and_mended(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("a")
    with path.open("a", encoding="latin-1") as file:
        file.write(rest)
    assert [e["event"] for e in read_events(path)] == ["a"]
    EventLog(path).write("b")
    assert [e["event"] for e in read_events(path)] == ["a", "b"]


def test_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"a"}')
    EventLog(path).write("b")
    assert [e["event"] for e in read_events(path)] == ["a", "b"]


def test_corrupt_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"a"}\nnonsense\n{"event":"b"}\n')
    with pytest.raises(VisardError, match=r"events\.jsonl: line 2 "):
        read_events(path)


def test_later_lines_of_a_resumed_run_win(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("run_started", resumed=False, name="old")
    log.write("round", stage="s", round=0, step=0, figures={"loss": 9})
    log.write("run_started", resumed=False, name="new")  # from scratch: the old run is gone
    log.write("stage_started", stage="s")
    for r in range(3):
        log.write("round", stage="s", round=r, step=r, figures={"loss": r})
        log.write("refused", stage="s", round=r, client="c1", message="Up", field="theta", reason="first try")
        log.write("refused", stage="s", round=r, client="c2", message="Up", field="theta", reason="first try")
    log.write("run_started", resumed=True, name="new")
    log.write("stage_started", stage="s")
    log.write("round", stage="s", round=2, step=2, figures={"loss": 20})
    log.write("warning", text="w")
    log.write("warning", text="w")
    events = read_events(tmp_path / "events.jsonl")
    assert [r.figures["loss"] for r in rounds(events)] == [0, 1, 20]
    refused = [(e["round"], e["client"]) for e in events if e["event"] == "refused"]
    assert refused == [(0, "c1"), (0, "c2"), (1, "c1"), (1, "c2")]  # those of the repeated round are superseded
    assert sum(e["event"] == "stage_started" for e in events) == 1
    assert sum(e["event"] == "warning" for e in events) == 2


def test_typed_readers_survive_wrong_types() -> None:
    events = [
        {
            "event": "round",
            "stage": 3,
            "round": "x",
            "asked": ["a", "b"],
            "replied": 1,
            "figures": [1],
            "seconds": True,
        },
        {"event": "round", "step": 1, "bytes_up": 10**400, "figures": {"loss": "low", "drift": 2}},
        {"event": "evaluation", "step": 1, "generic": {"t": {"eer": 0.1, "x": None}, "u": 5}, "clients": None},
    ]
    first, second = rounds(events)
    assert (first.stage, first.round, first.asked, first.replied, first.seconds) == ("3", 0, 2, 1, None)
    assert (second.bytes_up, second.figures) == (None, {"loss": None, "drift": 2.0})
    assert evaluations(events)[0].generic == {"t": {"eer": 0.1, "x": None}, "u": {}}


# --- words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(999_600), "1 MB"),
        (size(2_449_396), "2.45 MB"),
        (size(3e15), "3e+03 TB"),
        (duration(0.0123), "12.3 ms"),
        (duration(14.16), "14.2 s"),
        (duration(59.96), "1 min 0 s"),
        (duration(471), "7 min 51 s"),
        (duration(3599.7), "1 h 0 min"),
        (percent(0.9436), "94.4 %"),
        (percent(None), "–"),
        (share(1e-6), "0.0001 %"),
        (plain(1234.0), "1,234"),
        (plain(0.123456), "0.1235"),
        (visible("a\u202eb\x00\ud800"), "a\ufffdb\ufffd\ufffd"),
        (visible("abcdef", 4), "abc…"),
        (esc("<a href='x'>&"), "&lt;a href=&#x27;x&#x27;&gt;&amp;"),
    ],
)
def test_words(made: str, wanted: str) -> None:
    assert made.replace("\N{NO-BREAK SPACE}", " ") == wanted


def test_script_json_cannot_leave_its_element() -> None:
    text = script_json({"x": EVIL, "y": "<!--"})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"x": EVIL, "y": "<!--"}


def test_the_script_of_charts_is_the_one_that_its_authors_published() -> None:
    script = (files("visard.report") / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert f"plotly.js (basic - minified) v{PLOTLY_VERSION}\n".encode() in script[:200]


def test_a_page_is_small_and_has_only_charts_that_the_script_knows(fed: Path, fed_page: Page, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", sets=("unseen", "other"), stages=("pretrain", "federate"))
    assert len(fed_page.source.encode()) < 1_500_000
    for page in (fed_page, Page(build_report([fed, other], tmp_path / "both.html"))):
        traces = [trace for chart in page.charts for figure in chart["figures"] for trace in figure["data"]]
        assert {trace.get("type", "scatter") for trace in traces} == {"scatter", "bar"}  # of the basic kinds
    boxes = next(c for c in page.charts if c["id"] == "per-client")["figures"][0]
    middle, points, marks = boxes["data"][:3]
    low, median, high = np.quantile(points["y"], (0.25, 0.5, 0.75))
    assert [middle["base"][0], middle["base"][0] + middle["y"][0]] == pytest.approx([low, high])
    assert marks["y"] == pytest.approx([median, np.mean(points["y"])])
    assert boxes["layout"]["xaxis"]["ticktext"][:2] == ["fed", "other"]


def test_an_object_in_the_place_of_a_number_is_no_value() -> None:
    assert {v.value for v in values({"verification": {"auc": {"a": 0.5}}}) if v.metric == describe("auc")} == {None}


def test_a_run_shows_itself_in_a_notebook(fed: Path, tmp_path: Path) -> None:
    run = read_run(fed)
    html = run._repr_html_()
    loss = [r.figures["loss"] for r in run.rounds if r.stage == "federate"]
    assert f"Training loss, federate: {loss[0]:.4g} → {loss[-1]:.4g}, rounds 16 to 30" in html
    assert re.search(r"Verification accuracy, unseen: [\d.]+.% → [\d.]+.%, rounds", html), "in the unit of the table"
    curves = re.findall(r'points="([^"]*)"', html)
    assert [len(curve.split()) for curve in curves].count(len(loss)) == 2  # pre-training is as long
    places = [tuple(map(float, place.split(","))) for curve in curves for place in curve.split()]
    assert all(0 <= x <= 300 and 0 <= y <= 110 for x, y in places)
    for name, test in run.tests.items():
        assert name in html
        assert describe("auc").text(test["verification"]["auc"]) in html.replace("&nbsp;", " ")
    assert "<script" not in html
    edit(shutil.copytree(fed, tmp_path / "evil") / "metrics.json", lambda m: m["generic"].update({EVIL: {}}))
    assert "<script" not in read_run(tmp_path / "evil")._repr_html_()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.json").write_text("{}")
    assert "0 rounds" in read_run(empty)._repr_html_()


def test_a_number_without_json_is_a_gap() -> None:
    assert json.loads(script_json([{"y": (1.5, math.inf, -math.inf, math.nan)}, "a"])) == [
        {"y": [1.5, None, None, None]},
        "a",
    ]


@pytest.mark.parametrize(
    ("key", "label", "is_share", "better"),
    [
        ("accuracy", "Verification accuracy", True, True),
        ("tar@far=0.001", "TAR at FAR 0.1 %", True, True),
        ("tar@far=1e-06", "TAR at FAR 0.0001 %", True, True),
        ("rank1", "Rank-1 identification", True, True),
        ("eer", "Equal error rate", True, False),
        ("unseen/tar@far=0.01", "TAR at FAR 1 %, unseen", True, True),
        ("loss", "Training loss", False, False),
        ("proximal_loss", "proximal loss", False, False),
        ("drift", "drift", False, None),
    ],
)
def test_metrics_are_described(key: str, label: str, is_share: bool, better: bool | None) -> None:
    metric = describe(key)
    assert (metric.label.replace("\N{NO-BREAK SPACE}", " "), metric.is_share, metric.higher_is_better) == (
        label,
        is_share,
        better,
    )


def test_metrics_are_ordered_as_one_reads_them() -> None:
    keys = ["auc", "drift", "eer", "rank5", "rank1", "tar@far=0.001", "tar@far=0.1", "accuracy"]
    wanted = ["accuracy", "tar@far=0.1", "tar@far=0.001", "rank1", "rank5", "eer", "auc", "drift"]
    assert sorted(keys, key=order) == wanted


# --- one run --------------------------------------------------------------------------------------------------


def test_page_says_what_was_run(fed_page: Page) -> None:
    text = fed_page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "fedavg trained a tiny network (612,345 parameters) with 20 clients on 60,000 synthetic faces" in text
    assert "30 rounds in the stages pretrain and federate in 7 min 51 s on one machine" in text
    assert "Finished" in text
    for head in ("Headline metrics", "Round by round", "What left each client", "Refused, missing and far replies"):
        assert head in text
    assert 'name = "tiny"' in text  # the settings
    assert "has values that are not finite in stem.conv.weight" in text


def test_headline_metrics_are_those_of_the_metrics(fed: Path, fed_page: Page) -> None:
    v = json.loads((fed / "metrics.json").read_text())["generic"]["unseen"]["verification"]
    text = fed_page.text.replace("\N{NO-BREAK SPACE}", " ")
    low, high = (v["intervals"]["accuracy"][k] for k in ("low", "high"))
    assert f"{100 * v['accuracy']:.2f} %95 % interval {100 * low:.1f} – {100 * high:.1f} %" in text
    assert f"{100 * v['tar'][1]['tar']:.1f} %" in text
    assert f"{100 * v['eer']:.2f} %" in text
    assert "unreliable: 6 false accepts allowed, at least 10 needed" in text  # 0.0001 of 60,000
    assert "2.45 MB" in text


def test_every_chart_has_a_place_a_label_and_data(fed_page: Page) -> None:
    places = {a["id"]: a for t, a in fed_page.tags if t == "div" and a.get("class") == "chart"}
    assert set(places) == {f"chart-{i}" for i in fed_page.ids()}
    assert len(places) == len(fed_page.charts)  # no id twice
    assert {"roc", "det", "histogram", "evaluation", "per-client", "leaving", "seconds", "bytes"} <= set(fed_page.ids())
    for place in places.values():
        assert place["role"] == "img"
        assert len(place["aria-label"] or "") > 20
    for chart in fed_page.charts:
        assert all(f["data"] for f in chart["figures"])


def test_final_figures_end_the_evaluation_curve(fed: Path, fed_page: Page) -> None:
    metrics = json.loads((fed / "metrics.json").read_text())
    trace = fed_page.chart("evaluation")["figures"][0]["data"][0]
    assert trace["x"][-1] == 30
    assert trace["y"][-1] == metrics["generic"]["unseen"]["verification"]["accuracy"]
    assert [e.step for e in read_run(fed).measured] == [4, 9, 14, 19, 24, 29]


def test_clients_are_sorted_and_the_worst_is_named(fed: Path, fed_page: Page) -> None:
    figures = json.loads((fed / "metrics.json").read_text())["clients"]["figures"]
    eer = next(f for f in fed_page.chart("per-client")["figures"] if "Equal error rate" in f["alt"])
    wanted = sorted(figures, key=lambda c: -figures[c]["eer"])  # the highest error is the worst
    assert eer["layout"]["yaxis"]["ticktext"] == wanted
    assert eer["data"][0]["marker"]["color"] == ["@orange"] + ["@blue"] * 19
    assert f"Worst, in orange: {wanted[0]}" in eer["note"]


def test_page_is_one_file_without_any_address(fed_page: Page) -> None:
    for tag, attributes in fed_page.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (tag, name, value)
    own = fed_page.source.replace(fed_page.scripts[1], "")  # all but plotly.js
    assert "http:" not in own
    assert "https:" not in own
    assert "@import" not in own
    assert "url(" not in own
    policy = next(a["content"] for t, a in fed_page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for script in fed_page.scripts[1:]:  # only these may run
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "unsafe-inline'; img" in policy
    assert "script-src 'sha256-" in policy
    assert len(fed_page.source) - len(fed_page.scripts[1]) < 300_000


def test_no_temporary_file_stays_behind(fed: Path, fed_page: Page) -> None:
    assert {p.name for p in fed.iterdir()} == {
        "config.toml",
        "events.jsonl",
        "metrics.json",
        "ledger.json",
        "report.html",
    }


# --- what left ------------------------------------------------------------------------------------------------


def test_every_kind_is_judged() -> None:
    assert {k.value for k in Disclosure} == {*HARMLESS, *PRIVATE}


def test_promise_only_when_the_ledger_bears_it_out(tmp_path: Path, fed_page: Page) -> None:
    assert PROMISE in fed_page.text
    pooled = page_of(write_run(tmp_path / "central", method="central", pooled=True, rounds=6))
    assert PROMISE not in pooled.text
    assert "Labels and pictures of all clients were pooled in one place." in pooled.text
    assert "Left a client, per round" not in pooled.text  # 0 bytes in the rounds would look like a merit
    assert any(a.get("role") == "alert" for _, a in pooled.tags)


@pytest.mark.parametrize("kind", [*PRIVATE, "something_new"])
def test_private_or_unknown_kind_takes_the_promise_away(tmp_path: Path, kind: str) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    edit(folder / "ledger.json", lambda led: led["rows"].append(["s", 0, "client-000", "Up", "x", kind, 1, True]))
    page = page_of(folder)
    assert PROMISE not in page.text
    assert (kind in page.text.lower()) or (kind.replace("_", " ") in page.text.lower())


def test_empty_fields_are_not_said_to_have_left(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    row = ["federate", 0, "client-000", "Up", "W"]
    edit(folder / "ledger.json", lambda led: led["rows"].append([*row, "class_vectors", 0, False]))
    verdict = judge(add_up(read_run(folder)))
    assert verdict.title == PROMISE
    assert "lass vectors" not in verdict.text
    edit(folder / "ledger.json", lambda led: led["rows"].append([*row, "features", 0, False]))
    assert judge(add_up(read_run(folder))).level == "caution"


def test_class_vectors_in_the_open_are_pointed_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    row = ["federate", 0, "client-000", "Up", "W", "class_vectors", 512, False]
    edit(folder / "ledger.json", lambda led: led["rows"].append(row))
    verdict = judge(add_up(read_run(folder)))
    assert "Class vectors went unencrypted: each one stands for one identity." in verdict.text
    assert verdict.level == "caution"
    assert verdict.title == f"{PROMISE}; class vectors did, which are face templates"


def test_pooled_list_alone_takes_the_promise_away(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    edit(folder / "ledger.json", lambda led: led.update(pooled=["labels"]))
    assert judge(add_up(read_run(folder))).level == "alarm"


def test_missing_ledger_promises_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    (folder / "ledger.json").unlink()
    page = page_of(folder)
    assert PROMISE not in page.text
    assert "cannot say what left a client" in page.text


def test_ledger_adds_up(fed: Path) -> None:
    leaving = add_up(read_run(fed))
    assert leaving is not None
    rows = json.loads((fed / "ledger.json").read_text())["rows"]
    assert sum(leaving.bytes.values()) == sum(row[6] for row in rows)
    assert sum(line.bytes for line in leaving.lines) == sum(row[6] for row in rows)
    assert leaving.per_visit == 2_449_396  # evaluation replies do not water it down
    assert leaving.rounds.visits == 30 * 20 - 3
    assert leaving.evaluation.visits == 6 * 20
    assert set(leaving.by_round) == {(s, r) for s in ("pretrain", "federate") for r in range(15)}


def test_encryption_is_shown_only_if_every_byte_is_encrypted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6, encrypted=True)
    leaving = add_up(read_run(folder))
    assert leaving is not None
    assert leaving.encrypted == {"weights": False, "ciphertext": True, "public_key": False, "metric": False}
    edit(folder / "ledger.json", lambda led: led["rows"].append(["s", 0, "c", "Up", "x", "ciphertext", 1, False]))
    again = add_up(read_run(folder))
    assert again is not None
    assert again.encrypted["ciphertext"] is False


@pytest.mark.parametrize(
    "change",
    [
        lambda led: led.update(columns=["a"]),
        lambda led: led.update(rows={}),
        lambda led: led["rows"].append([1]),
        lambda led: led["rows"].append(["s", 0, "c", "m", "f", "weights", "many", False]),
        lambda led: led["rows"].append(["s", 0, "c", "m", "f", "weights", -1, False]),
    ],
)
def test_malformed_ledger_is_one_line(tmp_path: Path, change: Any) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    edit(folder / "ledger.json", change)
    with pytest.raises(VisardError, match=r"ledger\.json: ") as caught:
        build_report([folder])
    assert "\n" not in str(caught.value)


# --- unfinished and broken runs ---------------------------------------------------------------------------------


def test_losses_stand_side_by_side_before_the_tests(tmp_path: Path) -> None:
    """A method with a loss of the source and one of the sites."""
    folder = write_run(tmp_path / "run", rounds=6)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "round":
            loss = event["figures"].pop("loss")
            event["figures"] |= {"loss_source": loss, "loss_target": 2 * loss}
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    page = page_of(folder)
    assert page.ids()[:3] == ["training-0", "training-1", "evaluation"]
    assert page.text.index("Training loss, source") < page.text.index("Training loss, sites")


@pytest.mark.parametrize("sites", ['"south"', '["south", "east"]'])
def test_a_page_says_whose_people_the_sites_have_and_begins_with_them(tmp_path: Path, sites: str) -> None:
    folder = write_run(tmp_path / "run", rounds=6, sets=("north", "south"))
    (change,) = ({"accuracy": {"before": 0.5, "after": 0.6, "difference": 0.1, "low": 0.05, "high": 0.15}},)
    edit(folder / "metrics.json", lambda m: m.update(change={"generic": {"north": change, "south": change}}))
    config = (folder / "config.toml").read_text()
    split = f'kind = "domains"\nsource_domain = "north"\ntarget_domain = {sites}\n'
    (folder / "config.toml").write_text(re.sub(r"\[partition\]\n(?:\w.*\n)*", "", config) + f"\n[partition]\n{split}")
    text = page_of(folder).text
    words = "south and east" if "east" in sites else "south"
    assert f"The source has people of north; the sites have people of {words}." in text
    assert text.index("On south, people that no client has") < text.index("On north, people that no client has")


@pytest.mark.parametrize("value", [3, [3, ["x"]], {"a": 1}])
def test_odd_names_of_domains_are_no_names(tmp_path: Path, value: object) -> None:
    run = dataclasses.replace(
        read_run(write_run(tmp_path / "run", rounds=2)), config={"partition": {"target_domain": value}}
    )
    assert run.domains("target") == []


def test_stopped_run_has_a_useful_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", stop_after=12))
    assert "Stopped after round 12 of 30: interrupted by the user" in page.text
    assert "not final: after round 10" in page.text
    assert {"training-0", "evaluation", "seconds"} <= set(page.ids())


def test_killed_run_shows_the_ledger_of_its_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", stop_after=3, finished=False)
    (folder / "checkpoint").mkdir()
    row = json.dumps(["federate", 0, "client-000", "Up", "theta", "weights", 4096, False])
    (folder / "checkpoint" / "ledger.jsonl").write_text(f"{row}\n{row[:20]}")
    page = page_of(folder)
    assert "Unfinished: the log ends after round 3 of 30" in page.text
    assert "This holds for the rounds that the ledger covers." in page.text
    assert "4.1\N{NO-BREAK SPACE}kB per client and round" in page.text


@pytest.mark.parametrize("text", ["", '{"event":"run_started","name":"fresh","resumed":false}\n', '{"event":"run_st'])
def test_run_that_has_hardly_begun(tmp_path: Path, text: str) -> None:
    (tmp_path / "events.jsonl").write_text(text)
    page = page_of(tmp_path)
    assert "Unfinished: the log ends before the first round ended" in page.text
    assert "The run has no metrics yet." in page.text
    assert page.charts == []


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    for name in ("events.jsonl", "config.toml", "ledger.json"):
        (folder / name).unlink()
    page = page_of(folder)
    assert "Finished" in page.text
    assert "roc" in page.ids()


def test_method_without_generic_model_shows_its_clients(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run", method="local", generic=False, rounds=10)).text
    assert "Rank-1 identification, mean over clients" in text
    assert "Recognition of unseen people" not in text


def test_resumed_run_does_not_report_the_time_of_its_last_attempt(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=10)
    events = (folder / "events.jsonl").read_text().splitlines()
    again = json.loads(events[0]) | {"resumed": True}
    (folder / "events.jsonl").write_text("\n".join([*events[:-1], json.dumps(again), events[-1]]) + "\n")
    run = read_run(folder)
    assert run.seconds == pytest.approx(sum((r.seconds or 0) for r in run.rounds) + 6.1)


def test_wrong_folders_are_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for runs in ([], [tmp_path / "none"], [tmp_path / "file"], [tmp_path / "empty"]):
        with pytest.raises(UsageError) as caught:
            build_report(runs)
        assert "\n" not in str(caught.value)
    folder = write_run(tmp_path / "run", rounds=2)
    with pytest.raises(UsageError, match="is a folder"):
        build_report([folder], out=tmp_path / "empty")


BROKEN = [b"{", b"\xff\xfe", b'{"a":' + b"[" * 100_000, b"= 1"]


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, content) for name in ("metrics.json", "ledger.json", "config.toml") for content in BROKEN]
    + [("metrics.json", b"[1]"), ("ledger.json", b"7")],
    ids=lambda value: repr(value)[:24],
)
def test_corrupt_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    (folder / name).write_bytes(content)
    with pytest.raises(VisardError, match=re.escape(name)) as caught:
        build_report([folder])
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_figures_of_the_wrong_type_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)

    def spoil(metrics: dict[str, Any]) -> None:
        test = metrics["generic"]["unseen"]
        test["verification"] |= {"accuracy": "high", "tar": {"a": 1}, "eer": True, "curve": {"far": [0.1], "tar": []}}
        test["verification"]["histogram"] = {"genuine": [1, None], "impostor": 7}
        test["identification"] = [1]
        metrics["clients"] = {"figures": {"a": {"eer": None}, "b": 3}, "summary": {"eer": {"mean": "x"}, "auc": 1}}

    edit(folder / "metrics.json", spoil)
    page = page_of(folder)
    assert "roc" not in page.ids()
    assert "histogram" not in page.ids()


def test_existing_page_survives_a_failed_build(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    page = build_report([folder]).read_bytes()
    (folder / "ledger.json").write_text("{")
    with pytest.raises(VisardError):
        build_report([folder])
    assert (folder / "report.html").read_bytes() == page


# --- hostile text -----------------------------------------------------------------------------------------------


def hostile_run(folder: Path) -> Path:
    """A run in which everything that is text tries to break out."""
    write_run(folder, name=EVIL, method=EVIL, rounds=6, sets=(EVIL,), stages=(EVIL, "b"))
    (folder / "config.toml").write_text(f"name = {json.dumps(EVIL)}\n")

    def rename(metrics: dict[str, Any]) -> None:
        clients = metrics["clients"]
        clients["figures"] = {EVIL + c: {EVIL: 0.5, "eer": 0.1} for c in clients["figures"]}
        clients["summary"] = {EVIL: {"mean": 0.5, "worst": 0.5, "worst_client": EVIL, "best": 1, "best_client": EVIL}}

    edit(folder / "metrics.json", rename)
    edit(
        folder / "ledger.json",
        lambda led: led.update(
            rows=[[EVIL, 0, EVIL, EVIL, EVIL, EVIL, 5, False]], kinds={EVIL: EVIL}, pooled=[EVIL], totals=EVIL
        ),
    )
    log = EventLog(folder / "events.jsonl")
    log.write("refused", stage=EVIL, round=0, client=EVIL, message=EVIL, field=EVIL, reason=EVIL)
    log.write("warning", text=EVIL)
    log.write("round", stage=EVIL, round=1, step=1, figures={EVIL: 1.0, "loss": 2}, clients={EVIL: {EVIL: 1}})
    log.write(
        "evaluation", stage=EVIL, round=1, step=1, generic={EVIL: {EVIL: 1, "eer": 0.1}}, clients={EVIL: {"mean": 1}}
    )
    log.write("run_stopped", reason=EVIL)
    return folder


@pytest.mark.parametrize("several", [False, True])
def test_hostile_text_stays_text(tmp_path: Path, several: bool) -> None:
    folder = hostile_run(tmp_path / "run")
    page = Page(build_report([folder, folder] if several else [folder], out=tmp_path / "page.html"))
    assert len(page.scripts) == 3
    assert all(t != "img" for t, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "<script>alert" not in page.source
    assert "\u2028" not in page.source.replace(page.scripts[1], "").split("</style>")[1].split('id="charts"')[1]
    for chart in page.charts:  # plotly.js knows some HTML, so its labels must be escaped too
        for f in chart["figures"]:
            assert "<img" not in json.dumps([f["data"], f["layout"]])


# --- sample pictures ---------------------------------------------------------------------------------------------


def test_sample_pictures_only_of_synthetic_faces(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (5, 16, 16, 3), dtype=np.uint8)
    synthetic = write_run(tmp_path / "synthetic", rounds=2)
    real = write_run(tmp_path / "real", rounds=2, synthetic=False)
    for folder in (synthetic, real):
        np.save(folder / "samples.npy", pictures)
    (image,) = (a for t, a in page_of(synthetic).tags if t == "img")
    assert image["alt"] == "5 synthetic faces"
    assert (image["src"] or "").startswith("data:image/jpeg;base64,")
    assert not [t for t, _ in page_of(real).tags if t == "img"]
    both = Page(build_report([synthetic, synthetic], out=tmp_path / "x.html"))
    assert not [t for t, _ in both.tags if t == "img"]


def test_contact_sheet_places_pictures_in_rows() -> None:
    pictures = np.stack([np.full((4, 6, 3), i, np.uint8) for i in range(10)])
    sheet = contact_sheet(pictures)
    assert sheet.shape == (2 * 4 + 2, 8 * 6 + 7 * 2, 3)
    assert (sheet[6:, 8:14] == 9).all()
    assert (sheet[4:6] == 255).all()
    with pytest.raises(UsageError, match="uint8"):
        contact_sheet(np.zeros((2, 4, 4), np.uint8))


# --- long runs ---------------------------------------------------------------------------------------------------


def test_thin_keeps_the_ends_and_every_spike() -> None:
    x = list(range(100_000))
    y: list[float | None] = [0.0] * 100_000
    y[12_345], y[67_890], y[5] = 9.0, -9.0, None
    kept = thin(list(zip(x, y, strict=True)), 2000)
    xs, ys = [p[0] for p in kept], [p[1] for p in kept]
    assert len(xs) <= 2000
    assert (xs[0], xs[-1]) == (0, 99_999)
    assert xs == sorted(xs)
    assert ys[xs.index(12_345)] == 9.0
    assert ys[xs.index(67_890)] == -9.0
    assert thin([(1, 3), (2, None)]) == [(1, 3), (2, None)]


def test_long_run_stays_small(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    common = {"event": "round", "stage": "s", "seconds": 1.0, "bytes_up": 5, "bytes_down": 6, "asked": 2, "replied": 2}
    lines = [json.dumps({**common, "round": i, "step": i, "figures": {"loss": i % 7}}) for i in range(20_000)]
    log.path.write_text("\n".join(lines) + "\n")
    page = page_of(tmp_path)
    for chart in page.charts:
        for f in chart["figures"]:
            assert all(len(trace["x"]) <= 2000 for trace in f["data"])
    assert "Each bar is the mean of 84 rounds." in page.chart("seconds")["figures"][0]["note"]
    assert len(page.source) - len(page.scripts[1]) < 300_000


def test_line_marks_points_only_when_there_are_few() -> None:
    assert line([(1, 1), (2, 2)], "a", "@blue")["mode"] == "lines+markers"
    assert line([(x, 1.0) for x in range(50)], "a", "@blue")["mode"] == "lines"


# --- several runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(fed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Page]:
    base = tmp_path_factory.mktemp("several")
    runs = [
        fed,
        write_run(base / "central", name="upper", method="central", pooled=True, skill=1.25, seed=1),
        write_run(base / "local", name="lower", method="local", skill=0.7, seed=2, generic=False),
        write_run(base / "stopped", name="half", stop_after=12, seed=3),
    ]
    return runs, Page(build_report(runs, out=base / "page.html"))


def test_comparison_has_all_parts(several: tuple[list[Path], Page]) -> None:
    page = several[1]
    assert {"training", "evaluation", "roc", "det", "per-client", "leaving"} == set(page.ids())
    assert len(page.chart("training")["figures"][0]["data"]) == 4
    assert page.chart("per-client")["figures"][0]["layout"]["xaxis"]["ticktext"] == ["fed", "central", "local"]
    for words in (
        "method.name",
        "Stopped after round 12 of 30",
        "not final: after round 10",
        "tested on the same people.",
    ):
        assert words in page.text


def test_a_run_has_the_same_colour_in_every_chart(several: tuple[list[Path], Page]) -> None:
    page = several[1]
    colours = {
        trace["name"]: trace.get("line", trace.get("marker"))["color"]
        for id in ("training", "evaluation", "roc", "det", "per-client")
        for f in page.chart(id)["figures"]
        for trace in f["data"]
        if "name" in trace
    }
    assert colours == {"fed": "@blue", "central": "@orange", "local": "@green", "stopped": "@pink"}
    for id in ("training", "evaluation", "roc", "det", "per-client"):
        for f in page.chart(id)["figures"]:
            for trace in f["data"]:
                if "name" in trace:
                    assert trace.get("line", trace.get("marker"))["color"] == colours[trace["name"]]


def test_comparison_marks_best_and_difference(several: tuple[list[Path], Page]) -> None:
    runs, page = several
    accuracy = [json.loads((r / "metrics.json").read_text())["generic"] for r in runs[:2]]
    first, second = (a["unseen"]["verification"]["accuracy"] for a in accuracy)
    row = re.search(r'<tr><th scope="row">Verification accuracy</th>(.*?)</tr>', page.source)
    assert row is not None
    best = f'<span class="best">{percent(second, 2)}</span><small>{100 * (second - first):+.2f} points</small>'
    assert best in row[1]
    assert row[1].count('class="best"') == 1
    left = re.search(r'<tr><th scope="row">Left a client, per round</th>(.*?)</tr>', page.source)
    assert left is not None
    assert "–</td>" in left[1]  # the pooled run takes no part in it
    assert PROMISE in page.text
    assert "were pooled in one place" in page.text


def test_a_run_without_a_round_is_not_the_best_at_sending_little(tmp_path: Path, fed: Path) -> None:
    first = (fed / "events.jsonl").read_text().splitlines()[0]
    (tmp_path / "failed" / "checkpoint").mkdir(parents=True)
    (tmp_path / "failed" / "events.jsonl").write_text(f'{first}\n{{"event": "run_stopped", "reason": "no reply"}}\n')
    (tmp_path / "failed" / "checkpoint" / "ledger.jsonl").write_text("")
    page = build_report([fed, tmp_path / "failed"], tmp_path / "comparison.html").read_text()
    left = re.search(r'<tr><th scope="row">Left a client, per round</th>(.*?)</tr>', page)
    assert left is not None
    assert "best" not in left[1]
    assert "Stopped before the first round ended: no reply" in page


def test_a_fingerprint_that_is_no_text_is_not_known(tmp_path: Path, fed: Path) -> None:
    shutil.copytree(fed, tmp_path / "other")
    log = tmp_path / "other" / "events.jsonl"
    rows = [json.loads(row) for row in log.read_text().splitlines()]
    rows[0].setdefault("data", {})["fingerprint"] = [1]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build_report([fed, tmp_path / "other"], tmp_path / "comparison.html").exists()


def test_comparison_goes_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fed: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert build_report([fed, fed]) == Path("comparison.html")
    assert (tmp_path / "comparison.html").exists()
    assert labels([read_run(fed)] * 3) == ["fed", "fed (2)", "fed (3)"]


def test_settings_that_differ() -> None:
    assert flat({"a": 1, "b": {"c": {"d": 2}, "e": []}}) == {"a": 1, "b.c.d": 2, "b.e": []}


# --- the contract with the evaluation --------------------------------------------------------------------------------


def test_real_results_are_understood() -> None:
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(20), 6)
    features = (rng.normal(size=(20, 16))[identity] + rng.normal(size=(120, 16))).astype(np.float32)
    every = verify_all(features, identity, far=(0.1, 0.001), bootstrap=20).to_dict()
    v = json.loads(json.dumps(every))
    assert (v["genuine"], v["impostors"]) == (20 * 15, 120 * 119 // 2 - 300)
    rates = [m for m in values({"verification": v}) if m.at is not None]
    assert [r.name for r in rates] == ["tar@far=0.1", "tar@far=0.001"]
    assert [bool(r.doubt) for r in rates] == [False, True]
    assert all(r.value is not None and r.low is not None and r.low <= r.value <= (r.high or 0) for r in rates)
    assert charts.roc_points(v)[-1] == (1.0, 1.0)
    (drawn,) = charts.histograms({"test": v})
    impostor, genuine = (trace["y"] for trace in drawn.data)
    assert len(genuine) == len(impostor) > 10
    assert sum(genuine) == pytest.approx(1)
    assert drawn.layout["shapes"], "the threshold of equal errors"
    pairs = rng.integers(0, 120, (200, 2))
    folds = verify_pairs(features, pairs, identity[pairs[:, 0]] == identity[pairs[:, 1]], bootstrap=20).to_dict()
    f = {m.name: m for m in values({"verification": json.loads(json.dumps(folds))})}
    assert f["accuracy"].value is not None
    assert f["accuracy"].low is not None
    assert f["eer"].low is not None
    gallery = np.arange(0, 90, 6)
    probes = np.setdiff1d(np.arange(120), gallery)
    found = identify(features[gallery], identity[gallery], features[probes], identity[probes]).to_dict()
    i = {m.name: m.value for m in values({"identification": json.loads(json.dumps(found))})}
    assert found["gallery"] == 15
    assert i["rank1"] == found["rank"]["1"]
    assert (found["mated"], found["unmated"]) == (75, 30)
    assert [name for name in i if name.startswith("tpir")] == ["tpir@fpir=0.1", "tpir@fpir=0.01"]


def test_runs_read_what_they_wrote(fed: Path) -> None:
    run: Run = read_run(fed)
    assert (run.name, run.method, run.clients, run.planned) == ("fedavg-celestial", "fedavg", 20, 30)
    assert run.stages == [("pretrain", 0, 15), ("federate", 15, 15)]
    assert run.status == ("finished", "Finished")


def test_a_figure_that_never_changes_is_not_drawn(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for r in range(3):
        figures = {"loss": 1.0, "gradients": 100.0, "drift": 0.1 * r}
        log.write("round", stage="train", round=r, step=r, seconds=1.0, asked=1, replied=1, figures=figures)
    drawn = {chart.title for chart in charts.training(read_run(tmp_path))}
    assert drawn == {"Training loss", describe("drift").label}


def test_a_new_metric_needs_one_entry_in_the_registry(
    fed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Computed from the record of a test, it stands in the metrics of a run, in the curves and in the tables."""

    def gini(record: dict[str, Any]) -> float:
        return float(2 * record["auc"] - 1)

    entry = Metric("Gini index", "Twice the area above guessing.", True, True, test="verification", read=gini, card=2)
    monkeypatch.setitem(METRICS.built_in, "gini", entry)
    tests = read_run(fed).tests
    wanted = 2 * tests["unseen"]["verification"]["auc"] - 1
    assert brief(tests["unseen"])["gini"] == wanted
    assert {"figure": "gini", "value": wanted, "interval": ""} in headline(tests["unseen"])
    assert summarise({"a": {"gini": 0.5}, "b": {"gini": 0.25}})["gini"].worst_client == "b"
    page = page_of(fed, out=tmp_path / "page.html")
    assert page.text.count("Gini index") >= 3  # its card, its row, what it means
    assert f"Gini index {percent(wanted)}" in page.chart("evaluation")["figures"][0]["alt"]


# --- replies that were not accepted -----------------------------------------------------------------------------


def recorded(folder: Path, *rows: dict[str, Any]) -> None:
    records = Records(folder / "checkpoint", "received")
    for row in rows:
        records.append(**{"session": "0", "client": "client-000", "stage": "federate", "round": 0, "ask": 1} | row)
    records.close()


def reply(outcome: str, payload: int = 100, parts: list[Any] | None = None) -> dict[str, Any]:
    found = [["theta", "weights", payload]] if parts is None else parts
    return {"event": "reply", "outcome": outcome, "header": 10, "payload": payload, "parts": found}


def test_replies_that_were_not_accepted_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    recorded(folder, {"event": "begin"}, reply("read"), reply("read"), reply("late"), {"event": "given up"})
    recorded(folder, {"event": "refused", "parts": [["theta", "weights", 40]]}, {"event": "end", "open": []})
    verdict = judge(add_up(read_run(folder)))
    assert verdict.title == PROMISE
    assert "1 late, 1 refused and 1 repeated: 260\N{NO-BREAK SPACE}B that left in vain" in verdict.text
    assert verdict.text in page_of(folder).text


@pytest.mark.parametrize(
    ("refused", "level", "title"),
    [
        (reply("refused", parts=[["face", "pictures", 3072]]), "alarm", "Private data left the clients"),
        (reply("refused", 5000, parts=[]), "caution", "Replies of unknown content left the clients"),
    ],
)
def test_a_refused_reply_takes_the_promise_away(tmp_path: Path, refused: Any, level: str, title: str) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    recorded(folder, refused)
    verdict = judge(add_up(read_run(folder)))
    assert (verdict.level, verdict.title) == (level, title)


def test_a_broken_record_takes_the_promise_away(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    recorded(folder, reply("read"), reply("late"), reply("late"))
    path = folder / "checkpoint" / "received-000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"late","header":10', b'"late","header":11', 1))
    verdict = judge(add_up(read_run(folder)))
    assert (verdict.level, verdict.title) == ("caution", "The record of replies is broken")
    assert "line 3" in verdict.text


def test_between_parties_the_page_speaks_of_the_servers_record_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rounds=6)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("[engine]", '[engine]\nserver = "state"'))
    if '[engine]\nserver = "state"' not in config.read_text():
        config.write_text(config.read_text() + '\n[engine]\nserver = "state"\n')
    verdict = judge(add_up(read_run(folder)))
    assert verdict.title == "The server's record has no pictures, features or labels"
    assert "each party can check it against its own with visard ledger compare" in verdict.text
    text = page_of(folder).text
    assert PROMISE not in text
    assert "stay here" not in text


@pytest.mark.parametrize(
    ("low", "high", "title"),
    [
        (0.01, 0.05, "Better"),
        (-0.05, -0.01, "Worse"),
        (-0.01, 0.05, "No difference shown"),
        (0.0, 0.05, "No difference"),
    ],
)
def test_the_page_of_an_adaptation_says_better_only_where_the_interval_does(
    low: float, high: float, title: str
) -> None:
    change = {"far": 0.01, "before": 0.5, "after": 0.5 + (low + high) / 2, "low": low, "high": high}
    test = {"name": "visitors", "people": 6, "pictures": 36, "changes": [change]}
    said = adaptation._verdict(test)
    assert title in said
    assert "On 6 people (visitors, 36 pictures) that it did not learn from" in said
    assert adaptation._verdict(test | {"changes": [change | {"low": None}]}) == ""
    assert "Judged by 6 groups of 36 pictures" in adaptation._verdict(test | {"estimate": True})


def test_an_adaptation_that_is_worse_at_one_rate_is_called_worse() -> None:
    good = {"far": 0.01, "before": 0.5, "after": 0.55, "low": 0.02, "high": 0.08}
    bad = {"far": 0.001, "before": 0.4, "after": 0.3, "low": -0.15, "high": -0.05}
    test = {"name": "visitors", "people": 6, "pictures": 36, "changes": [good, bad]}
    said = adaptation._verdict(test).replace("\N{NO-BREAK SPACE}", " ")
    assert "worse at FAR 0.1 %" in said
    assert "Keep the recogniser as it came" in said
    assert "Keep the recogniser" not in adaptation._verdict(test | {"name": "source"})
    assert "better at FAR 1 %" in adaptation._verdict(
        test | {"changes": [good, good | {"far": 0.001, "low": -1}]}
    ).replace("\N{NO-BREAK SPACE}", " ")
