"""How parties join a run: what they learn about it, and the world that a party builds from it on its own data."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from visard import plugins
from visard.config import Settings, Stated, parse
from visard.core import ClientId, Disclosure, Method, Weights
from visard.data.faces import FaceSet, Federation
from visard.data.partition import Manifest, partition
from visard.data.partition_kinds import PartitionSettings
from visard.data.sources.catalog import find_set, open_faces
from visard.deployment.policy import Policy, without_folders
from visard.deployment.remote import PartyLink
from visard.engines.checkpoint import Checkpoint
from visard.engines.ledger import Ledger
from visard.engines.request import DIGEST
from visard.engines.shared_memory import in_memory, remove_folder
from visard.engines.world import World, centralised, make_world, refuse_unlabelled, want
from visard.errors import PublicError, UsageError, VisardError, one_line
from visard.files import mapping, read_json, whole, write_json
from visard.models import SENSORS
from visard.models.cut import HOW, Trunk, digest_of
from visard.models.files import DESCRIBES, start
from visard.models.inputs import Inputs
from visard.numerics import compute_on
from visard.text import line

SYNTHETIC = "synthetic"
MOST = 10**9  # pictures of one party


@dataclass(frozen=True)
class Presence:
    """What a party with its own pictures says about them when it joins."""

    identities: Annotated[int, Disclosure.count]
    pictures: Annotated[int, Disclosure.count]

    @classmethod
    def of(cls, client: str, counts: dict[str, int]) -> Presence:
        """Refuses impossible counts: the server allocates room for the identities of all parties together."""
        if counts.keys() != {"identities", "pictures"} or not 1 <= counts["identities"] <= counts["pictures"] <= MOST:
            raise VisardError(f"{client} says of its pictures what cannot be: {str(counts)[:100]}")
        return cls(**counts)


def run_spec(settings: Settings, manifest: Manifest, size: int, world: World) -> dict[str, Any]:
    """What every request says about the run: enough for a party to build the same world."""
    plain = {k: v for k, v in without_folders(settings.to_dict()).items() if k not in ("name", "engine", "parties")}
    plain["model"] = {k: v for k, v in plain["model"].items() if k not in ("weights", "class_vectors")}
    plain["model"]["name"] = world.spec["model"]
    if settings.data.source != SYNTHETIC or settings.data.sets:
        plain["data"] = {}
    return {
        "settings": plain,
        "partition": manifest.hash,
        "own": settings.partition.kind == "parties",
        "spec": dict(world.spec),
        "pictures": size,
        **({} if (trunk := world.trunk) is None else {"trunk": {"layer": trunk.layer, "digest": trunk.digest}}),
    }


def join(
    link: PartyLink,
    settings: Settings,
    manifest: Manifest,
    world: World,
    size: int,
    run: str,
    states: Checkpoint,
    ledger: Ledger,
) -> tuple[World, dict[str, Any], list[str]]:
    """Introduce the run to the parties; those with their own pictures say how many they have, and become the clients.

    Returns the world with these clients, the run spec for every request, and notes for the user.
    """
    spec = run_spec(settings, manifest, size, world)
    if files := [plugin for plugin in settings.plugins if "#" in plugin]:
        raise UsageError(
            f"plug-in {files[0].partition('#')[0]}: parties import no files of the server; install it as a package at "
            "every party, name it package.module:Name in the settings, and let the parties allow it (plugins.allow of "
            "their --policy)"
        )
    link.received = ledger.received
    link.introduce(run, spec)
    if settings.partition.kind != "parties":
        return world, spec, []
    if settings.method.centralises:
        raise UsageError(f"{settings.method.name} pools pictures: it cannot run where the parties keep theirs")
    refuse_oracle(settings.method)
    for name, value in (("client_benchmarks", False), ("impostors", "own")):
        if getattr(settings.evaluation, name) != value:
            raise UsageError(
                f"evaluation.{name}: parties that keep their pictures can test on their own alone; "
                f"add --set evaluation.{name}={str(value).lower()}"
            )
    path = states.folder / "parties.json"
    if not path.exists():
        write_json(path, link.parties(settings.partition.clients or 0))
    present = {client: Presence.of(client, counts) for client, counts in read_json(path).items()}
    if not states.committed.ledger_bytes:
        for client, counts in present.items():
            ledger.record("join", 0, client, counts)
    identities, notes = counted(settings, present)
    world = replace(
        world, training=tuple(present), classes=sum(identities.values()), _network=None,
        announced={c: p.pictures for c, p in present.items()}, announced_identities=identities,
    )  # fmt: skip
    return world, spec, notes


def counted(settings: Settings, present: Mapping[ClientId, Presence]) -> tuple[dict[ClientId, int], list[str]]:
    """How many identities each party counts for: those it claims, at most those the operator states; and a note for
    each party that claims more.

    The server allocates room for all of them, so their sum has a limit, which is checked first.
    """
    found, notes = {}, []
    for client, claim in present.items():
        found[client] = claim.identities
        for name, stated in settings.parties.get(client, Stated()):
            if stated is not None and (said := getattr(claim, name)) > stated:
                notes.append(f"{client} says that it has {said:,} {name}: it counts for {stated:,}, as the run states")
                found |= {client: stated} if name == "identities" else {}
    most, total = settings.engine.max_identities, sum(found.values())
    if total > most:
        largest = max(found, key=lambda c: found[c])
        raise VisardError(
            f"the parties say that they have {total:,} identities together ({largest}: {found[largest]:,}), more than "
            f"engine.max_identities = {most:,}: state what {largest} has with --set parties.{largest}.identities=N"
        )
    return found, notes


def refuse_oracle(method: Method[Any]) -> None:
    """Refuse a method that needs labels it must not use: folder names at the parties must not be used as labels."""
    if oracle := method.oracle():
        raise UsageError(f"{method.name} asks for {oracle}, which only a simulation knows: set clustering.clusters")


def world_of_party(
    run: dict[str, Any],
    policy: Policy,
    data: str,
    file: str | None,
    clients: list[str],
    encrypt_with: str | None = None,
    trunk: str | None = None,
    device: str = "cpu",
) -> tuple[World, Method[Any]]:
    """The world of a run at a party: its clients, on its own pictures, if its policy allows the settings.

    A party with a key refuses to keep unprotected data on disk. `trunk` is a model file of the party: if the run
    freezes a part of this network, the server need not send that part. The party chooses its `device`, whatever the
    settings say.
    """
    settings = settings_of(run, policy, encrypt_with)
    compute_on(device, settings.numerics.deterministic)
    faces = open_faces(settings.data) if data == SYNTHETIC else FaceSet.open(find_set(data))
    spec = network_spec(run, settings)
    if whole(side := run.get("pictures")) != faces.size:
        raise PublicError(f"the run is on pictures of {line(side, 20)} pixels, this party has {faces.size}")
    frozen = frozen_part(run, settings)
    memory = _memory(settings)
    if run["own"]:
        world = make_world(settings, faces, own_federation(settings, faces, clients), frozen, memory, spec)
    else:
        federation = shared_federation(run, settings, faces, file)
        world = centralised(make_world(settings, faces, federation, frozen, memory, spec), settings.method)[0]
    here = {client: world.clients[client] for client in clients if client in world.clients}
    try:
        refuse_unlabelled(settings.method, here)
    except UsageError as error:
        raise PublicError(str(error)) from None
    if not here:
        raise PublicError(f"the run has no client {clients[0]!r}")
    world = replace(world, clients=here)
    if world.trunk is not None and trunk is not None:
        world.trunk.load = partial(own_trunk, world.trunk, trunk, world.spec)
    want(world, settings)
    return world, settings.method


def network_spec(run: dict[str, Any], settings: Settings) -> dict[str, str]:
    """The network spec of the run, which must match its settings, which the policy has checked."""
    given = mapping(run.get("spec"))
    spec = {key: str(given[key]) for key in DESCRIBES if key in given}
    try:
        if spec["model"] != settings.model.name or not 1 <= int(spec["embedding"]) <= 4096:
            raise ValueError("is not the one of its settings")
        if spec["model"] not in SENSORS:
            Inputs.of_spec(spec)
    except (KeyError, ValueError, VisardError) as error:
        raise PublicError(f"the run's network cannot be made: {one_line(error)}") from None
    return spec


def own_trunk(trunk: Trunk, file: str, spec: Mapping[str, str]) -> Weights:
    """The frozen part from a party's own file; empty, with a line in the log, if the file holds another network."""
    try:
        with torch.random.fork_rng(devices=[]):  # this may be in the middle of a step
            found = trunk.of_trunk(
                start(file, spec["model"], int(spec["embedding"]), int(spec["size"]), check=False)[1]
            )
    except (VisardError, KeyError) as error:
        print(f"--trunk {file}: {one_line(error)}: the server is asked instead", file=sys.stderr, flush=True)
        return {}
    if digest_of(found) != trunk.digest:
        print(f"{file} is not what the run freezes: the server is asked for it", file=sys.stderr, flush=True)
    return found


def frozen_part(run: dict[str, Any], settings: Settings) -> tuple[str, str] | None:
    """Layer and digest of the frozen part of the run; its weights come later, once."""
    if not settings.model.is_cut:
        return None
    given = mapping(run.get("trunk"))
    layer, digest = str(given.get("layer")), str(given.get("digest"))
    known = not layer if settings.model.rank else HOW.fullmatch(f"from:{layer}")
    if not known or not DIGEST.fullmatch(digest):
        raise PublicError("the run freezes a part of the network and does not say which")
    return layer, digest


def _memory(settings: Settings) -> Path | None:
    """A folder for activations that must not be on disk; removed when the process ends."""
    if settings.model.stored_in != "memory":
        return None
    folder = in_memory()
    atexit.register(remove_folder, folder)
    return folder


def settings_of(run: dict[str, Any], policy: Policy, encrypt_with: str | None = None) -> Settings:
    """The settings of the run, which may name no file of this machine and need no forbidden labels.

    Plug-ins that the party does not allow are not imported, now or later in this process.
    """
    policy.check_method(run["settings"])
    plugins.allow_only(policy.plugins.allow)
    try:
        own = {} if encrypt_with is None else {"engine": {"encrypt_with": encrypt_with}}
        settings = parse(policy.applied(run["settings"]) | own, "settings of the run")
        policy.check(settings.to_dict())
        if run["own"]:
            refuse_oracle(settings.method)
    except UsageError as error:
        if policy.local:  # it may quote what this party has set
            raise
        raise PublicError(str(error)) from None
    named = (settings.data.source, settings.data.sets, settings.model.weights, settings.model.class_vectors)
    if named != (SYNTHETIC, (), None, None):
        raise PublicError("the run names a file or a face set for this party to open")
    return settings


def shared_federation(run: dict[str, Any], settings: Settings, faces: FaceSet, file: str | None) -> Federation:
    """The partition that the run was made with; it must be the same here and at the server."""
    manifest = partition(faces, settings.partition, settings.seed) if file is None else Manifest.load(file)
    if manifest.hash != run["partition"]:
        raise PublicError("this party's partition or face set is not the one of the run")
    return manifest.federation(faces)


def own_federation(settings: Settings, faces: FaceSet, clients: list[str]) -> Federation:
    """All pictures of the set are this party's; they are split as the run says."""
    if len(clients) != 1:
        raise PublicError("a party that brings its own pictures has exactly one role")
    alone = PartitionSettings(
        kind="equal", clients=1, split=settings.partition.split, min_images=settings.partition.min_images
    )
    federation = partition(faces, alone, settings.seed).federation(faces)
    (mine,) = federation.clients.values()
    return replace(federation, clients={clients[0]: mine}, unseen={}, hold_out=())
