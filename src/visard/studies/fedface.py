"""FedFace and its baselines: Table 1 and Figure 4 of Aggarwal, Zhou and Jain 2021."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from visard.data.sources.catalog import find_set
from visard.errors import UsageError
from visard.files import read_json, safe_name, write_json
from visard.inference.model import evaluate, load_model
from visard.studies import BENCHES, paper, scales
from visard.studies.plan import TRAINED_NORM, Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import look_up

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
UNSEEN = (
    *(Column(f"TAR @ FAR {far:g}", f"generic.test.verification.tar.{far:g}") for far in (0.1, 0.01, 0.001)),
    Column("accuracy", "generic.test.verification.accuracy"),
    Column("AUC", "generic.test.verification.auc"),
)


def on(data: str, protocol: str, metric: str) -> Callable[[Path], float | None]:
    """A metric of a run's model on a test set of the user; None where that set was not imported."""

    def value(folder: Path) -> float | None:
        kept = folder / f"on-{safe_name(data)}.json"
        if not kept.exists():
            try:
                find_set(data)
            except UsageError:
                return None
            tested = evaluate(load_model(folder / "model.safetensors"), data, protocols=(protocol,))
            write_json(kept, tested.to_dict())
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
    given = scales("fedface")[scale]
    series = {"FedAvg": tuple((float(n), _fedavg_name(n)) for n in given["clients"])}
    title = f"Figure 4: FedAvg with {given['identities']:,} people over ever more clients"
    return Plan(
        BENCHES["fedface"], _rows(given, "celeba-" if scale == "small" else ""), tables,
        (Figure(title, "clients", UNSEEN[0], series),),
        curves=(Curves("AUC on people whom nobody trained on", rows[1:], "generic.test.auc"),),
        notes=(
            "Table 1 as printed is filled where lfw, ijba and ijbc are imported under these names.",
            "FedAvg with one person on each client: a softmax over one class is 1 whatever the network does, so there "
            "is no gradient and the network only shrinks by weight decay.",
        ),
    )  # fmt: skip


def _rows(given: dict[str, Any], celeba: str) -> tuple[Row, ...]:
    every, identities = given["every"], given["identities"]
    tuned = (*every, f"partition.clients={given['tuned_clients']}", "partition.kind=one_identity")
    rows = [
        Row("pretrain", f"{celeba}pretrain", () if celeba else (*every, *given["pretrain"])),
        Row(
            CENTRAL,
            "celeba-fedface-central" if celeba else "central",
            (*tuned, *given["fine_tuning"], WEIGHTS, TRAINED_NORM),
        ),
        *(Row(n, f"{celeba}fedface", (*tuned, *given["work"], *more, WEIGHTS)) for n, more in VARIANTS.items()),
    ]
    for n in given["clients"]:
        kind = "one_identity" if n == identities else "equal"
        split = (f"partition.kind={kind}", f"partition.clients={n}", f"partition.identities={identities}")
        rows.append(Row(_fedavg_name(n), "fedavg-one-identity", (*every, *given["fedavg"], *split)))
    return tuple(rows)


def _fedavg_name(clients: int) -> str:
    return f"FedAvg, {clients} clients" if clients > 1 else "FedAvg, 1 client"
