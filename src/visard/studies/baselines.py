"""Local, FedAvg and central training side by side: the lower bound, the plain federated way, the upper bound."""

from __future__ import annotations

from visard.studies import BENCHES
from visard.studies.plan import Column, Curves, Plan, Row, Scale, Table

ROWS = ("local", "fedavg", "central")
SETTINGS: dict[Scale, tuple[str, ...]] = {
    "smoke": (
        "method.rounds=6",
        "data.identities=80",
        "data.images_per_identity=10",
        "partition.clients=5",
        "partition.test_identities=20",
        "evaluation.pairs=1000",
        "evaluation.bootstrap=0",
        "evaluation.every=2",
        "engine.kind=local",  # starting workers would take longer than the work
    ),
    "small": ("method.rounds=16", "partition.identities=2000", "evaluation.bootstrap=0", "evaluation.every=4"),
    "paper": (),
}


def unseen(metric: str, clients: str) -> str:
    """A metric on the test identities: of the one model, or where there is none the mean over the clients' own."""
    return f"generic.test.verification.{metric} | clients.summary.test/{clients}.mean"


def plan(scale: Scale) -> Plan:
    """Synthetic faces at `smoke`, CelebA at `small` and `paper` (the presets as they are)."""
    preset = "{}" if scale == "smoke" else "celeba-{}"
    few = ("evaluation.client_benchmarks=true", "evaluation.every=0")  # testing every client on all is slow
    rows = [Row(n, preset.format(n), SETTINGS[scale] + (few if n == "local" else ())) for n in ROWS]
    others = Table(
        "People not seen in training",
        ROWS,
        (
            Column("TAR @ FAR 0.1", unseen("tar.0.1", "tar@far=0.1")),
            Column("TAR @ FAR 0.01", unseen("tar.0.01", "tar@far=0.01")),
            Column("EER", unseen("eer", "eer")),
            Column("AUC", unseen("auc", "auc")),
        ),
        compare=(("fedavg", "local"), ("central", "fedavg")),
    )
    own = Table(
        "Every client on its own held-out pictures",
        ("local", "fedavg"),
        (
            Column("rank-1, mean over clients", "clients.summary.rank1.mean"),
            Column("rank-1, worst client", "clients.summary.rank1.worst"),
            Column("AUC, mean over clients", "clients.summary.auc.mean"),
        ),
        compare=(("fedavg", "local"),),
    )
    return Plan(
        BENCHES["baselines"],
        tuple(rows),
        (others, own),
        curves=(Curves("AUC on people not seen in training", ROWS, "generic.test.auc | clients.test/auc.mean"),),
        notes=("local: the mean over the clients' own networks, which have no common model.",),
    )
