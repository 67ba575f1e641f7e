"""What visard is made of: a bill of materials (CycloneDX), and the licences of all that is locked.

    python -m tests.sbom sbom.json              every installed package of the lock files, its licence and its digests
    python -m tests.sbom --page docs/licences.md

A licence is what a package's metadata says as an SPDX expression, or in the words of older metadata (`WORDS`). Where
the metadata says nothing, the package's licence file was read and stands in `READ`. `tests/unit/test_licences.py` fails
for a licence that is unknown or not allowed.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from license_expression import ExpressionError, ExpressionParseError, get_spdx_licensing
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lock import LOCKS, ROOT, parse, project
from visard.report.html import PLOTLY_VERSION, plotly

# permissive, or with duties that concern changes of the package itself alone (MPL, LGPL)
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND", "ISC", "LGPL-3.0-or-later",
    "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
# a second implementation for tests, which visard never imports
ALLOWED_IN_TESTS = {"phe": "GPL-3.0-only"}
WORDS = {
    "MIT License": "MIT", "OSI Approved :: MIT License": "MIT", "ISC License": "ISC", "PSFL": "PSF-2.0",
    "Apache 2.0": "Apache-2.0", "OSI Approved :: Apache Software License": "Apache-2.0", "GPLv3": "GPL-3.0-only",
    "BSD": "BSD-3-Clause", "3-Clause BSD License": "BSD-3-Clause", "OSI Approved :: BSD License": "BSD-3-Clause",
    "BSD, Public Domain": "BSD-2-Clause",  # pycryptodome: older parts are in the public domain
    "OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}  # fmt: skip
READ = {"finch-clust": "MIT"}
PLOTLY = "plotly.js-basic-dist-min"  # a copy is part of visard
SPDX = get_spdx_licensing()
INTRODUCTION = """# Licences of what visard uses

Written by `make pages` from the metadata of the locked packages (`requirements.lock`, `requirements-flower.lock`) and
torch. A test fails where a licence is unknown or not allowed. `phe` is a second implementation that tests compare with;
visard does not import it. `make sbom` writes the same, with digests, as a CycloneDX bill of materials.
"""


@dataclass(frozen=True)
class Package:
    """An installed package of the lock files, or torch."""

    name: str
    version: str
    licence: str  # SPDX; empty if unknown
    digests: tuple[str, ...]  # of every file of this version; none of torch, of which each index serves its own build
    needs: tuple[str, ...]


def packages() -> list[Package]:
    """All that is locked and needed here, by name."""
    pins = {name: pin for file in LOCKS for name, pin in parse((ROOT / file).read_text()).items()}
    digests = {name: pin.hashes for name, pin in pins.items() if pin.needed()} | {"torch": ()}
    found = []
    for name in sorted(digests):
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of the extra `flower`, where that is not installed
            continue
        asked = [Requirement(text) for text in about.requires or ()]
        needs = {canonicalize_name(r.name) for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})}
        found.append(
            Package(name, about.version, licence_of(about), digests[name], tuple(sorted(needs & digests.keys())))
        )
    return found


def licence_of(about: metadata.Distribution) -> str:
    """The licence of a package as an SPDX expression; empty if it is unknown."""
    words = about.metadata
    said = [words.get("License-Expression"), words.get("License")]
    kinds = [c.removeprefix("License :: ") for c in words.get_all("Classifier") or () if c.startswith("License :: ")]
    said.append(" OR ".join(WORDS.get(kind, kind) for kind in kinds) if kinds else None)
    for text in filter(None, said):
        with suppress(ExpressionError, ExpressionParseError):  # it is the text of a licence
            return str(SPDX.parse(WORDS.get(text.strip(), text.strip()), validate=True))
    return READ.get(canonicalize_name(words["Name"]), "")


def allowed(expression: str, more: frozenset[str] = frozenset()) -> bool:
    """Whether one may use what has this licence: one of alternatives, all of what holds together."""
    if not expression:
        return False

    def check(tree: object) -> bool:
        if isinstance(tree, SPDX.OR):
            return any(map(check, tree.args))
        if isinstance(tree, SPDX.AND):
            return all(map(check, tree.args))
        return str(tree) in ALLOWED | more or str(tree).partition(" WITH ")[0] in ALLOWED | more

    return check(SPDX.parse(expression))


def bill() -> str:
    """The bill of materials as CycloneDX JSON, checked against its schema."""
    bom = Bom()
    bom.metadata.component = root = Component(
        name="visard", version=metadata.version("visard"), type=ComponentType.APPLICATION, bom_ref="visard",
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
    )  # fmt: skip
    parts = {}
    for package in packages():
        parts[package.name] = Component(
            name=package.name, version=package.version, type=ComponentType.LIBRARY, bom_ref=package.name,
            purl=PackageURL("pypi", None, package.name, package.version),
            licenses=[LicenseFactory().make_from_string(package.licence)] if package.licence else (),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=d.removeprefix("sha256:")) for d in package.digests],
        )  # fmt: skip
        bom.components.add(parts[package.name])
    script = Component(
        name=PLOTLY, version=PLOTLY_VERSION, type=ComponentType.LIBRARY, bom_ref=PLOTLY,
        purl=PackageURL("npm", None, PLOTLY, PLOTLY_VERSION), licenses=[LicenseFactory().make_from_string("MIT")],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(plotly().encode()).hexdigest())],
    )  # fmt: skip
    bom.components.add(script)
    asked = project()
    direct = {canonicalize_name(r.name) for part in asked for r in asked[part] if part != "build"}
    bom.register_dependency(root, [*(parts[name] for name in sorted(direct & parts.keys())), script])
    for package in packages():
        bom.register_dependency(parts[package.name], [parts[name] for name in package.needs if name in parts])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"the bill of materials does not fit its schema: {problem}")
    return text


def page() -> str:
    """`docs/licences.md`."""
    lines = [INTRODUCTION, "| package | version | licence |", "|---|---|---|"]
    lines += [f"| {p.name} | {p.version.partition('+')[0]} | {p.licence or 'unknown'} |" for p in packages()]
    lines.append(f"| {PLOTLY} (npm; src/visard/report/plotly-basic.min.js) | {PLOTLY_VERSION} | MIT |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    *options, out = sys.argv[1:]
    Path(out).write_text(page() if options == ["--page"] else bill())
