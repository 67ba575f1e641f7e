"""Plug-ins: found by file, module and entry point, recorded in a run, never imported because somebody else says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.smoke import SMOKE

import visard
from visard import models, plugins
from visard.cli import main
from visard.config import load, parse
from visard.deployment.join import settings_of
from visard.deployment.policy import Plugins, Policy
from visard.errors import PublicError, UsageError, VisardError
from visard.methods import METHODS
from visard.models.files import save_model
from visard.plugins import Registry
from visard.runs.trackers import WATCHERS

METHOD = """
from dataclasses import dataclass

from torch import nn

from visard.methods.fedavg import FedAvg
from visard.plugins import register


@register("methods", "mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    title = "a method of my own"

    patience: int = 3


@register("backbones", "flat")
class Flat(nn.Module):
    def __init__(self, embedding: int = 24, size: int = 32) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * size**2, embedding)

    def forward(self, x):
        return self.fc(x.flatten(1))
"""
OTHERS = ("method.head.kind=normface", "aggregation.rule=coordinate-median", 'engine.watchers=["csv"]')
SETTINGS = [s for s in SMOKE if not s.startswith(("engine", "model"))] + ["model.name=flat"]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test registers is unknown to the next."""
    monkeypatch.setattr(plugins, "_added", {kind: {} for kind in plugins.KINDS})
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.setattr(plugins, "_doubted", {})
    before = set(sys.modules)
    yield
    for name in [m for m in sys.modules if m not in before and m.startswith(("canary", "visard_plugin_"))]:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(METHOD)
    return path


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `canary` with everything of `file`, and an entry point `sung`; importing it leaves the file `sang`."""
    folder = tmp_path / "site"
    info = folder / "canary_bird-1.2.dist-info"
    info.mkdir(parents=True)
    (folder / "canary.py").write_text(f"from pathlib import Path\n\nPath({str(tmp_path)!r}, 'sang').touch()\n{METHOD}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: canary-bird\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[visard.methods]\nsung = canary:Mine\n")
    monkeypatch.syspath_prepend(str(folder))
    return tmp_path / "sang"


def test_a_registry_is_a_mapping_whose_built_in_things_come_late() -> None:
    things: Registry[Any] = Registry("heads", {"path": "pathlib:Path", "size": len}, one="thing")
    assert list(things) == ["path", "size"]
    assert "path" in things
    assert things["path"] is Path
    assert things.find("size") is len
    assert things.origin("path") == "built in"
    with pytest.raises(KeyError):
        things["pat"]
    with pytest.raises(UsageError, match="unknown thing 'pat' \\(did you mean 'path'\\?\\)"):
        things.find("pat")


def test_by_module_and_name(canary: Path) -> None:
    assert METHODS.find("canary:Mine").name == "mine"
    assert METHODS.origin("canary:Mine") == "module canary"
    for name, words in (
        ("canary:Flat", "cannot be used as method"),
        ("canary:Nothing", "AttributeError"),
        ("no_such_module:Mine", "ModuleNotFoundError"),
        (":", "plug-in :: "),
    ):
        with pytest.raises(UsageError, match=words):
            METHODS.find(name)


def test_by_entry_point(canary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sung" in METHODS
    assert not canary.exists(), "listing names imports nothing"
    assert METHODS.origin("sung") == "canary-bird 1.2"
    monkeypatch.setattr(sys, "argv", ["visard", "methods"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "canary-bird" in capsys.readouterr().out  # a narrow table breaks the line after it
    assert METHODS["sung"].__module__ == "canary"


def test_listings_say_where_things_come_from(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, line in (("methods", "mine "), ("plugins", "backbones")):
        monkeypatch.setattr(sys, "argv", ["visard", command, "--plugin", str(file)])
        with pytest.raises(SystemExit, match="0"):
            main()
        shown = capsys.readouterr().out
        assert "mine.py" in shown
        assert line in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("from visard.plugins import register\nregister('method', 'x')", "no plug-ins of kind 'method' .*'methods'"),
        ("import sys; sys.no_such_thing", "AttributeError"),
    ],
)
def test_a_broken_plug_in_is_one_line(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        plugins.load([file])
    with pytest.raises(UsageError, match="No such file"):
        plugins.load([file.with_name("absent.py")])


def test_a_name_belongs_to_one_plug_in_and_never_to_a_built_in_thing_too(file: Path, tmp_path: Path) -> None:
    plugins.load([file])
    other = tmp_path / "other.py"
    other.write_text(METHOD)
    with pytest.raises(UsageError, match="'mine' of file other.py is already one of the methods of file mine.py"):
        plugins.load([other])
    other.write_text(METHOD.replace('"mine"', '"fedavg"').replace('"flat"', '"flat2"'))
    plugins.load([other])
    assert METHODS["fedavg"].__module__ == "visard.methods.fedavg"


def test_a_file_that_is_named_comes_before_one_that_was_imported(file: Path, tmp_path: Path) -> None:
    plugins.register("methods", "mine")(METHODS["fedavg"])
    plugins.load([file])
    plugins.register("methods", "mine")(METHODS["fedavg"])
    assert METHODS.origin("mine") == "file mine.py"


def test_settings_record_a_plug_in_and_old_settings_stay_as_they_were(file: Path) -> None:
    settings = load("mine", SETTINGS, [file])
    (recorded,), before = settings.plugins, settings.fingerprint()
    assert recorded.startswith(f"{file}#")
    assert settings.to_dict()["method"]["patience"] == 3
    assert parse(settings.to_dict()).fingerprint() == before
    moved = file.with_name("moved.py")
    file.rename(moved)
    plugins._added["methods"].clear()
    plugins._added["backbones"].clear()
    assert load("mine", SETTINGS, [moved]).fingerprint() == before
    assert "plugins" not in load("fedavg").to_dict()
    with pytest.raises(UsageError, match="plugins = 3: must be a list"):
        parse({"plugins": 3, "method": {"name": "fedavg"}})
    with pytest.raises(UsageError, match="unknown setting method.patiense .*patience"):
        load("mine", ["method.patiense=1"], [moved])


@pytest.mark.slow
def test_a_run_is_the_same_on_the_pool_and_goes_on_with_the_same_code_only(file: Path, tmp_path: Path) -> None:
    here = visard.run("mine", out=tmp_path / "here", overrides=[*SETTINGS, "engine.kind=local"], plugins=[file])
    pool = visard.run(
        "mine", out=tmp_path / "pool", overrides=[*SETTINGS, "engine.kind=pool", "engine.workers=2"], plugins=[file]
    )
    for name in ("model.safetensors", "metrics.json", "ledger.json"):
        assert (here.folder / name).read_bytes() == (pool.folder / name).read_bytes(), name
    assert here.metrics["method"] == "mine"
    (here.folder / "metrics.json").unlink()
    assert visard.resume(here.folder).metrics == pool.metrics
    file.write_text(METHOD + "\n# changed\n")
    with pytest.raises(UsageError, match=r"mine\.py has changed since the run began"):
        visard.resume(here.folder)


def written(tmp_path: Path, text: str) -> Path:
    """A file of settings that somebody sent."""
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    return path


NAMED = {  # settings that name `canary`, and what comes of them where the user names it too
    "plugins": ('plugins = ["canary"]\n[method]\nname = "mine"', lambda s: s.method.name == "mine"),
    "method": ('[method]\nname = "canary:Mine"', lambda s: s.method.name == "mine"),
    "network": ('[method]\nname = "fedavg"\n[model]\nname = "canary:Flat"', lambda s: models.build(s.model.name)),
    "watcher": (
        '[method]\nname = "fedavg"\n[engine]\nwatchers = ["canary:Flat"]',
        lambda s: WATCHERS.find(s.engine.watchers[0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_a_file_of_settings_does_not_choose_what_is_imported(canary: Path, tmp_path: Path, case: str) -> None:
    text, use = NAMED[case]
    theirs = written(tmp_path, text)
    with pytest.raises(UsageError, match=r"theirs\.toml: canary\S* is a program .* name it as well: --plugin canary$"):
        use(load(theirs))
    assert not canary.exists()
    assert "canary" not in sys.modules
    assert use(load(theirs, own=["canary"]))
    assert canary.exists()


def test_a_function_of_a_module_that_is_there_already_is_not_called_either(tmp_path: Path) -> None:
    theirs = written(tmp_path, '[method]\nname = "fedavg"\n[engine]\nwatchers = ["shutil:rmtree"]')
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="shutil:rmtree is a program"):
        visard.run(theirs, out=out)
    assert not out.exists()


def test_an_override_and_a_program_name_what_they_import(canary: Path, tmp_path: Path) -> None:
    theirs = written(tmp_path, '[method]\nname = "fedavg"')
    assert load(theirs, ["method.name=canary:Mine"]).method.name == "mine"
    assert load(theirs, ['plugins=["canary"]', "method.name=mine"]).method.name == "mine"
    assert parse({"method": {"name": "canary:Mine"}}).method.name == "mine"


def test_a_file_in_settings_is_named_by_its_path_or_its_content(file: Path, tmp_path: Path) -> None:
    recorded = load("mine", own=[file]).plugins[0]
    theirs = written(tmp_path, f'plugins = ["{recorded}"]\n[method]\nname = "mine"')
    for known in (plugins._loaded, plugins._added["methods"], plugins._added["backbones"]):
        known.clear()
    with pytest.raises(UsageError, match=r"name it as well: --plugin .*mine\.py$"):
        load(theirs)
    moved = file.rename(file.with_name("moved.py"))
    assert load(theirs, own=[moved]).plugins == (recorded.replace("mine.py", "moved.py"),)


@pytest.mark.slow
def test_one_continues_a_run_with_a_plug_in_by_naming_it_again(
    canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(canary.with_name("site")), os.environ.get("PYTHONPATH", "")]))
    out, sets = tmp_path / "run", [*SETTINGS[:-1], "model.name=canary:Flat", "engine.kind=pool", "engine.workers=2"]
    visard.run("canary:Mine", out=out, overrides=sets)
    assert plugins.again((), load(out / "config.toml").to_dict()) == " --plugin canary"
    (out / "metrics.json").unlink()
    for known in (plugins._loaded, plugins._trusted):
        known.clear()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--plugin canary$"):
        visard.resume(out)
    assert visard.resume(out, plugins=["canary"]).metrics["method"] == "mine"


def server_says(**settings: Any) -> dict[str, Any]:
    """What a server might tell a party of a run."""
    return {"settings": {"method": {"name": "fedavg"}} | settings, "own": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "canary:Mine"}},
        {"method": {"name": "sung"}},
        {"plugins": ["canary"]},
        {"aggregation": {"rule": "canary:Mine"}},
    ],
)
def test_a_party_imports_nothing_because_a_server_says_so(canary: Path, settings: dict[str, Any]) -> None:
    methods = ("fedavg", "canary:Mine", "sung")
    with pytest.raises(PublicError, match="which this party does not allow"):
        settings_of(server_says(**settings), Policy(methods=methods))
    with pytest.raises(PublicError, match="which this party does not allow"):
        settings_of(server_says(**settings), Policy(methods=methods, plugins=Plugins(allow=("canary.song",))))
    assert not canary.exists()
    assert "canary" not in sys.modules


def test_a_party_builds_no_network_of_a_plug_in_either(canary: Path, file: Path) -> None:
    settings = settings_of(server_says(model={"name": "canary:Flat"}), Policy(methods=("fedavg",)))
    with pytest.raises(PublicError, match="which this party does not allow"):
        models.build(settings.model.name)
    allowed = Plugins(allow=("canary", "mine", str(file)))
    with pytest.raises(PublicError, match="which this party does not allow"):
        settings_of(server_says(plugins=[str(file)]), Policy(methods=("fedavg",), plugins=allowed))
    assert not canary.exists()


def test_a_party_may_allow_a_module_itself(canary: Path, tmp_path: Path) -> None:
    own = tmp_path / "policy.toml"
    own.write_text('methods = ["canary:Mine"]\n[plugins]\nallow = ["canary"]\n')
    settings = settings_of(server_says(method={"name": "canary:Mine"}), Policy.load(own))
    assert settings.to_dict()["method"]["name"] == "canary:Mine"
    assert canary.exists()
    own.write_text('methods = ["fedavg"]\n[plugins]\nallow = "canary"\n')
    with pytest.raises(UsageError, match=r"plugins.allow: input should be a valid tuple"):
        Policy.load(own)


def test_a_plug_in_that_calls_itself_by_an_allowed_name_is_no_allowed_method(canary: Path) -> None:
    """A policy by method goes by where the class is, not by what it says of itself."""
    lying = Policy(methods=("fedavg", "mine"), plugins=Plugins(allow=("canary",)))
    with pytest.raises(PublicError, match="does not take part in 'canary:Mine'"):
        settings_of(server_says(method={"name": "canary:Mine"}), lying)
    assert not canary.exists()


def test_a_model_file_does_not_choose_what_is_imported(canary: Path, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "model.safetensors"
    weights = {"fc.weight": torch.zeros(24, 3 * 32**2), "fc.bias": torch.zeros(24)}
    save_model(path, weights, {"model": "canary:Flat", "embedding": "24", "size": "32"})
    with pytest.raises(VisardError, match="name its module if you trust it: --plugin canary"):
        visard.load_model(path)
    assert not canary.exists()
    plugins.load(["canary"])
    assert visard.load_model(path).network(torch.zeros(1, 3, 32, 32)).shape == (1, 24)


def test_every_kind_of_thing_can_be_a_plug_in(file: Path) -> None:
    from visard.clustering.cluster import Clustering, cluster
    from visard.data.partition_kinds import PartitionSettings
    from visard.data.sources.importing import import_faces
    from visard.evaluation.metrics import describe

    file.write_text(
        """
from visard.clustering.cluster import Clusters
from visard.data.partition_kinds import Equal
from visard.errors import UsageError
from visard.evaluation.metrics import Metric
from visard.plugins import register


@register("partitions", "mine")
class Mine(Equal): ...


@register("importers", "mine")
def read(source, colour="red"):
    raise UsageError(f"read {source.name} in {colour}")


@register("clusterings", "mine")
def alike(x, settings, identities):
    return Clusters((x[:, 0] > 0).astype("int64"))


register("metrics", "mine")(Metric("A metric of my own", higher_is_better=True))
"""
    )
    plugins.load([file])
    assert PartitionSettings(kind="mine", clients=2).kind == "mine"
    found = cluster(np.array([[1, 0], [1, 1], [-1, 0], [-1, 1]], np.float32), Clustering(method="mine", centre=False))
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert describe("mine").label == "A metric of my own"
    with pytest.raises(UsageError, match="read photos in blue"):
        import_faces("mine", "photos", file.parent / "out", colour="blue")
    with pytest.raises(UsageError, match="has no option 'color' .*'colour'"):
        import_faces("mine", "photos", file.parent / "out", color="blue")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_children")
@pytest.mark.parametrize(("name", "changes"), [("scaffold", ()), ("fedavg", OTHERS)])
def test_the_examples_run(name: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    files = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
    small = [s for s in SMOKE if not s.startswith("engine")]
    runs = {}
    for kind in ("local", "pool"):
        settings = [*small, *changes, f"engine.kind={kind}", "engine.workers=2"]
        runs[kind] = visard.run(name, out=tmp_path / kind, overrides=settings, plugins=files).folder
    for file in ("model.safetensors", "metrics.json", "ledger.json"):
        assert (runs["local"] / file).read_bytes() == (runs["pool"] / file).read_bytes(), file
    if changes:
        rows = (runs["local"] / "progress.csv").read_text().splitlines()
        assert rows[0] == "step,stage,metric,value"
        assert {row.split(",")[2] for row in rows} >= {"loss", "lr", "test/auc"}


@pytest.mark.flower
@pytest.mark.slow
def test_simulated_parties_load_the_same_file(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    visard.run("mine", out=tmp_path / "local", overrides=[*SETTINGS, "engine.kind=local"], plugins=[file])
    sets = [part for s in (*SETTINGS, "engine.workers=2") for part in ("--set", s)]
    words = ["run", "mine", "--plugin", str(file), "--engine", "flower", "--out", str(tmp_path / "flower"), *sets]
    command = [sys.executable, "-c", "from visard.cli import main; main()", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for name in ("model.safetensors", "metrics.json", "ledger.json"):
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "flower" / name).read_bytes(), name
