"""What a party allows: its file, and what of a run's settings is checked before anything leaves."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from visard.cli import client, load_command
from visard.config import load
from visard.deployment.guard import Guard
from visard.deployment.join import run_spec, settings_of, world_of_party
from visard.deployment.party import OwnStates, Party
from visard.deployment.policy import Bounds, Policy, Protect, Retention, leaves
from visard.engines.request import Reply, Request, pack, unpack
from visard.errors import PublicError, UsageError

FILE = """
methods = ["encrypted-mmd", "fedfr-da"]
kinds = ["weights", "statistic", "ciphertext", "public_key", "metric", "count"]
[require.method]
name = { one_of = ["encrypted-mmd", "fedfr-da"] }
noise = { at_least = 2.0, at_most = 50 }
min_batch = { at_least = 64 }
insecure_keys = false

[require.method.training]
batch_size = 64

[local.method]
keys = "own/keys"
pins = { target = "0123456789abcdef" }
"""
FITS = {"method.noise": "3", "method.min_batch": "64", "method.key_bits": "3072", "method.insecure_keys": "false"}


class _Partition:
    hash = "h"


WORLD = SimpleNamespace(spec={"model": "mlp", "embedding": 16, "size": 48}, trunk=None)
METHODS = 'methods = ["encrypted-mmd"]\n'


def policy(tmp_path: Path, text: str = FILE) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return Policy.load(path)


def run(**changes: str) -> dict[str, Any]:
    """What the server tells of a run."""
    settings = load("encrypted-mmd-sensors", [f"{k}={v}" for k, v in (FITS | changes).items()])
    plain = run_spec(settings, _Partition(), 48, WORLD)  # type: ignore[arg-type]
    plain["settings"]["data"] = {}
    return plain


def test_a_run_that_fits_goes_on_with_what_is_local(tmp_path: Path) -> None:
    method: Any = settings_of(run(), policy(tmp_path)).method
    assert method.keys == "own/keys"
    assert method.pins == {"target": "0123456789abcdef"}
    assert method.noise == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method.noise": "0"}, r"this party requires method.noise at least 2.0, the run has 0.0"),
        ({"method.noise": "100"}, r"this party requires method.noise at most 50, the run has 100.0"),
        ({"method.min_batch": "32"}, r"this party requires method.min_batch at least 64, the run has 32"),
        ({"method.insecure_keys": "true"}, r"this party requires method.insecure_keys = False, the run has True"),
        (
            {"method.training.batch_size": "128"},
            r"this party requires method.training.batch_size = 64, the run has 128",
        ),
    ],
)
def test_a_run_that_differs_is_refused(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(PublicError, match=words):
        settings_of(run(**changes), policy(tmp_path))
    settings_of(
        run(**changes),
        Policy(methods=("encrypted-mmd",), require={"method": {"insecure_keys": {"one_of": [True, False]}}}),
    )


def test_keys_that_can_be_broken_need_the_word_of_the_party(tmp_path: Path) -> None:
    weak = run(**{"method.insecure_keys": "true", "method.key_bits": "512"})
    with pytest.raises(PublicError, match="the run sets method.insecure_keys: this party does not allow"):
        settings_of(weak, Policy(methods=("encrypted-mmd",)))
    with pytest.raises(PublicError, match="the run sets method.insecure_keys"):
        settings_of(weak, policy(tmp_path, METHODS + "[require.method]\nname = 'encrypted-mmd'"))
    for table, other in (("require", "local"), ("local", "require")):
        text = f"{METHODS}[{table}.method]\ninsecure_keys = true\n[{other}.method]\nmin_batch = 64"
        method: Any = settings_of(weak, policy(tmp_path, text)).method
        assert method.key_bits == 512


def test_a_setting_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    for text in ("[require.method]\nnoize = 3", "[require.method.noise]\nsigma = 3"):
        with pytest.raises(PublicError, match="requirements for method.noi.*, which the run does not have"):
            settings_of(run(), policy(tmp_path, METHODS + text))
    with pytest.raises(UsageError, match="method.noize"):  # stays in the party's log: it may quote what is local
        settings_of(run(), policy(tmp_path, METHODS + "[local.method]\nnoize = 3"))


def test_no_server_chooses_a_folder_of_a_party() -> None:
    """Neither one that says so in the settings, nor one that makes up what it tells."""
    said = run(**{"method.keys": "/somewhere"})
    assert "keys" not in said["settings"]["method"]
    said["settings"]["method"]["keys"] = "/somewhere"
    method: Any = settings_of(said, Policy(methods=("encrypted-mmd",))).method
    assert method.keys == ""
    aligned = load("fedfr-da", ["method.align.keys=/somewhere"])
    assert "keys" not in run_spec(aligned, _Partition(), 32, WORLD)["settings"]["method"]["align"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[required.method]\nnoise = 3", "methods: field required"),
        ("[require.method]\nnoise = 3", r'name the methods that are allowed: methods = \["fedavg"\]'),
        ("methods = []", "methods: tuple should have at least 1 item"),
        ('methods = ["x"]\n[bound]', r"bound: unknown entry \(did you mean 'bounds'\?\)"),
        ('methods = ["x"]\n[bounds]\nround = 3', r"bounds.round: unknown entry \(did you mean 'rounds'\?\)"),
        ('methods = ["x"]\n[bounds]\nlr = { at_least = 1, at_most = 0.1 }', "bounds.lr: at_least = 1 is above at_most"),
        ('methods = ["x"]\n[bounds]\nlr = { at_least = nan, at_most = 0.1 }', "bounds.lr.at_least: "),
        ('methods = ["x"]\nkinds = ["weight"]', r"kinds: unknown kind 'weight' \(did you mean 'weights'\?\)"),
        ('methods = ["x"]\nrequire = 3', "require: input should be a valid dictionary"),
        ('methods = ["x"]\n[weights]\nstart = ["abc"]', "weights.start: a digest has 64 hexadecimal digits"),
        (METHODS + "[require.method]\nnoise = { at_least = '3' }", "method.noise: at_least = '3'"),
        (METHODS + "[require.method]\nname = { one_of = 'x' }", "method.name: one_of = 'x'"),
        ("[require", "Expected"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        policy(tmp_path, text)
    assert str(caught.value).startswith(f"--policy {tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Policy.load(tmp_path / "none.toml")


def test_a_policy_survives_its_file(tmp_path: Path) -> None:
    one = policy(tmp_path)
    assert policy(tmp_path, one.to_toml()) == one


@pytest.mark.parametrize(
    ("protect", "words"),
    [
        ("secure_aggregation = true", "secure aggregation, which the run has not"),
        ("dp_epsilon = 3", "requires differential privacy, which the run has not"),
    ],
)
def test_protection_that_a_run_has_not_refuses_it(tmp_path: Path, protect: str, words: str) -> None:
    with pytest.raises(PublicError, match=words):
        settings_of(run(), policy(tmp_path, f"{METHODS}[protect]\n{protect}"))


def test_a_method_that_is_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(PublicError, match="does not take part in 'encrypted-mmd'"):
        settings_of(run(), policy(tmp_path, 'methods = ["fedavg"]'))


@pytest.mark.flower
def test_the_client_hands_it_to_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    given: list[Any] = []
    monkeypatch.setattr(client, "take_part", lambda *rest: given.extend(rest))
    policy(tmp_path)
    words = ["--server", "h:1", "--keys", str(tmp_path), "--node", "1", "--role", "a", "--data", "synthetic"]
    words += ["--state", str(tmp_path / "mine")]
    call(*words, "--policy", str(tmp_path / "policy.toml"))
    assert Policy.parse(given[6], "") == policy(tmp_path)
    with pytest.raises(UsageError, match="no policy and no terminal to ask at: allow it in a file"):
        call(*words)
    with pytest.raises(UsageError, match="--require is now --policy"):
        call(*words, "--require", "mine.toml")
    with pytest.raises(UsageError, match="--node is missing"):
        call("--server", "h:1", "--keys", str(tmp_path))


def call(*words: str) -> None:
    """`visard client ...` in this process."""
    load_command("client").main(list(words), standalone_mode=False)


def test_a_policy_without_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    call("policy", "--allow", "fedavg", "--kind", "statistic", "--parties", "3", "--days", "7", "--out", str(out))
    made = Policy.load(out)
    assert (made.methods, made.bounds.parties, made.retention.days) == (("fedavg",), 3, 7.0)
    assert made.kinds == ("weights", "metric", "count", "ciphertext", "public_key", "statistic")
    assert "fedavg: runs that would send class_vectors or noisy_vectors are refused" in capsys.readouterr().out
    assert out.stat().st_mode & 0o777 == 0o600
    for words, says in (
        (("--allow", "fedavg"), "exists already"),
        (("--allow", "fedavgg", "--out", "x"), r"unknown method \(did you mean 'fedavg'\?\)"),
        (("--allow", "fedavg", "--kind", "picture", "--out", "x"), r"unknown kind 'picture' \(did you mean 'pictures'"),
        (("--out", "x"), "no terminal to ask at: name what is allowed"),
    ):
        with pytest.raises(UsageError, match=says):
            call("policy", *(words if "--out" in words else (*words, "--out", str(out))))


def test_a_policy_by_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter at every question gives a safe policy; class vectors are asked for in words that say what they are."""
    asked: list[str] = []

    def prompt(text: str, default: Any = None, **_: Any) -> Any:
        asked.append(text)
        return "fedface, fedavgg" if len(asked) == 1 else "fedface" if len(asked) == 2 else default

    def confirm(text: str, default: bool = False) -> bool:
        asked.append(text)
        return default

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr("typer.confirm", confirm)
    call("policy", "--out", str(tmp_path / "mine.toml"))
    made = Policy.load(tmp_path / "mine.toml")
    assert made == Policy(methods=("fedface",), retention=Retention(days=30.0))
    assert "May class_vectors leave this machine?" in asked
    assert "May statistic leave this machine?" in asked


def test_a_party_refuses_before_it_says_anything(tmp_path: Path) -> None:
    """Not even how many pictures it has."""
    floors = Policy(methods=("encrypted-mmd",), require={"method": {"noise": {"at_least": 2.0}}})
    make = partial(world_of_party, data="synthetic", file=None, clients=["user-1"])
    party = Party(make, OwnStates(tmp_path), Guard(tmp_path, floors))
    header, payload = party.do(pack(Request("0" * 32, run(**{"method.noise": "0"}))), b"")
    answer = unpack(header, Reply)
    assert answer.failure == "this party requires method.noise at least 2.0, the run has 0.0"
    assert not answer.roles
    assert payload == b""


def test_the_file_of_the_page_is_the_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    found = Policy.parse(tomllib.loads(text), "docs/policy.md")
    assert found.bounds == Bounds()
    assert found.protect == Protect()
    assert set(found.kinds) <= set(Policy(methods=("x",)).kinds)
    names = {name for name, _ in leaves(found.model_dump(exclude_none=True))}
    assert all(f"{name.rpartition('.')[2]} = " in text or "steps" in name or "lr" in name for name in names)


@pytest.mark.parametrize("table", ["require", "local"])
@pytest.mark.parametrize("value", ["07:32:00", "1979-05-27", "[1979-05-27T07:32:00Z]", "inf", "[-inf]", "nan"])
def test_dates_and_numbers_without_end_are_no_settings(tmp_path: Path, table: str, value: str) -> None:
    """The worker process, which gets the policy as JSON, would have another one."""
    what = "a date or a time" if "7" in value else "inf or nan"
    with pytest.raises(UsageError, match=rf"policy\.toml: {table}: holds {what}, which no setting is"):
        policy(tmp_path, f"{METHODS}[{table}.method]\nrounds = {value}\n")
