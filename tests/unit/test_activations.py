"""Stored activations: as the trunk gives them live, private, resumable, and gone when their pictures are."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.toys import SIZE, noise_faces
from torch import Tensor

from visard import models
from visard.data.activations import (
    CHUNK,
    MIRROR,
    PLAIN,
    Activations,
    Store,
    entries,
    forget,
    pictures_digest,
    refuse_random,
    store_of,
    sweep,
    through,
)
from visard.data.augment import Augment, augment, to_float
from visard.data.faces import FaceSet
from visard.errors import UsageError, VisardError
from visard.learning.features import embed, features_of, input_batch
from visard.models.cut import Frozen, split
from visard.numerics import Numerics


@pytest.fixture
def faces(tmp_path: Path) -> FaceSet:
    """150 pictures: three chunks, the last one not full."""
    return noise_faces(tmp_path / "faces", identities=30, images=5)


def halves(seed: int = 0) -> tuple[Frozen, torch.nn.Module]:
    torch.manual_seed(seed)
    whole = models.build("mobilefacenet", embedding=16, size=SIZE).train()
    for module in whole.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0  # statistics of this batch: what differs between pictures comes out
    with torch.no_grad():
        whole(torch.randn(64, 3, SIZE, SIZE) / 2)
    trunk, tail = split(Numerics().prepare(whole.eval()), "blocks.13")
    return trunk, tail


class Counting:
    """A trunk that counts the pictures it saw."""

    def __init__(self, trunk: Frozen) -> None:
        self.trunk, self.seen = trunk, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.trunk(x)


def stored(faces: FaceSet, trunk: object, root: Path, dtype: str = "fp32", name: str = "t") -> Activations:
    found = Activations(faces, lambda: trunk, store_of(faces, name, (128, 2, 2), dtype, root))  # type: ignore[arg-type,return-value]
    found.wanted = {PLAIN: np.arange(len(faces)), MIRROR: np.arange(len(faces))}
    return found


def relative(got: Tensor, expected: Tensor) -> float:
    """Length of the difference; kernels for other numbers of pictures add up in another order."""
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("fp16", 4e-4)])
def test_stored_activations_are_those_of_the_live_trunk(
    faces: FaceSet, tmp_path: Path, dtype: str, bound: float
) -> None:
    trunk, _ = halves()
    view = stored(faces, trunk, tmp_path / "cache", dtype).behind(faces.all())
    rng = np.random.default_rng(0)
    for rows in (np.arange(7), rng.permutation(150)[:64], rng.permutation(150)[:40], np.arange(150)):
        pictures = to_float(faces.pixels[rows], channels_last=True)
        mirrored = rng.random(len(rows)) < 0.5
        got = torch.from_numpy(np.asarray(view.batch(rows, mirrored), np.float32))
        live = trunk(torch.where(torch.from_numpy(mirrored).view(-1, 1, 1, 1), pictures.flip(3), pictures))
        assert relative(got, live) <= (bound if len(rows) % 16 == 0 else bound + 5e-7)  # the network is untrained
        assert dtype == "fp16" or len(rows) % 16 or torch.equal(got, live), "in whole batches the same bits"
    assert relative(trunk(pictures.flip(3)), trunk(pictures)) > 0.1, "a mirror image is something else"
    assert relative(trunk(pictures).flip(3), trunk(pictures.flip(3))) > 0.1, "and not the mirrored activation"


def test_training_batches_are_mirrored_by_the_same_random_numbers(faces: FaceSet, tmp_path: Path) -> None:
    trunk, tail = halves()
    cached, live = stored(faces, trunk, tmp_path / "cache"), Activations(faces, lambda: trunk, None)
    rows, numerics = np.arange(3, 60), Numerics()
    batches, states = [], []
    for one in (cached, live):
        rng = torch.Generator().manual_seed(7)
        batches.append(input_batch(one.behind(faces.all()), rows, numerics, rng, Augment()))
        states.append(rng.get_state())
    assert torch.equal(*states), "what is drawn later is the same too"
    assert relative(*batches) <= 1e-6
    assert batches[0].is_contiguous(memory_format=torch.channels_last)
    pictures = augment(to_float(faces.pixels[rows], True), torch.Generator().manual_seed(7), Augment())
    assert relative(batches[0], trunk(pictures)) <= 1e-6
    plain = input_batch(cached.behind(faces.all()), rows, Numerics(channels_last=False))
    assert plain.is_contiguous()
    for flip in (False, True):
        a, b = (embed(tail, one.behind(faces.all()), flip=flip, batch=50) for one in (cached, live))
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
    none = cached.behind(faces.all()).take([])
    assert embed(tail, none).shape == (0, 16)
    assert len(features_of(tail, none)) == 0


def test_each_picture_goes_through_once_and_only_where_it_is_needed(faces: FaceSet, tmp_path: Path) -> None:
    trunk, _ = halves()
    counting = Counting(trunk)
    first = stored(faces, counting, tmp_path / "cache")
    first.wanted = {PLAIN: np.array([3, 70]), MIRROR: np.array([70])}
    shown: list[tuple[int, int]] = []
    first.prepare(lambda done, total: shown.append((done, total)))
    assert counting.seen == 3 * CHUNK
    assert shown[-1] == (3 * CHUNK, 3 * CHUNK)
    bits = first.behind(faces.all()).batch(np.arange(60))
    assert counting.seen == 3 * CHUNK
    first.behind(faces.all()).batch(np.array([149]))  # what was not foreseen is computed when it is read
    assert counting.seen == 3 * CHUNK + 150 - 2 * CHUNK
    again = stored(faces, lambda x: 1 / 0, tmp_path / "cache")
    again.wanted = first.wanted
    again.prepare()
    assert np.array_equal(again.behind(faces.all()).batch(np.arange(60)), bits)
    whole = stored(faces, counting, tmp_path / "other")  # another order, and everything: the same bits
    whole.prepare()
    assert np.array_equal(whole.behind(faces.all()).batch(np.arange(60)), bits)


def test_files_are_private(faces: FaceSet, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        stored(faces, halves()[0], tmp_path / "cache").prepare()
    finally:
        os.umask(before)
    found = list((tmp_path / "cache").rglob("*"))
    assert {p.name for p in found} >= {"plain.bin", "mirror.bin", "plain.done", "mirror.done", "about.json"}
    for path in [tmp_path / "cache", *found]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


FILL = """
import sys, time, torch
from pathlib import Path
from visard.data import activations
from visard.data.faces import FaceSet
import numpy as np
activations.SYNC_SECONDS = 0.0
activations.cores = lambda: 1
def slow(x):
    time.sleep(0.05)
    print("chunk", flush=True)
    return x[:, :1, :2, :2].contiguous()
faces = FaceSet.open(sys.argv[1])
store = activations.store_of(faces, "t", (1, 2, 2), "fp32", Path(sys.argv[2]))
seen = activations.Activations(faces, lambda: slow, store)
seen.wanted = {"plain": np.arange(len(faces)), "mirror": np.arange(len(faces))}
seen.prepare()
"""


def test_a_killed_fill_goes_on_where_it_was(tmp_path: Path) -> None:
    faces = noise_faces(tmp_path / "faces", identities=64, images=10)  # 10 chunks, twice
    command = [sys.executable, "-W", "ignore", "-c", FILL, str(faces.path), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(8):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    (entry,) = entries(tmp_path / "cache")
    done = sum(entry.complete.values())
    assert 4 * CHUNK <= done < 20 * CHUNK
    rest = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.count("chunk")
    assert rest == 20 - done // CHUNK
    (entry,) = entries(tmp_path / "cache")
    assert entry.complete == {PLAIN: 640, MIRROR: 640}
    store = Store(entry.folder, entry.about)
    expected = to_float(np.array(faces.pixels), True)
    assert np.array_equal(store.read(np.arange(640)), expected[:, :1, :2, :2].numpy())
    assert np.array_equal(store.read(np.arange(640), np.ones(640, bool)), expected.flip(3)[:, :1, :2, :2].numpy())


def test_room_is_checked_first(faces: FaceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    counting = Counting(halves()[0])
    with pytest.raises(VisardError, match="GB are free there: visard data cache clear"):
        stored(faces, counting, tmp_path / "cache").prepare()
    assert counting.seen == 0


def test_what_cannot_be_kept_is_an_error(faces: FaceSet, tmp_path: Path) -> None:
    with pytest.raises(VisardError, match="NaN or infinity"):
        stored(faces, lambda x: torch.full((len(x), 128, 2, 2), float("nan")), tmp_path / "a").prepare()
    with pytest.raises(VisardError, match="too large for fp16"):
        stored(faces, lambda x: torch.full((len(x), 128, 2, 2), 1e6), tmp_path / "b", "fp16").prepare()
    with pytest.raises(VisardError, match=r"the trunk gives \(1, 2, 2\)"):
        stored(faces, lambda x: x[:, :1, :2, :2], tmp_path / "c").prepare()
    assert not any(sum(e.complete.values()) for root in "abc" for e in entries(tmp_path / root))


def test_a_store_is_of_one_trunk_one_set_and_one_type(faces: FaceSet, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    found = {
        store_of(faces, name, (128, 2, 2), dtype, root).folder for name in ("t", "u") for dtype in ("fp32", "fp16")
    }
    assert len(found) == 4
    other = noise_faces(tmp_path / "other", identities=30, images=5, seed=1)
    assert store_of(other, "t", (128, 2, 2), "fp32", root).folder not in found
    copied = shutil.copytree(faces.path, tmp_path / "copy")
    assert store_of(FaceSet.open(copied), "t", (128, 2, 2), "fp32", root).folder in found, "equal pictures share it"


def test_one_changed_pixel_or_a_removed_set_takes_the_activations_with_it(faces: FaceSet, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    trunk = halves()[0]
    stored(faces, trunk, root).prepare()
    before = pictures_digest(faces, root)
    sweep(root)
    assert len(entries(root)) == 1, "nothing changed"
    path = faces.path / "images.npy"
    pixels = np.load(path)
    pixels[33, 0, 0, 0] ^= 1  # no sampled picture
    np.save(path, pixels)
    changed = FaceSet.open(faces.path)
    assert pictures_digest(changed, root) != before
    stored(changed, trunk, root).prepare()
    assert [entry.about["faces"] for entry in entries(root)] == [pictures_digest(changed, root)]
    shutil.rmtree(faces.path)
    sweep(root)
    assert not entries(root)


def test_forget_takes_all_of_one_set(faces: FaceSet, tmp_path: Path) -> None:
    root, trunk = tmp_path / "cache", halves()[0]
    other = noise_faces(tmp_path / "other", identities=30, images=5, seed=1)
    for one in (faces, other):
        stored(one, trunk, root).prepare()
    stored(faces, trunk, root, name="u").prepare()
    assert forget(faces.path, root) == 2
    assert [entry.about["path"] for entry in entries(root)] == [str(other.path)]


@pytest.mark.parametrize("change", [{"shift": 2}, {"jitter": 0.1}, {"erase": 0.5}])
def test_random_changes_without_a_stored_activation_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(UsageError, match=rf"method.training.augment.{name} = {change[name]}.*model.cache = off"):
        refuse_random("method.training.augment", Augment(**change))  # type: ignore[arg-type]
    refuse_random("method.training.augment", Augment(flip=False))


def test_two_processes_do_not_do_the_work_twice(faces: FaceSet, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FILL, str(faces.path), str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [child.communicate(timeout=60)[0].count("chunk") for child in children]
    assert sum(said) == 6
    assert all(child.returncode == 0 for child in children)


def test_a_fill_waits_while_another_process_holds_the_lock(faces: FaceSet, tmp_path: Path) -> None:
    computed = threading.Event()
    trunk = halves()[0]

    def watched(x: Tensor) -> Tensor:
        computed.set()
        return trunk(x)

    kept = stored(faces, watched, tmp_path / "cache")
    assert kept.store is not None
    held = os.open(kept.store.folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    filling = threading.Thread(target=kept.prepare)
    filling.start()
    assert not computed.wait(2), "computed while another process does the same"
    os.close(held)
    filling.join(60)
    assert computed.is_set()


def test_filling_leaves_the_threads_of_torch_alone(faces: FaceSet, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    stored(faces, halves()[0], tmp_path / "cache").prepare()
    assert torch.get_num_threads() == before
    assert through(faces, np.arange(2), halves()[0]).shape == (2, 128, 2, 2)
