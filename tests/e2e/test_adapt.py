"""`visard adapt` on synthetic faces with a small ONNX recogniser: what comes out, what it says, and going on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from safetensors.numpy import load_file
from tests.engines.deployed import Deployment

import visard
from visard.cli import main
from visard.cli.adapt import show
from visard.config import EvaluationSettings
from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.data.synthetic.sets import SyntheticSpec, make
from visard.engines.watchers import Watcher
from visard.errors import UsageError, VisardError
from visard.report.run_folder import read_run
from visard.runs.adapt import IMPORTS
from visard.text import percent

QUICK = ["method.rounds=2", "method.training.amount=2", "method.training.batch_size=16", "engine.kind=local"]
SIDE = 32


def recogniser(path: Path) -> Path:
    """A graph for one picture at a time: three convolutions and a matrix, with random weights."""
    rng = np.random.default_rng(0)
    sizes = {"a": (16, 3, 3, 3), "b": (32, 16, 3, 3), "c": (32, 32, 3, 3), "d": (16, 32)}
    weights = [
        numpy_helper.from_array((rng.normal(size=s) / np.sqrt(np.prod(s[1:]))).astype(np.float32), n)
        for n, s in sizes.items()
    ]
    nodes, last = [], "face"
    for name in "abc":
        nodes.append(helper.make_node("Conv", [last, name], [f"{name}1"], strides=[2, 2], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"{name}1"], [f"{name}2"]))
        last = f"{name}2"
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "d"], ["template"], transB=1),
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("face", [1, 3, SIDE, SIDE]), ("template", [1, 16]))
    ]
    graph = helper.make_graph(nodes, "small", ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recogniser, two sites of loose pictures, two with a folder for each person, a source, people to test on."""
    folder = tmp_path_factory.mktemp("adapt")
    recogniser(folder / "small.onnx")
    for seed, (name, people) in enumerate({"harbour": 6, "market": 6, "known": 8, "visitors": 6, "few": 1}.items()):
        faces = FaceSet.open(make(SyntheticSpec(people, 6, SIDE, ("north",), seed), folder / "drawn" / name))
        for row, picture in enumerate(faces.pixels):
            named = folder / name / f"person-{faces.identity[row]}"
            named.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(picture)).save(named / f"{row}.png")
    for name in ("harbour", "market", "few"):
        (folder / f"{name}-loose").mkdir()
        for k, picture in enumerate(sorted((folder / name).rglob("*.png"))):
            shutil.copy(picture, folder / f"{name}-loose" / f"{k}.png")
    return folder


def adapted(desk: Path, out: str, *sites: str, **more: object) -> visard.Adapted:
    settings: dict[str, object] = {"align": "none", "overrides": QUICK, "out": out}
    for role in ("source", "test"):
        if role in more:
            more[role] = desk / str(more[role])
    return visard.adapt(desk / "small.onnx", [desk / site for site in sites], **(settings | more))  # type: ignore[arg-type]


LOOSE = ("harbour-loose", "market-loose")


@pytest.fixture(scope="module")
def whole(desk: Path, tmp_path_factory: pytest.TempPathFactory) -> visard.Adapted:
    """An adaptation that was never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        out = str(tmp_path_factory.mktemp("whole") / "mine")
        return adapted(desk, out, *LOOSE, source="known", test="visitors")


def test_what_comes_out_takes_the_place_of_what_came_in(desk: Path, whole: visard.Adapted) -> None:
    """The same names, shapes and pictures in; the features of the run's own model out."""
    one, two = (onnxruntime.InferenceSession(str(p)) for p in (desk / "small.onnx", whole.onnx))
    for ports in ("get_inputs", "get_outputs"):
        before, after = ([(p.name, p.shape, p.type) for p in getattr(s, ports)()] for s in (one, two))
        assert before == after
    model = visard.load_model(whole.folder / "run" / "model.safetensors")
    picture = np.array(FaceSet.open(whole.folder / "faces" / "visitors").pixels[:1])
    (found,) = two.run(None, {"face": model.inputs.tensor(picture).numpy()})
    assert np.allclose(found, visard.embed(model, picture), atol=1e-5)
    (given,) = one.run(None, {"face": model.inputs.tensor(picture).numpy()})
    assert not np.allclose(found, given, atol=1e-5), "it did learn"


def test_what_it_says(whole: visard.Adapted) -> None:
    assert [(test.name, test.estimate, test.people) for test in whole.tests] == [
        ("visitors", False, 6), ("source", False, 2),
    ]  # fmt: skip
    for change in whole.tests[0].changes:
        assert change.difference == pytest.approx(change.after - change.before)
        assert change.low is not None
        assert change.high is not None
        assert change.low <= change.difference <= change.high
    run = read_run(whole.folder / "run")
    assert "class_vectors" in run.ledger["totals"], "all sites are on this machine: their people are kept apart"  # type: ignore[index]
    points = run.metrics["generic"]["visitors"]["verification"]["tar"]
    assert [(p["far"], p["tar"], p["threshold"]) for p in points] == [
        (c.far, c.after, c.threshold_after) for c in whole.tests[0].changes
    ]
    record = json.loads((whole.folder / "adapt.json").read_text())
    assert [(s["name"], s["role"], s["people"]) for s in record["sets"]] == [
        ("harbour-loose", "clients", None), ("market-loose", "clients", None), ("known", "source", 8),
        ("visitors", "test", 6),
    ]  # fmt: skip
    page = whole.report.read_text()
    body = page.partition("<main")[2].partition("config.toml")[0]
    changes = [change for test in whole.tests for change in test.changes]
    thresholds = [f"{value:.4f}" for c in changes for value in (c.threshold_before, c.threshold_after)]
    rates = [f"{percent(c.before)} → {percent(c.after)}" for c in changes]
    for figures in (thresholds, rates):
        for figure in figures:
            assert body.count(figure) == figures.count(figure), "each figure stands once"
    for words in (
        "Before and after",
        "Threshold after",
        "people of the source",
        "What left each client",
        "enrol again",
    ):
        assert words in page
    assert "estimate" not in body
    assert "Weights and class vectors, which are face templates, went between sites and server" in page
    assert not [p for p in (whole.folder / "faces").rglob("*") if p.is_file() and p.stat().st_mode & 0o077]


def test_the_same_call_goes_on_where_it_stopped(
    desk: Path, whole: visard.Adapted, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the import of two sets, then in the middle of the run: the same bits, nothing done twice."""
    arguments = {"source": "known", "test": "visitors"}
    seen = list[str]()

    def importing(kind: str, source: Path, *args: object, **named: object) -> object:
        seen.append(Path(source).name)
        if len(seen) == 3:
            raise VisardError("killed")
        return import_faces(kind, source, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("visard.runs.adapt.import_faces", importing)
    with pytest.raises(VisardError, match="killed"):
        adapted(desk, "mine", *LOOSE, **arguments)

    class Stops(Watcher):
        def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
            if step == 2:
                raise KeyboardInterrupt

    with pytest.raises((VisardError, KeyboardInterrupt)):
        adapted(desk, "mine", *LOOSE, **arguments, watcher=Stops())
    done = adapted(desk, "mine", *LOOSE, **arguments)
    assert seen == ["harbour-loose", "market-loose", "known", "known", "visitors"]
    ours, theirs = ((a.folder / "run" / "model.safetensors").read_bytes() for a in (done, whole))
    assert ours == theirs
    assert done.tests == whole.tests
    assert [event["resumed"] for event in done.run.of("run_started")] == [False, True]
    before = (done.folder / "adapt.json").stat().st_mtime_ns
    assert adapted(desk, "mine", *LOOSE, **arguments).tests == whole.tests
    assert (done.folder / "adapt.json").stat().st_mtime_ns == before, "a finished one is only read"
    with pytest.raises(UsageError, match="holds an adaptation with other settings: --overwrite"):
        adapted(desk, "mine", *LOOSE, **arguments, seed=1)
    other = adapted(desk, "mine", *LOOSE, **arguments, seed=1, overwrite=True)
    assert (other.folder / "run" / "model.safetensors").read_bytes() != theirs


@pytest.mark.parametrize(("low", "high", "said"), [(-0.3, -0.1, True), (-0.1, 0.3, False), (None, None, False)])
def test_worse_than_before_is_said_at_the_end(
    whole: visard.Adapted, capsys: pytest.CaptureFixture[str], low: float | None, high: float | None, said: bool
) -> None:
    """Of people of the sites or of --test; what the source loses stands in the table."""
    tests = tuple(
        dataclasses.replace(
            test, changes=tuple(dataclasses.replace(change, low=low, high=high) for change in test.changes)
        )
        for test in whole.tests
    )
    show(dataclasses.replace(whole, tests=tests))
    lines = [
        line for line in capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").splitlines() if "worse" in line
    ]
    wanted = "worse visitors, FAR 1 % and 0.1 %, beyond chance: keep the recogniser as it came"
    assert [line.startswith(wanted) for line in lines] == ([True] if said else [])


def test_without_names_to_test_on_it_says_that_it_estimates(
    desk: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a source too, from the command line."""
    command = ["visard", "adapt", "--model", str(desk / "small.onnx"), "--sites", *(str(desk / s) for s in LOOSE)]
    command += ["--align", "none", "--out", "mine", "--far", "0.1", *(p for s in QUICK for p in ("--set", s))]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = capsys.readouterr().out
    assert "(estimate)" in said
    assert "give --test" in said
    page = Path("mine/report.html").read_text()
    assert "What is an estimate" in page
    assert "with_source = false" in Path("mine/run/config.toml").read_text()


@pytest.mark.parametrize("method", [None, "fedfr-joint", "fedfr-da"])
def test_sites_with_names(desk: Path, here: Path, method: str | None) -> None:
    """Every third person is held out; FedAvg is what names allow, others are a choice."""
    source = {"source": "known"} if method else {}
    done = adapted(desk, "mine", "harbour", "market", method=method, fold=(2, 3), **source)
    assert read_run(done.folder / "run").method == (method or "fedavg")
    tested = {test.name: test for test in done.tests}
    assert (tested["sites"].people, tested["sites"].estimate) == (4, False)
    assert done.run.config["partition"]["fold"] == [1, 3], "parts are counted from 0 in settings"
    assert {"harbour", "market"} == {g["name"] for g in tested["sites"].groups["after"]["groups"]}
    failures = [g["enrolment"]["failure"] for g in tested["sites"].groups["after"]["groups"]]
    assert [(f["errors"], f["trials"]) for f in failures] == [(0, 12), (0, 12)]
    assert "Failed to enrol" in done.report.read_text()
    content = json.loads((done.folder / "run" / "partition.json").read_text())
    assert {name: len(rows["train"]) for name, rows in content["clients"].items() if name != "source"} == {
        "harbour": 24, "market": 24,
    }  # fmt: skip


def test_how_pictures_go_in_is_what_the_user_says(desk: Path, whole: visard.Adapted, here: Path) -> None:
    """`--input imagenet --order bgr`: the network is tested, trained and exported so."""
    how = {"input": "imagenet", "order": "bgr"}
    done = adapted(desk, "mine", *LOOSE, test="visitors", far=(0.1,), **how)
    given, made = visard.load_model(desk / "small.onnx", **how), visard.load_model(done.onnx)
    assert made.inputs == given.inputs
    faces = FaceSet.open(done.folder / "faces" / "visitors")
    for model, rate in ((given, "before"), (made, "after")):
        settings = EvaluationSettings(far=(0.1,), bootstrap=0)
        point = visard.evaluate(model, faces, protocols=["verification"], settings=settings).verification.tar[0]
        assert getattr(done.tests[0].changes[0], rate) == pytest.approx(point.tar, abs=0.02), rate
        assert getattr(done.tests[0].changes[0], f"threshold_{rate}") == pytest.approx(point.threshold, abs=1e-4)
    plain = visard.evaluate(
        visard.load_model(desk / "small.onnx"), faces, protocols=["verification"], settings=settings
    )
    assert plain.verification.tar[0].threshold != pytest.approx(done.tests[0].changes[0].threshold_before, abs=1e-4)


def command(*words: str) -> None:
    sys.argv = ["visard", *words]
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def test_a_recogniser_that_is_kept_under_a_name(
    desk: Path, whole: visard.Adapted, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--model NAME`: the kept file and its contract; where that is the file's own, the bits of the file itself."""
    keep = ("models", "add", str(desk / "small.onnx"), "--name", "ours", "--align", "none")
    command(*keep)
    sites = [str(desk / site) for site in LOOSE]
    sets = [part for one in QUICK for part in ("--set", one)]
    others = ("--source", str(desk / "known"), "--test", str(desk / "visitors"))
    command("adapt", "--model", "ours", "--sites", *sites, "--out", "mine", *others, *sets)
    assert "looking for faces" in (shown := capsys.readouterr().out)
    assert "mtcnn" not in shown, "the contract says how pictures are cut"
    record = json.loads(Path("mine/adapt.json").read_text())
    assert (record["model"]["file"], record["model"]["align"]) == ("ours", "none")
    ours, theirs = (load_file(at / "run" / "model.safetensors") for at in (Path("mine"), whole.folder))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    command(*keep, "--bgr")
    with pytest.raises(UsageError, match="an adaptation with other settings"):
        visard.adapt("ours", sites, source=desk / "known", test=desk / "visitors", out="mine", overrides=QUICK)
    done = visard.adapt("ours", sites, source=desk / "known", test=desk / "visitors", out="other", overrides=QUICK)
    assert visard.load_model(done.onnx).inputs.order == "bgr", "the contract of the name goes on into the result"
    assert done.tests != whole.tests


@pytest.mark.flower
def test_a_party_that_is_the_source(desk: Path, whole: visard.Adapted, here: Path) -> None:
    """`--source-party`: three parties, of which the one called source has names, and trains on them."""
    names = {1: "harbour", 2: "market", 3: "source"}
    there = Deployment(here, 3, [f"{number}={name}" for number, name in names.items()])
    try:
        for number, name in names.items():
            faces = "known" if name == "source" else f"{name}-loose"
            there.start_node(number, [name], str(whole.folder / "faces" / faces))
        there.wait_server()
        there.wait_connected("node-1", "node-2", "node-3")
        done = adapted(
            desk, "mine", server=there.state, parties=3, source_party=True, test="visitors",
            overrides=[*QUICK[:-1], "engine.wait=60"],
        )  # fmt: skip
    finally:
        there.close()
    trained = {row["client"] if isinstance(row, dict) else row[2] for row in done.run.ledger["rows"]}  # type: ignore[index]
    assert trained == {"harbour", "market", "source"}
    assert [(test.name, test.estimate) for test in done.tests] == [("visitors", False)]
    assert done.run.config["method"]["with_source"] is True


@pytest.mark.flower
def test_sites_that_are_parties(desk: Path, whole: visard.Adapted, here: Path) -> None:
    """Two parties with their own loose pictures: they train, their pictures stay, and the test is done here."""
    there = Deployment(here, 2, ["1=harbour", "2=market"])
    try:
        for number, name in ((1, "harbour"), (2, "market")):
            there.start_node(number, [name], str(whole.folder / "faces" / f"{name}-loose"))
        there.wait_server()
        there.wait_connected("node-1", "node-2")
        done = adapted(
            desk, "mine", server=there.state, parties=2, test="visitors", overrides=[*QUICK[:-1], "engine.wait=60"]
        )
    finally:
        there.close()
    assert [(test.name, test.estimate) for test in done.tests] == [("visitors", False)]
    trained = {row["client"] if isinstance(row, dict) else row[2] for row in done.run.ledger["rows"]}  # type: ignore[index]
    assert trained == {"harbour", "market"}
    assert "class_vectors" not in done.run.ledger["totals"], "face templates stay with the parties"  # type: ignore[index]
    assert "on one machine" not in done.report.read_text().partition("<main")[2][:3000]


BAD: dict[str, tuple[tuple[str, ...], dict[str, object], str]] = {
    "no site": ((), {}, "give the sites: --sites"),
    "one site": (("harbour-loose",), {}, "one site alone has no other to adapt with"),
    "no such folder": (("harbour-loose", "marcet"), {}, "no folder, zip file or face set .*marcet"),
    "twice": (("harbour", "harbour"), {}, "is given twice"),
    "too few": (("harbour-loose", "few-loose"), {}, "few-loose has 6 faces: too few to group"),
    "test without people": (LOOSE, {"test": "few-loose"}, "has no folder for each person, which --test needs"),
    "one person": (LOOSE, {"test": "few"}, "a test needs two people"),
    "source without people": (LOOSE, {"source": "few-loose"}, "which --source needs"),
    "names for fedavg": (LOOSE, {"method": "fedavg"}, "2 sites have none"),
    "joint": (("harbour", "market"), {"method": "fedfr-joint"}, "fedfr-joint needs --source"),
    "method": (LOOSE, {"method": "magic"}, "must be one of fedfr-da"),
    "rate": (LOOSE, {"far": (2.0,)}, "between 0 and 1"),
    "fold": (LOOSE, {"fold": (4, 3)}, "one of several parts"),
    "server and sites": (LOOSE, {"server": "state"}, "leave out --sites"),
    "server without test": ((), {"server": "state"}, "with --server give --test"),
    "server without parties": ((), {"server": "state", "test": "visitors"}, "with --server give --parties"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_line_for_bad_input(desk: Path, here: Path, case: str) -> None:
    sites, more, words = BAD[case]
    with pytest.raises(UsageError, match=words):
        adapted(desk, "mine", *sites, **more)


def test_a_mistake_that_is_mended_needs_no_other_folder(
    desk: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong setting is found before the import; after a later mistake the faces are there, of other sites anew."""
    seen = list[str]()

    def importing(kind: str, source: Path, *args: object, **named: object) -> object:
        seen.append(Path(source).name)
        return import_faces(kind, source, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("visard.runs.adapt.import_faces", importing)
    with pytest.raises(UsageError, match=r"^--set: unknown setting method\.round \(did you mean 'rounds'"):
        adapted(desk, "mine", *LOOSE, test="visitors", overrides=[*QUICK, "method.round=3"])
    with pytest.raises(UsageError, match="no folder, zip file or face set"):
        adapted(desk, "mine", "harbour-loose", "marcet", test="visitors")
    assert not seen
    assert not Path("mine").exists()
    with pytest.raises(UsageError, match="6 faces: too few to group"):
        adapted(desk, "mine", "harbour-loose", "few-loose", test="visitors")
    with pytest.raises(UsageError, match="--method fedavg needs a folder for each person"):
        adapted(desk, "mine", *LOOSE, test="visitors", method="fedavg")
    assert seen == ["harbour-loose", "few-loose", "visitors", *LOOSE], "other sites: all anew"
    with pytest.raises(UsageError, match=r"^--set: .*method\.rounds = 'many'"):
        adapted(desk, "mine", *LOOSE, test="visitors", overrides=[*QUICK, "method.rounds=many"])
    assert adapted(desk, "mine", *LOOSE, test="visitors", far=(0.1,)).tests[0].people == 6
    assert seen[5:] == ["visitors"], "the sites' pictures were not looked at again"
    with pytest.raises(UsageError, match="other settings: --overwrite"):
        adapted(desk, "mine", *LOOSE, test="visitors", far=(0.2,))


def test_a_detector_that_is_not_used_is_said(desk: Path, here: Path) -> None:
    with pytest.raises(UsageError, match="--detector: faces are framed by none here, without a detector"):
        adapted(desk, "mine", *LOOSE, test="visitors", detector="mtcnn")
    said = list[str]()
    drawn = {"align": "five", "detector": "mtcnn", "test": "drawn/visitors", "method": "fedfr-da", "say": said.append}
    adapted(desk, "mine", "drawn/harbour", "drawn/market", **drawn)
    assert said[0].startswith("small.onnx does not say how pictures go in: (x - 127.5) / 127.5 (arcface) is assumed.")
    assert said[1:] == ["--detector is not used: all pictures come as face sets, whose faces were found before"]


def test_pictures_without_faces(desk: Path, here: Path) -> None:
    for name in ("grey", "dark"):
        Path(name).mkdir()
        for k in range(3):
            Image.new("RGB", (200, 200), (40 * k,) * 3).save(f"{name}/{k}.png")
    with pytest.raises(UsageError, match=r"not one of 3 pictures could be used \(0.png: no face was found\)"):
        visard.adapt(desk / "small.onnx", ["grey", "dark"], out="mine")


def test_a_folder_with_other_things_is_left_alone(desk: Path, here: Path) -> None:
    Path("mine").mkdir()
    Path("mine/diary.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no adaptation"):
        adapted(desk, "mine", *LOOSE)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"adapt.json": "{}", "report.html": "mine", "faces/x/photos.npy": "mine"}, "is of no adaptation"),
        ({"adapt.json": "ASKED", "faces/x/notes.txt": "mine"}, "holds faces/x/notes.txt, which no adaptation wrote"),
        ({"adapt.json": "ASKED", "run/model.safetensors": "mine"}, "run is not empty and is not a run"),
    ],
)
def test_nothing_of_the_users_is_removed(desk: Path, here: Path, own: dict[str, str], says: str) -> None:
    """A file adapt.json of another program, or files of the user's beside those of an adaptation."""
    asked = dict.fromkeys((*IMPORTS, "overrides"), 0)
    for name, text in own.items():
        Path("mine", name).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", name).write_text(text.replace("ASKED", json.dumps({"asked": asked})))
    before = {path: path.read_text() for path in Path("mine").rglob("*") if path.is_file()}
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=says):
            adapted(desk, "mine", *LOOSE, overwrite=overwrite)
    assert {path: path.read_text() for path in Path("mine").rglob("*") if path.name != ".lock" and path.is_file()} == (
        before
    )


@pytest.mark.parametrize("link", ["faces", "faces/harbour", "run"])
def test_links_in_the_folder_of_an_adaptation_are_not_followed(desk: Path, here: Path, link: str) -> None:
    """One that stopped before training is begun anew without --overwrite: what links lead to is not its own."""
    own = ("my.npy", "faces.json", "model.safetensors", "sub/x.npy")
    for name in own:
        Path("elsewhere", name).parent.mkdir(parents=True, exist_ok=True)
        Path("elsewhere", name).write_text("mine")
    Path("mine", link).parent.mkdir(parents=True)
    Path("mine/adapt.json").write_text('{"asked": {}}')
    Path("mine", link).symlink_to(Path("elsewhere").absolute())
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=f"holds the link {link}"):
            adapted(desk, "mine", *LOOSE, overwrite=overwrite)
    assert [Path("elsewhere", name).read_text() for name in own] == ["mine"] * len(own)


@pytest.mark.parametrize(
    "content", ["[]", '"x"', '{"seconds": 3}', '{"asked": ASKED, "seconds": {"all": "x"}, "tests": [1]}']
)
def test_a_damaged_record_is_no_finished_adaptation(
    desk: Path, whole: visard.Adapted, here: Path, content: str
) -> None:
    shutil.copytree(whole.folder, "mine")
    asked = json.dumps(whole.record["asked"])
    Path("mine/adapt.json").write_text(content.replace("ASKED", asked))
    arguments = {"source": "known", "test": "visitors"}
    if "ASKED" in content:
        assert adapted(desk, "mine", *LOOSE, **arguments).tests == whole.tests, "what is missing is computed again"
    else:
        with pytest.raises(UsageError, match="other settings: --overwrite"):
            adapted(desk, "mine", *LOOSE, **arguments)
