"""Adapts presets to other data: their numbers of people and clients are scaled down to the people in the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from visard.data.faces import FaceSet
from visard.data.joined import Joined
from visard.data.partition_kinds import home_domain, pictures_of, sites_of
from visard.data.sources.catalog import DataSettings, open_faces
from visard.errors import UsageError
from visard.files import mapping, whole

FEWEST = 2  # people of a test set, public people, clients, and people of a client


def scaled(
    preset: Mapping[str, Any], data: Mapping[str, Any], partition: Mapping[str, Any], given: Collection[str]
) -> tuple[dict[str, Any], str]:
    """`[partition]` of a preset for the people of `[data]`, and a line on what differs from the preset.

    What is `given` by the user stays as it is, and so does what there are enough people for. The preset's shares of
    people to test on, of public people and of clients are kept, its synthetic people being the whole.
    """
    own = mapping(preset.get("data"))
    whole_set = whole(own.get("identities"))
    try:
        settings = DataSettings.model_validate(data)
        drawn = settings.source in ("synthetic", "sensors") and not settings.sets
        if not whole_set or drawn or partition.get("kind") == "parties":
            return dict(partition), ""
        faces = open_faces(settings)
    except (ValidationError, UsageError):  # reported where settings are read and data are opened
        return dict(partition), ""
    if faces.dtype != np.uint8:  # readings, whose classes are no people
        return dict(partition), ""
    _check_domains(faces, partition, given)
    found, groups = dict(partition), max(1, len(own.get("domains") or ("north",)))
    fit = _Fit(faces, found, given, set())
    fit.test(whole_set / groups)
    fit.public(whole_set)
    fit.clients(whole_set, groups)
    if not fit.changed:
        return found, ""
    listed = ", ".join(f"partition.{name} = {found[name]}" for name in sorted(fit.changed))
    people = f"{fit.people.sum()} people with labels in {faces.path.name}"
    return found, f"{listed}, for {people}; the preset is made for {whole_set} people (give others with --set)"


def _check_domains(faces: FaceSet, partition: Mapping[str, Any], given: Collection[str]) -> None:
    """One line where a preset divides by domains that other data do not have."""
    sides = [name for name in ("source_domain", "target_domain") if f"partition.{name}" not in given]
    wanted = [partition.get(name) or () for name in sides]
    named = [name for names in wanted for name in ([names] if isinstance(names, str) else names)]
    if partition.get("kind") not in ("domains", "one_domain"):
        return
    if any(name not in faces.domains for name in named):
        have = ", ".join(faces.domains[:6])
        raise UsageError(
            f"the preset has a source and a target domain ({', '.join(named)}), {faces.path.name} has {have}: give "
            "partition.source_domain and partition.target_domain, or sets: --data source=SET --data clients=SET"
        )


class _Fit:
    """One set of partition settings being fitted to a face set."""

    def __init__(self, faces: FaceSet, found: dict[str, Any], given: Collection[str], changed: set[str]) -> None:
        self.faces, self.found, self.given, self.changed = faces, found, given, changed
        roles = faces.roles if isinstance(faces, Joined) else np.full(len(faces.names), "clients")
        self.has = {str(role) for role in np.unique(roles)}
        enough = pictures_of(faces) >= max(1, whole(found.get("min_images")) or 1)
        self.people = (roles == "clients") & ~faces.unlabelled & enough  # (identities,)
        home = home_domain(faces)
        usable = self.people & (pictures_of(faces) >= FEWEST)
        self.of_domains = [n for n in np.bincount(home[usable], minlength=1).tolist() if n]  # people to test on
        self.left = int(self.people.sum())

    def put(self, name: str, value: int) -> None:
        if f"partition.{name}" not in self.given and self.found.get(name) != value:
            self.found[name] = value
            self.changed.add(name)

    def number(self, name: str) -> int:
        return whole(self.found.get(name)) or 0

    def test(self, preset: float) -> None:
        """People to test on, of each domain."""
        asked = self.number("test_identities")
        if asked and "test" in self.has:
            self.put("test_identities", 0)  # there is a set for that
        elif asked:
            smallest = min(self.of_domains, default=0)
            if 0 < smallest < preset:
                self.put("test_identities", max(FEWEST, round(asked / preset * smallest)))
        self.left -= self.number("test_identities") * len(self.of_domains)

    def public(self, preset: float) -> None:
        """People whose pictures every client has."""
        asked = self.number("public_identities")
        if asked and "public" in self.has:
            self.put("public_identities", 0)
        elif asked and self.people.sum() < preset:
            self.put("public_identities", max(FEWEST, round(asked / preset * self.people.sum())))
        self.left -= self.number("public_identities")

    def clients(self, preset: float, groups: int) -> None:
        """Clients, and those of them that are held out."""
        kind, asked, most = self.found.get("kind", "equal"), self.number("clients"), self.left
        if kind == "sites":
            now = len([site for site in sites_of(self.faces).values() if self.people[self.faces.identity[site]].any()])
        else:
            if kind == "one_identity":
                most = min(self.left, max(FEWEST, round(asked / preset * self.people.sum()))) if asked else self.left
            elif kind in ("equal", "lognormal"):
                most = max(1, self.left // FEWEST)
            now = min(asked, most) if kind in ("equal", "lognormal", "one_identity") else asked
            if asked and now < asked and now > 0:
                self.put("clients", now)
        out = self.number("hold_out")
        if out and asked and now and now < asked:
            self.put("hold_out", min(max(1, round(out / asked * now)), max(0, now - 1)))
