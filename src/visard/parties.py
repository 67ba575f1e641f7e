"""What the server tells the parties of a run, and the world that a party builds from it on its own data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from visard.config import Settings, parse
from visard.core import Leaves, Method
from visard.data.faces import FaceSet, Federation
from visard.data.locate import find_set, open_faces
from visard.data.manifest import Manifest
from visard.data.partition import PartitionSettings, partition
from visard.engines.checkpoint import Checkpoint
from visard.engines.remote import Link
from visard.engines.world import World, pooled
from visard.errors import UsageError, VisardError
from visard.files import read_json, write_json
from visard.privacy.ledger import Ledger
from visard.runs import make_world

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Presence:
    """What a party that brings its own pictures says of them when it joins."""

    identities: Annotated[int, Leaves.count]
    pictures: Annotated[int, Leaves.count]


def told(settings: Settings, manifest: Manifest, size: int, embedding: int) -> dict[str, Any]:
    """What every request carries of the run: enough for a party to build the same world, and nothing of the server."""
    plain = {k: v for k, v in settings.to_dict().items() if k not in ("name", "engine")}
    plain["model"] = {k: v for k, v in plain["model"].items() if k not in ("weights", "class_vectors")}
    if settings.data.source != SYNTHETIC:
        plain["data"] = {}
    return {
        "settings": plain,
        "partition": manifest.hash,
        "own": settings.partition.kind == "parties",
        "spec": {"model": settings.model.name, "embedding": embedding, "size": size},
    }


def join(
    link: Link,
    settings: Settings,
    manifest: Manifest,
    world: World,
    size: int,
    run: str,
    states: Checkpoint,
    ledger: Ledger,
) -> tuple[World, dict[str, Any]]:
    """Introduce the run to the parties; those that bring their own pictures say how many, and become the clients."""
    run_told = told(settings, manifest, size, world.embedding)
    link.introduce(run, run_told)
    if settings.partition.kind != "parties":
        return world, run_told
    if settings.method.pools:
        raise UsageError(f"{settings.method.name} pools pictures: it cannot run where the parties keep theirs")
    path = states.folder / "parties.json"
    if not path.exists():
        write_json(path, link.parties(settings.partition.clients or 0))
    present = {role: Presence(**counts) for role, counts in read_json(path).items()}
    if not states.committed.ledger_bytes:
        for role, counts in present.items():
            ledger.record("join", 0, role, counts)
    classes = sum(p.identities for p in present.values())
    return replace(world, training=tuple(present), classes=classes, _network=None), run_told


def world_of_party(run: dict[str, Any], data: str, file: str | None, roles: list[str]) -> tuple[World, Method[Any]]:
    """The world of a run at a party: its own roles, on its own pictures."""
    settings = parse(run["settings"], "settings of the run")
    faces = open_faces(settings.data) if data == SYNTHETIC else FaceSet.open(find_set(data))
    size = int(run["spec"]["size"])
    if faces.size != size:
        raise UsageError(f"the run is on pictures of {size} pixels, this party has {faces.size}")
    if run["own"]:
        federation = own_federation(settings, faces, roles)
        world = make_world(settings, faces, federation)
    else:
        world = pooled(make_world(settings, faces, shared_federation(run, settings, faces, file)), settings.method)[0]
    here = {role: world.clients[role] for role in roles if role in world.clients}
    if not here:
        raise UsageError(f"the run has no client {roles[0]!r}")
    return replace(world, clients=here), settings.method


def shared_federation(run: dict[str, Any], settings: Settings, faces: FaceSet, file: str | None) -> Federation:
    """The partition that the run was made with; it must be the same here and at the server."""
    manifest = partition(faces, settings.partition, settings.seed) if file is None else Manifest.load(file)
    if manifest.hash != run["partition"]:
        raise VisardError("this party's partition or face set is not the one of the run")
    return manifest.federation(faces)


def own_federation(settings: Settings, faces: FaceSet, roles: list[str]) -> Federation:
    """All pictures of the set are this party's; they are split as the run says."""
    if len(roles) != 1:
        raise UsageError("a party that brings its own pictures has exactly one role")
    alone = PartitionSettings(
        kind="equal", clients=1, split=settings.partition.split, min_images=settings.partition.min_images
    )
    federation = partition(faces, alone, settings.seed).federation(faces)
    (mine,) = federation.clients.values()
    return replace(federation, clients={roles[0]: mine}, unseen={}, hold_out=())
