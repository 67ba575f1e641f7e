"""Finding faces in photographs, beside the bare loop over OpenCV's detector, and their import with both cores.

    python -m benchmarks.detection [--photos ../shared/data/photos] [--detector FILE] [--import-of 2000] [--json FILE]

Detection: `find_faces` against a loop that does nothing but reduce a decoded picture to 640 pixels and ask
`cv2.FaceDetectorYN`, the same pictures, in turns, one thread, CPU time. Import: `visard data import folder` of many
photographs (those given, many times over with another brightness and crop, so that no two files are alike), each in a
process of its own: a bare loop that reads, decodes and asks the detector, with one thread, then the import with one
thread and with one per core, in turns. Seconds of the clock, and of CPU, which say on a busy machine what free cores
would do, and the most memory. Both imports must give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import cv2
import numpy as np
from PIL import Image, ImageEnhance

from visard.data.detection import LEAST, OVERLAP, SIDE, YuNet, find_faces
from visard.data.faces import FaceSet
from visard.data.pictures import upright
from visard.data.sources.importing import import_faces

ROUNDS = 5


def detection(files: list[Path], detector: Path) -> dict[str, float]:
    """Milliseconds of CPU a picture, the bare loop's and ours, and their ratio."""
    pictures = [np.asarray(upright(file.read_bytes())[0]) for file in files]
    bare = cv2.FaceDetectorYN.create(str(detector), "", (SIDE, SIDE), LEAST, OVERLAP, 5000)
    ours = YuNet(detector)

    def loop() -> None:
        for picture in pictures:
            scale = min(1.0, SIDE / max(picture.shape[:2]))
            size = (round(picture.shape[1] * scale), round(picture.shape[0] * scale))
            reduced = cv2.resize(picture, size, interpolation=cv2.INTER_AREA) if scale < 1 else picture
            bare.setInputSize(size)
            bare.detect(cv2.cvtColor(reduced, cv2.COLOR_RGB2BGR))

    def product() -> None:
        for picture in pictures:
            find_faces(ours, picture)

    times: dict[str, list[float]] = {"bare": [], "visard": []}
    for name, work in [("", loop), ("", product)] + [("bare", loop), ("visard", product)] * ROUNDS:
        start = time.process_time()
        work()
        times.setdefault(name, []).append((time.process_time() - start) / len(pictures) * 1000)
    found = {f"{name}_ms": median(times[name]) for name in ("bare", "visard")}
    return found | {"ratio": median(b / a for a, b in zip(times["bare"], times["visard"], strict=True))}


def many(files: list[Path], count: int, folder: Path) -> None:
    """`count` photographs, all different: the same people in the same folders, other brightness, another crop."""
    for k in range(count):
        turn, file = divmod(k, len(files))
        with Image.open(files[file]) as picture:
            changed = ImageEnhance.Brightness(picture.convert("RGB")).enhance(1 + 0.01 * (turn % 20))
            changed = changed.crop((turn % 3, turn // 3 % 3, *changed.size))
        path = folder / files[file].parent.name / f"{turn}-{files[file].name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        changed.save(buffer, "JPEG", quality=90)
        path.write_bytes(buffer.getvalue())


def digest(path: Path) -> str:
    """Of everything in a set."""
    faces = FaceSet.open(path)
    parts = (faces.pixels, faces.identity, faces.extra("landmarks"), faces.extra("quality"))
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def bare_loop(folder: Path, detector: Path) -> tuple[float, float, int]:
    """Read, decode, reduce and ask the detector, with OpenCV alone: seconds of clock and CPU, and bytes of memory."""
    cv2.setNumThreads(1)
    bare = cv2.FaceDetectorYN.create(str(detector), "", (SIDE, SIDE), LEAST, OVERLAP, 5000)
    wall, cpu = time.perf_counter(), time.process_time()
    for file in sorted(folder.rglob("*.jpg")):
        picture = cv2.imread(str(file))
        if picture is None:
            continue
        scale = min(1.0, SIDE / max(picture.shape[:2]))
        size = (round(picture.shape[1] * scale), round(picture.shape[0] * scale))
        bare.setInputSize(size)
        bare.detect(cv2.resize(picture, size, interpolation=cv2.INTER_AREA) if scale < 1 else picture)
    return time.perf_counter() - wall, time.process_time() - cpu, _peak()


def one_import(folder: Path, detector: Path, out: Path, workers: int) -> tuple[float, float, int]:
    """Seconds of clock and CPU, and bytes of memory."""
    cv2.setNumThreads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    import_faces("folder", folder, out, size=112, detector=str(detector), workers=workers, overwrite=True)
    return time.perf_counter() - wall, time.process_time() - cpu, _peak()


def _peak() -> int:
    # not ru_maxrss, which a new process takes over from the one that starts it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def importing(folder: Path, detector: Path, out: Path, rounds: int) -> dict[str, float | bool]:
    """The bare loop, the import with one thread and with one per core; and whether both give the same bits."""
    cores = os.cpu_count() or 1
    took: dict[int, list[tuple[float, float, int]]] = {0: [], 1: [], cores: []}
    bits = set()
    fresh = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for workers in took:
            with ProcessPoolExecutor(1, fresh) as alone:
                if workers == 0:
                    took[0].append(alone.submit(bare_loop, folder, detector).result())
                    continue
                target = out / str(workers)
                took[workers].append(alone.submit(one_import, folder, detector, target, workers).result())
            bits.add(digest(target))
    bare, one, all_cores = ([median(part) for part in zip(*took[k], strict=True)] for k in (0, 1, cores))
    return {
        "cores": cores, "bare_seconds": bare[0], "bare_cpu": bare[1], "bare_bytes": bare[2],
        "one_seconds": one[0], "one_cpu": one[1], "cores_seconds": all_cores[0], "cores_cpu": all_cores[1],
        "cores_bytes": all_cores[2], "same_bits": len(bits) == 1, "at_once": all_cores[1] / all_cores[0],
        "speedup": median(a[0] / b[0] for a, b in zip(took[1], took[cores], strict=True)),
        "rate_to_bare": median(a[0] / b[0] for a, b in zip(took[0], took[cores], strict=True)),
        "cpu_to_bare": median(b[1] / a[1] for a, b in zip(took[0], took[1], strict=True)),
    }  # fmt: skip


def main() -> None:
    shared = Path("../shared/data")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, default=shared / "photos")
    parser.add_argument("--detector", type=Path, default=shared / "models" / "face_detection_yunet_2026may.onnx")
    parser.add_argument("--import-of", type=int, default=2000, help="photographs, made of those given")
    parser.add_argument("--rounds", type=int, default=3, help="imports of each kind")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    files = sorted(file for file in given.photos.rglob("*.jpg")) if given.photos.is_dir() else []
    if not files or not given.detector.is_file():
        print("no photographs or no detector file: name them with --photos and --detector")
        return
    cv2.setNumThreads(1)
    found = detection(files[:100], given.detector)
    print(f"detection, ms of CPU a picture: bare loop {found['bare_ms']:.1f}, visard {found['visard_ms']:.1f};"
          f" ratio {found['ratio']:.2f} (at most 1.2)")  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        many(files, given.import_of, Path(work) / "photos")
        imported = importing(Path(work) / "photos", given.detector, Path(work), given.rounds)
    print(f"import of {given.import_of} photographs: bare loop on one thread {imported['bare_seconds']:.0f} s,"
          f" import on one thread {imported['one_seconds']:.0f} s,"
          f" on {imported['cores']} {imported['cores_seconds']:.0f} s"
          f" ({given.import_of / imported['cores_seconds']:.1f} pictures a second):"
          f" {imported['rate_to_bare']:.2f} times the bare loop's rate, {imported['speedup']:.2f} times that of one"
          f" thread, {imported['at_once']:.2f} cores at work; CPU of the import {imported['cpu_to_bare']:.2f} times the"
          f" bare loop's; memory {imported['cores_bytes'] / 2**20:.0f} MB (bare loop"
          f" {imported['bare_bytes'] / 2**20:.0f}); same bits: {imported['same_bits']}")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps({"detection": found, "import": imported}, indent=1))


if __name__ == "__main__":
    main()
