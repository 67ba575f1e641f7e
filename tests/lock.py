"""The lock files: every version with the SHA-256 of every file of it, so that an index cannot serve other content.

`make lock` writes them anew from pyproject.toml and constraints.txt, after a change of either; `make setup`,
`make flower` and `make site` install them and nothing else. torch is left out, because each index serves its own build
of it, and so are the CUDA libraries that some of these builds need.

    python -m tests.lock
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = {"requirements.lock": ("dev", "mtcnn"), "requirements-flower.lock": ("flower",)}  # the second adds to the first
SITE = "requirements-site.lock"  # of the same pins: what only the documentation site needs, beyond the first
IMAGE = "containers/requirements.lock"  # of the same pins: what a server or a party needs, without tools for developers
UNLOCKED = re.compile(r"torch|triton|(nvidia|cuda)-.*")
HEADING = "# Written by `make lock`: {what}. Do not edit.\n"


@dataclass(frozen=True)
class Pin:
    """One version of one package, where it is needed, and the digests of its files."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        (only,) = self.requirement.specifier
        if only.operator != "==":
            raise ValueError(f"{self.requirement} is not one version")
        return only.version

    def needed(self, environment: dict[str, str] | None = None) -> bool:
        """Whether it is installed here, or in the environment given."""
        marker = self.requirement.marker
        return marker is None or marker.evaluate(environment)

    def __str__(self) -> str:
        return " \\\n".join([str(self.requirement), *(f"    --hash={digest}" for digest in self.hashes)])


def parse(text: str) -> dict[str, Pin]:
    """The pins of a lock file, by name."""
    found: dict[str, Pin] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        requirement, *hashes = re.split(r"\s+--hash=", line)
        pin = Pin(Requirement(requirement), tuple(sorted(h.strip() for h in hashes)))
        if pin.name in found:
            raise ValueError(f"{pin.name} stands in the lock twice")
        found[pin.name] = pin
    return found


def project() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: "" is the base, "build" what builds the package, the others are the extras."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {"": about["project"]["dependencies"], "build": about["build-system"]["requires"]}
    asked |= about["project"]["optional-dependencies"]
    return {name: [Requirement(text) for text in texts] for name, texts in asked.items()}


def resolve(extras: tuple[str, ...], constraints: str) -> dict[str, Pin]:
    """All that the package needs with these extras, for every platform and Python that it supports."""
    asked = project()
    given = "\n".join(str(r) for part in ("", "build", *extras) for r in asked[part])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.in").write_text(given)
        (Path(folder) / "constraints.txt").write_text(constraints)
        command = [
            sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
            "--generate-hashes", "--no-header", "--no-annotate",
            "--constraints", f"{folder}/constraints.txt", f"{folder}/asked.in",
        ]  # fmt: skip
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name: pin for name, pin in parse(text).items() if not UNLOCKED.fullmatch(name)}


def main() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    extras = tuple(extra for each in LOCKS.values() for extra in each)
    everything = resolve((*extras, "site"), constraints)  # together, so that the files agree
    exactly = "\n".join(f"{pin.name}=={pin.version}" for pin in everything.values())
    torch = next(line for line in constraints.splitlines() if line.startswith("torch=="))
    written: set[str] = set()
    for file, own in LOCKS.items():
        names = resolve(own, f"{exactly}\n{torch}").keys() - written
        what = f"what visard needs with {' and '.join(own)}" + (", beyond requirements.lock" if written else "")
        pins = [str(everything[name]) for name in sorted(names)]
        (ROOT / file).write_text("\n".join([HEADING.format(what=what), *pins]) + "\n")
        print(f"{file}: {len(pins)} packages")
        written |= names
    first = parse((ROOT / next(iter(LOCKS))).read_text())
    for file, extra, without, what in (
        (SITE, "site", first.keys(), "what the documentation site needs, beyond requirements.lock"),
        (IMAGE, "flower", set(), "what a server or a party in a container needs, without torch"),
    ):
        names = resolve((extra,), f"{exactly}\n{torch}").keys() - without
        pins = [str(everything[name]) for name in sorted(names)]
        (ROOT / file).write_text("\n".join([HEADING.format(what=what), *pins]) + "\n")
        print(f"{file}: {len(pins)} packages")


if __name__ == "__main__":
    main()
