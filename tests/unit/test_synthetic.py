"""The synthetic faces: the same pixels always, attributes that are really drawn, people who are hard to tell apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.fft import dctn, idctn
from scipy.special import ndtri
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from visard.data.faces import FaceSet
from visard.data.synthetic import sets
from visard.data.synthetic import traits as streams
from visard.data.synthetic.head import camera, measures, meet, skull
from visard.data.synthetic.picture import compress, draw
from visard.data.synthetic.render import textures
from visard.data.synthetic.sets import ATTRIBUTES, DOMAINS, SyntheticSpec, cached, make, render
from visard.data.synthetic.traits import BLACK, BLOND, BROWN, GRAY, attributes, traits
from visard.errors import UsageError, VisardError

BOTH = SyntheticSpec(identities=8, images_per_identity=6, size=32, domains=("north", "south"), seed=5)
CELEBA = {
    "Male", "Young", "Eyeglasses", "Wearing_Hat", "Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair", "Bald",
    "Bushy_Eyebrows", "Goatee", "Mustache", "No_Beard", "Smiling", "Chubby", "Oval_Face", "Rosy_Cheeks",
    "Wearing_Lipstick", "Bags_Under_Eyes",
}  # fmt: skip


def everyone(spec: SyntheticSpec) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(spec.count)
    return rows // spec.images_per_identity, rows % spec.images_per_identity


# --- the same pixels always ------------------------------------------------------------------------------------


def test_a_picture_does_not_depend_on_its_batch() -> None:
    who, which = everyone(BOTH)
    images, marks = render(BOTH, who, which)
    order = np.random.default_rng(0).permutation(len(who))
    shuffled, shuffled_marks = render(BOTH, who[order], which[order])
    np.testing.assert_array_equal(shuffled, images[order])
    np.testing.assert_array_equal(shuffled_marks, marks[order])
    for row in (0, 7, 23, 24, 47):
        one, one_marks = render(BOTH, who[row : row + 1], which[row : row + 1])
        np.testing.assert_array_equal(one[0], images[row])
        np.testing.assert_array_equal(one_marks[0], marks[row])


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_a_picture_does_not_depend_on_how_many_are_drawn_at_a_time(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SyntheticSpec(identities=5, images_per_identity=10, size=48, domains=("north", "south"))
    expected = render(spec, *everyone(spec))[0]
    monkeypatch.setattr("visard.data.synthetic.render.CHUNK", chunk)
    np.testing.assert_array_equal(render(spec, *everyone(spec))[0], expected)


def test_worker_processes_make_the_same_set(tmp_path: Path) -> None:
    heard: list[int] = []
    spec = SyntheticSpec(identities=10, images_per_identity=15, size=32, domains=("north", "south"), seed=1)
    alone = FaceSet.open(make(spec, tmp_path / "alone", workers=1, progress=heard.append))
    together = FaceSet.open(make(spec, tmp_path / "together", workers=2))
    for name in ("images", "identity", "domain", "attributes"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(together, name))
    np.testing.assert_array_equal(alone.images, render(spec, *everyone(spec))[0])
    assert heard == sorted(heard)
    assert heard[-1] == spec.count
    assert alone.fingerprint() == together.fingerprint()


def test_a_drawing_process_starts_with_little() -> None:
    heavy = "{'torch', 'scipy', 'pydantic', 'PIL'} & set(sys.modules)"
    code = f"import sys, visard.processes, visard.data.synthetic.render; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_growing_a_set_or_adding_a_domain_keeps_the_people() -> None:
    small = SyntheticSpec(identities=3, images_per_identity=2, size=32)
    large = SyntheticSpec(identities=14, images_per_identity=9, size=32, domains=("north", "south"))
    who, which = everyone(small)
    np.testing.assert_array_equal(render(small, who, which)[0], render(large, who, which)[0])
    south = SyntheticSpec(identities=7, images_per_identity=2, size=32, domains=("south",))
    np.testing.assert_array_equal(render(south, who, which)[0], render(large, who + 7, which)[0])


def test_seeds_identities_and_pictures_all_matter() -> None:
    spec = SyntheticSpec(identities=4, images_per_identity=3, size=32)
    images = render(spec, *everyone(spec))[0]
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == 12
    other = render(SyntheticSpec(4, 3, 32, seed=1), *everyone(spec))[0]
    assert not (images == other).all(axis=(1, 2, 3)).any()


def test_pixels_belong_to_the_version_of_the_renderer() -> None:
    """Block means of three pictures: if this fails, VERSION must go up, or old caches would be wrong."""
    spec = SyntheticSpec(identities=3, images_per_identity=1, size=32, seed=0)
    blocks = render(spec, *everyone(spec))[0].reshape(3, 2, 16, 2, 16, 3).mean(axis=(2, 4, 5))
    assert sets.VERSION == "2"
    np.testing.assert_allclose(blocks.reshape(3, 4), EXPECTED_BLOCKS, atol=0.6)


EXPECTED_BLOCKS = [[97.9, 83.3, 86.8, 84.9], [119.9, 124.9, 139.3, 131.7], [136.8, 152.6, 173.3, 160.9]]


# --- attributes are drawn, and correlate as they do in life -------------------------------------------------------


def test_attribute_names_are_celebas_in_celebas_order() -> None:
    assert set(ATTRIBUTES) == CELEBA
    assert list(ATTRIBUTES) == sorted(ATTRIBUTES)
    assert render(BOTH, *everyone(BOTH))[1].dtype == np.int8
    assert set(np.unique(render(BOTH, *everyone(BOTH))[1])) == {-1, 1}


PLAIN = {
    "yaw": 0.0, "pitch": 0.0, "roll": 0.0, "scale": 1.27, "shift_x": 0.0, "shift_y": 0.0, "hat": 0.0, "glasses": 0.0,
    "cover": 0.0, "bald": 0.0, "stubble": 0.0, "mustache": 0.0, "goatee": 0.0, "beard": 0.0, "shaven": 1.0,
    "hair_kind": BROWN, "smile": 0.0, "open": 0.0, "lipstick": 0.0, "rosy": 0.0, "bagged": 0.0, "blur": 0.3,
    "blocks": 0.0, "exposure": 1.0, "contrast": 1.0, "colour": 1.0, "light_x": 0.0, "light_y": -0.5, "light_z": 0.87,
    "key": 0.8, "warmth": 0.0, "old": 0.0, "weight": 0.0, "chubby": 0.0, "oval": 0.0, "bushy": 0.0, "fringe": 0.0,
    "melanin": 0.15, "back_shade": 0.9, "back_kind": 0.0, "shaded": 0.0, "length": 0.2, "raise": 0.0, "lids": 1.0,
    "freckles": 0.0, "mole1": 0.0, "mole2": 0.0, "grain": 0.0,
}  # fmt: skip


def shown(size: int = 64, people: int = 12, **changes: float) -> np.ndarray:
    """Float pictures (B, S, S, 3) of people in plain frontal light, with some traits changed."""
    who, which = np.arange(people), np.zeros(people, dtype=np.int64)
    s = traits(3, "north", who, which)
    for name, value in (PLAIN | changes).items():
        s[name] = np.full(people, float(value))
    return draw(measures(s), *textures(3, "north", who, which, size), size).astype(np.float64)


def box(pictures: np.ndarray, u: tuple[float, float], v: tuple[float, float]) -> np.ndarray:
    """The part of frontal pictures between face coordinates u and v."""
    size = pictures.shape[1]
    left, right, top, bottom = (round((x / PLAIN["scale"] + 1) * size / 2) for x in (*u, *v))
    return pictures[:, top:bottom, left:right]


def brightness(pictures: np.ndarray) -> np.ndarray:
    return pictures.mean(axis=(1, 2, 3))


def redness(pictures: np.ndarray) -> np.ndarray:
    return (pictures[..., 0] - pictures[..., 1]).mean(axis=(1, 2))


CROWN, BROW, EYES = ((-0.3, 0.3), (-1.25, -1.0)), ((-0.5, 0.5), (-0.48, -0.24)), ((-0.55, 0.55), (-0.3, 0.02))
UNDER_EYES, CHEEKS, LIP = ((0.2, 0.45), (-0.08, 0.06)), ((0.3, 0.55), (0.05, 0.3)), ((-0.2, 0.2), (0.36, 0.46))
MOUTH, CHIN, FOREHEAD = ((-0.2, 0.2), (0.45, 0.62)), ((-0.12, 0.12), (0.68, 0.9)), ((-0.3, 0.3), (-0.8, -0.5))


@pytest.mark.parametrize(
    ("changes", "where", "least"),
    [
        ({"mustache": 1, "shaven": 0}, LIP, 8.0),
        ({"goatee": 1, "shaven": 0}, CHIN, 15.0),
        ({"beard": 1, "mustache": 1, "shaven": 0}, CHIN, 15.0),
        ({"stubble": 1, "shaven": 0}, CHIN, 5.0),
        ({"bushy": 1}, BROW, 3.0),
        ({"bagged": 1}, UNDER_EYES, 3.0),
        ({"glasses": 1, "frame_dark": 0.3}, EYES, 3.0),
        ({"glasses": 1, "shaded": 1}, EYES, 15.0),
        ({"hat": 1, "hat_shade": 0.0}, CROWN, 3.0),
        ({"hair_kind": BLACK}, CROWN, 5.0),
    ],
)
def test_it_darkens_its_place(changes: dict[str, float], where: tuple[tuple[float, float], ...], least: float) -> None:
    darker = brightness(box(shown(), *where)) - brightness(box(shown(**changes), *where))
    assert np.median(darker) > least
    assert (darker > 0).mean() > 0.8


@pytest.mark.parametrize(
    ("changes", "where", "measure"),
    [
        ({"hair_kind": BLOND}, CROWN, brightness),
        ({"hair_kind": GRAY}, CROWN, brightness),
        ({"bald": 1}, CROWN, brightness),
        ({"rosy": 1}, CHEEKS, redness),
        ({"lipstick": 1, "lip_hue": 0.5}, MOUTH, redness),
    ],
)
def test_it_brightens_or_reddens_its_place(changes: dict[str, float], where, measure) -> None:  # type: ignore[no-untyped-def]
    more = measure(box(shown(**changes), *where)) - measure(box(shown(), *where))
    assert np.median(more) > 8.0
    assert (more > 0).mean() > 0.8


def test_gray_hair_has_no_colour() -> None:
    assert redness(box(shown(hair_kind=GRAY), *CROWN)).mean() < 0.5 * redness(box(shown(), *CROWN)).mean()


def test_age_draws_lines() -> None:
    def texture(pictures: np.ndarray) -> np.ndarray:
        return np.abs(np.diff(box(pictures, *FOREHEAD), axis=1)).mean(axis=(1, 2, 3))

    assert np.median(texture(shown(96, old=1.0)) / texture(shown(96, old=0.0))) > 1.3


def test_a_smile_moves_the_mouth_and_little_else() -> None:
    change = np.abs(shown(smile=0.9) - shown(smile=0.0))
    assert box(change, *MOUTH).mean() > 3 * box(change, *CROWN).mean()
    assert box(change, *MOUTH).mean() > 4.0


@pytest.mark.parametrize(("trait", "sign"), [("chubby", 1), ("oval", -1)])
def test_face_shapes_differ_in_width(trait: str, sign: int) -> None:
    who = np.arange(10)
    areas = []
    for value in (0.0, 1.0):
        s = traits(3, "north", who, 0 * who)
        for name, plain in (PLAIN | {trait: value}).items():
            s[name] = np.full(10, float(plain))
        t = measures(s)
        areas.append((meet(camera(t, 64), skull(t), t).margin > 0).sum(axis=(1, 2)))
    assert (sign * (areas[1] - areas[0]) > 10).all()


def test_parts_move_by_depth() -> None:
    """Turning the head moves the tip of the nose further than the plane of the eyes."""
    moved = {}
    for yaw in (0.0, 0.4):
        s = traits(3, "north", np.arange(6), np.zeros(6, dtype=np.int64))
        for name, plain in (PLAIN | {"yaw": yaw}).items():
            s[name] = np.full(6, float(plain))
        t = measures(s)
        eye = camera(t, 112)
        f = meet(eye, skull(t), t)
        for part, v in (("nose", t["nose_v"]), ("eyes", t["eye_v"])):
            near = np.abs(f.u) * 3 + np.abs(f.v - v)
            moved[part, yaw] = eye.x.reshape(6, -1)[np.arange(6), near.reshape(6, -1).argmin(axis=1)]
    nose, eyes = (moved[part, 0.4] - moved[part, 0.0] for part in ("nose", "eyes"))
    assert (eyes > 0.2).all()
    assert (nose - eyes > 0.02).all()


EXPRESSIONS = """
Male Eyeglasses -Wearing_Hat Young
Male Eyeglasses -Wearing_Hat -Young Gray_Hair
Male Eyeglasses -Wearing_Hat -Young Chubby
-Male Eyeglasses -Wearing_Hat
-Eyeglasses Wearing_Hat
-Male -Eyeglasses -Wearing_Hat Blond_Hair Oval_Face Rosy_Cheeks
Male -Eyeglasses -Wearing_Hat Goatee -Bald Smiling
Male -Eyeglasses -Wearing_Hat -Goatee Bald
Male -Eyeglasses -Wearing_Hat Gray_Hair -Goatee
Male -Eyeglasses -Wearing_Hat -Young -Goatee Bushy_Eyebrows -Black_Hair -Blond_Hair
Male -Eyeglasses -Wearing_Hat Young Brown_Hair -Goatee Bushy_Eyebrows
-Male -Eyeglasses -Wearing_Hat -Young Oval_Face Wearing_Lipstick -Rosy_Cheeks
-Male -Eyeglasses -Wearing_Hat Young -Oval_Face Wearing_Lipstick Rosy_Cheeks
Male -Eyeglasses -Wearing_Hat -Bushy_Eyebrows Mustache
Male -Eyeglasses -Wearing_Hat Young -No_Beard -Mustache Bushy_Eyebrows
Male -Eyeglasses -Wearing_Hat Young -No_Beard -Mustache -Bushy_Eyebrows
Male -Eyeglasses -Wearing_Hat Young Black_Hair Bags_Under_Eyes
-Male -Eyeglasses -Wearing_Hat -Young Bags_Under_Eyes
""".strip().splitlines()


@pytest.fixture(scope="module")
def table() -> dict[str, np.ndarray]:
    """Attributes as booleans (people, pictures) of 200 people with 20 pictures each; nothing is drawn."""
    who, which = np.divmod(np.arange(4000), 20)
    marks = attributes(traits(0, "north", who, which)) > 0
    return {name: marks[:, k].reshape(200, 20) for k, name in enumerate(ATTRIBUTES)}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_partitions_by_attributes_find_pictures(table: dict[str, np.ndarray], expression: str) -> None:
    chosen = [~table[word[1:]] if word[0] == "-" else table[word] for word in expression.split()]
    assert np.logical_and.reduce(chosen).sum() >= 5


def test_attributes_go_together_as_in_life(table: dict[str, np.ndarray]) -> None:
    assert not (~table["Male"] & (~table["No_Beard"] | table["Goatee"] | table["Mustache"] | table["Bald"])).any()
    assert not (table["Male"] & table["Wearing_Lipstick"]).any()
    assert not (table["Goatee"] & table["No_Beard"]).any()
    colours = sum(table[c + "_Hair"].astype(int) for c in ("Black", "Blond", "Brown", "Gray"))
    assert colours.max() == 1
    assert table["Young"][table["Gray_Hair"]].mean() < 0.3
    assert table["Gray_Hair"][~table["Young"]].mean() > 0.25
    for name, (low, high) in RATES.items():
        assert low < table[name].mean() < high, name


RATES = {
    "Male": (0.3, 0.6), "Young": (0.55, 0.85), "Smiling": (0.35, 0.65), "Eyeglasses": (0.08, 0.3),
    "Wearing_Hat": (0.04, 0.15), "Wearing_Lipstick": (0.25, 0.5), "No_Beard": (0.65, 0.92), "Bald": (0.01, 0.12),
    "Oval_Face": (0.15, 0.5), "Chubby": (0.04, 0.25), "Bushy_Eyebrows": (0.04, 0.25),
}  # fmt: skip


def test_some_attributes_belong_to_people_and_some_to_pictures(table: dict[str, np.ndarray]) -> None:
    for name in ("Male", "Oval_Face", "Bushy_Eyebrows"):
        assert (table[name] == table[name][:, :1]).all()
    for name in ("Eyeglasses", "Smiling", "Wearing_Hat"):
        varies = table[name].any(axis=1) & ~table[name].all(axis=1)
        assert varies.mean() > 0.4
    for name in ("Brown_Hair", "No_Beard", "Young"):
        usual = table[name].mean(axis=1) > 0.5
        odd = (table[name] != usual[:, None]).mean()
        assert 0.002 < odd < 0.15


# --- surfaces, numbers, compression ------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", DOMAINS)
def test_rays_meet_the_surface(domain: str) -> None:
    """The height at which a section is cut is the height of the point that is found on it."""
    who = np.arange(40)
    t = measures(traits(0, domain, who, 0 * who))
    eye = camera(t, 64)
    f = meet(eye, skull(t), t)
    z1 = (f.z - f.v * eye.sin_pitch) / eye.cos_pitch
    off = np.abs(eye.y + z1 * eye.sin_pitch - f.v * eye.cos_pitch)[f.margin > 0.05]
    assert np.median(off) < 0.002  # a pixel is 0.04
    assert np.quantile(off, 0.99) < 0.04


def test_normal_numbers_are_normal_up_to_their_bound() -> None:
    u = np.random.default_rng(0).uniform(size=5000)
    np.testing.assert_allclose(streams.normal(u), np.clip(ndtri(u), -2.4, 2.4), atol=6e-6)
    assert streams.normal(np.array([1e-9, 1 - 1e-9])).tolist() == [-2.4, 2.4]


def test_sensor_noise_has_unit_variance_and_a_place_of_its_own() -> None:
    words = streams.raw(0, streams.SENSOR, 0, [(i, 0) for i in range(20)], 1)[:, 0]
    noise = streams.grain(words, 3 * 64 * 64)
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1.0) < 0.02
    assert np.abs(np.corrcoef(noise) - np.eye(20)).max() < 0.05


@pytest.mark.parametrize("size", [32, 45])
def test_compression_is_rounding_of_cosine_blocks(size: int) -> None:
    rng = np.random.default_rng(size)
    images = rng.integers(0, 256, (2, size, size, 3)).astype(np.uint8)
    quality = np.array([0.4, 0.9])
    for image, q, result in zip(images, quality, compress(images, quality), strict=True):
        off = np.abs(slow_compress(image.astype(float), q) - result)
        assert (off <= 1).mean() > 0.99  # 32 bits here, 64 there: a few coefficients fall on the other side


def slow_compress(rgb: np.ndarray, quality: float) -> np.ndarray:
    """One picture in float64, block by block."""
    size = len(rgb)
    rgb = np.pad(rgb, ((0, -size % 16), (0, -size % 16), (0, 0)), mode="edge")
    luma = rgb @ [0.299, 0.587, 0.114]
    step = 2.0 + 14.0 * (1.0 - quality)

    def rounded(plane: np.ndarray, step: float, slope: float) -> np.ndarray:
        out = np.empty_like(plane)
        grid = step * (1.0 + slope * np.add.outer(np.arange(8), np.arange(8)))
        for i in range(0, len(plane), 8):
            for j in range(0, len(plane), 8):
                block = dctn(plane[i : i + 8, j : j + 8], norm="ortho")
                out[i : i + 8, j : j + 8] = idctn(np.rint(block / grid) * grid, norm="ortho")
        return out

    def tint(channel: int) -> np.ndarray:
        colour = rgb[:, :, channel] - luma
        half = colour.reshape(len(luma) // 2, 2, len(luma) // 2, 2).mean(axis=(1, 3))
        return rounded(half, 1.5 * step, 0.6).repeat(2, axis=0).repeat(2, axis=1)

    red, blue = tint(0), tint(2)
    luma = rounded(luma - 128.0, step, 0.35) + 128.0
    green = -(0.299 * red + 0.114 * blue) / 0.587
    out = np.stack([luma + red, luma + green, luma + blue], axis=2)
    return np.floor(np.clip(out, 0.0, 255.0) + 0.5)[:size, :size]


# --- domains and difficulty ---------------------------------------------------------------------------------------


def test_domains_differ_in_skin_shape_and_camera() -> None:
    who = np.arange(300)
    t = {name: traits(0, name, who, 0 * who) for name in DOMAINS}
    north, south = t["north"], t["south"]
    assert south["melanin"].mean() > north["melanin"].mean() + 0.25
    assert south["nose_width"].mean() > north["nose_width"].mean() + 0.8
    assert south["blur"].mean() > 1.2 * north["blur"].mean()
    assert (south["hair_kind"] == BLOND).mean() < 0.5 * (north["hair_kind"] == BLOND).mean()
    faces = {}
    for name in DOMAINS:
        spec = SyntheticSpec(identities=60, images_per_identity=1, size=32, domains=(name,))
        faces[name] = render(spec, np.arange(60), np.zeros(60, dtype=np.int64))[0][:, 12:24, 10:22].mean(axis=(1, 2))
    assert faces["north"].mean() > faces["south"].mean() + 10


def test_pixels_alone_are_far_from_telling_people_apart() -> None:
    spec = SyntheticSpec(identities=40, images_per_identity=20, size=32, seed=2)
    who, which = everyone(spec)
    pixels = render(spec, who, which)[0].reshape(len(who), 16, 2, 16, 2, 3).mean(axis=(2, 4)).reshape(len(who), -1)
    seen = which < 15
    linear = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(pixels[seen], who[seen])
    accuracy = (linear.predict(pixels[~seen]) == who[~seen]).mean()
    assert 3 / 40 < accuracy < 0.65  # something of the identity is in the pixels, but not in plain sight
    centred = pixels - pixels.mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    scores = unit @ unit.T
    same = who[:, None] == who[None, :]
    genuine, impostor = scores[same & ~np.eye(len(who), dtype=bool)], scores[~same]
    best = max((genuine >= t).mean() + (impostor < t).mean() for t in np.linspace(-0.5, 0.9, 60)) / 2
    assert 0.52 < best < 0.66


# --- sizes, sets on disk, wrong use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 45, 112])
def test_any_size_shows_the_same_scene(size: int) -> None:
    """At another resolution the same address is the same picture, but for noise."""

    def thumb(s: int) -> np.ndarray:
        pictures = render(SyntheticSpec(identities=6, images_per_identity=1, size=s), np.arange(6), np.zeros(6, int))[0]
        assert pictures.shape == (6, s, s, 3)
        edges = (np.arange(9) * s) // 8
        wide = np.diff(edges)
        rows = np.add.reduceat(pictures.astype(float), edges[:-1], axis=1) / wide[:, None, None]
        return np.add.reduceat(rows, edges[:-1], axis=2) / wide[:, None]

    for a, b in zip(thumb(size), thumb(64), strict=True):
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.9


def test_a_set_on_disk_says_what_it_is(tmp_path: Path) -> None:
    spec = SyntheticSpec(identities=5, images_per_identity=2, size=32, domains=("south", "north"), seed=9)
    faces = FaceSet.open(make(spec, tmp_path / "set"))
    assert len(faces) == 10
    assert faces.synthetic
    assert faces.names == ["south-00000", "south-00001", "north-00000", "north-00001", "north-00002"]
    assert faces.domains == ["south", "north"]
    assert faces.domain.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert faces.file(9) == "north-00002/0001"
    assert tuple(faces.attribute_names) == ATTRIBUTES
    assert faces.info["renderer"] == sets.VERSION
    assert SyntheticSpec(**faces.info["spec"]) == spec


def test_the_cache_draws_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISARD_CACHE", str(tmp_path / "cache"))
    spec = SyntheticSpec(identities=2, images_per_identity=2, size=32)
    folder = cached(spec)
    assert folder.parent == tmp_path / "cache"
    monkeypatch.setattr(sets, "make", lambda *args, **kwargs: pytest.fail("drawn again"))
    assert cached(spec) == folder
    monkeypatch.setattr(sets, "VERSION", "another")
    assert sets.folder_name(spec) != folder.name
    monkeypatch.undo()
    names = {sets.folder_name(s) for s in (spec, SyntheticSpec(2, 2, 33), SyntheticSpec(2, 2, 32, seed=1))}
    assert len(names) == 3


def test_two_who_draw_the_same_set_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SyntheticSpec(identities=2, images_per_identity=2, size=32)
    real = make

    def slower(spec: SyntheticSpec, out: Path, **kwargs: object) -> Path:
        real(spec, out)  # another process is done in the meantime
        return real(spec, out)

    monkeypatch.setattr(sets, "make", slower)
    assert len(FaceSet.open(cached(spec, tmp_path))) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domains": ("nroth",)}, "did you mean 'north'"),
        ({"domains": ()}, "at least one domain"),
        ({"domains": ("north", "north")}, "named twice"),
        ({"identities": 0}, "0 identities"),
        ({"identities": 1, "domains": ("north", "south")}, "1 identities for 2"),
        ({"images_per_identity": 0}, "0 pictures"),
        ({"size": 31}, "32 to 112"),
        ({"size": 113}, "32 to 112"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_impossible_sets_are_refused_in_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        SyntheticSpec(**change)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("who", "which"), [([8], [0]), ([-1], [0]), ([0], [6]), ([0], [-1]), ([0, 1], [0]), ([[0]], [[0]])]
)
def test_pictures_that_do_not_exist_are_refused(who: list[int], which: list[int]) -> None:
    with pytest.raises(UsageError, match="render: "):
        render(BOTH, np.array(who), np.array(which))


def test_no_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 processes"):
        make(BOTH, tmp_path / "set", workers=0)
    assert not list(tmp_path.iterdir())


def test_a_failing_process_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sets.compute
    monkeypatch.setattr(sets, "compute", lambda function, jobs, workers: real("visard.no_such:draw", jobs, workers))
    with pytest.raises(VisardError, match=r"a drawing process failed: .*visard\.no_such") as error:
        make(BOTH, tmp_path / "set", workers=2)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_info_is_plain_json(tmp_path: Path) -> None:
    faces = FaceSet.open(make(SyntheticSpec(identities=1, images_per_identity=1, size=32), tmp_path / "one"))
    assert json.loads(json.dumps(faces.info)) == faces.info
