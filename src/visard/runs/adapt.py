"""`visard adapt`: adapts a given recogniser to the people of several sites, whose pictures stay there.

out/
  faces/NAME       face sets that were imported from folders of pictures
  start.safetensors   the given recogniser, as a network that can be trained
  run/             the run: settings, ledger, checkpoints, its own report
  adapted.onnx     the result, with the same input as the given file
  adapt.json, report.html

The same call continues where an earlier one stopped: complete sets are kept, the run is resumed.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
import torch

from visard.config import Settings, load
from visard.data.faces import FaceSet
from visard.data.joined import RESERVED
from visard.data.partition_kinds import pictures_of
from visard.data.sources.catalog import data_folder
from visard.data.sources.importing import import_faces
from visard.data.storage import HEADER, is_of_set
from visard.engines.watchers import Watcher, Watchers
from visard.engines.world import CLASS_VECTORS
from visard.errors import UsageError, VisardError
from visard.files import PRIVATE_FOLDER, SHARED, mapping, number, only_user, plain, read_json, write_json
from visard.inference.export import export
from visard.inference.model import FaceModel, load_model
from visard.learning.features import class_means, embed
from visard.models.catalogue import locate
from visard.models.convert import convert
from visard.models.files import located, open_model, save_model, start
from visard.models.inputs import Inputs, choose
from visard.models.onnx import OnnxNetwork, rename_ports
from visard.report.adaptation import write_page
from visard.report.run_folder import Run, read_run
from visard.runs.before_after import BeforeAndAfter, Test
from visard.runs.folder import check_removable, refuse_links, remove_written
from visard.runs.run import run
from visard.text import plural

Method = Literal["fedfr-da", "fedavg", "fedfr-joint"]
METHODS: tuple[Method, ...] = ("fedfr-da", "fedavg", "fedfr-joint")
FAR = (0.01, 0.001)
FOLD = (1, 5)  # which part of the labelled people is tested on, of how many parts
LEAST = 16  # fewest pictures of a site that can be grouped
WRITTEN = ("adapt.json", "report.html", "adapted.onnx", "start.safetensors", "class_vectors.safetensors")
IMPORTS = ("model", "sites", "source", "test", "unlabelled", "detector", "align")  # what face sets depend on
Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class _Asked:
    """The arguments of `adapt` that its results depend on."""

    model: str | Path
    sites: Sequence[str | Path]
    source: str | Path | None
    test: str | Path | None
    method: str | None
    far: Sequence[float]
    fold: tuple[int, int]
    seed: int
    server: str | Path | None
    parties: int | None
    source_party: bool
    unlabelled: bool
    inputs: dict[str, str | None]
    detector: str | None
    align: str | None
    overrides: Sequence[str]

    @property
    def pictures(self) -> list[str | Path]:
        """All folders, zip files and face sets that were given."""
        return [path for path in (*self.sites, self.source, self.test) if path is not None]


@dataclass(frozen=True)
class Adapted:
    """The results of `adapt`."""

    folder: Path
    run: Run
    tests: tuple[Test, ...]
    onnx: Path
    record: dict[str, Any]  # all of adapt.json

    @property
    def report(self) -> Path:
        """The page to show."""
        return self.folder / "report.html"


def adapt(
    model: str | Path,
    sites: Sequence[str | Path] = (),
    *,
    source: str | Path | None = None,
    test: str | Path | None = None,
    out: str | Path = "runs/adapted",
    method: str | None = None,
    far: Sequence[float] = FAR,
    fold: tuple[int, int] = FOLD,
    seed: int = 0,
    server: str | Path | None = None,
    parties: int | None = None,
    source_party: bool = False,
    unlabelled: bool = False,
    input: str | None = None,
    order: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    detector: str | None = None,
    align: str | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    watcher: Watcher | None = None,
    progress: Progress = lambda text, done, total: None,
    say: Say = lambda text: None,
) -> Adapted:
    """Adapt the recogniser in a file to the people of `sites`, and test it before and after.

    A site, the `source` (labelled people whom the recogniser should not forget) and `test` are folders of pictures, zip
    files or face sets. Where a site has no folder for each person (or with `unlabelled`), its pictures are grouped and
    FedFR-DA learns from the groups; where all have, FedAvg learns from their names, unless `method` says otherwise.
    Without `test`, part k of n (`fold`) of the labelled people is tested on; where there are none, the metrics are
    estimates over groups. With `server` the sites are the `parties` (a number) of a deployment, and `source_party` says
    that one of them is called source. `input`, `order`, `mean`, `std` say how pictures go in, where the file does not.

    >>> import visard
    >>> done = visard.adapt("w600k_mbf.onnx", ["north", "south"], out="runs/mine")    # doctest: +SKIP
    >>> done.tests[0].changes[0].difference                                           # doctest: +SKIP
    """
    begun, folder = time.monotonic(), Path(out)
    inputs = {"input": input, "order": order, "mean": mean, "std": std}
    asked = _Asked(
        model, sites, source, test, method, far, fold, seed, server, parties, source_party, unlabelled, inputs,
        detector, align, overrides,
    )  # fmt: skip
    _check(asked)
    for path in asked.pictures:
        _found(path)
    given = open_given(model, inputs)
    if detector is not None and (how := align or given.align) != "five":
        raise UsageError(f"--detector: faces are framed by {how} here, without a detector; --align five uses one")
    _check_overrides([method] if method else METHODS, overrides)
    if input is None and given.assumption:
        say(given.assumption)
    record = plain({**vars(asked), "model": [given.fingerprint, given.align]})
    _prepare(folder, record, overwrite)
    with only_user(folder):
        if (earlier := _finished(folder)) is not None:
            return earlier
        watchers = Watchers(watcher)
        about: dict[str, Any] = {"asked": record, "seconds": {}, **_earlier(folder)}
        write_json(folder / "adapt.json", about)
        sets = _Sets(folder / "faces", given, detector, align, progress, say)
        clients = [sets.take(path, "clients", unlabelled) for path in sites]
        known = [s for s in clients if not s.faces.unlabelled.any()]
        chosen = _method(method, len(clients), len(known), source is not None, server is not None)
        others = [sets.take(source, "public" if chosen == "fedfr-joint" else "source")] if source is not None else []
        others += [sets.take(test, "test")] if test is not None else []
        members = [*clients, *others]
        _check_sets(clients, others, chosen)
        if detector is not None and all((_found(path) / HEADER).is_file() for path in asked.pictures):
            say("--detector is not used: all pictures come as face sets, whose faces were found before")
        if sets.seconds:
            about["seconds"]["import"] = about["seconds"].get("import", 0.0) + sets.seconds
            write_json(folder / "adapt.json", about)
        first = _write_start(folder, model, given, inputs)
        settings = _settings(folder, first, members, chosen, asked, len(known) == len(clients))
        done = _run(folder / "run", settings, watchers)
        tests = BeforeAndAfter.of_run(folder / "run", tuple(far)).tests()
        onnx = _export(folder, given)
        about["seconds"]["all"] = about["seconds"].get("all", 0.0) + time.monotonic() - begun
        made = about | _record(given, Path(model).name, chosen, members, tests, done)
        write_json(folder / "adapt.json", plain(made), SHARED)
        write_page(folder / "report.html", done, plain(made))
    return Adapted(folder, done, tests, onnx, made)


def _check(asked: _Asked) -> None:
    fold = asked.fold
    if asked.method is not None and asked.method not in METHODS:
        raise UsageError(f"--method {asked.method}: must be one of {', '.join(METHODS)}")
    if not asked.far or not all(0 < rate < 1 for rate in asked.far):
        raise UsageError("false accept rates are numbers between 0 and 1, for example 0.01")
    if not 1 <= fold[0] <= fold[1] or fold[1] < 2:
        raise UsageError(f"--fold {fold[0]}/{fold[1]}: must be one of several parts, for example 1/5")
    if asked.server is not None:
        if asked.sites or asked.source is not None:
            raise UsageError("with --server the sites are the parties: leave out --sites and --source")
        if asked.test is None:
            raise UsageError("with --server give --test: pictures of the parties stay with them")
        if asked.parties is None or asked.parties < 1:
            raise UsageError("with --server give --parties: how many take part")
        return
    if not asked.sites:
        raise UsageError("give the sites: --sites FOLDER FOLDER ..., or --server for parties elsewhere")
    if len(asked.sites) == 1 and asked.source is None:
        raise UsageError("one site alone has no other to adapt with: give two sites or more, or --source too")
    if twice := [path for path, times in Counter(map(str, asked.pictures)).items() if times > 1]:
        raise UsageError(f"{twice[0]} is given twice")


def open_given(path: str | Path, inputs: dict[str, str | None]) -> FaceModel:
    """The given recogniser."""
    network, spec = open_model(
        path, name=inputs["input"], order=inputs["order"], mean=inputs["mean"], std=inputs["std"]
    )
    return FaceModel(network, spec, locate(located(path))[0])


def _prepare(folder: Path, asked: dict[str, Any], overwrite: bool) -> None:
    """The folder of this adaptation: new, continued, or emptied of an earlier one."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder")
    about = folder / "adapt.json"
    if not about.is_file():
        if folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no adaptation: give another --out")
    elif overwrite:
        with only_user(folder):
            _remove(folder)
    elif (earlier := mapping(read_json(about)).get("asked")) != asked:
        if (folder / "run" / "config.toml").is_file():
            raise UsageError(f"{folder} holds an adaptation with other settings: --overwrite, or another --out")
        with only_user(folder):  # it ended before training, perhaps because of a mistake that is corrected now
            _remove(folder, faces=any(mapping(earlier).get(key) != asked[key] for key in IMPORTS))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None


def _remove(folder: Path, faces: bool = True) -> None:
    """Remove only what an earlier adaptation wrote; without `faces` its face sets stay."""
    _check_own(folder)
    inner = folder / "run"
    if inner.is_dir():
        remove_written(inner)
        with suppress(OSError):
            (inner / ".lock").unlink(missing_ok=True)
            inner.rmdir()
    for path in sorted((folder / "faces").glob("*/*")) if faces else ():
        if is_of_set(path):
            path.unlink()
    for path in sorted((folder / "faces").glob("*")) if faces else ():
        with suppress(OSError):
            path.rmdir()
    for name in WRITTEN:
        (folder / name).unlink(missing_ok=True)


def _check_own(folder: Path) -> None:
    """Refuse a folder that another program made, or with files that no adaptation wrote."""
    refuse_links(folder)
    asked = mapping(mapping(read_json(folder / "adapt.json")).get("asked"))
    if not asked.keys() >= {*IMPORTS, "overrides"}:
        raise UsageError(f"{folder / 'adapt.json'} is of no adaptation: nothing is removed there, give another --out")
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        name = path.relative_to(folder)
        of_set = len(name.parts) == 3 and name.parts[0] == "faces" and is_of_set(path)
        if str(name) not in (*WRITTEN, ".lock") and name.parts[0] != "run" and not of_set and path.suffix != ".tmp":
            raise UsageError(f"{folder} holds {name}, which no adaptation wrote: nothing is removed there")
    inner = folder / "run"
    if inner.is_dir() and any(path.name != ".lock" for path in inner.iterdir()):
        check_removable(inner)


def _finished(folder: Path) -> Adapted | None:
    """An adaptation that is complete, from what it wrote."""
    with suppress(VisardError):
        record = mapping(read_json(folder / "adapt.json"))
        if "tests" in record and all((folder / name).is_file() for name in ("adapted.onnx", "report.html")):
            tests = _tests(record)
            return Adapted(folder, read_run(folder / "run"), tests, folder / "adapted.onnx", record)
    return None


def _tests(record: dict[str, Any]) -> tuple[Test, ...]:
    """The tests in adapt.json, where it has all that is shown at the end."""
    try:
        tests = tuple(Test.of(test) for test in record["tests"])
        figures = [record["seconds"]["all"], record["cost"]["peak_bytes"], record["cost"]["bytes_up"]]
        for change in (change for test in tests for change in test.changes):
            figures += [change.far, change.before, change.after, change.threshold_before, change.threshold_after]
            figures += [value for value in (change.low, change.high) if value is not None]
    except (TypeError, KeyError):
        figures = [None]
    if any(number(value) is None for value in figures):
        raise VisardError("adapt.json is damaged")
    return tests


def _earlier(folder: Path) -> dict[str, Any]:
    """Times that earlier calls took, for the total cost."""
    with suppress(VisardError):
        seconds = mapping(mapping(read_json(folder / "adapt.json")).get("seconds"))
        return {"seconds": {key: value for key, value in seconds.items() if number(value) is not None}}
    return {}


@dataclass(frozen=True)
class _Set:
    """One of the sets: where it is, what it is called and what it is for."""

    name: str
    role: str
    faces: FaceSet
    skipped: int

    @property
    def people(self) -> int | None:
        return None if self.faces.unlabelled.any() else len(self.faces.names)


def _found(path: str | Path) -> Path:
    """Where pictures or a face set are: here, or in the data folder."""
    for where in (Path(path), data_folder() / path):
        if where.exists():
            return where
    raise UsageError(f"no folder, zip file or face set {path}")


@dataclass
class _Sets:
    """Opens face sets, and imports folders and zip files."""

    folder: Path
    model: FaceModel
    detector: str | None
    align: str | None
    progress: Progress
    say: Say
    names: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, path: str | Path, role: str, unlabelled: bool = False) -> _Set:
        where = _found(path)
        name = self._name(where, role)
        if (where / HEADER).is_file():
            if unlabelled:
                raise UsageError(f"{path} is a face set, imported with its names: --method fedfr-da does not use them")
            faces = FaceSet.open(where)
        else:
            faces = self._imported(where, name, unlabelled)
        skipped = int(faces.info.get("skipped_count") or 0)
        return _Set(name, role, faces, skipped)

    def _name(self, where: Path, role: str) -> str:
        name = where.resolve().stem if where.is_file() else where.resolve().name
        if name in self.names or (name in RESERVED and role == "clients"):
            name = f"{where.resolve().parent.name}-{name}"
        while name in self.names or (name in RESERVED and role == "clients"):
            name += "-2"
        self.names.append(name)
        return name

    def _imported(self, where: Path, name: str, unlabelled: bool) -> FaceSet:
        folder, begun = self.folder / name, time.monotonic()
        if not (folder / HEADER).is_file():
            self.folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            how = self.align or self.model.align
            done = import_faces(
                "folder", where, folder, size=self.model.size, align=how, detector=self.detector, say=self.say,
                progress=lambda done, total: self.progress(f"looking for faces in {name}", done, total),
                unlabelled=unlabelled,
            )  # fmt: skip
            self.seconds += time.monotonic() - begun
            if done.skipped:
                self.say(
                    f"{name}: {plural(done.pictures, 'face')}; {plural(len(done.skipped), 'picture')} skipped "
                    f"({done.skipped[0][0]}: {done.skipped[0][1]})"
                )
        return FaceSet.open(folder)


def _method(asked: str | None, sites: int, known: int, source: bool, server: bool) -> str:
    """The method that was asked for, or the one that the labels allow."""
    chosen = asked or ("fedavg" if known == sites and not server else "fedfr-da")
    if chosen != "fedfr-da" and known < sites:
        raise UsageError(
            f"--method {chosen} needs a folder for each person at every site; "
            f"{plural(sites - known, 'site has', 'sites have')} none: leave --method out, or take fedfr-da"
        )
    if chosen == "fedfr-joint" and not source:
        raise UsageError("--method fedfr-joint needs --source: people whose pictures every site may have")
    return chosen


def _check_sets(clients: Sequence[_Set], others: Sequence[_Set], method: str) -> None:
    for one in clients:
        if method == "fedfr-da" and len(one.faces) < LEAST:
            raise UsageError(
                f"{one.name} has {plural(len(one.faces), 'face')}: too few to group, at least {LEAST} are needed"
            )
    for one in others:
        if one.people is None:
            raise UsageError(f"{one.name} has no folder for each person, which --{_option(one.role)} needs")
        pairs = int((pictures_of(one.faces) >= 2).sum())
        if one.role == "test" and (one.people < 2 or not pairs):
            raise UsageError(f"{one.name}: a test needs two people, and one of them with two pictures")


def _option(role: str) -> str:
    return "test" if role == "test" else "source"


def _write_start(folder: Path, model: str | Path, given: FaceModel, inputs: dict[str, str | None]) -> Path:
    """The recogniser as a network that trains, with its input."""
    target = folder / "start.safetensors"
    if target.is_file():
        return target
    path, entry = locate(located(model))
    if path.suffix.lower() == ".onnx" and entry is None:
        found = convert(path, name=inputs["input"])
        spec, weights = found.spec, found.weights
    else:
        spec, weights = start(model, "tiny", None, given.size)
    own = choose(Inputs.of_spec(spec), inputs["input"], order=inputs["order"], mean=inputs["mean"], std=inputs["std"])
    kept = {k: v for k, v in spec.items() if k != "visard"}
    save_model(target, weights, kept | own.to_spec(), SHARED)
    return target


# Chosen with a public MobileFaceNet; what they gave: docs/results/adapt.md.
TRAINING = {
    "optimiser": "adam", "lr": 0.0002, "weight_decay": 0.0, "batch_size": 64, "unit": "iterations", "amount": 10,
    "schedule": "cosine", "clip": 5.0, "augment": {"flip": False},
}  # fmt: skip
HEAD = {"kind": "cosface", "scale": 30.0, "margin": 0.4}
ROUNDS = 16
CLUSTERING = {"d": "auto", "min_size": 4}
OF_METHODS: dict[str, dict[str, Any]] = {
    "fedfr-da": {
        "rounds": ROUNDS, "training": TRAINING, "head": HEAD, "clustering": CLUSTERING, "dcl": 0.0,
        "source_head": "means", "pretraining": {"augment": {"flip": False}},  # no mirror images are stored
    },
    "fedavg": {"rounds": ROUNDS, "training": TRAINING, "head": HEAD, "head_start": "means"},
    "fedfr-joint": {"rounds": ROUNDS},
}  # fmt: skip


def _settings(
    folder: Path, first: Path, members: Sequence[_Set], method: str, asked: _Asked, labelled: bool
) -> Settings:
    """The settings of the run, with what the user changes."""
    roles, server = {one.role for one in members}, asked.server
    tree: dict[str, Any] = {
        "name": folder.resolve().name,
        "seed": asked.seed,
        "method": {"name": method, **OF_METHODS[method]},
        "data": {"sets": [{"path": str(m.faces.path), "role": m.role, "name": m.name} for m in members]},
        "partition": {"kind": "parties" if server else "sites", "split": [1.0, 0.0, 0.0], "seed": 0},
        "model": {"weights": str(first.absolute()), "train": "tail", "cache": "fp16"},
        "evaluation": {"every": 0, "clients": False, "bootstrap": 200, "far": list(asked.far), "fmr": asked.far[0]},
    }
    if method != "fedfr-joint" and server is None:  # between parties class vectors would be face templates that leave
        tree["method"]["negatives"] = "class_vectors"
    if method == "fedfr-da":
        tree["method"] |= {"with_source": "source" in roles or asked.source_party, "measure": labelled and not server}
    if "source" in roles or (labelled and "test" not in roles):
        tree["partition"]["fold"] = [asked.fold[0] - 1, asked.fold[1]]
    if server is not None:
        tree["engine"] = {"kind": "flower", "server": str(Path(server).absolute())}
        tree["partition"]["clients"] = asked.parties
    if "public" in roles:
        tree["model"]["class_vectors"] = str(_class_vectors(folder, first, members))
    return _load(tree, asked.overrides)


def _load(tree: dict[str, Any], overrides: Sequence[str]) -> Settings:
    """These settings with what the user changes."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "settings.toml"
        base.write_text(tomli_w.dumps(tree))
        try:
            return load(base, overrides)
        except UsageError as error:  # the mistake is in the overrides
            raise UsageError(f"--set: {str(error).removeprefix(f'{base}: ')}") from None


def _check_overrides(methods: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse changes that fit none of the methods, before pictures are imported."""
    refused = []
    for method in methods:
        try:
            _load({"method": {"name": method, **OF_METHODS[method]}, "partition": {"kind": "sites"}}, overrides)
        except UsageError as error:
            refused.append(error)
    if len(refused) == len(methods):
        raise refused[0]


def _class_vectors(folder: Path, first: Path, members: Sequence[_Set]) -> Path:
    """Class vectors of the public people, which FedFR-joint starts from: the means of their features."""
    target = folder / "class_vectors.safetensors"
    if not target.is_file():
        model = load_model(first)
        faces = next(one.faces for one in members if one.role == "public")
        features = torch.from_numpy(embed(model.network, faces.all(), inputs=model.inputs))
        means = class_means(features, torch.from_numpy(faces.identity.astype(np.int64)), len(faces.names))
        save_model(target, {CLASS_VECTORS: means}, {k: model.spec[k] for k in ("model", "embedding", "size")})
    return target.absolute()


def _run(folder: Path, settings: Settings, watchers: Watcher) -> Run:
    """The finished run: made, resumed, or read."""
    if (folder / "metrics.json").is_file() and read_run(folder).status[0] == "finished":
        return read_run(folder)
    begun = (folder / "config.toml").is_file()
    return run(settings, out=folder, resume=begun, watcher=watchers)


def _export(folder: Path, given: FaceModel) -> Path:
    """The adapted network as ONNX; of an ONNX file with the names and the batch of its input and output."""
    target, network = folder / "adapted.onnx", given.network
    made = load_model(folder / "run" / "model.safetensors")
    fixed = isinstance(network, OnnxNetwork) and network.batch == 1
    export(made, target, dynamic_batch=not fixed)
    if isinstance(network, OnnxNetwork):
        rename_ports(target, network.name, network.output)
    return target


def _record(
    given: FaceModel, name: str, method: str, members: Sequence[_Set], tests: Sequence[Test], done: Run
) -> dict[str, Any]:
    """The results in adapt.json."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    label = next((r.figures for r in done.rounds if r.stage == "label"), {})
    return {
        "model": {"file": name, "fingerprint": given.fingerprint, "align": given.align,
                  **given.inputs.to_spec()},
        "method": method,
        "sets": [{"name": m.name, "role": m.role, "pictures": len(m.faces), "people": m.people, "skipped": m.skipped,
                  "align": m.faces.align, "synthetic": m.faces.synthetic} for m in members],
        "groups": label,
        "tests": [plain(test) for test in tests],
        "cost": {"peak_bytes": peak * 1024, "cores": os.cpu_count(), **done.metrics.get("communication", {})},
        "trained": done.metrics.get("trained", {}),
    }  # fmt: skip
