"""The world of a run from its settings: here, and anew in every worker process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from visard import models
from visard.config import Settings, load
from visard.core import PUBLIC, Method
from visard.data.catalog import open_faces
from visard.data.faces import ClientData, FaceSet, Federation
from visard.data.partition import Manifest
from visard.engines.world import World, centralised
from visard.errors import UsageError
from visard.models.files import read_model, start_weights

CLASS_VECTORS, BIASES = "class_vectors", "biases"


def make_world(settings: Settings, faces: FaceSet, federation: Federation) -> World:
    """The parties and rules of a run."""
    embedding = settings.model.embedding or models.default_embedding(settings.model.name)
    build = partial(models.build, settings.model.name, embedding=embedding, size=faces.size)
    vectors, biases = _class_vectors(settings.model.class_vectors, embedding)
    return World(
        seed=settings.seed,
        clients=_parties(federation),
        training=tuple(federation.training),
        benchmarks=federation.unseen,
        classes=federation.identities,
        embedding=embedding,
        build=build,
        numerics=settings.numerics,
        timeout=settings.engine.timeout,
        min_replies=settings.engine.min_replies,
        held_out=federation.hold_out,
        public=federation.public,
        others=federation.everyone() if settings.evaluation.impostors == "all" else None,
        class_vectors=vectors,
        biases=biases,
        aggregation=settings.aggregation,
        start_from=start_weights(settings.model.weights, build) if settings.model.weights else None,
    )


def _parties(federation: Federation) -> dict[str, ClientData]:
    """The clients, and the party with the public pictures where there are some."""
    if federation.public is None:
        return federation.clients
    none = federation.public.take([])
    return federation.clients | {PUBLIC: ClientData(federation.public, none, none)}


def _class_vectors(file: str | None, embedding: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if file is None:
        return None, None
    held = read_model(file)[0]
    vectors, biases = held.get(CLASS_VECTORS), held.get(BIASES)
    if vectors is None or vectors.ndim != 2 or vectors.shape[1] != embedding:
        raise UsageError(f"model.class_vectors = {file}: holds no class vectors of length {embedding}")
    if biases is not None and biases.shape not in (vectors.shape[:1], (1,)):
        raise UsageError(f"model.class_vectors = {file}: {len(vectors)} class vectors, biases {tuple(biases.shape)}")
    return vectors, biases


def world_of_run(folder: str) -> tuple[World, Method[Any]]:
    """The world of a run folder, built anew in a worker process of the pool."""
    settings = load(Path(folder) / "config.toml")
    faces = open_faces(settings.data)
    federation = Manifest.load(Path(folder) / "partition.json").federation(faces)
    return centralised(make_world(settings, faces, federation), settings.method)[0], settings.method
