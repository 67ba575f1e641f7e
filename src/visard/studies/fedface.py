"""FedFace and its baselines: Table 1 and Figure 4 of Aggarwal, Zhou and Jain 2021."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from visard.data.catalog import find_set
from visard.errors import UsageError
from visard.files import read_json, write_json
from visard.inference.model import evaluate, load_model
from visard.studies import paper
from visard.studies.plan import Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import look_up

TITLE = "FedFace: one face on each phone improves a pre-trained network"

CENTRAL, RANDOM, TRAINABLE, ALONE, FEDFACE = (
    "central fine-tuning", "random fixed", "random trainable", "no spread-out", "FedFace",
)  # fmt: skip
WEIGHTS = "model.weights={pretrain}/model.safetensors"
VARIANTS = {
    RANDOM: ("method.init=random", "method.train_vectors=false", "method.spread.weight=0"),
    TRAINABLE: ("method.init=random",),
    ALONE: ("method.spread.weight=0",),
    FEDFACE: (),
}
TUNED_CLIENTS = {"smoke": 40, "small": 1000, "paper": 1000}
# Figure 4: the same identities over ever more clients, from scratch; the last has one identity on each
IDENTITIES = {"smoke": 24, "small": 300, "paper": 10000}
CLIENTS: dict[Scale, tuple[int, ...]] = {
    "smoke": (1, 4, 24),
    "small": (1, 4, 15, 60, 300),
    "paper": (1, 4, 8, 16, 64, 10000),
}
EVERY: dict[Scale, tuple[str, ...]] = {
    "smoke": (
        "data.identities=124", "data.images_per_identity=8", "data.size=32", "model.embedding=32",
        "partition.public_identities=60", "partition.test_identities=24", "partition.split=[1.0,0.0,0.0]",
        "evaluation.bootstrap=0", "evaluation.pairs=600", "evaluation.every=0", "evaluation.clients=false",
        "engine.kind=local",
    ),
    "small": ("evaluation.bootstrap=0", "engine.kind=local"),
    "paper": (
        "data.source=casia-webface", "model.name=spherenet64", "partition.public_identities=9000",
        "partition.test_identities=400", "partition.split=[1.0,0.0,0.0]", "evaluation.bootstrap=0",
        "evaluation.clients=false",
    ),
}  # fmt: skip
PRETRAIN: dict[Scale, tuple[str, ...]] = {
    "smoke": (*EVERY["smoke"], "method.rounds=8", "partition.clients=1", "partition.identities=1"),
    "small": (),
    "paper": (
        *EVERY["paper"], "method.rounds=20", "method.training.batch_size=256", "method.head.scale=30",
        "method.head.margin=0.3333", "partition.clients=1", "partition.identities=1",
    ),
}  # fmt: skip
WORK: dict[Scale, tuple[str, ...]] = {
    "smoke": ("method.rounds=10", "method.pretrain_rounds=0"),
    "small": (),
    "paper": (
        "method.rounds=200", "method.pretrain_rounds=0", "method.training.lr=0.001", "method.spread.weight=10",
        "method.spread.steps=1", "method.enrol=false", "evaluation.every=20",
    ),
}  # fmt: skip
FINE_TUNING: dict[Scale, tuple[str, ...]] = {
    "smoke": ("method.rounds=4", "method.head_start=means", "method.training.lr=0.01"),
    "small": (),
    "paper": (
        "method.rounds=4", "method.head_start=means", "method.training.lr=0.001", "method.training.batch_size=256",
        "method.head.scale=30", "method.head.margin=0.3333",
    ),
}  # fmt: skip
FEDAVG: dict[Scale, tuple[str, ...]] = {
    "smoke": ("method.rounds=6",),
    "small": (
        "method.rounds=10", "data.source=celeba", "partition.public_identities=3000", "partition.test_identities=1000",
        "partition.min_images=5", "evaluation.every=0",
    ),
    "paper": (
        "method.rounds=20", "method.training.batch_size=256", "method.head.scale=30", "method.head.margin=0.3333",
        "partition.public_identities=0",
    ),
}  # fmt: skip
UNSEEN = (
    *(Column(f"TAR @ FAR {far:g}", f"generic.test.verification.tar.{far:g}") for far in (0.1, 0.01, 0.001)),
    Column("accuracy", "generic.test.verification.accuracy"),
    Column("AUC", "generic.test.verification.auc"),
)


def on(data: str, protocol: str, metric: str) -> Callable[[Path], float | None]:
    """A metric of a run's model on a test set of the user; None where that set was not imported."""

    def value(folder: Path) -> float | None:
        kept = folder / f"on-{data}.json"
        if not kept.exists():
            try:
                find_set(data)
            except UsageError:
                return None
            write_json(kept, evaluate(load_model(folder / "model.safetensors"), data, protocols=(protocol,)))
        return look_up(read_json(kept), metric)

    return value


PRINTED = (
    Column("LFW accuracy", on("lfw", "lfw", "lfw.accuracy")),
    Column("IJB-A TAR @ FAR 0.001", on("ijba", "ijb", "ijb.mean.tar@far=0.001")),
    Column("IJB-C TAR @ FAR 0.001", on("ijbc", "ijb", "ijb.mean.tar@far=0.001")),
)


def plan(scale: Scale) -> Plan:
    """Synthetic faces at `smoke`, CelebA at `small`; `paper` needs CASIA-WebFace imported as casia-webface."""
    rows = ("pretrain", CENTRAL, RANDOM, TRAINABLE, ALONE, FEDFACE)
    compare = ((FEDFACE, "pretrain"), (FEDFACE, RANDOM), (FEDFACE, TRAINABLE), (FEDFACE, ALONE), (CENTRAL, FEDFACE))
    tables = (
        Table("Table 1 on people whom nobody trained on", rows, UNSEEN, compare=compare),
        Table("Table 1 as printed: LFW, IJB-A and IJB-C", rows, PRINTED, paper("fedface")),
    )
    series = {"FedAvg": tuple((float(n), _fedavg_name(n)) for n in CLIENTS[scale])}
    figures = (
        Figure(
            f"Figure 4: FedAvg with {IDENTITIES[scale]:,} people over ever more clients", "clients", UNSEEN[0], series
        ),
    )
    return Plan(
        TITLE, _rows(scale), tables, figures,
        curves=(Curves("AUC on people whom nobody trained on", rows[1:], "generic.test.auc"),),
        notes=(
            "Table 1 as printed is filled where lfw, ijba and ijbc are imported under these names.",
            "FedAvg with one person on each client: a softmax over one class is 1 whatever the network does, so there "
            "is no gradient and the network only shrinks by weight decay.",
        ),
    )  # fmt: skip


def _rows(scale: Scale) -> tuple[Row, ...]:
    clients = (f"partition.clients={TUNED_CLIENTS[scale]}", "partition.kind=one_identity")
    small = scale == "small"
    pretrain = Row("pretrain", "celeba-pretrain" if small else "pretrain", PRETRAIN[scale])
    tuned = Row(
        CENTRAL,
        "celeba-fedface-central" if small else "central",
        (*EVERY[scale], *clients, *FINE_TUNING[scale], WEIGHTS),
    )
    federated = [
        Row(name, "celeba-fedface" if small else "fedface", (*EVERY[scale], *clients, *WORK[scale], *more, WEIGHTS))
        for name, more in VARIANTS.items()
    ]
    return pretrain, tuned, *federated, *(_fedavg(scale, n) for n in CLIENTS[scale])


def _fedavg(scale: Scale, clients: int) -> Row:
    identities = IDENTITIES[scale]
    kind = "one_identity" if clients == identities else "equal"
    split = (f"partition.kind={kind}", f"partition.clients={clients}", f"partition.identities={identities}")
    return Row(_fedavg_name(clients), "fedavg-one-identity", (*EVERY[scale], *FEDAVG[scale], *split))


def _fedavg_name(clients: int) -> str:
    return f"FedAvg, {clients} clients" if clients > 1 else "FedAvg, 1 client"
