"""FedFR-DA and its baselines: Tables 2 to 5 and Figures 4 to 6 of Zhuang et al. 2021."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.faces import FaceView
from visard.errors import UsageError
from visard.evaluation.arrays import Floats
from visard.evaluation.identification import identify
from visard.files import read_json, write_json
from visard.inference.model import embed, evaluate, load_model, open_data
from visard.studies import paper
from visard.studies.plan import Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import NoMetric, run_at

# RFW as the test of a bench's runs: the pairs of each domain, and rank-1 among its identities.
SET = "rfw"  # its name in the data folder
FILE = "rfw.json"  # in a run's folder: embedding takes minutes, tables are made again and again
RATES = ("0.1", "0.01", "0.001")


def domain_columns(side: str, metric: Callable[[str], str | Callable[[Path], float | None]]) -> tuple[Column, ...]:
    """Ten-fold accuracy, TAR at three FARs and rank-1 of a domain, called by its side of the adaptation."""
    titles = {"accuracy": "accuracy", **{far: f"TAR @ FAR {far}" for far in RATES}, "rank-1": "rank-1"}
    return tuple(Column(f"{side} {title}", metric(name)) for name, title in titles.items())


def rfw_columns(side: str, domain: str) -> tuple[Column, ...]:
    """The columns of a domain of RFW."""
    return domain_columns(side, partial(_on_rfw, domain))


def _on_rfw(domain: str, name: str) -> Callable[[Path], float | None]:
    def of(folder: Path) -> float | None:
        known: dict[str, float | None] = tested(folder).get(domain, {})
        if name not in known:
            raise NoMetric(f"RFW: the set {SET} has no domain {domain}")
        return known[name]

    return of


def tested(folder: Path) -> dict[str, Any]:
    """Domain -> metric -> value of a run's model on the set `rfw`; made once."""
    if not (folder / FILE).exists():
        try:
            view = open_data(SET)
        except UsageError as error:
            raise NoMetric(f"RFW: {error} (visard data import rfw)") from None
        features = embed(load_model(folder / "model.safetensors"), view, flip=True)
        write_json(folder / FILE, rfw_metrics(features, view))
    found: dict[str, Any] = read_json(folder / FILE)
    return found


def rfw_metrics(features: Floats, view: FaceView) -> dict[str, dict[str, float | None]]:
    """From the features of all pictures of the set."""
    groups = evaluate(features, view, protocols=("rfw",))["rfw"]["groups"]
    found = {}
    for domain, pairs in groups.items():
        rows = np.flatnonzero(view.faces.domain == view.faces.domains.index(domain))
        rates = {f"{point['far']:g}": point["tar"] for point in pairs["roc"]["tar"]}
        found[domain] = {"accuracy": pairs["accuracy"], **rates, "rank-1": rank_1(features[rows], view.identity[rows])}
    return found


def rank_1(features: Floats, identity: Any) -> float | None:
    """Share of queries, one picture of everybody who has two or more, whose nearest picture of the rest is a mate."""
    _, first, counts = np.unique(identity, return_index=True, return_counts=True)
    query = np.zeros(len(identity), bool)
    query[first[counts > 1]] = True
    if not query.any():
        return None
    rest = ~query
    return identify(features[rest], identity[rest], features[query], identity[query], template="max").rank[1]


TITLE = "FedFR-DA: adapting to people whose pictures nobody labelled"

VARIANTS = ("S", "L")  # the source is as large as the target, or several times as large
COMPARED = ("Source-Only", "Target-Only", "Merge", "Fine-tune", "DAN", "DANN", "FedFR-DA")
ALONE = ("K = 1", "FedFR-DA, K = 1")  # without and with DCL: what the paper does in its tables of L
CLUSTERINGS = {
    "FINCH": ("method=finch", "partition=1"),
    "K-means": ("method=kmeans",),
    "DBSCAN": ("method=dbscan",),
    "C-FINCH as written": ("metric=euclidean", "centre=false"),
}
TESTS: dict[Scale, dict[str, str]] = {  # names of the test sets; at paper scale also the domains of RFW
    "smoke": {"source": "north", "target": "south"},
    "small": {"source": "source", "target": "target"},
    "paper": {"source": "Caucasian", "target": "African"},
}
DATA: dict[Scale, tuple[str, ...]] = {
    "smoke": (
        'data.domains=["north","south"]', "data.identities=160", "data.images_per_identity=10",
        "data.size=32", "model.embedding=32",
        "partition.source_domain=north", "partition.target_domain=south", "partition.identities=40",
        "partition.test_identities=20", "partition.clients=2",
        "evaluation.pairs=600",
    ),
    "small": (
        "data.source=celeba", "partition.source_domain=Male", "partition.target_domain=!Male",
        "partition.min_images=5", "partition.client_images=12", "partition.test_identities=400",
        "partition.clients=4",
    ),
    "paper": (
        "model.name=iresnet34", "model.embedding=256", "partition.source_domain=Caucasian",
        "partition.target_domain=African", "partition.clients=4", "partition.test_identities=100",
    ),
}  # fmt: skip
ALL = ("partition.kind=domains", "partition.split=[1.0,0.0,0.0]", "partition.public_identities=0",
       "evaluation.clients=false", "evaluation.bootstrap=0", "evaluation.every=0", "engine.kind=local")  # fmt: skip
SOURCE: dict[Scale, dict[str, tuple[str, ...]]] = {
    "smoke": {"S": ("partition.source_identities=40",), "L": ("partition.source_identities=60",)},
    "small": {"S": ("partition.source_identities=480",), "L": ("partition.source_identities=2000",)},
    "paper": {"S": ("data.source=bupt-balancedface",), "L": ("data.source=ms1m-and-bupt",)},
}
EPOCHS = {"smoke": {"S": 4, "L": 4}, "small": {"S": 12, "L": 8}, "paper": {"S": 20, "L": 20}}  # of pre-training
MERGED = {"smoke": 2, "small": 3, "paper": 20}  # epochs of both domains together
ROUNDS = {"smoke": 2, "small": 6, "paper": 53}  # R
E = {"smoke": 4, "small": 16, "paper": 1500}
# rounds, and E of about one pass over a client's pictures: how long the paper trains, which makes 53 of them
LONGER: dict[Scale, tuple[int, int]] = {"smoke": (3, 8), "small": (16, 30)}
OTHER_E = {"smoke": (8,), "small": (48,), "paper": (3000, 6000)}
K = {"smoke": 2, "small": 4, "paper": 4}
OTHER_K = {"smoke": (1,), "small": (1, 2), "paper": (1, 2, 6)}
LAMBDA: dict[Scale, dict[str, float]] = {
    "smoke": {"S": 0.1, "L": 0.3},
    "small": {"S": 0.1, "L": 0.3},
    "paper": {"S": 0.002, "L": 0.01},
}
D: dict[Scale, dict[str, str]] = {
    "smoke": {"S": "auto", "L": "auto"},
    "small": {"S": "auto", "L": "auto"},
    "paper": {"S": "1.2", "L": "0.9"},
}
HEAD = {
    "smoke": ("arcface", 16, 0.1),
    "small": ("arcface", 20, 0.1),
    "paper": ("arcface", 64, 0.5),
}
EVERY = {"smoke": 1, "small": 2, "paper": 10}  # rounds between the points of Figure 6
LR = {"smoke": (0.1, 0.05), "small": (0.2, 0.05), "paper": (0.1, 0.01)}  # from scratch, from the source's network
BATCH = {"smoke": 16, "small": 32, "paper": 54}


def f_score(folder: Path) -> float | None:
    """Pairwise F of the pseudo labels that training ended with."""
    found = [r.figures.get("pairwise_f") for r in run_at(folder).rounds]
    return next((f for f in reversed(found) if f is not None), None)


def megabytes(what: str) -> Callable[[Path], float]:
    """What left the clients ("up"), went to them ("down") or was pooled before the first round, all rounds together."""
    return lambda folder: run_at(folder).metrics["communication"][f"bytes_{what}"] / 1e6


class Variant:
    """The rows of one benchmark, S or L, at a scale."""

    def __init__(self, name: str, scale: Scale) -> None:
        self.name, self.scale = name, scale
        kind, s, m = HEAD[scale]
        head = (f"method.head.kind={kind}", f"method.head.scale={s}", f"method.head.margin={m}")
        self.common = (*ALL, *DATA[scale], *SOURCE[scale][name], *head, f"method.training.batch_size={BATCH[scale]}")
        given = f"{{{name} Source-Only}}"
        self.start = (f"model.weights={given}/model.safetensors",)
        self.vectors = (*self.start, f"model.class_vectors={given}/class_vectors.safetensors")

    def iterations(self, amount: int, count: int) -> tuple[str, ...]:
        """`count` rounds of `amount` iterations from the source's network."""
        training = (f"lr={LR[self.scale][1]}", "unit=iterations", f"amount={amount}")
        return (f"method.rounds={count}", *(f"method.training.{t}" for t in training))

    def row(self, name: str, preset: str, *more: str) -> Row:
        return Row(self.called(name), preset, (*self.common, *more))

    def called(self, name: str) -> str:
        """The name of a row; Target-Only is the same for both."""
        return name if name == "Target-Only" else f"{self.name} {name}"

    def fl(self, name: str, *more: str, amount: int = 0, dcl: float = 0.0) -> Row:
        """FedFR-DA with E = `amount`, and as many rounds as make the same number of iterations."""
        e = amount or E[self.scale]
        count = max(1, ROUNDS[self.scale] * E[self.scale] // e)
        own = ("method.pretrain_rounds=0", f"method.dcl={dcl}", f"method.clustering.d={D[self.scale][self.name]}")
        return self.row(name, "fedfr-da", *self.vectors, *self.iterations(e, count), *own, *more)

    def rows(self) -> list[Row]:
        scale, epochs = self.scale, EPOCHS[self.scale][self.name]
        scratch = (f"method.rounds={epochs}", f"method.training.lr={LR[scale][0]}", "method.training.unit=epochs")
        # as many target pictures as all clients see together; DAN and DANN take as many of the source beside them
        pooled = self.iterations(E[scale] * K[scale], ROUNDS[scale])
        curve = f"evaluation.every={EVERY[scale]}"
        labels = ("method.pretrain_rounds=0", f"method.clustering.d={D[scale][self.name]}")
        merged = (f"method.rounds={MERGED[scale]}", f"method.training.lr={LR[scale][1]}", "method.training.unit=epochs")
        longer = [self.fl(f"E = {e}", amount=e) for e in OTHER_E[scale]]
        split = [self.fl(f"K = {k}", f"partition.clients={k}") for k in OTHER_K[scale]]
        if self.name == "L":
            split.append(self.fl(ALONE[1], "partition.clients=1", dcl=LAMBDA[scale][self.name]))
        return [
            self.row("Source-Only", "pretrain", *scratch, "method.at=source"),
            *([self.row("Target-Only", "target-only", *scratch)] if self.name == VARIANTS[0] else []),
            self.row("Merge", "central", *self.start, *merged, "method.head_start=means"),
            self.row("Fine-tune", "finetune", *self.start, *pooled, *labels),
            self.row("DAN", "dan", *self.vectors, *pooled),
            self.row("DANN", "dann", *self.vectors, *pooled),
            self.fl("FL", curve),
            self.fl("FedFR-DA", curve, dcl=LAMBDA[scale][self.name]),
            self.fl("FL without source", curve, "method.with_source=false"),
            *[
                self.fl(name, *(f"method.clustering.{text}" for text in how))
                for name, how in CLUSTERINGS.items()
            ],
            self.fl("FL, clustered again", f"method.relabel_every={max(1, ROUNDS[scale] // 3)}"),
            *longer,
            *split,
            *self.longest(labels),
        ]  # fmt: skip

    def longest(self, labels: tuple[str, ...]) -> list[Row]:
        """Fine-tune and FedFR-DA for many passes, in which the first fits the mistakes of the pseudo labels."""
        if self.name == "S" or self.scale not in LONGER:
            return []
        rounds, e = LONGER[self.scale]
        dcl = f"method.dcl={LAMBDA[self.scale][self.name]}"
        return [
            self.row(
                "Fine-tune, longer", "finetune", *self.start, *self.iterations(e * K[self.scale], rounds), *labels
            ),
            self.row("FedFR-DA, longer", "fedfr-da", *self.vectors, *self.iterations(e, rounds), *labels, dcl),
        ]

    def printed(self, names: tuple[str, ...], columns: tuple[Column, ...]) -> dict[str, dict[str, float]]:
        """The paper's numbers of these rows; of L its clusterings have K = 4, its other tables K = 1."""
        known: dict[str, Any] = paper("fedfr_da")[self.name]
        if self.name == "L":
            alone = dict(zip(ALONE, (known["FL"], known["FedFR-DA"]), strict=True))
            known = known | alone | {"FL": known["C-FINCH, K = 4"], "FedFR-DA": {}}
        titles = {c.title for c in columns}
        found = {n: {t: v for t, v in known.get(n, {}).items() if t in titles} for n in names}
        return {self.called(n): cells for n, cells in found.items() if cells}

    def full(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.called(n) for n in names)

    def table(
        self, title: str, names: tuple[str, ...], columns: tuple[Column, ...], compare: tuple[tuple[str, str], ...] = ()
    ) -> Table:
        pairs = tuple((self.called(a), self.called(b)) for a, b in compare)
        return Table(f"{title}, {self.name}", self.full(names), columns, self.printed(names, columns), pairs)


def columns_of(side: str, scale: Scale) -> tuple[Column, ...]:
    """The columns of one domain; at paper scale from RFW, whose identities were in no training set."""
    if scale == "paper":
        return rfw_columns(side, TESTS[scale][side])
    places = {"accuracy": "verification.accuracy", "rank-1": "identification.rank.1"}
    places |= {far: f"verification.tar.{far}" for far in RATES}
    return domain_columns(side, lambda name: f"generic.{TESTS[scale][side]}.{places[name]}")


def plan(scale: Scale) -> Plan:
    """Synthetic populations at `smoke`, men and women of CelebA at `small`, the paper's own at `paper`."""
    both = [Variant(name, scale) for name in VARIANTS]
    target, source = columns_of("target", scale), columns_of("source", scale)
    quality = Column("F-score", f_score)
    wide, narrow = (*target, *source), (target[0], target[-1], source[0], source[-1])  # as in the paper
    tables = []
    for v in both:
        number = {"S": "Table 2: all methods", "L": "Table 3: all methods"}[v.name]
        others = tuple(("FedFR-DA", name) for name in ("Source-Only", "Fine-tune", "DAN", "DANN"))
        alone = ALONE if v.name == "L" else ()
        more = tuple(f"K = {k}" for k in OTHER_K[scale]) + tuple(f"E = {e}" for e in OTHER_E[scale])
        tables += [
            v.table(number, COMPARED + alone[1:], wide if v.name == "L" else narrow, others),
            v.table("Table 4: clusterings, without DCL", ("FL", *CLUSTERINGS, "FL, clustered again"),
                    (quality, target[0], target[-1])),
            v.table("Table 5: parts of FedFR-DA", ("Source-Only", "Fine-tune", "FL", "FedFR-DA", *alone), target,
                    (("FL", "Fine-tune"), ("FedFR-DA", "FL"), *([alone[::-1]] if alone else []))),
            v.table("Traffic in megabytes", (*COMPARED[2:], "FL", "FL without source", *more),
                    (Column("rounds", "communication.rounds", False),
                     *(Column(what, megabytes(what), False) for what in ("up", "down", "pooled")))),
        ]  # fmt: skip
    if scale in LONGER:
        many = ("Fine-tune, longer", "FedFR-DA, longer")
        tables.append(both[1].table("As long as the paper trains", many, wide, (many[::-1],)))
    e = {v.name: ((E[scale], f"{v.name} FL"), *((e, f"{v.name} E = {e}") for e in OTHER_E[scale])) for v in both}
    k = {
        v.name: tuple(sorted([(K[scale], f"{v.name} FL"), *((k, f"{v.name} K = {k}") for k in OTHER_K[scale])]))
        for v in both
    }
    curves = [
        Curves(f"Figure 6, {v.name}: accuracy on the {side}", v.full(("FL", "FL without source", "FedFR-DA")),
               f"generic.{TESTS[scale][side]}.accuracy")
        for v in both for side in ("target", "source")
    ]  # fmt: skip
    return Plan(
        TITLE,
        tuple(row for v in both for row in v.rows()),
        tuple(tables),
        (
            Figure("Figure 4: local iterations, target accuracy", "E", target[0], e),
            Figure("Figure 4: local iterations, target rank-1", "E", target[-1], e),
            Figure("Figure 5: target clients, target accuracy", "K", target[0], k),
            Figure("Figure 5: target clients, target rank-1", "K", target[-1], k),
        ),
        tuple(curves),
        NOTES[scale],
    )


NOTES: dict[Scale, tuple[str, ...]] = {
    "smoke": ("Synthetic populations and a few rounds: the metrics say only that everything runs.",),
    "small": (
        "Source: men, target: women with 12 pictures or more; tested on 400 men and 400 women whom nobody trained on.",
        "K-means is told the number of people. FINCH is its second partition. 'As written' is C-FINCH between plain "
        "means of features that are not centred.",
        "All rows but Source-Only and Target-Only start from the network of Source-Only; Merge too, to save time.",
        "lambda was not tuned. K = 4 unless a row says otherwise; 'K = 1' alone is FL. The paper's numbers of L are of "
        "K = 1, but for those of the clusterings.",
    ),
    "paper": (
        "bupt-balancedface: a face set with the domains Caucasian and African. ms1m-and-bupt: MS1M without the "
        "people of the target and of RFW as Caucasian, with the African people of BUPT-Balancedface as African.",
        "Tables and Figures 4 and 5 are of RFW, a face set called rfw (visard data import rfw): its own pairs, "
        "features summed with those of mirrored pictures; rank-1 of one picture of everybody among all other "
        "pictures of the domain. Figure 6 is of 100 people of each domain of the set itself, whom nobody trains on.",
        "K = 4 unless a row says otherwise; 'K = 1' alone is FL. The paper's numbers of L are of K = 1, but for "
        "those of the clusterings.",
    ),
}
