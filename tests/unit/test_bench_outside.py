"""Columns of test sets that users bring (LFW, IJB-A): filled from made-up files of the same layout, else one line."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.test_bench import sets, visard
from tests.toys import noise_faces
from tests.unit.pictures import encode
from tests.unit.test_bench_fedface import lfw_set, model_in
from tests.unit.test_ijb import HEAD, put

from visard.data.faces import FaceSet
from visard.data.sources.importing import import_faces
from visard.evaluation.arrays import Doubles
from visard.inference.model import embed, load_model
from visard.studies import find
from visard.studies.fedfr_da import OUTSIDE
from visard.studies.plan import SCALES
from visard.studies.results import NotHere, metric_of

SUBJECTS, SIDE = 36, 112
TABLE = "Parts of FedFR-DA on LFW and IJB-A (supplement)"
PARTS = ("Source-Only", "Fine-tune", "FL", "FedFR-DA")


def ijba_files(root: Path) -> Path:
    """Two splits of made-up people in the layout of IJB-A; template 2s + 1 has two pictures of s, 2s + 2 the third."""
    rng = np.random.default_rng(5)
    for subject in range(SUBJECTS):
        base = rng.integers(90, 160, (4, 4, 3))
        for k in range(3):
            noisy = np.clip(base + rng.integers(-25, 25, base.shape), 0, 255).astype(np.uint8)
            put(root / "images" / "img" / f"{subject}-{k}.png", encode(noisy.repeat(28, 0).repeat(28, 1)))

    def lines(subject: int, kind: int) -> str:
        pictures = (0, 1) if kind == 0 else (2,)
        return "".join(
            f"{2 * subject + 1 + kind},{subject},img/{subject}-{k}.png,{10 * subject + k},,,0,0,{SIDE},{SIDE},,,,,,\n"
            for k in pictures
        )

    for split, people in splits().items():
        every = [(s, kind) for s in people for kind in (0, 1)]
        folder = root / "IJB-A_11_sets" / f"split{split}"
        put(folder / f"verify_metadata_{split}.csv", HEAD + "".join(lines(*one) for one in every))
        pairs = [(2 * s + 1, 2 * t + 2) for s, t in product(people, people)]
        put(folder / f"verify_comparisons_{split}.csv", "".join(f"{a},{b}\n" for a, b in pairs))
        folder = root / "IJB-A_1N_sets" / f"split{split}"
        put(folder / f"search_gallery_{split}.csv", HEAD + "".join(lines(s, 0) for s in people))
        put(folder / f"search_probe_{split}.csv", HEAD + "".join(lines(s, 1) for s in people))
    return root


def splits() -> dict[int, range]:
    """The people of each split."""
    return {1: range(SUBJECTS), 2: range(2, SUBJECTS)}


def expected_ijba(features: Doubles, faces: FaceSet) -> dict[str, float]:
    """Means over the splits, by slow loops; features are sums with those of mirrored pictures."""
    row = {Path(faces.file(k)).stem: k for k in range(len(faces))}
    found: dict[str, list[float]] = {}
    for people in splits().values():
        gallery = {s: features[row[f"{s}-0"]] + features[row[f"{s}-1"]] for s in people}  # a medium for each picture
        probe = {s: features[row[f"{s}-2"]] for s in people}
        score = {
            (s, t): float(gallery[s] @ probe[t] / np.linalg.norm(gallery[s]) / np.linalg.norm(probe[t]))
            for s, t in product(people, people)
        }
        strangers = sorted((v for (s, t), v in score.items() if s != t), reverse=True)
        for far in (0.1, 0.01, 0.001):
            bar = strangers[int(far * len(strangers))]  # the first that must not pass
            found.setdefault(f"TAR @ FAR {far:g}", []).append(float(np.mean([score[s, s] > bar for s in people])))
        first = [max(people, key=lambda s: score[s, t]) == t for t in people]
        found.setdefault("rank-1", []).append(float(np.mean(first)))
    return {f"IJB-A {name}": float(np.mean(values)) for name, values in found.items()}


def expected_lfw(features: Doubles, faces: FaceSet) -> float:
    """Accuracy of each fold at the best distance of the other one, in steps of 0.01 from 0 to 4, by slow loops."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    pairs = np.load(faces.path / "pairs.npy").astype(int)
    distance = [float(((unit[a] - unit[b]) ** 2).sum()) for a, b, *_ in pairs]

    def accuracy(fold: int, bar: float) -> float:
        return float(np.mean([(d < bar) == bool(p[2]) for d, p in zip(distance, pairs, strict=True) if p[3] == fold]))

    bars = np.arange(0, 4, 0.01)
    chosen = {fold: max(bars, key=lambda bar: accuracy(1 - fold, bar)) for fold in (0, 1)}
    return float(np.mean([accuracy(fold, chosen[fold]) for fold in (0, 1)]))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("VISARD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def brought(data: Path, tmp_path: Path) -> tuple[FaceSet, FaceSet]:
    """LFW and IJB-A of a user, both of 32 pixels."""
    lfw = lfw_set(tmp_path, data / "lfw")
    return lfw, FaceSet.open(import_faces("ijb", ijba_files(tmp_path / "IJBA"), data / "ijba", size=32).path)


def expected(run: Path, lfw: FaceSet, ijba: FaceSet) -> dict[str, float]:
    """Column -> figure of a run's model."""
    model = load_model(run / "model.safetensors")
    on_lfw, on_ijba = (embed(model, faces, flip=True).astype(np.float64) for faces in (lfw, ijba))
    return {"LFW accuracy": expected_lfw(on_lfw, lfw)} | expected_ijba(on_ijba, ijba)


def test_columns_are_what_slow_loops_find(data: Path, tmp_path: Path) -> None:
    """And a kept result is not made again."""
    run = model_in(tmp_path / "run", 3)
    figures = expected(run, *brought(data, tmp_path))
    assert list(figures) == [c.title for c in OUTSIDE]
    assert len(set(figures.values())) == len(figures), "figures that are alike cannot be told from one another"
    assert {c.title: metric_of(c, run) for c in OUTSIDE} == pytest.approx(figures)
    (run / "model.safetensors").unlink()
    assert {c.title: metric_of(c, run) for c in OUTSIDE} == pytest.approx(figures)


@pytest.mark.parametrize("scale", SCALES)
def test_the_table_has_the_parts_of_both_benchmarks(scale: str) -> None:
    (table,) = (t for t in find("fedfr-da", scale).tables if "LFW" in t.title)
    assert (table.title, table.columns) == (TABLE, OUTSIDE)
    assert table.rows == tuple(f"{v} {part}" for v in ("S", "L") for part in PARTS)


def test_a_set_without_pairs_or_templates_is_left_out_with_a_line(data: Path, tmp_path: Path) -> None:
    run = model_in(tmp_path / "run", 0)
    for name in ("lfw", "ijba"):
        noise_faces(data / name, identities=3, images=2)
    for column in OUTSIDE:
        with pytest.raises(
            NotHere, match=r"^face set (lfw: lfw carries no pairs|ijba: ijba has no templates)"
        ) as caught:
            metric_of(column, run)
        assert "\n" not in str(caught.value)


def test_without_the_sets_a_bench_says_one_line_for_each_and_with_them_the_table_is_filled(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command before and after the import: the runs are kept."""
    out = tmp_path / "b"
    words = ["bench", "fedfr-da", "--scale", "smoke", "--seeds", "0", "--out", str(out)]
    words += ["--only", "S Source-Only", "--only", "S Fine-tune"]
    words += sets("method.rounds=1", "partition.identities=6", "partition.source_identities=6")

    def shown() -> tuple[dict[str, Any], list[str]]:
        assert visard(*words) == 0, capsys.readouterr().err
        read = json.loads((out / "results.json").read_text())
        lines = [n for n in read["notes"] if n.startswith("Left out")]
        said = " ".join(capsys.readouterr().out.split())
        for text in (said, " ".join((out / "results.md").read_text().split())):
            assert text.count("Left out") == len(lines)
            assert all(line in text for line in lines)
        assert (TABLE in (out / "report.html").read_text()) == (not lines)
        return {t["title"]: t["cells"] for t in read["tables"]}, lines

    tables, lines = shown()
    assert TABLE not in tables
    assert lines == [
        "Left out, no face set lfw (visard data import): LFW accuracy.",
        "Left out, no face set ijba (visard data import): IJB-A TAR @ FAR 0.1, IJB-A TAR @ FAR 0.01, "
        "IJB-A TAR @ FAR 0.001, IJB-A rank-1.",
    ]
    made = brought(data, tmp_path)
    tables, lines = shown()
    assert lines == []
    assert set(tables[TABLE]) == {"S Source-Only", "S Fine-tune"}
    for row, cells in tables[TABLE].items():
        figures = expected(out / "runs" / row / "seed-0", *made)
        assert {title: cell["values"]["0"] for title, cell in cells.items()} == pytest.approx(figures)
