"""`python tests/way.py [--files] [picture|local|pool|flower ...]`: through how many files of the package things go.

- picture: `visard run fedavg` with smoke settings on the local engine, from the drawing of the faces to the report.
- local, pool, flower: one `net.ask` of one step at one client and the reply to it, over all processes. The step itself
  and the building of the world are left out.

Each is done twice, and the first time counts. Printed beside it is the second: the faces are drawn, caches filled, and
workers there. A file counts if code of one of its functions ran (those that dataclasses write for its classes too);
what ran because a module was being imported does not count. Every process started below has a profiler, by way of a
`sitecustomize`; a byte in a shared file turns it on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOYS = "tests/toys.py"
UNCOUNTED = (f"{TOYS}:add", f"{TOYS}:pool_world")  # the step's own function, and the building of the world
WAYS = ("picture", "local", "pool", "flower")

# --- what to adjust when modules move ---------------------------------------------------------------------------------


def command() -> None:
    """The command line."""
    from visard.cli import main

    main()


def network(kind: str, folder: Path):  # type: ignore[no-untyped-def]
    """An engine with a world of toys."""
    from tests.toys import toy_engine, toy_world
    from visard.deployment.remote import RemoteNetwork
    from visard.engines.checkpoint import Checkpoint
    from visard.engines.ledger import Ledger
    from visard.engines.pool import PoolNetwork
    from visard.processes import Recipe

    world = toy_world(folder)
    if kind == "local":
        return toy_engine(folder, world)
    states = Checkpoint(folder / "checkpoint", "toy")
    recipe = Recipe("tests.toys:pool_world", {"folder": str(folder)})
    if kind == "pool":
        return PoolNetwork(world, states, Ledger(states.ledger), recipe, 1)
    from visard.deployment import flower

    flower.require()
    from visard.deployment.flower.simulation import SimulationLink

    link = SimulationLink(world.clients, recipe, states.folder.absolute(), 1)
    return RemoteNetwork(world, states, Ledger(states.ledger), link, "ab" * 16)


# ----------------------------------------------------------------------------------------------------------------------

WATCH = """
import os
if "WAY_LOG" in os.environ:
    import mmap, sys, threading

    package, uncounted = os.environ["WAY_PACKAGE"] + os.sep, os.environ["WAY_UNCOUNTED"].split(",")
    log = os.open(os.environ["WAY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    switch = open(os.environ["WAY_SWITCH"], "r+b")
    phase = mmap.mmap(switch.fileno(), 1)
    seen, kinds, inside = set(), {}, threading.local()

    def file_of(frame):
        name = frame.f_code.co_filename
        return frame.f_globals.get("__file__") or name if name == "<string>" else name  # of a dataclass, say

    def kind_of(frame):  # 2: nothing below counts, 1: a function of the package, 0: neither
        code, name = frame.f_code, file_of(frame)
        if code.co_name == "<module>":
            return 0 if frame.f_globals.get("__name__") == "__main__" else 2
        if any(
            name.endswith(file) and code.co_name == function
            for file, _, function in (entry.partition(":") for entry in uncounted)
        ):
            return 2
        return int(name.startswith(package) and bool(code.co_flags & 1))  # 1: not the body of a class

    def watch(frame, event, arg):
        if event != "call" and event != "return":
            return
        code = frame.f_code
        kind = kinds.get(code)
        if kind is None:
            kind = kinds[code] = kind_of(frame)
        if kind == 2:
            depth = getattr(inside, "depth", 0) + (1 if event == "call" else -1)
            inside.depth = max(0, depth)  # this very file returns without having been called
        elif kind == 1 and phase[0] and not getattr(inside, "depth", 0):
            entry = (phase[0], code)
            if entry not in seen:
                seen.add(entry)
                where, name = file_of(frame)[len(package):], getattr(code, "co_qualname", code.co_name)
                os.write(log, f"{entry[0]} {os.getpid()} {where} {name}\\n".encode())

    threading.setprofile(watch)
    sys.setprofile(watch)
"""


def package_folder() -> Path:
    """Of the visard that is imported."""
    import visard

    return Path(visard.__file__).resolve().parent


def watched(what: str, folder: Path) -> list[tuple[int, int, str, str]]:
    """Do something in a process of its own; returns (phase, process, file of the package, function)."""
    folder.mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WATCH)
    (folder / "switch").write_bytes(b"\0")
    package = package_folder()
    path = [str(folder / "site"), str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "WAY_LOG": str(folder / "log"), "WAY_SWITCH": str(folder / "switch"), "WAY_PACKAGE": str(package),
        "WAY_UNCOUNTED": ",".join(UNCOUNTED), "PYTHONPATH": os.pathsep.join(p for p in path if p),
        "OMP_NUM_THREADS": "1", "VISARD_DATA": str(folder / "data"), "VISARD_CACHE": str(folder / "cache"),
    }  # fmt: skip
    entry = f"import runpy, sys; sys.argv = ['way']; runpy.run_path({str(Path(__file__).resolve())!r})['{what}']"
    subprocess.run(
        [sys.executable, "-c", f"{entry}({str(folder)!r})"], check=True, env={**os.environ, **environment},
        stdout=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    return [(int(p), int(pid), file, name) for p, pid, file, name in (line.split(" ", 3) for line in lines)]


def turn(phase: int) -> None:
    """Count from here on as `phase`; 0: do not count."""
    with Path(os.environ["WAY_SWITCH"]).open("r+b") as file:
        file.write(bytes([phase]))


def picture(folder: str) -> None:
    """Two runs; the second one finds the faces drawn."""
    from tests.e2e.smoke import smoke

    settings = [part for setting in smoke("fedavg") for part in ("--set", setting)]
    for phase in (1, 2):
        sys.argv = ["visard", "run", "fedavg", "--out", f"{folder}/run-{phase}", *settings]
        turn(phase)
        try:
            command()
        except SystemExit as stop:
            if stop.code:
                raise
        finally:
            turn(0)


def message(kind: str, folder: str) -> None:
    """Two asks of one client."""
    import torch

    from tests.toys import Toy, ToyDown

    method, net = Toy(), network(kind, Path(folder))
    try:
        for phase in (1, 2):
            net.begin("add", phase)
            step, down = method.add, ToyDown(torch.zeros(4), {"a": torch.zeros(2, 2)})
            turn(phase)
            replies = net.ask(step, {net.clients[0]: down})
            turn(0)
            assert len(replies) == 1, replies.missing
    finally:
        net.close()


def local(folder: str) -> None:
    message("local", folder)


def pool(folder: str) -> None:
    message("pool", folder)


def flower(folder: str) -> None:
    message("flower", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("ways", nargs="*", help=f"{', '.join(WAYS)} (all)")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print(f"package: {package_folder()}")
    for way in given.ways or WAYS:
        with tempfile.TemporaryDirectory(prefix="way-") as home:
            found = watched(way, Path(home) / "w")
        first, second = ({file for p, _, file, _ in found if p == phase} for phase in (1, 2))
        functions = len({(file, name) for p, _, file, name in found if p == 1})
        processes = len({pid for p, pid, _, _ in found if p == 1})
        print(
            f"{way}: {len(first)} files, {functions} functions, {processes} process(es); "
            f"{len(second)} files the second time"
        )
        if given.files:
            for file in sorted(first | second):
                print(f"  {file}" + ("" if file in second else "  (first time only)"))


if __name__ == "__main__":
    main()
