"""`visard watch`: what it shows of a run that goes on, to this machine alone."""

from __future__ import annotations

import http.client
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.chromium import Browser, find
from tests.unit.fake_run import write_run

from visard.cli import watch
from visard.errors import UsageError
from visard.report import live
from visard.report.live import Followed, LiveView
from visard.report.page import build_report
from visard.report.run_folder import EventLog, Round, round_of
from visard.text import line

NAME = "<img src=x onerror=alert(1)>"


def begin(folder: Path, rounds: int = 4, name: str = NAME) -> EventLog:
    log = EventLog(folder / "events.jsonl")
    log.write("run_started", name=name, method="fedavg", clients=3, stages=[{"name": "federate", "rounds": rounds}])
    return log


def go_on(log: EventLog, step: int, **more: Any) -> None:
    log.write(
        "round", stage="federate", round=step, step=step, seconds=2.0, bytes_up=1000, bytes_down=2000, asked=3,
        replied=3, figures={"lr": 0.00012, "loss": 5.0 - step}, clients={},
        slowest={"a": 1.0, "b": 1.1, "c": 9.0}, **more,
    )  # fmt: skip


@pytest.fixture
def view(tmp_path: Path) -> Iterator[LiveView]:
    view = LiveView([tmp_path / "run"])
    serving = threading.Thread(target=view.serve)
    serving.start()
    yield view
    view.close()
    serving.join(10)


def get(view: LiveView, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", view.port, timeout=10)) as link:
        link.request("GET", path, headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def test_a_run_is_followed_as_its_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Followed(tmp_path)
    assert run.state()["state"] == "waiting"
    log = begin(tmp_path)
    assert (run.state()["state"], run.state()["planned"]) == ("running", 4)
    go_on(log, 0)
    log.write("missing", stage="federate", round=1, client="b", reason="no reply\x1b[31m")
    log.write("evaluation", stage="federate", round=0, step=0, seconds=1.0, generic={"test": {"accuracy": 0.75}})
    go_on(log, 1)
    state = run.state()
    assert state["done"] == 2
    facts = dict(state["facts"])
    assert facts["Time left"] == "about 5\N{NO-BREAK SPACE}s", "two rounds of two seconds, and half a test each"
    assert facts["Sent up"] == "2\N{NO-BREAK SPACE}kB"
    curves = {curve["label"]: curve for curve in state["curves"]}
    assert list(curves)[:2] == ["Training loss", "Verification accuracy (test)"]
    assert curves["Verification accuracy (test)"] == {
        "label": "Verification accuracy (test)",
        "percent": True,
        "points": [(1, 0.75)],
    }
    assert curves["Training loss"]["points"] == [(1, 5.0), (2, 4.0)]
    assert {c["name"]: c["state"] for c in state["clients"]} == {"a": "there", "b": "missing", "c": "slow"}
    assert not any("\x1b" in text for text in (*state["messages"], *(c["reason"] for c in state["clients"])))
    monkeypatch.setattr(live, "QUIET", -1.0)
    monkeypatch.setattr(live, "_usual", lambda run: 0.0)
    assert run.state()["state"] == "quiet", "nothing new for too long"
    log.write("run_finished", seconds=5.0)
    assert run.state()["state"] == "finished"


def test_only_whole_lines_count_and_a_new_log_begins_anew(tmp_path: Path) -> None:
    log, run = begin(tmp_path), Followed(tmp_path)
    go_on(log, 0)
    text = log.path.read_bytes()
    log.path.write_bytes(text[:-30])
    assert run.state()["done"] == 0, "the round is half written"
    with log.path.open("ab") as file:
        file.write(text[-30:])
    assert run.state()["done"] == 1
    log.path.unlink()
    begin(tmp_path, rounds=9, name="another")
    assert (run.state()["name"], run.state()["done"], run.state()["planned"]) == ("another", 0, 9)
    longer = begin(tmp_path / "longer", rounds=9, name="a third one")
    for step in range(5):
        go_on(longer, step)
    longer.path.replace(log.path)
    assert (run.state()["name"], run.state()["done"]) == ("a third one", 5), "also where it is longer than the old one"


def test_each_round_is_read_once_and_one_that_is_done_again_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def noted(event: dict[str, Any]) -> Round:
        read.append(event["step"])
        return round_of(event)

    monkeypatch.setattr(live, "round_of", noted)
    log, run = begin(tmp_path), Followed(tmp_path)
    for step in range(3):
        go_on(log, step)
        assert [run.state()["done"], run.state()["done"]] == [step + 1] * 2
    assert read == [0, 1, 2]
    log.write("run_started", name="again", method="fedavg", clients=3, resumed=True, stages=[])
    log.write("round", stage="federate", round=2, step=2, seconds=1.0, figures={"loss": 9.0}, clients={}, slowest={})
    state = run.state()
    assert state["done"] == 3
    assert next(c for c in state["curves"] if c["label"] == "Training loss")["points"][-1] == (3, 9.0)
    assert read == [0, 1, 2, 2]


def test_clients_without_a_reply_in_a_round_that_never_ended_are_in_trouble(tmp_path: Path) -> None:
    run, log = Followed(tmp_path), begin(tmp_path)
    log.write("missing", stage="federate", round=0, client="b", reason="no reply")
    assert [(c["name"], c["state"]) for c in run.state()["clients"]] == [("b", "missing")]
    for step in range(2):
        go_on(log, step)
    assert {c["name"]: c["state"] for c in run.state()["clients"]} == {"c": "slow", "a": "there", "b": "there"}
    log.write("refused", stage="federate", round=2, client="a", reason="has values that are not finite")
    log.write("run_stopped", reason="too few replies")
    assert {c["name"]: c["state"] for c in run.state()["clients"]} == {"a": "refused", "c": "slow", "b": "there"}


def test_the_privacy_that_is_spent_and_the_budget_are_shown(tmp_path: Path) -> None:
    run, log = Followed(tmp_path), begin(tmp_path)
    log.write("round", stage="federate", round=0, step=0, seconds=1.0, figures={"epsilon": 1.234567})
    assert dict(run.state()["facts"])["Privacy spent"] == "epsilon 1.23"
    (tmp_path / "config.toml").write_text("[aggregation.dp]\nepsilon = 8.0\n")
    assert dict(run.state()["facts"])["Privacy spent"] == "epsilon 1.23 of 8"


def test_runs_of_the_same_name_are_named_by_their_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, name in zip(folders, ("fedavg", "fedavg", "local"), strict=True):
        begin(folder, name=name).write("run_finished", seconds=1.0)
    view = LiveView(folders)
    assert [run["name"] for run in json.loads(view.state())["runs"]] == ["one", "two", "local"]
    rows = [{"name": "fedavg", "folder": f"runs/{row}/seed-0"} for row in ("plain", "deep")]
    assert [row["name"] for row in live.named(rows)] == ["plain/seed-0", "deep/seed-0"]
    watch.follow(folders)
    assert [said.split(":")[0] for said in capsys.readouterr().out.splitlines()] == ["one", "two", "local"]
    view._server.server_close()


def test_a_report_that_comes_after_the_end_is_linked(tmp_path: Path) -> None:
    log, run = begin(tmp_path), Followed(tmp_path)
    go_on(log, 0)
    log.write("run_finished", seconds=5.0)
    assert (run.state()["state"], run.state()["report"]) == ("finished", False)
    (tmp_path / "report.html").write_text("a report")
    assert run.state()["report"]


def test_a_log_that_could_not_be_read_for_a_while_goes_on(tmp_path: Path) -> None:
    log = begin(tmp_path)
    run = Followed(tmp_path)
    text = log.path.read_bytes()
    log.path.unlink()
    log.path.mkdir()
    assert (run.state()["state"], "Is a directory" in run.state()["words"]) == ("stopped", True)
    log.path.rmdir()
    log.path.write_bytes(text)
    assert run.state()["state"] == "running"


def test_long_curves_are_thinned_and_end_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POINTS", 10)
    log = begin(tmp_path, rounds=100)
    for step in range(96):
        go_on(log, step)
    points = next(c for c in Followed(tmp_path).state()["curves"] if c["label"] == "Training loss")["points"]
    assert len(points) <= 11
    assert points[-1][0] == 96


def test_the_token_and_this_machine_are_needed(view: LiveView, tmp_path: Path) -> None:
    begin(tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("a report")
    inside = f"/{view.token}/"
    status, page, headers = get(view, inside)
    assert status == 200
    assert b"connect-src 'self'" in page
    assert headers["Cache-Control"] == "no-cache"
    assert get(view, f"{inside}report-0")[1] == b"a report"
    for path in ("/", "/state.json", "/wrong/state.json", f"{inside}report-1", f"{inside}report-../x",
                 f"{inside}../run", f"{inside}events.jsonl", f"/{view.token[:-1]}/"):  # fmt: skip
        assert get(view, path)[0] == 404, path
    assert get(view, inside, Host=f"evil.example:{view.port}")[0] == 404, "a name that points here is not enough"
    assert get(view, inside, Host=f"localhost:{view.port}")[0] == 200


def test_what_has_not_changed_is_not_sent_again(view: LiveView, tmp_path: Path) -> None:
    log = begin(tmp_path / "run")
    status, body, headers = get(view, f"/{view.token}/state.json")
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 0)
    assert get(view, f"/{view.token}/state.json", **{"If-None-Match": headers["ETag"]})[:2] == (304, b"")
    go_on(log, 0)
    status, body, _ = get(view, f"/{view.token}/state.json", **{"If-None-Match": headers["ETag"]})
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 1)


@pytest.mark.skipif(find() is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_follows(view: LiveView, tmp_path: Path, width: int) -> None:
    log = begin(tmp_path / "run")
    with Browser(tmp_path / "profile") as browser:
        browser.visit(view.address, "document.documentElement?.dataset.shown", width, dark=width < 600)
        assert browser.evaluate("document.getElementById('title').textContent") == NAME, "text, not an element"
        assert browser.evaluate("document.getElementById('sites').hidden")
        site = {"roles": ["a"], "connected": True, "seen": round(time.time()), "version": NAME, "refused": ""}
        (tmp_path / "sites.json").write_text(json.dumps({NAME: site}))
        (tmp_path / "run" / "config.toml").write_text(f'[engine]\nserver = "{tmp_path}"\n')
        go_on(log, 0)
        go_on(log, 1)
        log.write("evaluation", stage="federate", round=1, step=1, seconds=1.0, generic={"test": {"accuracy": 0.75}})
        browser.wait("document.querySelectorAll('.plot path').length == 5")
        heads = browser.evaluate("[...document.querySelectorAll('#plots h3')].map((h) => h.textContent)")
        assert heads[:2] == ["Training loss", "Verification accuracy (test)"]
        drawn = "[...document.querySelectorAll('.plot')].map((p) => p.clientWidth / p.viewBox.baseVal.width)"
        assert all(0.9 < stretched < 1.1 for stretched in browser.evaluate(drawn)), "the last one is alone in its row"
        browser.wait("document.querySelector('.value').textContent == '2 of 4 rounds'")
        assert browser.evaluate("document.querySelector('.pill.slow').textContent") == "slow"
        cells = "[...document.querySelectorAll('#siterows tr > *')].map((cell) => cell.textContent)"
        shown = browser.evaluate(cells)
        assert [shown[i] for i in (0, 1, 2, 4)] == [line(NAME, 60), "connected", "a", "2"]
        assert not browser.evaluate("document.getElementById('sites').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        go_on(log, 2)
        browser.wait("document.querySelectorAll('.plot path').length == 2")
        same = browser.evaluate("document.getElementById('same').textContent")
        assert same.startswith("The same in every round: Learning rate 0.00012, Seconds of a round 2, Megabytes"), same
        log.write("run_finished", seconds=5.0)
        browser.wait("document.querySelector('.pill.finished')")
        assert browser.errors == []
        assert {address.split("/")[2] for address in browser.requests if "data:" not in address} == {
            f"127.0.0.1:{view.port}"
        }


@pytest.mark.skipif(find() is None, reason="no Chromium here")
def test_a_report_from_anywhere_learns_nothing_of_other_runs(view: LiveView, tmp_path: Path) -> None:
    """Its scripts run, since a report draws; what this server says of all runs, and other servers, they cannot ask."""
    begin(tmp_path / "run", name="private")
    (tmp_path / "run" / "report.html").write_text(
        """<title>asking</title><script>
        const ask = (address) => fetch(address).then((answer) => answer.text(), () => "refused");
        const asked = ["state.json", "http://127.0.0.1:9/gone"].map(ask);
        Promise.all(asked).then((said) => { document.title = said.join(); });
        </script>"""
    )
    with Browser(tmp_path / "profile") as browser:
        browser.visit(f"{view.address}report-0", "document.title != 'asking' && document.title")
        assert browser.evaluate("document.title") == "refused,refused"
        assert [address for address in browser.requests if ":9/" in address] == []


@pytest.mark.skipif(find() is None, reason="no Chromium here")
def test_a_report_draws_where_it_is_served(view: LiveView, tmp_path: Path) -> None:
    build_report([write_run(tmp_path / "run", rounds=3, clients=3)])
    with Browser(tmp_path / "profile") as browser:
        browser.visit(f"{view.address}report-0", "document.querySelector('.cartesianlayer .trace path')")
        assert browser.errors == []


def test_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = begin(tmp_path / "one", name="one")
    go_on(log, 0)
    log.write("run_finished", seconds=5.0)
    watch.follow([tmp_path / "one"])
    said = " ".join(capsys.readouterr().out.split())
    assert "one: Finished, 1 of 4 rounds. Training loss 5" in said


def test_the_tables_of_the_terminal_show_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, state = begin(tmp_path / "run", name="mine"), tmp_path / "state"
    go_on(log, 0)
    log.write("missing", stage="federate", round=1, client="b", reason="its machine is gone\x1b[31m")
    log.write("round", stage="federate", round=1, step=1, seconds=2.0, figures={"epsilon": 1.5})
    state.mkdir()
    site = {"roles": ["a"], "connected": True, "seen": time.time(), "version": "0.1.0", "refused": ""}
    (state / "sites.json").write_text(json.dumps({"node-1": site}))
    (tmp_path / "run" / "config.toml").write_text(f'[engine]\nserver = "{state}"\n[aggregation.dp]\nepsilon = 8.0\n')
    shown, found = Console(width=200, record=True, file=io.StringIO()), Followed(tmp_path / "run").state()
    shown.print(watch._tables([found]))
    text = shown.export_text()
    for word in (
        "2 of 4",
        "kB up",
        "kB down",
        "epsilon 1.5 of 8",
        "Training loss 5",
        "its machine is gone",
        "node-1",
        "0.1.0",
    ):
        assert word in text.replace("\N{NO-BREAK SPACE}", " "), word
    assert "\x1b" not in text
    assert "privacy spent: epsilon 1.5 of 8" in watch._words(found)
    monkeypatch.setattr(watch, "MOST", 0)
    shown.print(watch._tables([found]))
    assert "node-1" not in shown.export_text(), "as many rows as there is room for"


def test_clients_without_a_reply_are_one_line_each(tmp_path: Path) -> None:
    log, run = begin(tmp_path), Followed(tmp_path)
    for step in range(3):
        log.write("missing", stage="federate", round=step, client="b", reason="its party is not connected")
        go_on(log, step)
    assert run.state()["messages"] == ["b: no reply 3 times, last in federate round 3: its party is not connected"]


def test_a_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run is there"):
        watch.watch([tmp_path])


def test_a_token_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text("a-token-of-ones-own\n")
    assert watch._token(file) == "a-token-of-ones-own"
    for text in ("short", "with/a/slash/in/it/here", "x" * 201, ""):
        file.write_text(text)
        with pytest.raises(UsageError, match="16 to 200 letters"):
            watch._token(file)
    with pytest.raises(UsageError, match="No such file"):
        watch._token(tmp_path / "none")


def test_the_page_of_a_run_that_begins_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = watch.PageWatcher()
    watcher.begun(tmp_path)
    address = " ".join(capsys.readouterr().out.split()).partition("watching at ")[2]
    port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
    begin(tmp_path)
    with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)) as link:
        link.request("GET", f"/{token}/state.json")
        assert json.loads(link.getresponse().read())["runs"][0]["planned"] == 4
    watcher.close()
    with pytest.raises(OSError), closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)) as link:
        link.request("GET", "/")


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, ".".join("a" * 50_000) + " = 1"], ids=["lists", "parts"])
def test_settings_that_are_no_settings_do_not_stop_the_page(tmp_path: Path, text: str) -> None:
    go_on(begin(tmp_path), 0)
    (tmp_path / "config.toml").write_text(text)
    begun = time.monotonic()
    assert Followed(tmp_path).state()["sites"] == []
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("name", ["events.jsonl", "config.toml", "report.html", "sites.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_page(view: LiveView, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    go_on(begin(folder), 0)
    (folder / "config.toml").write_text(f'[engine]\nserver = "{folder}"\n')
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert get(view, f"/{view.token}/state.json")[0] == 200
    assert get(view, f"/{view.token}/report-0")[0] == 404


def test_sites_of_a_deployment_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    go_on(begin(run), 0)
    state.mkdir()
    assert Followed(run).state()["sites"] == []
    (run / "config.toml").write_text(f'[engine]\nkind = "flower"\nserver = "{state}"\n')
    assert Followed(run).state()["sites"] == [], "the server has not written yet"
    now = round(time.time())
    site = {"roles": ["a"], "connected": True, "seen": now - 3, "version": "0.1.0\x1b[31m", "refused": ""}
    gone = {"roles": ["z"], "connected": False, "seen": 0, "version": "", "refused": "the key of node-2 was revoked"}
    away = {"roles": [], "connected": False, "seen": now - 7200, "version": "0.0.9", "refused": ""}
    (state / "sites.json").write_text(json.dumps({"node-1": site, "node-2": gone, "node-3": away, "node-4": 3}))
    one, two, three, four = Followed(run).state()["sites"]
    assert (one["state"], one["roles"], one["round"]) == ("connected", "a", 1)
    assert 2 < float(one["seen"].removesuffix("\N{NO-BREAK SPACE}s ago")) < 10
    assert one["version"].startswith("0.1.0")
    assert "\x1b" not in one["version"]
    assert (two["state"], two["seen"], two["reason"]) == ("refused", "never", "the key of node-2 was revoked")
    assert (three["state"], three["version"], three["round"]) == ("away", "0.0.9", None)
    assert four["state"] == "away", "whatever the file says"
    said = watch._words(Followed(run).state())
    assert "not connected: node-2, node-3, node-4" in said
    monkeypatch.setattr(live, "STOPPED", -1.0)
    assert {s["state"] for s in Followed(run).state()["sites"]} == {"away"}
    assert Followed(run).state()["sites"][0]["reason"] == "the server does not run"
