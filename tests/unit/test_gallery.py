"""Galleries: enrolment, search by every way, thresholds, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.unit.pictures import encode, pixels

from visard.errors import UsageError, VisardError
from visard.inference import search as search_module
from visard.inference.gallery import PROBES, Gallery, enrol_folder, features_of, person_of
from visard.inference.model import load_model
from visard.inference.search import Exact, Sketch
from visard.models import build
from visard.models.files import save_model

ABOUT = {
    "model": "f00", "model_file": "/m", "order": "rgb", "mean": "0.5", "std": "0.5", "size": "32", "align": "none",
    "flip": "0",
}  # fmt: skip


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def crowd(people: int = 30, each: int = 4, dim: int = 16, noise: float = 0.5, seed: int = 0):
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal((people, dim))
    owner = np.repeat(np.arange(people), each)
    return [f"p{k:03d}" for k in owner], centre[owner] + noise * rng.standard_normal((len(owner), dim))


def test_a_template_is_the_normalised_mean_of_unit_features() -> None:
    names, features = crowd(5, 3)
    order = np.random.default_rng(1).permutation(len(names))
    gallery = Gallery.enrol([names[i] for i in order], features[order], ABOUT)
    assert gallery.names == ("p000", "p001", "p002", "p003", "p004")
    for k, template in enumerate(gallery.templates):
        mean = sum(row / np.linalg.norm(row) for row in features[3 * k : 3 * k + 3])
        assert template == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert gallery.pictures.tolist() == [3] * 5


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("queries", [1, 40])
def test_exact_search_is_a_sort(library: bool, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if library:
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr(search_module, "faiss", lambda: None)
    monkeypatch.setattr(search_module, "CELLS", 700)
    rng = np.random.default_rng(0)
    templates, asked = unit(rng.standard_normal((200, 16))), unit(rng.standard_normal((queries, 16)))
    scores, rows = Exact(templates).search(asked, 7)
    full = asked.astype(np.float64) @ templates.astype(np.float64).T
    for i in range(queries):
        expected = sorted(range(200), key=lambda row, i=i: -full[i, row])[:7]
        assert rows[i].tolist() == expected
        assert scores[i] == pytest.approx(full[i, expected], abs=1e-6)


def test_ties_and_small_galleries() -> None:
    templates = unit(np.array([[1.0, 0], [0, 1], [1, 0], [1, 0]]))
    scores, rows = Exact(templates).search(unit(np.array([[1.0, 0]])), 9)
    assert rows.tolist() == [[0, 2, 3, 1]]
    assert scores.tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_a_sketch_finds_what_is_alike() -> None:
    pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    templates = unit(rng.standard_normal((20_000, 64)))
    asked = unit(templates[:50] + 1.5 / 8 * rng.standard_normal((50, 64)))  # cosine about 0.55
    exact, sketch = Exact(templates).search(asked, 1), Sketch(templates).search(asked, 1)
    assert np.array_equal(exact[1], sketch[1])
    assert sketch[0] == pytest.approx(exact[0], abs=1e-6)
    few = Sketch(templates[:10]).search(asked, 3)
    assert np.array_equal(few[1], Exact(templates[:10]).search(asked, 3)[1])


def test_a_sketch_needs_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "faiss", lambda: None)
    with pytest.raises(UsageError, match=r"pip install 'visard\[gallery\]'"):
        Sketch(np.eye(4, dtype=np.float32))


def test_thresholds_from_the_definition() -> None:
    names, features = crowd(12, 4, noise=1.5)
    gallery = Gallery.enrol(names, features, ABOUT)
    rows, owner = gallery.probes.astype(np.float64), gallery.owner
    templates = gallery.templates.astype(np.float64)
    against = [r @ t for r, o in zip(rows, owner, strict=True) for k, t in enumerate(templates) if k != o]
    pairs = [rows[i] @ rows[j] for i in range(len(rows)) for j in range(i) if owner[i] != owner[j]]
    best = [max(r @ t for k, t in enumerate(templates) if k != o) for r, o in zip(rows, owner, strict=True)]
    for rate in (0.5, 0.1, 0.011, 1e-4, 1.0):
        for find, strangers in (
            (gallery.comparison_threshold, against), (gallery.pair_threshold, pairs), (gallery.search_threshold, best),
        ):  # fmt: skip
            limit = find(rate)
            assert limit.comparisons == len(strangers)
            reach = sum(np.float32(s) >= limit.value + 1e-6 for s in strangers)
            assert reach / len(strangers) <= rate
            more = sum(np.float32(s) >= limit.value - 1e-6 for s in strangers)
            assert rate == 1.0 or more / len(strangers) > rate or more == reach + 1
            assert limit.unreliable == (rate * len(strangers) < 10)


def test_a_threshold_with_ties_lets_no_more_through() -> None:
    features = np.tile(np.eye(3), (2, 1))
    gallery = Gallery.enrol(["a", "b", "c"] * 2, features, ABOUT)
    assert gallery.comparison_threshold(0.5).value > 0  # all strangers' scores are 0: none may reach it
    assert gallery.comparison_threshold(1.0).value == -1
    with pytest.raises(UsageError, match="fewer than two people"):
        Gallery.enrol(["a", "a"], features[:2], ABOUT).comparison_threshold(0.1)
    with pytest.raises(UsageError, match="fewer than two people"):
        Gallery.enrol(["a", "a"], features[:2], ABOUT).search_threshold(0.1)
    with pytest.raises(UsageError, match="rate 0"):
        gallery.comparison_threshold(0.0)


def test_many_pictures_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visard.inference.gallery.PROBES", 20)
    monkeypatch.setattr("visard.inference.gallery.COMPARISONS", 100)
    names, features = crowd(30, 2)
    gallery = Gallery.enrol(names, features, ABOUT)
    assert gallery.probes.shape == (20, 16)
    assert 80 <= gallery.comparison_threshold(0.5).comparisons <= 100
    more = Gallery.enrol([f"q{n}" for n in names], features, ABOUT)
    both = gallery.with_more(more)
    assert len(both) == 60
    assert (both.owner < 30).sum() == 10
    assert len(both.probes) == 20


def test_more_people() -> None:
    names, features = crowd(6, 2)
    whole = Gallery.enrol(names, features, ABOUT)
    one, two = (Gallery.enrol(names[s], features[s], ABOUT) for s in (slice(0, 8), slice(8, 12)))
    both = one.with_more(two)
    assert both.names == whole.names
    assert np.array_equal(both.templates, whole.templates)
    assert np.array_equal(both.probes, whole.probes)
    assert np.array_equal(both.owner, whole.owner)
    assert both.identify(features[11:], 1)[0][0].name == "p005"
    with pytest.raises(UsageError, match="p000 is enrolled already"):
        both.with_more(one)
    other = Gallery.enrol(["z"], features[:1], ABOUT | {"model": "other"})
    with pytest.raises(UsageError, match="another model"):
        both.with_more(other)
    assert PROBES == 4096


def test_a_gallery_on_disk(tmp_path: Path) -> None:
    names, features = crowd()
    names = [n.replace("p", "Zoë ") for n in names]
    gallery = Gallery.enrol(names, features, ABOUT)
    gallery.save(tmp_path / "g")
    first = (tmp_path / "g").read_bytes()
    again = Gallery.load(tmp_path / "g")
    assert (again.names, again.about) == (gallery.names, gallery.about)
    for key in ("templates", "pictures", "probes", "owner"):
        assert np.array_equal(getattr(again, key), getattr(gallery, key))
    again.save(tmp_path / "g")
    assert (tmp_path / "g").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def change(path: Path, name: str, value: np.ndarray | None = None, about: dict | None = None) -> None:
    tensors = load_file(path)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path, {"gallery": json.dumps(about or {"kind": "visard gallery", "version": 1, **ABOUT})})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.unlink(), "no gallery at"),
        (lambda p: p.write_bytes(b""), "not a readable gallery"),
        (lambda p: p.write_bytes(b"\xff" * 64), "not a readable gallery"),
        (lambda p: p.write_bytes(p.read_bytes()[:-7]), "not a readable gallery"),
        (lambda p: save_file({"x": np.zeros(2)}, p), "is no gallery"),
        (lambda p: change(p, "", about={"kind": "visard gallery", "version": 9}), "format 9"),
        (lambda p: change(p, "names", np.frombuffer(b"{", np.uint8)), "not a readable gallery"),
        (lambda p: change(p, "names", np.frombuffer(b'["a"]', np.uint8)), "damaged: templates"),
        (lambda p: change(p, "names", np.frombuffer(json.dumps(["a"] * 30).encode(), np.uint8)), "each once"),
        (lambda p: change(p, "templates", np.ones((30, 16), np.float32)), "length one"),
        (lambda p: change(p, "templates", np.full((30, 16), np.nan, np.float32)), "length one"),
        (lambda p: change(p, "templates", np.ones((30, 16), np.float64)), "templates is float64"),
        (lambda p: change(p, "owner", np.full(120, 99)), "shows no face"),
        (lambda p: change(p, "owner", np.zeros((2, 2), np.int64)), "damaged"),
    ],
)
def test_damaged_galleries(damage, says: str, tmp_path: Path) -> None:
    names, features = crowd()
    path = tmp_path / "g"
    Gallery.enrol(names, features, ABOUT).save(path)
    damage(path)
    with pytest.raises(VisardError, match=says) as caught:
        Gallery.load(path)
    assert "\n" not in str(caught.value)


def test_features_that_do_not_fit() -> None:
    gallery = Gallery.enrol(*crowd(), ABOUT)
    with pytest.raises(UsageError, match="3 dimensions, the gallery has 16"):
        gallery.identify(np.ones((1, 3)))
    with pytest.raises(VisardError, match="all zeros"):
        gallery.identify(np.zeros((1, 16)))
    with pytest.raises(VisardError, match="cancel to zero"):
        Gallery.enrol(["a", "a"], np.array([[1.0, 0], [-1, 0]]), ABOUT)
    with pytest.raises(UsageError, match="no person to enrol"):
        Gallery.enrol([], np.zeros((0, 4)), ABOUT)


@pytest.mark.parametrize(
    ("file", "person"),
    [("anna/1.jpg", "anna"), ("anna/2020/x.jpg", "anna"), ("anna.jpg", "anna"), ("anna_12.jpg", "anna"),
     ("Anna B_0001.jpg", "Anna B"), ("anna (2).jpg", "anna"), ("agent-47.png", "agent-47"), ("_1.png", "_1")],
)  # fmt: skip
def test_whom_a_file_shows(file: str, person: str) -> None:
    assert person_of(file) == person


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weights = build("tiny", embedding=16, size=32).state_dict()
    save_model(tmp_path / "m.safetensors", weights, {"model": "tiny", "embedding": "16", "size": "32"})
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("flat", [False, True])
def test_enrolling_a_folder(flat: bool, model_path: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for k, person in enumerate(("anna", "bob")):
        for i in (1, 2):
            path = photos / (f"{person}_{i}.png" if flat else f"{person}/{i}.png")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode(pixels(10 * k, 32) // 2 + pixels(10 * k + i, 32) // 4))
    (photos / "carl_1.png").write_bytes(b"")
    (photos / "notes.txt").write_text("not a picture")
    model = load_model(model_path)
    gallery, skipped = enrol_folder(photos, model)
    assert gallery.names == ("anna", "bob")
    assert skipped == [("carl_1.png", "the file is empty")]
    files = sorted(photos.rglob("anna*1.png") if flat else photos.glob("anna/1.png"))
    match = gallery.identify(features_of(files, gallery.load_model()), 2)[0]
    assert (match[0].name, len(match)) == ("anna", 2)
    with pytest.raises(UsageError, match="no such file"):
        features_of([photos / "gone.png"], model)
    with pytest.raises(VisardError, match="notes.txt: not a picture"):
        features_of([photos / "notes.txt"], model)


def test_pictures_with_short_features_are_left_out(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for k in range(6):
        (tmp_path / "photos" / f"p{k}.png").write_bytes(encode(pixels(k, 32)))
    model = load_model(model_path)
    norm = model.embed(tmp_path / "photos", align="none").norm
    limit = float(np.sort(norm)[2:4].mean())
    gallery, skipped = enrol_folder(tmp_path / "photos", model, min_norm=limit)
    assert gallery.names == tuple(f"p{k}" for k in range(6) if norm[k] > limit)
    assert [file for file, _ in skipped] == [f"p{k}.png" for k in range(6) if norm[k] < limit]
    assert all("its feature has length" in reason for _, reason in skipped)
    with pytest.raises(UsageError, match="not one of 6 pictures could be used"):
        enrol_folder(tmp_path / "photos", model, min_norm=1e6)


def test_the_model_of_a_gallery(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(encode(pixels(1, 32)))
    gallery, _ = enrol_folder(tmp_path / "photos", load_model(model_path, order="bgr"))
    assert gallery.load_model().inputs.order == "bgr"
    moved = model_path.rename(tmp_path / "moved.safetensors")
    with pytest.raises(UsageError, match="no longer at"):
        gallery.load_model()
    assert gallery.load_model(moved).inputs.order == "bgr"
    other = build("tiny", embedding=16, size=32).state_dict()
    save_model(tmp_path / "n.safetensors", other, {"model": "tiny", "embedding": "16", "size": "32"})
    with pytest.raises(UsageError, match="is not the model that made this gallery"):
        gallery.load_model(tmp_path / "n.safetensors")


def test_folders_that_cannot_be_enrolled(model_path: Path, tmp_path: Path) -> None:
    model = load_model(model_path)
    with pytest.raises(UsageError, match="no such file or folder"):
        enrol_folder(tmp_path / "gone", model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no pictures"):
        enrol_folder(tmp_path / "empty", model)
    (tmp_path / "empty" / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(UsageError, match="not one of 1 pictures"):
        enrol_folder(tmp_path / "empty", model)
    with pytest.raises(UsageError, match="alignment 'eyes'"):
        enrol_folder(tmp_path / "empty", model, align="eyes")
