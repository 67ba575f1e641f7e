"""FedFR-DA and its baselines: Tables 2 to 5 and Figures 4 to 6 of Zhuang et al. 2021."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from visard.data.faces import FaceView
from visard.errors import UsageError
from visard.evaluation.arrays import Floats
from visard.evaluation.identification import identify
from visard.files import read_json, write_json
from visard.inference.model import embed, evaluate, load_model, open_data
from visard.studies import BENCHES, paper, scales
from visard.studies.plan import TRAINED_NORM, Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import NoMetric, on_set, run_at

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

    def metric(name: str) -> Callable[[Path], float | None]:
        def of(folder: Path) -> float | None:
            known: dict[str, float | None] = tested(folder).get(domain, {})
            if name not in known:
                raise NoMetric(f"RFW: the set {SET} has no domain {domain}")
            return known[name]

        return of

    return domain_columns(side, metric)


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
    groups = evaluate(features, view, protocols=("rfw",)).to_dict()["rfw"]["groups"]
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


VARIANTS = ("S", "L")  # the source is as large as the target, or several times as large
COMPARED = ("Source-Only", "Target-Only", "Merge", "Fine-tune", "DAN", "DANN", "FedFR-DA")
ALONE = ("K = 1", "FedFR-DA, K = 1")  # without and with DCL: what the paper does in its tables of L
LONGER = ("Fine-tune, longer", "FedFR-DA, longer")
GIVEN = "pre-trained"  # the network that was given, as it came (scale real)
DEEPER = ", deeper"  # ends the names of rows in which more of the network trains (scale real)
IN_DEEPER = ("Source-Only", "Merge", "Fine-tune", "DAN", "DANN", "FL", "FedFR-DA", "FL, negatives class_vectors")
EPOCHS = "FL by epochs"  # rounds of one pass at every client: all wait for the source
OUTSIDE = (  # of the supplement's ablation, where these sets are imported under these names
    Column("LFW accuracy", on_set("lfw", "lfw", "lfw.accuracy")),
    *(Column(f"IJB-A TAR @ FAR {f:g}", on_set("ijba", "ijb", f"ijb.mean.tar@far={f:g}")) for f in (0.1, 0.01, 0.001)),
    Column("IJB-A rank-1", on_set("ijba", "ijb", "ijb.mean.rank1")),
)
CLUSTERINGS = {
    "FINCH": ("method=finch", "partition=1"),
    "K-means": ("method=kmeans",),
    "DBSCAN": ("method=dbscan",),
    "C-FINCH as written": ("metric=euclidean", "centre=false"),
}
ALL = ("partition.kind=domains", "partition.split=[1.0,0.0,0.0]", "partition.public_identities=0",
       "evaluation.clients=false", "evaluation.bootstrap=0", "evaluation.every=0", "engine.kind=local")  # fmt: skip


def f_score(folder: Path) -> float | None:
    """Pairwise F of the pseudo labels that training ended with."""
    found = [r.figures.get("pairwise_f") for r in run_at(folder).rounds]
    return next((f for f in reversed(found) if f is not None), None)


def megabytes(what: str) -> Callable[[Path], float]:
    """What left the clients ("up"), went to them ("down") or was pooled before the first round, all rounds together."""
    return lambda folder: run_at(folder).metrics["communication"][f"bytes_{what}"] / 1e6


def slowest(folder: Path) -> float | None:
    """Seconds of a round at the client that takes longest, in the mean: with clients side by side, all wait for it."""
    found = _seconds(folder)
    return float(np.mean([max(times) for times in found])) if found else None


def idle(folder: Path) -> float | None:
    """The share of their time that clients wait for the slowest one."""
    found = _seconds(folder)
    return 1 - float(np.mean([sum(t) / (len(t) * max(t)) for t in found])) if found else None


def _seconds(folder: Path) -> list[list[float]]:
    """Of each client in each round of federated training."""
    rounds = [r.clients for r in run_at(folder).rounds if r.stage == "federate"]
    times = [[s for c in clients.values() if (s := c.get("seconds"))] for clients in rounds]
    return [t for t in times if t]


class Variant:
    """The rows of one benchmark, S or L, at a scale."""

    def __init__(self, name: str, given: dict[str, Any], model: str = "", suffix: str = "") -> None:
        """`model`: the network that a bench at scale real starts from, of which the last part trains.

        `suffix` ends the names of the rows.
        """
        self.name, self.given, self.suffix = name, given, suffix
        self.E, self.K, self.rounds, self.lr = given["E"], given["K"], given["rounds"], given["lr"]
        self.dcl, self.d = given["lambda"][name], f"method.clustering.d={given['d'][name]}"
        kind, s, m = given["head"]
        head = (f"method.head.kind={kind}", f"method.head.scale={s}", f"method.head.margin={m}")
        batch = f"method.training.batch_size={given['batch']}"
        self.common = (*ALL, *given["data"], given["source"][name], *head, batch)
        base = f"{{{self.called('Source-Only')}}}"
        norm = () if model else (TRAINED_NORM,)
        self.start = (f"model.weights={base}/model.safetensors", *norm)
        self.first = (f"model.weights={model}", "method.head_start=means") if model else ()
        self.vectors = (*self.start, f"model.class_vectors={base}/class_vectors.safetensors")

    @property
    def negatives(self) -> dict[str, list[str]]:
        """Rows with negatives from other clients, and their settings."""
        return {f"FL, negatives {name}": how for name, how in self.given.get("negatives", {}).items()}

    def rate(self, name: str, otherwise: float) -> float:
        """The learning rate of a row where the scale has one for it alone."""
        found: float = self.given.get("rates", {}).get(name, otherwise)
        return found

    def iterations(self, amount: int, count: int, name: str = "FL") -> tuple[str, ...]:
        """`count` rounds of `amount` iterations from the source's network, at the rate of the row `name`."""
        training = (f"lr={self.rate(name, self.lr[1])}", "unit=iterations", f"amount={amount}")
        return (f"method.rounds={count}", *(f"method.training.{t}" for t in training))

    def row(self, name: str, preset: str, *more: str) -> Row:
        return Row(self.called(name), preset, (*self.common, *more))

    def called(self, name: str) -> str:
        """The name of a row; Target-Only is the same for both."""
        return name if name == "Target-Only" else f"{self.name} {name}{self.suffix}"

    def fl(self, name: str, *more: str, amount: int = 0, dcl: float = 0.0) -> Row:
        """FedFR-DA with E = `amount`, and as many rounds as make the same number of iterations."""
        e = amount or self.E
        count = max(1, self.rounds * self.E // e)
        own = ("method.pretrain_rounds=0", f"method.dcl={dcl}", self.d, *self.given.get("labels", ()))
        return self.row(name, "fedfr-da", *self.vectors, *self.iterations(e, count), *own, *more)

    def rows(self) -> list[Row]:
        given, epochs = self.given, "method.training.unit=epochs"
        passes = f"method.rounds={given['epochs'][self.name]}"
        scratch = (passes, f"method.training.lr={self.lr[0]}", epochs)
        target = (passes, f"method.training.lr={self.rate('Target-Only', self.lr[0])}", epochs)
        # as many target pictures as all clients see together; DAN and DANN take as many of the source beside them
        pooled = {name: self.iterations(self.E * self.K, self.rounds, name) for name in ("Fine-tune", "DAN", "DANN")}
        curve = f"evaluation.every={given['every']}"
        labels = ("method.pretrain_rounds=0", self.d, *given.get("labels", ()))
        again = given["merge_from"] == "scratch"  # else on from the source's network, which takes fewer passes
        merged: tuple[str, ...] = (
            f"method.rounds={given['merged']}",
            f"method.training.lr={self.rate('Merge', self.lr[0 if again else 1])}",
            epochs,
        )
        merged = merged if again else (*self.start, *merged, "method.head_start=means")
        rows = [
            *(
                [self.row(GIVEN, "pretrain", self.first[0], "method.rounds=0", "method.at=source")]
                if self.first
                else []
            ),
            self.row("Source-Only", "pretrain", *self.first, *scratch, "method.at=source"),
            *([self.row("Target-Only", "target-only", *self.first, *target)] if self.name == VARIANTS[0] else []),
            self.row("Merge", "central", *merged),
            self.row("Fine-tune", "finetune", *self.start, *pooled["Fine-tune"], *labels),
            self.row("DAN", "dan", *self.vectors, *pooled["DAN"]),
            self.row("DANN", "dann", *self.vectors, *pooled["DANN"]),
            self.fl("FL", curve),
            self.fl("FedFR-DA", curve, dcl=self.dcl),
            self.fl("FL without source", curve, "method.with_source=false"),
            *(self.fl(name, *(f"method.clustering.{h}" for h in how)) for name, how in CLUSTERINGS.items()),
            self.fl("FL, clustered again", f"method.relabel_every={max(1, self.rounds // 3)}"),
            *(self.fl(f"E = {e}", amount=e) for e in given["other_E"]),
            *(self.fl(f"K = {k}", f"partition.clients={k}") for k in given["other_K"]),
        ]
        rows += [self.fl(f"lambda = {x:g}", dcl=x) for x in given.get("grid", ())]
        rows += [
            self.fl(name, *(f"method.clustering.{h}" for h in how)) for name, how in given.get("recipes", {}).items()
        ]
        rows += [self.fl(name, *how) for name, how in self.negatives.items()]
        if self.name == "L":
            rows.append(self.fl(ALONE[1], "partition.clients=1", dcl=self.dcl))
            rows.append(self.fl(EPOCHS, "method.training.unit=epochs", "method.training.amount=1"))
        if self.name == "L" and "longer" in given:
            # for many passes, in which Fine-tune fits the mistakes of the pseudo labels
            rounds, e = given["longer"]
            rows += [
                self.row(LONGER[0], "finetune", *self.start, *self.iterations(e * self.K, rounds, "Fine-tune"),
                         *labels),
                self.row(LONGER[1], "fedfr-da", *self.vectors, *self.iterations(e, rounds), *labels,
                         f"method.dcl={self.dcl}"),
            ]  # fmt: skip
        return rows

    def only(self, names: tuple[str, ...]) -> list[Row]:
        """The rows of these names."""
        wanted = {self.called(name) for name in names}
        return [row for row in self.rows() if row.name in wanted]

    def printed(self, names: tuple[str, ...], columns: tuple[Column, ...]) -> dict[str, dict[str, float]]:
        """The paper's numbers of these rows; of L its clusterings have K = 4, its other tables K = 1."""
        known: dict[str, Any] = paper("fedfr_da")[self.name]
        if self.name == "L":
            alone = dict(zip(ALONE, (known["FL"], known["FedFR-DA"]), strict=True))
            known = known | alone | {"FL": known["C-FINCH, K = 4"], "FedFR-DA": {}}
        titles = {c.title for c in columns}
        found = {n: {t: v for t, v in known.get(n, {}).items() if t in titles} for n in names}
        return {self.called(n): cells for n, cells in found.items() if cells}

    def table(
        self, title: str, names: tuple[str, ...], columns: tuple[Column, ...], compare: tuple[tuple[str, str], ...] = ()
    ) -> Table:
        pairs = tuple((self.called(a), self.called(b)) for a, b in compare)
        rows = tuple(map(self.called, names))
        return Table(f"{title}, {self.name}", rows, columns, self.printed(names, columns), pairs)


def deeper(given: dict[str, Any], model: str) -> Variant:
    """Rows of L in which more of the network trains: what differs is the section `deeper` of the scale."""
    more = given["deeper"]
    return Variant("L", given | more | {"data": [*given["data"], *more["data"]]}, model, DEEPER)


def columns_of(side: str, scale: Scale, test: str) -> tuple[Column, ...]:
    """The columns of one domain; at paper scale from RFW, whose identities were in no training set."""
    if scale == "paper":
        return rfw_columns(side, test)
    places = {"accuracy": "verification.accuracy", "rank-1": "identification.rank.1"}
    places |= {far: f"verification.tar.{far}" for far in RATES}
    return domain_columns(side, lambda name: f"generic.{test}.{places[name]}")


def plan(scale: Scale, model: str = "") -> Plan:
    """Synthetic populations at `smoke`, men and women of CelebA at `small`, the paper's own at `paper`.

    `real`: from the network in the file `model`, CelebA as the source and another population as the target.
    """
    given = scales("fedfr_da")[scale]
    both = [Variant(name, given, model) for name in VARIANTS]
    first = (GIVEN,) if model else ()
    target, source = (columns_of(side, scale, given["tests"][side]) for side in ("target", "source"))
    quality = Column("F-score", f_score)
    wide, narrow = (*target, *source), (target[0], target[-1], source[0], source[-1])  # as in the paper
    tables = []
    for v in both:
        number = f"Table {2 if v.name == 'S' else 3}: all methods"
        others = tuple(("FedFR-DA", name) for name in ("Source-Only", "Fine-tune", "DAN", "DANN"))
        alone = ALONE if v.name == "L" else ()
        more = tuple(f"K = {k}" for k in given["other_K"]) + tuple(f"E = {e}" for e in given["other_E"])
        tables += [
            v.table(number, first + COMPARED + alone[1:], wide if v.name == "L" or first else narrow, others),
            v.table("Table 4: clusterings, without DCL", ("FL", *CLUSTERINGS, "FL, clustered again"),
                    (quality, *target) if first else (quality, target[0], target[-1]),
                    tuple(("FL", name) for name in CLUSTERINGS) if first else ()),
            *([v.table("Figures 4 and 5: iterations of a round and clients", ("FL", *more), wide,
                       tuple((name, "FL") for name in more))] if first else []),
            v.table("Table 5: parts of FedFR-DA", ("Source-Only", "Fine-tune", "FL", "FedFR-DA", *alone), target,
                    (("FL", "Fine-tune"), ("FedFR-DA", "FL"), *([alone[::-1]] if alone else []))),
            v.table("Traffic in megabytes", (*COMPARED[2:], "FL", "FL without source", *more),
                    (Column("rounds", "communication.rounds", False),
                     *(Column(what, megabytes(what), False) for what in ("up", "down", "pooled")))),
        ]  # fmt: skip
    tables.append(both[1].table(
        "Rounds of iterations and of epochs", ("FL", EPOCHS),
        (target[0], target[-1], Column("seconds of the slowest client", slowest, False), Column("time waiting", idle)),
        ((EPOCHS, "FL"),),
    ))  # fmt: skip
    parts = tuple(v.called(n) for v in both for n in ("Source-Only", "Fine-tune", "FL", "FedFR-DA"))
    tables.append(Table("Parts of FedFR-DA on LFW and IJB-A (supplement)", parts, OUTSIDE))
    if "grid" in given:
        sweep = tuple(f"lambda = {x:g}" for x in given["grid"])
        tables += [v.table("DCL over lambda", ("FL", *sweep), wide, tuple((n, "FL") for n in sweep)) for v in both]
    if "recipes" in given:
        names = tuple(given["recipes"])
        compare = tuple((name, "FL") for name in names)
        tables.append(both[1].table("Better pseudo labels", ("FL", *names), (quality, *wide), compare))
    if own := tuple(both[1].negatives):
        compare = tuple((name, other) for other in ("FL", "Fine-tune") for name in own)
        tables.append(both[1].table("Negatives from other clients", ("Fine-tune", "FL", *own), wide, compare))
    deep = [deeper(given, model)] if "deeper" in given else []
    for v in deep:
        others = tuple(("FedFR-DA", name) for name in ("Source-Only", "Fine-tune", "DAN", "DANN", "FL"))
        against = (("Merge", "FL"), ("Fine-tune", "Source-Only"), *((IN_DEEPER[-1], n) for n in ("FL", "Fine-tune")))
        tables.append(v.table("More of the network trains", IN_DEEPER, wide, (*others, *against)))
    if "longer" in given:
        tables.append(both[1].table("As long as the paper trains", LONGER, wide, (LONGER[::-1],)))
    e = {v.name: ((given["E"], f"{v.name} FL"), *((e, f"{v.name} E = {e}") for e in given["other_E"])) for v in both}
    k = {
        v.name: tuple(sorted([(v.K, f"{v.name} FL"), *((k, f"{v.name} K = {k}") for k in given["other_K"])]))
        for v in both
    }
    curves = [
        Curves(f"Figure 6, {v.name}: accuracy on the {side}", rows, f"generic.{given['tests'][side]}.accuracy")
        for v in both
        for rows in [tuple(f"{v.name} {n}" for n in ("FL", "FL without source", "FedFR-DA"))]
        for side in ("target", "source")
    ]
    return Plan(
        BENCHES["fedfr-da"],
        (*(row for v in both for row in v.rows()), *(row for v in deep for row in v.only(IN_DEEPER))),
        tuple(tables),
        tuple(
            Figure(f"Figure {title}, {column.title}", x, column, series)
            for title, x, series in (("4: local iterations", "E", e), ("5: target clients", "K", k))
            for column in (target[0], target[-1])
        ),
        tuple(curves),
        tuple(given["notes"]),
    )
