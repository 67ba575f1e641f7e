"""The world of a run: its clients with their data, the network, the seed and the limits, built from the settings."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from visard import models, plugins
from visard.aggregation.compression import Compress
from visard.aggregation.outgoing import Postprocessor
from visard.aggregation.rules import Mean, Rule
from visard.at_rest import Key
from visard.config import Settings, load
from visard.core import PUBLIC, ClientId, Disclosure, Method, Setup, Weights
from visard.crypto.signatures import Signer
from visard.data.activations import MIRROR, PLAIN, Activations, refuse_random, seen, store_of
from visard.data.augment import Augment
from visard.data.faces import ClientData, FaceSet, FaceView, Federation
from visard.data.partition import Manifest
from visard.data.sources.catalog import open_faces
from visard.errors import UsageError
from visard.learning.train import keep_statistics
from visard.models.cut import Trunk, activation_shape, choose
from visard.models.files import read_model, start
from visard.models.inputs import Inputs
from visard.models.lora import LowRank
from visard.numerics import Numerics, compute_on, seed_device

CLASS_VECTORS, BIASES = "class_vectors", "biases"  # entries of a file of class vectors
POOL: ClientId = "pool"  # the client that holds the data where a method centralises them


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed from the run's seed and a path such as (stage, round, ask, client).

    Random numbers depend on what is computed, never on where or in which order.
    """
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A torch generator seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, *parts))


def seed_default(seed: int) -> None:
    """Seed the default generators of the CPU and of the device of this process, and no other: `torch.manual_seed` also
    keeps a traceback for each call until a GPU is first used, which is slow for thousands of steps."""
    torch.default_generator.manual_seed(seed)
    seed_device(seed)


@dataclass
class World:
    """The clients of a run and the rules that all of them share."""

    seed: int
    clients: dict[ClientId, ClientData]
    training: tuple[ClientId, ...]
    benchmarks: Mapping[str, FaceView]  # public test sets of identities that no client has
    classes: int
    embedding: int
    build: Callable[[], nn.Module]
    numerics: Numerics
    timeout: float = 3600.0  # seconds of one step
    min_replies: float = 0.5  # share of the asked clients
    rounds: int = 0  # of all stages of the method
    held_out: tuple[ClientId, ...] = ()  # clients that take no part in training
    public: FaceView | None = None  # pictures that every client has
    others: FaceView | None = None  # the test pictures of all clients, where tests may use them
    class_vectors: Tensor | None = field(default=None, repr=False)  # of the public identities, from a file
    biases: Tensor | None = field(default=None, repr=False)  # from the same file
    start_from: Weights | None = field(default=None, repr=False)  # instead of fresh weights
    aggregation: Rule = Mean()  # how replies are averaged
    secret: bytes | None = field(default=None, repr=False)  # of the party where these clients are; None: simulated
    signer: Signer | None = field(default=None, repr=False)  # with the key of that party
    outgoing: tuple[Postprocessor, ...] = ()  # what happens to replies before they leave a client
    frozen_norm: bool = False  # whether batch norm keeps its statistics
    spec: Mapping[str, str] = field(default_factory=dict)  # what the network is and expects, for model files
    trunk: Trunk | None = None  # the frozen part, where clients train the tail alone; `build` then makes a tail
    activations: Activations | None = field(
        default=None, repr=False
    )  # the set of activations that all views are of then
    announced: Mapping[ClientId, int] = field(default_factory=dict)  # how many pictures parties say they have
    announced_identities: Mapping[ClientId, int] = field(default_factory=dict)  # and how many people
    stated: Mapping[ClientId, int] = field(default_factory=dict)  # pictures that the operator states, at most
    _network: nn.Module | None = field(default=None, repr=False)

    def network(self) -> nn.Module:
        """The one backbone of this process, reused by all clients; its weights are those of the last one."""
        if self._network is None:
            with torch.random.fork_rng(devices=[]):  # a step draws the same whether it is the first here or not
                self._network = self.numerics.prepare(self.build())
            if self.frozen_norm:
                keep_statistics(self._network)
            if self.numerics.compile:
                self._network.compile()  # in place, so that the names of the weights stay
        return self._network

    @functools.cached_property
    def statistics(self) -> frozenset[str]:
        """Entries of the network's weights that are not parameters, such as batch norm's running means: they are
        computed from pictures, so they leave a client as the kind `statistic`."""
        network = self._network
        if network is None:  # a server that trains nothing needs the names alone
            with torch.random.fork_rng(devices=[]):
                network = self.build() if self.trunk is None else self.trunk.outline()
        return frozenset(network.state_dict()) - {name for name, _ in network.named_parameters(remove_duplicate=False)}

    def secret_of(self, client: ClientId) -> bytes:
        """The secret behind a client's masks and noise: that of its party, or in a simulation from the run's seed."""
        own = b"simulated %d" % self.seed if self.secret is None else self.secret
        return hmac.digest(own, client.encode(), "sha256")

    @property
    def compress(self) -> Compress | None:
        """The postprocessor that compresses replies, where the run has one."""
        return next((p for p in self.outgoing if isinstance(p, Compress)), None)

    def signer_of(self, client: ClientId) -> Signer:
        """The key that a client signs with: that of its party, or in a simulation one from the run's seed."""
        return self.signer or Signer.of_secret(self.secret_of(client))

    def whole(self, weights: Weights) -> Weights:
        """The weights of the whole network, from the trained ones."""
        return weights if self.trunk is None else self.trunk.whole(weights)

    def new_weights(self) -> Weights:
        """The weights a run starts from: given ones, or fresh ones that are the same for the same seed."""
        if self.start_from is not None:
            return dict(self.start_from)
        seed_default(derive(self.seed, "weights"))
        return {k: v.detach().clone() for k, v in self.build().state_dict().items()}

    def setup(self) -> Setup:
        """What the server knows before the first round; the default generator is seeded for heads."""
        seed_default(derive(self.seed, "setup"))
        return Setup(
            self.training, self.classes, self.embedding, self.new_weights, self.seed,
            given=self.start_from is not None,
            public_classes=0 if self.public is None else self.public.n_classes,
            class_vectors=self.class_vectors,
            biases=self.biases,
        )  # fmt: skip

    def pictures(self, client: ClientId) -> int:
        """How many pictures a client has, as far as the server knows."""
        data = self.clients.get(client)
        return self.announced.get(client, 0) if data is None else len(data.train) + len(data.val) + len(data.test)

    def rows(self, client: ClientId) -> int:
        """How many class vectors a client may have: one for each of its own or the public identities."""
        return max(self.people(client), 0 if self.public is None else self.public.n_classes)

    def people(self, client: ClientId) -> int:
        """How many identities a client has, as far as the server knows."""
        data = self.clients.get(client)
        return self.announced_identities.get(client, 0) if data is None else data.n_classes

    def replies_needed(self, asked: int) -> int:
        """The smallest number of good replies that a round needs."""
        return max(1, math.ceil(self.min_replies * asked))


def centralised(world: World, method: Method[Any]) -> tuple[World, dict[ClientId, dict[Disclosure, int]]]:
    """The world of a method that centralises data: one client with everything, and what left each real one."""
    if not method.centralises:
        return world, {}
    kinds = {c: kinds for c in world.training if (kinds := method.centralises_from(c))}
    if not kinds:
        raise UsageError(f"{method.name} pools no client's pictures: it needs partition.kind = domains")
    left = {c: centralised_bytes(world.clients[c], kinds[c]) for c in kinds}
    parts = [world.clients[c] for c in kinds]
    if method.centralises_public():
        if world.public is None:
            raise UsageError("method.with_public = true, but partition.public_identities = 0")
        parts.append(world.clients[PUBLIC])
    classes = np.unique(np.concatenate([p.train.classes for p in parts]))

    def merge(views: list[FaceView]) -> FaceView:
        return FaceView.of(views[0].faces, np.concatenate([v.index for v in views]), classes)

    train, val, test = (merge([getattr(p, name) for p in parts]) for name in ("train", "val", "test"))
    pool = ClientData(train, val, test, parts={c: world.clients[c].train for c in kinds})
    clients = {**world.clients, POOL: pool}
    return replace(world, clients=clients, training=(POOL,), held_out=(), _network=None), left


def centralised_bytes(data: ClientData, kinds: frozenset[Disclosure]) -> dict[Disclosure, int]:
    """Bytes of a client's training data that are moved out, by kind."""
    faces = data.train.faces
    picture = math.prod(faces.shape) * faces.dtype.itemsize
    each = {Disclosure.pictures: picture, Disclosure.labels: 8}
    return {k: each[k] * (len(data.train) + len(data.val)) for k in sorted(kinds, key=lambda k: k.value)}


def make_world(
    settings: Settings,
    faces: FaceSet,
    federation: Federation,
    frozen: tuple[str, str] | None = None,
    memory: Path | None = None,
    spec: Mapping[str, str] | None = None,
    check: bool = False,
) -> World:
    """The world that the settings of a run describe.

    A party has no weights to start from: it knows the `frozen` part by its last layer and its digest, and the network
    by its `spec`. `memory` is the folder for activations that must not be on disk. `check` compares a network from an
    ONNX file with onnxruntime.
    """
    first = None
    if spec is None:
        spec, first = network_of(settings, faces.size, check)
    embedding = int(spec["embedding"])
    build = partial(models.build_spec, spec, faces.size)
    vectors, biases = _class_vectors(settings.model.class_vectors, embedding, settings.engine.encrypt_with)
    trunk = trunk_of(settings, build, input_shape(faces), first, frozen) if settings.model.is_cut else None
    world = World(
        seed=settings.seed,
        clients=clients_of(federation),
        training=tuple(federation.training),
        benchmarks=federation.unseen,
        classes=federation.identities,
        embedding=embedding,
        build=build,
        numerics=settings.numerics,
        timeout=settings.engine.timeout,
        min_replies=settings.engine.min_replies,
        rounds=sum(stage.rounds for stage in settings.method.stages()),
        held_out=federation.hold_out,
        public=federation.public,
        others=federation.everyone() if settings.evaluation.impostors == "all" else None,
        class_vectors=vectors,
        biases=biases,
        aggregation=settings.aggregation,
        outgoing=settings.outgoing,
        frozen_norm=settings.frozen_norm,
        stated={c: stated.pictures for c, stated in settings.parties.items() if stated.pictures is not None},
        start_from=first,
        spec=spec,
    )
    if trunk is None:
        return world
    seed = derive(settings.seed, "weights")
    tail = None if first is None else trunk.fresh(seed) if settings.model.fresh else trunk.start(first, seed)
    world = replace(world, build=trunk.tail, trunk=trunk, start_from=tail)
    return world if settings.model.rank else behind(world, trunk, settings, faces, memory)


def network_of(settings: Settings, side: int, check: bool = False) -> tuple[dict[str, str], Weights | None]:
    """The spec of the network that the settings name, for pictures of `side` pixels, and weights that are given."""
    model = settings.model
    if model.weights is not None:
        return start(model.weights, model.name, model.embedding, side, check)
    if model.name == models.ONNX:
        raise UsageError("model.name = onnx: the network is in a file, give it with model.weights = FILE.onnx")
    embedding = model.embedding or models.default_embedding(model.name)
    return {"model": model.name, "embedding": str(embedding), "size": str(side)}, None


def refuse_unlabelled(method: Method[Any], clients: Mapping[ClientId, ClientData]) -> None:
    """One clear line where a method needs labels and the pictures of a client have none."""
    free = method.without_labels(tuple(clients)) if clients else ()
    for client, data in clients.items():
        if client not in free and not data.train.labelled:
            raise UsageError(
                f"{method.name} needs labels, and the pictures of {client} have none: put the pictures of each person "
                "into a folder of its own and import them again, or take fedfr-da, which groups them itself"
            )


def input_shape(faces: FaceSet) -> tuple[int, ...]:
    """Of one picture or reading, as a network takes it."""
    return faces.shape if faces.dtype != np.uint8 else (3, faces.size, faces.size)


def trunk_of(
    settings: Settings,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    start: Weights | None,
    frozen: tuple[str, str] | None,
) -> Trunk:
    """The part of the network that the settings freeze."""
    rank = settings.model.rank
    if frozen is not None:
        return LowRank(build, *frozen, rank=rank) if rank else Trunk(build, *frozen)
    if start is None:
        raise UsageError(
            f"model.train = {settings.model.train}: what stays frozen must have been trained: give model.weights, "
            "for example the model of visard run pretrain"
        )
    if rank:
        return LowRank.beside(build, rank, start)
    with torch.random.fork_rng(devices=[]):
        layer = choose(build(), settings.model.train, shape)
    return Trunk.of(build, layer, start)


def behind(world: World, trunk: Trunk, settings: Settings, faces: FaceSet, memory: Path | None) -> World:
    """The world in which views give the activations of the trunk instead of pictures."""
    store = None
    if settings.model.cache != "off":
        for path, how in augments(settings.method):
            refuse_random(path, how)
        with torch.random.fork_rng(devices=[]):
            shape = activation_shape(trunk.build(), trunk.layer, input_shape(faces))
        store = store_of(faces, _seen_by(trunk, world.spec), shape, settings.model.cache, memory)
    activations = Activations(faces, lambda: Numerics().prepare(trunk.network()), store)
    see = activations.behind
    world = replace(
        world,
        activations=activations,
        clients={client: seen(data, activations) for client, data in world.clients.items()},
        benchmarks={name: see(view) for name, view in world.benchmarks.items()},
        public=None if world.public is None else see(world.public),
        others=None if world.others is None else see(world.others),
    )  # fmt: skip
    want(world, settings)
    return world


def _seen_by(trunk: Trunk, spec: Mapping[str, str]) -> str:
    """A digest of everything that determines the activations of a trunk: the weights, the graph and its input."""
    more = {k: spec[k] for k in ("graph", "order", "mean", "std", "size") if k in spec}
    if spec["model"] in models.SENSORS or (Inputs.of_spec(more).is_plain and "graph" not in spec):
        return trunk.digest
    return hashlib.sha256(json.dumps([trunk.digest, more], sort_keys=True).encode()).hexdigest()


def want(world: World, settings: Settings) -> None:
    """Announce which activations the clients and tests of this world will read."""
    if world.activations is None:
        return
    trained = [data.train for data in world.clients.values()] + ([world.public] if world.public is not None else [])
    tested = [view for data in world.clients.values() for view in (data.val, data.test)]
    tested += [*world.benchmarks.values(), *([world.others] if world.others is not None else [])]
    tuning = settings.evaluation.tuning
    flips = any(how.flip for _, how in augments(settings.method)) or (tuning.batches > 0 and tuning.flip)
    mirrored = (trained if flips else []) + (tested if settings.evaluation.flip else [])
    world.activations.wanted = {PLAIN: _rows([*trained, *tested]), MIRROR: _rows(mirrored)}


def _rows(views: Sequence[FaceView]) -> npt.NDArray[np.int64]:
    return np.unique(np.concatenate([np.empty(0, np.int64), *(view.index for view in views)]))


def augments(settings: Any, path: str = "method") -> Iterator[tuple[str, Augment]]:
    """Every setting of a method that says how pictures change at random, and its name."""
    if isinstance(settings, Augment):
        yield path, settings
    elif is_dataclass(settings):
        for part in fields(settings):
            yield from augments(getattr(settings, part.name), f"{path}.{part.name}")


def clients_of(federation: Federation) -> dict[ClientId, ClientData]:
    """The clients, and one with the public pictures where there are some."""
    if federation.public is None:
        return federation.clients
    none = federation.public.take([])
    return federation.clients | {PUBLIC: ClientData(federation.public, none, none)}


def _class_vectors(
    file: str | None, embedding: int, encrypt_with: str | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if file is None:
        return None, None
    held = read_model(file, Key.load(encrypt_with))[0]
    vectors, biases = held.get(CLASS_VECTORS), held.get(BIASES)
    if vectors is None or vectors.ndim != 2 or vectors.shape[1] != embedding:
        raise UsageError(f"model.class_vectors = {file}: holds no class vectors of length {embedding}")
    if biases is not None and biases.shape not in (vectors.shape[:1], (1,)):
        raise UsageError(f"model.class_vectors = {file}: {len(vectors)} class vectors, biases {tuple(biases.shape)}")
    return vectors, biases


def world_of_run(
    folder: str, memory: str | None = None, trusted: Sequence[str] = (), device: str | None = None
) -> tuple[World, Method[Any]]:
    """The world of a run folder, built in a worker process of the pool; `trusted` are plug-ins that the user named.

    `device` is where the process computes from then on.
    """
    plugins.trust(trusted)
    settings = load(Path(folder) / "config.toml")
    if device is not None:
        compute_on(device, settings.numerics.deterministic)
    faces = open_faces(settings.data)
    federation = Manifest.load(Path(folder) / "partition.json").federation(faces)
    world = make_world(settings, faces, federation, memory=None if memory is None else Path(memory))
    return centralised(world, settings.method)[0], settings.method
