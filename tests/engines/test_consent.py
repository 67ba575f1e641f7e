"""The question before a party's first part in a run, and what a yes, a no and a missing terminal lead to."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.test_guard import HOUSE, RUN, Server
from tests.toys import noise_faces

from visard.cli.client import agree
from visard.deployment.consent import Consent
from visard.deployment.consent_question import text
from visard.deployment.guard import Guard
from visard.deployment.party import Basis
from visard.deployment.policy import Policy
from visard.engines.codec import encode
from visard.engines.request import Reply, Request, pack, unpack
from visard.methods import METHODS, fedavg


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_faces(tmp_path_factory.mktemp("faces") / "set", 6, 8).path


class Desk:
    """The people at a party, and what was shown to them."""

    def __init__(self, server: Server, answer: bool | None) -> None:
        self.server, self.answer = server, answer
        self.shown: list[str] = []
        self.said: list[str] = []
        ask = None if answer is None else self.ask
        self.consent = Consent(server.party.do, server.home, "server.example:9443", self.said.append, ask)

    def ask(self, text: str) -> bool:
        self.shown.append(text)
        return bool(self.answer)

    def join(self, run: str = RUN) -> Reply:
        return unpack(self.consent.do(pack(Request(run, self.server.spec)), b"")[0], Reply)


def test_a_yes_is_kept_for_that_run_and_that_server(tmp_path: Path, faces: Path) -> None:
    server = Server(tmp_path, faces, None)
    desk = Desk(server, True)
    assert desk.join().roles == {HOUSE: {"identities": 6, "pictures": 48}}
    (text,) = desk.shown
    for words in (
        "server    server.example:9443", f"run       {RUN}", "method    fedavg: federated averaging",
        "2 in an average, says the server", "house-1: 38 training pictures of 6 people", "training.lr = 0.1",
        "training.batch_size = 8", "rounds = 30", "weights: network weights. Weights of one client in the clear",
        "statistic: statistics over many pictures", "When it joins, it also says how many people and pictures",
        "What a hostile server could do", "learning rates of 0.00099",
    ):  # fmt: skip
        assert words in text, words
    assert "class_vectors" not in text.partition("What a hostile")[0], "not with these settings"
    kept = Policy.load(tmp_path / "consents" / f"{RUN}.toml")
    assert (kept.runs, kept.servers, kept.methods, kept.retention.days) == ((RUN,), ("the CA",), ("fedavg",), 30.0)
    assert (tmp_path / "consents" / f"{RUN}.toml").stat().st_mode & 0o777 == 0o600
    assert any(str(tmp_path / "consents" / f"{RUN}.toml") in line for line in desk.said)
    assert server.train() == ""
    assert "has lr = 0.2" in server.train(lr=0.2, round=1), "more than was asked for"
    server.restart(None)
    assert Desk(server, None).join().failure is None, "a restart, at a terminal or not, does not ask again"
    again = Desk(server, True)
    again.join("cd" * 16)
    assert len(again.shown) == 1, "another run is another question"
    other = Guard(tmp_path, None, "another CA")
    server.party.guard = other
    assert "does not name the server" in (Desk(server, True).join().failure or "")


def test_a_no_holds_and_nothing_is_said(tmp_path: Path, faces: Path) -> None:
    desk = Desk(Server(tmp_path, faces, None), False)
    for _ in range(2):
        reply = desk.join()
        assert reply.failure == "the party does not take part in this run"
        assert not reply.roles
    assert len(desk.shown) == 1
    assert not (tmp_path / "consents").exists()
    assert not list((tmp_path / "states").glob("*/run.json"))


def test_without_a_terminal_one_line_says_how_to_allow_it(tmp_path: Path, faces: Path) -> None:
    desk = Desk(Server(tmp_path, faces, None), None)
    assert desk.join().failure == "the party does not take part in this run"
    assert desk.said == [
        f"refused run {RUN[:8]}: allow it in a file (visard client policy) and start with --policy FILE, or start at a "
        "terminal to be asked"
    ]
    down = encode(fedavg.Down(desk.server.theta, {}, None, 0.1))
    for request in (
        Request(RUN, desk.server.spec, HOUSE, "local", "federate", 0, 1),
        Request(RUN, desk.server.spec, HOUSE, "", "federate", 0, 1, keep="ours"),
    ):
        header, payload = desk.consent.do(pack(request), encode(Basis(None)) if request.keep else down)
        assert unpack(header, Reply).failure == "the party does not take part in this run"
        assert payload == b"", "the question stays here"


def test_what_cannot_begin_is_not_asked_about(tmp_path: Path, faces: Path) -> None:
    server = Server(tmp_path, faces, None)
    server.spec["settings"]["method"] = {"name": "somebodys.module:Method"}
    desk = Desk(server, True)
    assert "which this party does not allow (plugins.allow)" in (desk.join().failure or "")
    assert not desk.shown


def test_fedface_says_that_the_server_holds_templates(tmp_path: Path, faces: Path) -> None:
    changes = ["model.frozen_norm=true", "method.pretrain_rounds=0", "partition.public_identities=0"]
    desk = Desk(Server(tmp_path, faces, None, *changes, method="fedface"), True)
    assert desk.join().failure is None
    assert "The server holds a face template (class vector) of every person" in desk.shown[0]


def test_clients_in_turn_and_negatives_are_in_the_question(tmp_path: Path, faces: Path) -> None:
    changes = ["method.in_turn=2", "method.negatives=noisy", "method.negatives_by.noise=0.01"]
    desk = Desk(Server(tmp_path, faces, None, *changes), True)
    desk.join()
    for words in ("in_turn = 2", "negatives = noisy", "negatives_by.noise = 0.01", "1 in an average, says the server"):
        assert words in desk.shown[0]


def test_text_of_a_server_cannot_move_the_cursor(tmp_path: Path, faces: Path) -> None:
    server = Server(tmp_path, faces, None)
    server.spec["settings"]["method"]["head"] = {"kind": "arcface", "options": {"init": "\x1b[2J"}}
    desk = Desk(server, True)
    desk.join()
    assert all(c.isprintable() or c == "\n" for text in desk.shown for c in text)


@pytest.mark.parametrize(("lines", "expected"), [(["yes"], True), (["maybe", "N"], False), ([], False)])
def test_yes_and_no(monkeypatch: pytest.MonkeyPatch, lines: list[str], expected: bool) -> None:
    left = iter(lines)

    def answer(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    assert agree("?") is expected


@pytest.mark.parametrize("name", METHODS.built_in)
def test_every_method_says_what_a_hostile_server_can_do(name: str) -> None:
    assert 40 < len(METHODS[name].hostile) < 1990, "all of it is shown"


def test_a_server_cannot_write_lines_of_its_own_into_the_question(tmp_path: Path, faces: Path) -> None:
    server = Server(tmp_path, faces, None)
    evil = {"init": "x\n\nWhat would leave this machine, and what it reveals:\n  nothing\r\x1b[2J"}
    settings = server.spec["settings"]
    request = Request(RUN, server.spec | {"settings": settings | {"method": settings["method"] | evil}})
    world, method = server.party.make_world(server.spec, Policy(methods=("fedavg",)))
    shown = text(request, world, method, Policy(methods=("fedavg",)))
    assert len([row for row in shown.splitlines() if row.startswith("What would leave")]) == 1
    assert "\x1b" not in shown
    assert "\r" not in shown
