"""The records of a party and of the server, without any transport: what agrees, what is open, what differs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.test_remote import CLIENTS, RUN, DictLink, Forge, forged, network, party, rounds
from tests.toys import Toy, ToyServer, toy_engine, toy_world
from typer.testing import CliRunner

from visard.cli.ledger import app
from visard.deployment.ledger_check import Comparison, compare, verify
from visard.deployment.party import Party
from visard.deployment.party_ledger import PartyLedger
from visard.deployment.remote import Parts, RemoteNetwork
from visard.engines.records import Records, files_of, read_records
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import UsageError, VisardError

Row = dict[str, Any]


class Posted(DictLink):
    """As `DictLink`, but parties keep a record of what they send; `lost` says which replies never arrive."""

    recorded = True

    def __init__(self, folder: Path, forge: Forge | None = None, lost: Callable[[Request], str] = lambda _: "") -> None:
        super().__init__({c: party(folder, c) for c in CLIENTS}, forge)
        self.lost, self.held = lost, dict[str, Parts]()
        self.sent = {c: PartyLedger(folder / "at" / c, "server:1", c, lambda c=c: carried(self.at[c])) for c in CLIENTS}

    def send(self, client: str, header: bytes, payload: bytes, timeout: float) -> str | None:
        self.count += 1
        party, asked = self.at[client], unpack(header, Request)
        party.carried = {}
        answer: Parts | None = party.do(header, payload)
        self.sent[client].record(header, *answer)
        fate = self.lost(asked)
        if fate != "unknown":
            self.sent[client].after(taken=fate != "not taken")
        if self.forge and answer:
            answer = self.forge(asked, *answer)
        if answer is not None and not fate:
            self.answers[str(self.count)] = answer
        if answer is not None and fate == "late":
            self.held[str(self.count)] = answer
        return str(self.count)

    def stop(self) -> None:
        for sent in self.sent.values():
            sent.close()


def carried(party: Party) -> bytes:
    return json.dumps(party.carried).encode()


def far(folder: Path, link: Posted, **changes: Any) -> RemoteNetwork:
    net = network(folder, link, **changes)
    (folder / "run" / "checkpoint").mkdir(parents=True, exist_ok=True)
    return net


def checked(folder: Path, *clients: str) -> Comparison:
    """As `visard ledger compare`, of a network whose checkpoint is in `far`."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    if not (run / "checkpoint").is_symlink():
        (run / "checkpoint").rmdir() if (run / "checkpoint").exists() else None
        (run / "checkpoint").symlink_to(folder / "far")
    (folder / "far" / "run.id").write_text(RUN)
    return compare(run, [folder / "at" / c for c in clients or CLIENTS])


def received(folder: Path) -> list[Row]:
    return [line.record for line in read_records(files_of(folder / "far", "received"))]


def of(rows: list[Row], event: str) -> list[Row]:
    return [row for row in rows if row["event"] == event]


def test_every_reply_is_on_both_records_with_its_true_size(tmp_path: Path) -> None:
    link = Posted(tmp_path)
    net = far(tmp_path, link)
    server = rounds(net, Toy(), 0, 2)
    net.keep(server.theta, "ours")
    net.close()
    link.stop()
    found = checked(tmp_path)
    assert (found.same, found.open, found.differences, found.unchecked) == (9, [], [], {})
    rows = received(tmp_path)
    assert [row["event"] for row in rows] == ["begin", *["reply"] * 9, "end"]
    mine = [line.record for line in read_records(files_of(tmp_path / "at" / CLIENTS[1], "ledger"))]
    assert [row["event"] for row in mine] == ["begin", "reply", "reply", "reply", "end"]
    first = of(mine, "reply")[0]
    assert (first["client"], first["stage"], first["round"], first["ask"]) == (CLIENTS[1], "add", 0, 1)
    assert (first["message"], first["run"]) == ("ToyUp", RUN)
    assert [part[:2] for part in first["parts"]] == [
        ["w", "class_vectors"], ["theta", "weights"], ["n", "count"], ["loss", "metric"],
    ]  # fmt: skip
    framed = first["payload"] - sum(size for _, _, size in first["parts"])
    assert 0 < framed < 100, "what is not content is the frame of the message"
    assert [row["before"] for row in mine] == ["unknown", "unknown", "delivered", "delivered", "delivered"]
    assert of(mine, "reply")[-1]["payload"] == 0, "that a model was kept is a reply too"


def test_a_reply_that_is_sent_again_after_a_kill_may_be_the_same_in_every_byte(tmp_path: Path) -> None:
    link = Posted(tmp_path)
    net = far(tmp_path, link)
    original = link.sent[CLIENTS[1]].record

    def twice(*given: bytes) -> None:
        original(*given)
        original(*given)  # a party that was killed in between does not know what became of the first

    link.sent[CLIENTS[1]].record = twice  # type: ignore[method-assign]
    rounds(net, Toy(), 0, 1)
    net.close()
    link.stop()
    found = checked(tmp_path)
    assert found.differences == []
    assert found.same == 3
    (first,) = found.open
    assert "line 2)" in first


@pytest.mark.parametrize("fault", ["raise", "bug", "figure with a bad name"])
def test_a_failure_is_a_reply_too(tmp_path: Path, fault: str) -> None:
    link = Posted(tmp_path)
    net = far(tmp_path, link, faults={CLIENTS[1]: fault})
    rounds(net, Toy(), 0, 1)
    net.close()
    assert checked(tmp_path).same == 3
    (row,) = [row for row in received(tmp_path) if row.get("outcome") == "failed"]
    assert row["client"] == CLIENTS[1]
    assert row["header"] > len(row["reason"]) > 0
    assert "\x1b" not in row["reason"]


def test_refused_replies_are_on_the_servers_record_and_no_resume_removes_them(tmp_path: Path) -> None:
    link = Posted(tmp_path)
    net = far(tmp_path, link, faults={CLIENTS[1]: "nan"})
    server = rounds(net, Toy(), 0, 1)
    net.begin("add", 1)
    Toy().round(server, net)  # the server dies before it commits this round
    net.received.flush()  # type: ignore[union-attr]
    again = Posted(tmp_path)
    net = far(tmp_path, again)
    rounds(net, Toy(), 1, 1, net.states.server_state(ToyServer))
    net.close()
    rows = received(tmp_path)
    assert [(row["client"], row["round"]) for row in of(rows, "refused")] == [(CLIENTS[1], 0), (CLIENTS[1], 1)]
    assert "not finite" in of(rows, "refused")[0]["reason"]
    assert {part[1] for part in of(rows, "refused")[0]["parts"]} == {"class_vectors", "weights", "count", "metric"}
    assert len(of(rows, "reply")) == 9, "round 1 was done twice, and left twice"
    accepted = [json.loads(line) for line in net.states.ledger.read_text().splitlines()]
    assert len(accepted) == (2 + 3) * 4, "the rows of accepted replies are as ever"
    found = checked(tmp_path)
    assert (found.same, found.differences) == (9, [])


@pytest.mark.parametrize(
    ("forge", "outcome"),
    [
        (forged(lambda a: replace(a, round=7)), "refused"),
        (lambda r, h, p: (b"\xff", p) if r.client == CLIENTS[1] else (h, p), "refused"),
        (lambda r, h, p: (h, p + bytes(3000)) if r.client == CLIENTS[1] else (h, p), "refused"),
    ],
)
def test_bytes_that_the_party_has_not_on_record_differ(tmp_path: Path, forge: Forge, outcome: str) -> None:
    link = Posted(tmp_path, forge)
    net = far(tmp_path, link)
    rounds(net, Toy(), 0, 1)
    net.close()
    link.stop()
    (row,) = [r for r in received(tmp_path) if r.get("outcome") == outcome]
    assert row["client"] == CLIENTS[1]
    found = checked(tmp_path)
    assert found.same == 2
    assert len(found.differences) == 1
    assert CLIENTS[1] in found.differences[0]
    assert "received: " in found.differences[0]


def test_late_replies_are_recorded_when_they_come(tmp_path: Path) -> None:
    link = Posted(tmp_path, lost=lambda r: "late" if (r.client, r.round) == (CLIENTS[1], 0) else "")
    net = far(tmp_path, link, timeout=0.3)
    server = rounds(net, Toy(), 0, 1)
    assert net.traffic.problems[0]["reason"] == "no reply before the time limit"
    assert of(received(tmp_path), "given up")[0]["client"] == CLIENTS[1]
    assert len(checked(tmp_path).open) == 1
    link.answers |= link.held
    rounds(net, Toy(), 1, 1, server)
    net.close()
    assert [row["outcome"] for row in of(received(tmp_path), "reply")].count("late") == 1
    found = checked(tmp_path)
    assert (found.same, found.open, found.differences) == (6, [], [])


def test_a_reply_that_comes_after_the_last_round_is_recorded_at_the_end(tmp_path: Path) -> None:
    link = Posted(tmp_path, lost=lambda r: "late" if r.client == CLIENTS[1] else "")
    net = far(tmp_path, link, timeout=0.3)
    rounds(net, Toy(), 0, 1)
    link.answers |= link.held
    net.close()
    rows = received(tmp_path)
    assert [row["outcome"] for row in of(rows, "reply")] == ["read", "read", "late"]
    assert of(rows, "end")[0]["open"] == []
    assert checked(tmp_path).same == 3


@pytest.mark.parametrize(
    ("fate", "says"),
    [("not taken", "turned it away"), ("unknown", "does not know that it arrived"), ("gone", "stopped waiting")],
)
def test_what_a_kill_may_leave_open(tmp_path: Path, fate: str, says: str) -> None:
    link = Posted(tmp_path, lost=lambda r: fate if r.client == CLIENTS[2] else "")
    net = far(tmp_path, link, timeout=0.3)
    rounds(net, Toy(), 0, 1)
    if fate == "gone":
        monkey = net.received
        assert monkey is not None
        monkey.end([(CLIENTS[2], "add", 0, 1)])
    link.sent[CLIENTS[2]].close()
    found = checked(tmp_path)
    assert (found.same, found.differences) == (2, [])
    assert len(found.open) == 1
    assert says in found.open[0]


class Killed(BaseException):
    """Stands for a SIGKILL of the run."""


def test_a_killed_server_may_lack_the_last_reply_of_each_client_and_no_more(tmp_path: Path) -> None:
    link = Posted(tmp_path)
    net = far(tmp_path, link)
    server = rounds(net, Toy(), 0, 1)
    receive = link.receive

    def kill(numbers: Collection[str]) -> dict[str, Parts | str]:
        raise Killed

    link.receive = kill  # type: ignore[method-assign]
    net.begin("add", 1)
    with pytest.raises(Killed):
        Toy().round(server, net)
    link.receive = receive  # type: ignore[method-assign]
    link.stop()
    found = checked(tmp_path)
    assert (found.same, found.differences, len(found.open)) == (3, [], 3)
    assert all("the server's process was stopped" in line for line in found.open)
    again = Posted(tmp_path)
    net = far(tmp_path, again)
    rounds(net, Toy(), 1, 1, net.states.server_state(ToyServer))
    net.close()
    found = checked(tmp_path)
    assert (found.same, found.differences, len(found.open)) == (6, [], 3), "they stay open, and are named"


def cut(folder: Path, client: str, keep: int) -> None:
    path = folder / "at" / client / "ledger-000001.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


def forget(folder: Path, keep: Callable[[Row], bool]) -> None:
    """Write the server's record anew, as a whole chain, without some of its rows."""
    (path,) = files_of(folder / "far", "received")
    rewrite(path, [row for row in received(folder) if keep(row)])


def rewrite(path: Path, rows: list[Row]) -> None:
    path.unlink()
    records = Records(path.parent, "received")
    for row in rows:
        records.append(row["event"], **{k: v for k, v in row.items() if k not in ("n", "previous", "event")})


def play(folder: Path, count: int = 3) -> None:
    link = Posted(folder)
    net = far(folder, link)
    rounds(net, Toy(), 0, count)
    net.close()
    link.stop()
    assert checked(folder).agree


def test_a_party_that_cuts_the_end_of_its_record_is_found_out(tmp_path: Path) -> None:
    play(tmp_path)
    cut(tmp_path, CLIENTS[0], 3)
    assert verify(tmp_path / "at" / CLIENTS[0]).records == 3, "the chain alone does not show it"
    found = checked(tmp_path)
    assert found.same == 2 + 3 + 3
    assert [line.split(": client")[0] for line in found.differences] == [
        f"received, but {tmp_path / 'at' / CLIENTS[0]} has no record of it"
    ]
    cut(tmp_path, CLIENTS[0], 1)
    assert "has no reply of this run" in checked(tmp_path).differences[0]


def test_a_server_that_leaves_out_a_reply_is_found_out(tmp_path: Path) -> None:
    play(tmp_path)
    forget(tmp_path, lambda row: (row.get("client"), row.get("round")) != (CLIENTS[1], 1))
    found = checked(tmp_path)
    assert "sent, but the server has no record of it: client-001, add round 1, ask 1" in found.differences[0]
    assert any("which no reply on record carries" in line for line in found.differences), "its own ledger has it"


def test_a_server_that_cuts_its_record_can_hide_one_reply_of_a_client_as_open_and_not_two(tmp_path: Path) -> None:
    play(tmp_path)
    (tmp_path / "far" / "ledger.jsonl").write_text("")
    forget(tmp_path, lambda row: row["event"] != "end" and row.get("round") != 2)
    found = checked(tmp_path)
    assert (found.differences, len(found.open)) == ([], 3)
    forget(tmp_path, lambda row: row.get("round") != 1)
    found = checked(tmp_path)
    assert len(found.differences) == 3


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    play(tmp_path, 1)
    (path,) = files_of(tmp_path / "far", "received")
    text = path.read_text()
    assert '"parts":[["w","class_vectors",78]' in text
    path.write_text(text.replace('["w","class_vectors",78]', '["w","class_vectors",8]'))
    with pytest.raises(VisardError, match="does not follow from the line before it"):
        checked(tmp_path)
    rewrite(path, [json.loads(line) for line in path.read_text().splitlines()])
    assert any("the same reply with other sizes" in line for line in checked(tmp_path).differences)


def test_only_the_given_parties_are_compared(tmp_path: Path) -> None:
    play(tmp_path)
    found = checked(tmp_path, CLIENTS[0])
    assert (found.same, found.differences) == (3, [])
    assert found.unchecked == {CLIENTS[1]: 3, CLIENTS[2]: 3}
    with pytest.raises(UsageError, match="is not a run with parties"):
        compare(tmp_path, [])


def test_simulated_clients_leave_a_record_only_of_what_was_refused(tmp_path: Path) -> None:
    net = toy_engine(tmp_path, toy_world(tmp_path))
    rounds(net, Toy(), 0, 1)
    assert not files_of(tmp_path / "checkpoint", "received")
    net.world.min_replies = 0.0
    rounds(net, Toy(faults={CLIENTS[0]: "nan", CLIENTS[1]: "raise"}), 1, 1)
    rows = [line.record for line in read_records(files_of(tmp_path / "checkpoint", "received"))]
    assert [(row["event"], row.get("client")) for row in rows] == [("begin", None), ("refused", CLIENTS[0])]


def test_a_request_that_could_not_be_read_is_answered_on_record(tmp_path: Path) -> None:
    sent = PartyLedger(tmp_path, "server:1", "1", lambda: b"")
    sent.record(b"\xff", pack(Reply(failure="request refused: malformed request")), b"")
    sent.close()
    (row,) = [line.record for line in read_records(files_of(tmp_path, "ledger")) if line.record["event"] == "reply"]
    assert (row["run"], row["reason"]) == ("", "request refused: malformed request")


def test_a_server_cannot_fill_the_record_of_a_party_with_long_names(tmp_path: Path) -> None:
    sent = PartyLedger(tmp_path, "server:1", "1", lambda: b"")
    long = "\0" * 20_000
    sent.record(pack(Request(run=long, client=long, stage=long, session=long)), pack(Reply(failure=long)), b"")
    sent.close()
    (file,) = files_of(tmp_path, "ledger")
    assert file.stat().st_size < 15_000
    assert len(list(read_records([file]))) == 3


def test_the_commands(tmp_path: Path) -> None:
    play(tmp_path)
    runner, command = CliRunner(), app
    own = [str(tmp_path / "at" / c) for c in CLIENTS]
    done = runner.invoke(command, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 0
    assert "11 records, the chain is whole; digest of the last one " in done.output.replace("\n", "")
    assert "replies: 9 read" in done.output
    done = runner.invoke(command, ["compare", str(tmp_path / "run"), *own])
    assert (done.exit_code, done.output) == (0, "9 replies on both sides, byte for byte the same\n")
    cut(tmp_path, CLIENTS[0], 3)
    done = runner.invoke(command, ["compare", str(tmp_path / "run"), *own])
    assert done.exit_code == 1
    assert "DIFFERENT: received, but " in done.output
    assert str(done.exception) == "the records differ in 1 place"
    assert isinstance(runner.invoke(command, ["verify", str(tmp_path / "no")]).exception, UsageError)
