"""FedFace and its baselines: Table 1 and Figures 4 and 5 of Aggarwal, Zhou and Jain 2021."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from visard.evaluation.benchmarks import lfw_metrics, pairs_of, squared_distances
from visard.evaluation.scores import stream_roc
from visard.files import read_json, write_json
from visard.inference.model import embed, load_model
from visard.runs.before_after import BeforeAndAfter
from visard.studies import BENCHES, paper, scales
from visard.studies.plan import TRAINED_NORM, Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import on_set, users_set

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
FEDAVG: dict[str, tuple[str, ...]] = {  # heads of their own, or one with all people everywhere: the paper's
    "FedAvg": (),
    "FedAvg, common head": ("method.share_head=true", "method.mask_absent=false"),
    "FedAvg, masked common head": ("method.share_head=true",),  # others' people are no negatives
}
UNSEEN = (
    *(Column(f"TAR @ FAR {far:g}", f"generic.test.verification.tar.{far:g}") for far in (0.1, 0.01, 0.001)),
    Column("accuracy", "generic.test.verification.accuracy"),
    Column("AUC", "generic.test.verification.auc"),
)


PRINTED = (
    Column("LFW accuracy", on_set("lfw", "lfw", "lfw.accuracy")),
    Column("IJB-A TAR @ FAR 0.001", on_set("ijba", "ijb", "ijb.mean.tar@far=0.001")),
    Column("IJB-C TAR @ FAR 0.001", on_set("ijbc", "ijb", "ijb.mean.tar@far=0.001")),
)


def matched(folder: Path) -> np.ndarray:
    """Which pairs of one person of LFW a run's model matches, at the distance that the other folds choose."""
    kept = folder / "lfw-pairs.json"
    if not kept.exists():
        with users_set("lfw") as view:
            model, pairs = load_model(folder / "model.safetensors"), pairs_of(view.faces, None)
            features = embed(model, view, flip=True)
        chosen = np.array(lfw_metrics(features, view.faces, None, (0.001,)).fold_distance)
        fold = np.unique(pairs.fold, return_inverse=True)[1]
        near = squared_distances(features, pairs.first, pairs.second) < chosen[fold]
        write_json(kept, near[pairs.same].astype(int).tolist())
    return np.array(read_json(kept), bool)


def turned(now: bool) -> Callable[[Path], float | None]:
    """The share of the pairs of one person that the pre-trained network missed and this one matches, or (not `now`) the
    other way round.
    """

    def share(folder: Path) -> float:
        after, before = matched(folder), matched(folder.parents[1] / "pretrain" / folder.name)
        return float((after & ~before if now else before & ~after).mean())

    return share


PAIRS = (Column("missed before, matched now", turned(True)), Column("matched before, missed now", turned(False)))


def turned_unseen(far: float, now: bool) -> Callable[[Path], float | None]:
    """The same of the pairs of people not seen in training, each network at its own threshold for a false accept rate;
    before: the network that the run began with.
    """

    def share(folder: Path) -> float:
        kept = folder / f"turned-{far:g}.json"
        if not kept.exists():
            both = BeforeAndAfter.of_run(folder, (far,))
            view = both.world.benchmarks["test"]
            write_json(kept, turned_pairs(*both.features(view), view.identity, far))
        return float(read_json(kept)["gained" if now else "lost"])

    return share


def turned_pairs(before: np.ndarray, after: np.ndarray, identity: np.ndarray, far: float) -> dict[str, float]:
    """Shares of the pairs of one person that only the second (gained) or only the first network (lost) accepts, each
    at the threshold that gives `far` on these pictures; features (N, E) are of the same pictures.
    """
    accepted = []
    for features in (before, after):
        bar = stream_roc(features, identity, far=(far,)).tar[0].threshold
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        own = [unit[identity == person] for person in np.unique(identity)]
        accepted.append(np.concatenate([(x @ x.T)[np.triu_indices(len(x), 1)] for x in own]) >= bar)
    was, now = accepted
    return {"gained": float((now & ~was).mean()), "lost": float((was & ~now).mean())}


UNSEEN_PAIRS = tuple(
    Column(f"{when} @ FAR {far:g}", turned_unseen(far, now))
    for far in (0.01, 0.001)
    for when, now in (("missed before, matched now", True), ("matched before, missed now", False))
)


def plan(scale: Scale, model: str = "") -> Plan:
    """Synthetic faces at `smoke`, CelebA at `small`; `paper` needs CASIA-WebFace imported as casia-webface.

    `real`: CelebA, from the network in the file `model`, of which the last part trains.
    """
    given = scales("fedface")[scale]
    rates = tuple(_at_rate(name, lr) for lr in given.get("vectors_lr", ()) for name in (TRAINABLE, FEDFACE))
    rows = ("pretrain", CENTRAL, RANDOM, TRAINABLE, ALONE, FEDFACE, *rates)
    compare: tuple[tuple[str, str], ...] = (
        (FEDFACE, "pretrain"),
        (FEDFACE, RANDOM),
        (FEDFACE, TRAINABLE),
        (FEDFACE, ALONE),
        (CENTRAL, FEDFACE),
    )
    compare += tuple((row, "pretrain") for row in (CENTRAL, RANDOM, TRAINABLE, ALONE, *rates))
    compare += tuple((_at_rate(FEDFACE, lr), _at_rate(TRAINABLE, lr)) for lr in given.get("vectors_lr", ()))
    tables: tuple[Table, ...] = (
        Table("Table 1 on people not seen in training", rows, UNSEEN, compare=compare),
        Table("Table 1 as printed: LFW, IJB-A and IJB-C", rows, PRINTED, paper("fedface")),
        Table("Figure 5: pairs of one person of LFW, against the pre-trained network", rows[1:], PAIRS),
        Table(
            "Figure 5 on people not seen in training: pairs of one person, against the pre-trained network",
            rows[1:],
            UNSEEN_PAIRS,
        ),
    )
    alone, *more = given["clients"]
    names = {kind: [_fedavg_name(n, kind) for n in more] for kind in FEDAVG}
    fewest = {kind: _fedavg_name(alone, kind) for kind in FEDAVG}
    tables += (
        Table(
            "Figure 4 in numbers",
            tuple(name for kind in FEDAVG for name in (fewest[kind], *names[kind])),
            UNSEEN,
            compare=tuple((name, fewest[kind]) for kind in FEDAVG for name in names[kind]),
        ),
    )
    series = {kind: tuple((float(n), _fedavg_name(n, kind)) for n in given["clients"]) for kind in FEDAVG}
    title = f"Figure 4: FedAvg with {given['identities']:,} people over ever more clients"
    return Plan(
        BENCHES["fedface"], _rows(given, "celeba-" if scale == "small" else "", model), tables,
        (Figure(title, "clients", UNSEEN[0], series),),
        curves=(Curves("AUC on people not seen in training", rows[1:], "generic.test.auc"),),
        notes=(
            "Table 1 as printed and Figure 5 are filled where lfw, ijba and ijbc are imported under these names.",
            "FedAvg with heads of their own and one person on each client: a softmax over one class is 1 whatever the "
            "network does, so there is no gradient and the network only shrinks by weight decay. With a common head, "
            "as in the paper, every client has the class vectors of all people and pushes those of the others away.",
        ),
    )  # fmt: skip


def _at_rate(name: str, lr: float) -> str:
    return f"{name}, rate of class vectors {lr:g}"


def _rows(given: dict[str, Any], celeba: str, model: str) -> tuple[Row, ...]:
    every, identities = given["every"], given["identities"]
    first = (f"model.weights={model}",) if model else ()
    means = ("method.head_start=means",) if model else ()
    variants = dict(VARIANTS)
    for lr in given.get("vectors_lr", ()):
        variants |= {_at_rate(n, lr): (*VARIANTS[n], f"method.vectors_lr={lr}") for n in (TRAINABLE, FEDFACE)}
    tuned = (*every, f"partition.clients={given['tuned_clients']}", "partition.kind=one_identity")
    rows = [
        Row("pretrain", f"{celeba}pretrain", () if celeba else (*every, *given["pretrain"], *first, *means)),
        Row(
            CENTRAL,
            "celeba-fedface-central" if celeba else "central",
            (*tuned, *given["fine_tuning"], WEIGHTS, *(() if model else (TRAINED_NORM,))),
        ),
        *(Row(n, f"{celeba}fedface", (*tuned, *given["work"], *more, WEIGHTS)) for n, more in variants.items()),
    ]
    for n in given["clients"]:
        kind = "one_identity" if n == identities else "equal"
        split = (f"partition.kind={kind}", f"partition.clients={n}", f"partition.identities={identities}")
        for head, more in FEDAVG.items():
            rows.append(
                Row(_fedavg_name(n, head), "fedavg-one-identity", (*every, *given["fedavg"], *split, *more, *first))
            )
    return tuple(rows)


def _fedavg_name(clients: int, head: str) -> str:
    return f"{head}, {clients} clients" if clients > 1 else f"{head}, 1 client"
