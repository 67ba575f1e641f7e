"""Encrypted MMD and its centralised references: Tables 2 to 6 and Figures 4 to 6 of Kang, Li and Zhang 2022."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from visard.config import load
from visard.report.run_folder import Round
from visard.studies import BENCHES, paper, scales
from visard.studies.plan import REAL, Column, Curves, Figure, Plan, Row, Scale, Table
from visard.studies.results import run_at

NONE, MULTI, SINGLE, ENCRYPTED = "none", "central", "central, one source", "encrypted"
FITTED, FURTHER, LINEAR = "central, fitted", "central, lambda 0", "central, linear"
SURE, ENCRYPTED_LINEAR, ENCRYPTED_SURE = "central, information", "encrypted, linear", "encrypted, linear, information"
DEGREE_1 = ("method.compare.kernel=taylor", "method.compare.degree=1")  # compares means alone
CENTRAL: dict[str, tuple[str, ...]] = {  # how each centralised reference differs
    MULTI: (),
    SINGLE: ("method.pooled=true",),
    FITTED: ("method.exact=false",),  # the kernel of the encrypted method
    FURTHER: ("method.weight=0",),  # the same further batches at the sources, without alignment
    LINEAR: ("method.exact=false", *DEGREE_1),
    SURE: (),  # with information maximisation at the target, see Task.sure
}
SEALED: dict[str, tuple[str, ...]] = {ENCRYPTED: (), ENCRYPTED_LINEAR: DEGREE_1, ENCRYPTED_SURE: DEGREE_1}
QUALITY = (
    Column("balanced accuracy", "training.balanced_accuracy"),
    Column("weighted F1", "training.weighted_f1"),
)
REAL_KINDS = (NONE, FURTHER, MULTI, FITTED, LINEAR, SURE, ENCRYPTED, ENCRYPTED_LINEAR, ENCRYPTED_SURE)
REAL_DIFFERENCES = (
    *((kind, NONE) for kind in REAL_KINDS[1:]), (ENCRYPTED, MULTI), (ENCRYPTED_LINEAR, MULTI), (ENCRYPTED, FITTED),
    (ENCRYPTED_LINEAR, LINEAR), (FITTED, MULTI), (LINEAR, MULTI), (FITTED, LINEAR), (SURE, MULTI),
    (ENCRYPTED_SURE, SURE), (ENCRYPTED_SURE, ENCRYPTED_LINEAR), (ENCRYPTED_SURE, MULTI),
)  # fmt: skip
DIFFERENCES = ((FURTHER, NONE), (MULTI, NONE), (FITTED, NONE), (ENCRYPTED, NONE), (ENCRYPTED, MULTI))
FEW = "smaller batches at the target"
PROTOCOLS = {"packed": "packed", "A + B": "both", "B": "chain_rule", "A": "compressed", "naive": "naive"}


@dataclass(frozen=True)
class Case:
    """Sources and a target; several target domains are one party."""

    name: str
    sources: tuple[str, ...]
    target: tuple[str, ...]

    def settings(self, sources: int | None = None) -> tuple[str, ...]:
        return (f"partition.source_domain={names(self.sources[:sources])}",
                f"partition.target_domain={names(self.target)}")  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A data set with its network, its cases and how it is trained."""

    title: str
    cases: tuple[Case, ...]
    data: tuple[str, ...]  # data and network
    pretrain: tuple[str, ...]
    align: tuple[str, ...]
    lengths: tuple[int, ...] = (4,)  # L; the paper's is 4
    steps: tuple[int, int] = (4, 10)  # rounds, and batches in a round
    sealed: tuple[str, ...] = ()  # of the encrypted method alone
    sealed_long: tuple[str, ...] = ()  # also where L is above the paper's 4
    only: tuple[str, ...] = ()  # the kinds of rows, where they are not the usual ones
    sure: tuple[str, ...] = ()  # of the rows with information maximisation

    def called(self, case: Case, kind: str, length: int) -> str:
        return f"{case.name}, {kind}" + ("" if length == self.lengths[0] else f", L = {length}")

    def row(self, case: Case, kind: str, length: int, *more: str, sources: int | None = None, name: str = "") -> Row:
        """A run that starts from the pre-trained network of the case."""
        base = self.called(case, NONE, length) if sources is None else f"{case.name}, {NONE}, {sources} sources"
        given = (f"model.weights={{{base}}}/model.safetensors",
                 f"model.class_vectors={{{base}}}/class_vectors.safetensors", "method.pretrain_rounds=0",
                 f"method.rounds={self.steps[0]}", f"method.exchanges={self.steps[1]}", *self.align)  # fmt: skip
        start = ("method.rounds=0", *self.pretrain) if kind == NONE else given
        preset = "central-mmd" if kind in CENTRAL else "encrypted-mmd-sensors"
        sealed = (*self.sealed, *(self.sealed_long if length > 4 and kind == ENCRYPTED else ()), *SEALED.get(kind, ()))
        also = CENTRAL.get(kind, sealed) + (self.sure if kind in (SURE, ENCRYPTED_SURE) else ())
        common = (*self.data, *case.settings(sources), f"model.embedding={length}")
        return Row(name or self.called(case, kind, length), preset, (*common, *start, *also, *more))

    def kinds(self, case: Case) -> tuple[str, ...]:
        if self.only:
            return self.only
        one = (SINGLE,) if len(case.sources) > 1 else ()
        return (NONE, FURTHER, MULTI, *one, FITTED, ENCRYPTED)

    def rows(self) -> list[Row]:
        return [self.row(c, kind, L) for c in self.cases for L in self.lengths for kind in self.kinds(c)]

    def real_table(self) -> Table:
        """All rows, the means over the cases, and differences of both."""
        (length,), several = self.lengths, len(self.cases) > 1
        names = {kind: tuple(self.called(c, kind, length) for c in self.cases) for kind in self.only}
        means = {f"mean, {kind}": rows for kind, rows in names.items()} if several else {}
        compare = [(f"mean, {a}", f"mean, {b}") for a, b in REAL_DIFFERENCES] if several else []
        compare += [
            (self.called(c, a, length), self.called(c, b, length)) for c in self.cases for a, b in REAL_DIFFERENCES
        ]
        return Table(
            self.title, (*means, *(row.name for row in self.rows())), QUALITY, compare=tuple(compare), means=means
        )

    def table(self, printed: dict[str, dict[str, float]]) -> Table:
        names = tuple(row.name for row in self.rows())
        compare = [
            (self.called(c, a, L), self.called(c, b, L))
            for c in self.cases for L in self.lengths for a, b in DIFFERENCES
        ]  # fmt: skip
        if len(self.lengths) > 1:
            first, last = self.lengths[0], self.lengths[-1]
            compare += [(self.called(c, ENCRYPTED, last), self.called(c, ENCRYPTED, first)) for c in self.cases]
        return Table(self.title, names, QUALITY, {n: v for n, v in printed.items() if n in names}, tuple(compare))


def names(domains: tuple[str, ...]) -> str:
    return "[" + ",".join(f'"{d}"' for d in domains) + "]"


def per_batch(value: Callable[[Path], float | None]) -> Callable[[Path], float | None]:
    """A cost of all rounds of alignment, for one batch of every client."""

    def one(folder: Path) -> float | None:
        method: Any = load(folder / "config.toml").method
        done, found = len(aligned(folder)), value(folder)
        return found / (done * method.exchanges * method.batches) if done and found is not None else None

    return one


def seconds(folder: Path) -> float:
    """Wall time of alignment: all parties one after the other, with their training."""
    return sum(r.seconds or 0 for r in aligned(folder))


def aligned(folder: Path) -> list[Round]:
    """The rounds of alignment."""
    return [r for r in run_at(folder).rounds if r.stage == "align"]


def counted(name: str) -> Callable[[Path], float]:
    """Operations of all parties."""

    def total(folder: Path) -> float:
        return sum(r.figures.get(name) or 0 for r in aligned(folder))

    return total


def seconds_of(who: str) -> Callable[[Path], float | None]:
    """Time of the steps of the sources or the target, with their training; None where the run did not record it."""

    def total(folder: Path) -> float | None:
        times = [f.get("seconds") or 0 for r in aligned(folder) for c, f in r.clients.items() if _side(c) == who]
        return sum(times) if times else None

    return total


def kilobytes(who: str) -> Callable[[Path], float]:
    """Ciphertexts that the sources or the target sent, with those of the key exchange."""

    def total(folder: Path) -> float:
        ledger = run_at(folder).ledger or {}
        at = {name: i for i, name in enumerate(ledger["columns"])}
        mine = (r for r in ledger["rows"] if r[at["stage"]] == "align" and r[at["kind"]] == "ciphertext")
        return sum(int(r[at["bytes"]]) for r in mine if who in ("all", _side(r[at["client"]]))) / 1000

    return total


def _side(client: str) -> str:
    return client if client == "target" else "sources"


SECONDS = Column("seconds", per_batch(seconds), percent=False)
TOTAL = Column("kB", per_batch(kilobytes("all")), percent=False)
COSTS = (
    SECONDS,
    Column("seconds of the sources", per_batch(seconds_of("sources")), percent=False),
    Column("seconds of the target", per_batch(seconds_of("target")), percent=False),
    Column("kB of the sources", per_batch(kilobytes("sources")), percent=False),
    Column("kB of the target", per_batch(kilobytes("target")), percent=False),
    TOTAL,
    *(Column(n, per_batch(counted(n)), percent=False) for n in ("encryptions", "decryptions", "multiplications")),
)


@dataclass(frozen=True)
class Study:
    """Costs and parameters on one case, as the paper does on PAMAP2: always L = 4."""

    task: Task
    case: Case
    keys: tuple[int, ...]  # bits of n in Figure 6c
    few: int  # n_t of the rows in which the target's batches are smaller than the sources'

    def cost(self, name: str, protocol: str, *more: str, sources: int | None = None) -> Row:
        """One batch of every client, which is enough for its costs."""
        short = (f"method.protocol={protocol}", "method.rounds=1", "method.exchanges=1")
        return self.task.row(self.case, ENCRYPTED, 4, *short, *more, sources=sources, name=name)

    def degree(self, k: int) -> Row:
        """The paper's protocol with the Taylor polynomial of degree k."""
        taylor = ("method.protocol=both", "method.compare.kernel=taylor", f"method.compare.degree={k}")
        return self.task.row(self.case, ENCRYPTED, 4, *taylor, name=f"degree {k}")

    def rows(self) -> list[Row]:
        rows = [self.cost(name, protocol) for name, protocol in PROTOCOLS.items()]
        rows.append(self.cost("A + B, one source", "both", "method.pooled=true"))
        few = (f"method.target_batch={self.few}", f"method.min_batch={self.few}")
        rows += [self.cost(f"{name}, {FEW}", PROTOCOLS[name], *few) for name in ("packed", "A + B")]
        rows += [self.degree(k) for k in (1, 2, 3)]
        for bits in self.keys:
            key = (f"method.key_bits={bits}",)
            rows += [self.cost(f"{name}, {bits} bits", PROTOCOLS[name], *key) for name in ("packed", "A + B")]
        for s in range(1, len(self.case.sources) + 1):
            fewer = f"{self.case.name}, {NONE}, {s} sources"
            rows.append(self.task.row(self.case, NONE, 4, sources=s, name=fewer))
            rows.append(self.task.row(self.case, ENCRYPTED, 4, sources=s, name=f"encrypted, {s} sources"))
            rows += [self.cost(f"{n}, {s} sources", PROTOCOLS[n], sources=s) for n in ("A + B", "naive")]
        return rows

    def figures(self) -> tuple[Figure, ...]:
        s = range(1, len(self.case.sources) + 1)
        found = {"encrypted": tuple((float(n), f"encrypted, {n} sources") for n in s)}
        sent = {name: tuple((float(n), f"{name}, {n} sources") for n in s) for name in ("A + B", "naive")}
        degrees = {"A + B": tuple((float(k), f"degree {k}") for k in (1, 2, 3))}
        keys = {name: tuple((float(b), f"{name}, {b} bits") for b in self.keys) for name in ("packed", "A + B")}
        return (
            *(Figure(f"Figure 6a: sources, {c.title}", "sources", c, found) for c in QUALITY),
            *(Figure(f"Figure 6a: sources, {c.title} of a batch", "sources", c, sent) for c in (SECONDS, TOTAL)),
            *(Figure(f"Figure 6b: Taylor degree, {c.title}", "degree", c, degrees) for c in (*QUALITY, SECONDS)),
            Figure("Figure 6c: key size, kB of a batch", "bits of n", TOTAL, keys),
        )

    def table(self) -> Table:
        names = (*PROTOCOLS, "A + B, one source", *(f"{name}, {FEW}" for name in ("packed", "A + B")))
        printed = paper("encrypted_mmd")["costs"]
        return Table("Tables 5 and 6 and Figure 4: one batch of every party", names, COSTS, printed)


def plan(scale: Scale) -> Plan:
    """Synthetic users at `smoke`; Widar3.0 and Office-Caltech10 at `small`; `paper` needs PAMAP2 and Office-31 too.

    `real`: all pairs of Office-Caltech10, users, orientations and rooms of Widar3.0, accuracy alone.
    """
    if scale == REAL:
        return _real()
    known, costs, printed, notes = tasks(scale), study(scale), paper("encrypted_mmd"), scales("encrypted_mmd")
    rows = {row.name: row for task in known for row in task.rows()}
    rows |= {row.name: row for row in [*costs.task.rows(), *costs.rows()]}
    curves = [
        Curves(
            f"Figure 5, {t.title}: balanced accuracy",
            # of the encrypted method there is one figure, at the end: its classifiers stay at the sources until then
            tuple(t.called(t.cases[0], kind, t.lengths[-1]) for kind in (MULTI, FITTED)),
            "training.balanced_accuracy",
        )
        for t in known
    ]
    curves += [
        Curves(
            f"Figure 5, {t.title}: loss of the sources",
            tuple(t.called(t.cases[0], kind, t.lengths[-1]) for kind in (MULTI, FITTED, ENCRYPTED)),
            "training.task",
        )
        for t in known
    ]
    return Plan(
        BENCHES["encrypted-mmd"], tuple(rows.values()),
        (*(t.table(printed["prediction"]) for t in known), costs.table()), costs.figures(), tuple(curves),
        (*notes["notes"], *notes[scale]["notes"]),
    )  # fmt: skip


def _real() -> Plan:
    known, notes = real_tasks(), scales("encrypted_mmd")
    rows = {row.name: row for task in known for row in task.rows()}
    curves = [
        Curves(
            f"{t.title}: balanced accuracy",
            tuple(t.called(t.cases[0], kind, 64) for kind in (MULTI, FITTED, LINEAR, SURE)),
            "training.balanced_accuracy",
        )
        for t in known
    ]
    return Plan(
        BENCHES["encrypted-mmd"], tuple(rows.values()), tuple(t.real_table() for t in known), (), tuple(curves),
        (*notes["notes"], *notes[REAL]["notes"]),
    )  # fmt: skip


# The data sets and settings at each scale.

ROOMS = {1: (14, 15, 16), 2: (1, 6), 3: (3, 7, 8)}  # users of Widar3.0; the subset has two in room 2
PAMAP2 = (101, 102, 105, 106, 108)
DOMAINS = {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"}
KEYS = ("method.key_bits=512", "method.insecure_keys=true")  # decryption is exact: results do not depend on the key
LONG = ("method.scheme=ckks",)  # at L = 64 several times faster


def sensors(count: int, classes: int, rows: int, batch: int, rounds: int, steps: tuple[int, int]) -> Task:
    """The last of `count` synthetic users is the target, as one of PAMAP2 is."""
    users = tuple(f"user-{k + 1}" for k in range(count))
    data = ("data.source=sensors", f"data.identities={classes}", f"data.images_per_identity={rows}", "data.size=32",
            f"data.domains={names(users)}", "model.name=mlp",
            f"method.training.batch_size={batch}", "engine.kind=local")  # fmt: skip
    cases = (Case(users[-1], users[:-1], users[-1:]),)
    pretrain = (f"method.pretrain_rounds={rounds}", "method.training.lr=0.01")
    align, sealed = ("method.training.lr=0.003",), (*KEYS, f"method.min_batch={batch}")
    return Task("Table 4, synthetic users", cases, data, pretrain, align, steps=steps, sealed=sealed)


def widar(lengths: tuple[int, ...], steps: tuple[int, int]) -> Task:
    """Users of one room to those of another."""
    rooms = {room: tuple(f"room-{room}-user-{u}" for u in users) for room, users in ROOMS.items()}
    cases = tuple(Case(f"Room {a} to {b}", rooms[a], rooms[b]) for a, b in ((1, 2), (2, 3), (3, 1)))
    data = ("data.source=widar", "model.name=cnn_gru")
    pretrain = ("method.pretrain_rounds=16", "method.training.lr=0.003")
    align = ("method.training.lr=0.0002", "method.training.batch_size=128", "method.weight=0.25")
    return Task("Table 2, Widar3.0", cases, data, pretrain, align, lengths, steps, sealed_long=LONG)


def widar_by(what: str, steps: tuple[int, int]) -> Task:
    """Orientations or locations of the users of room 1, where domains differ more than rooms do."""
    sources, target = tuple(f"room-1-{what}-{k}" for k in (2, 3)), (f"room-1-{what}-5",)
    cases = (Case(f"{what.capitalize()}s 2, 3 to 5", sources, target),)
    users = widar((64,), steps)
    data = (f"data.source=widar-{what}", "model.name=cnn_gru")
    return replace(users, title=f"Widar3.0 by {what}", cases=cases, data=data)


def office(source: str, model: str, lengths: tuple[int, ...], steps: tuple[int, int]) -> Task:
    """One camera to another."""
    cases = tuple(Case(f"{a} to {b}", (DOMAINS[a],), (DOMAINS[b],)) for a, b in ("AW", "WD", "DW"))
    data = (f"data.source={source}", f"model.name={model}")
    pretrain = ("method.pretrain_rounds=25", "method.training.lr=0.001")
    align = ("method.training.lr=0.0003", "method.training.batch_size=128")
    title = "Table 3, Office-Caltech10" if source == "office-caltech" else "Table 3, Office-31"
    return Task(title, cases, data, pretrain, align, lengths, steps, sealed_long=LONG)


def pamap2(steps: tuple[int, int]) -> Task:
    """Leave one user out; three classes of intensity."""
    users = {u: f"user-{u}" for u in PAMAP2}
    cases = tuple(Case(f"{u}", tuple(n for v, n in users.items() if v != u), (n,)) for u, n in users.items())
    data = ("data.source=pamap2", "model.name=mlp")
    pretrain = ("method.pretrain_rounds=30", "method.training.lr=0.003")
    return Task("Table 4, PAMAP2", cases, data, pretrain, ("method.training.lr=0.001",), steps=steps)


def real_tasks() -> tuple[Task, ...]:
    """As `small`, with all pairs and more domains; what differs is in the section real of the scale's file."""
    given = scales("encrypted_mmd")[REAL]
    known = {
        "office": replace(
            office("office-caltech", "mlp128", (64,), (4, 20)), title="Office-Caltech10, all pairs",
            cases=tuple(Case(f"{a} to {b}", (DOMAINS[a],), (DOMAINS[b],)) for a, b in permutations(DOMAINS, 2)),
        ),
        "users": replace(
            widar((64,), (4, 10)), title="Widar3.0, users of room 1",
            cases=tuple(_users(sources, target) for sources, target in given["users"]),
        ),
        "orientations": replace(
            widar_by("orientation", (4, 10)), title="Widar3.0, orientations in room 1",
            cases=tuple(_orientations(sources, target) for sources, target in given["orientations"]),
        ),
        "rooms": replace(widar((64,), (4, 10)), title="Widar3.0, rooms"),
    }  # fmt: skip
    return tuple(
        replace(
            task, only=REAL_KINDS, align=(*task.align, *given["align"][name]), lengths=(64,),
            sure=(f"method.target_entropy={given['entropy'][name]}",), steps=tuple(given["steps"][name]),
        )
        for name, task in known.items()
    )  # fmt: skip


def _users(sources: list[int], target: int) -> Case:
    return Case(
        f"Users {', '.join(map(str, sources))} to {target}", tuple(f"room-1-user-{u}" for u in sources),
        (f"room-1-user-{target}",),
    )  # fmt: skip


def _orientations(sources: list[int], target: int) -> Case:
    return Case(
        f"Orientations {', '.join(map(str, sources))} to {target}", tuple(f"room-1-orientation-{k}" for k in sources),
        (f"room-1-orientation-{target}",),
    )  # fmt: skip


def tasks(scale: Scale) -> tuple[Task, ...]:
    if scale == "smoke":
        return (sensors(3, 4, 20, 16, 8, (3, 5)),)
    if scale == "small":
        by = (widar_by(what, (4, 10)) for what in ("orientation", "location"))
        return widar((4, 64), (4, 10)), *by, office("office-caltech", "mlp128", (4, 64), (4, 20))
    return widar((4, 64), (20, 50)), office("office31", "resnet18", (4, 64), (20, 50)), pamap2((20, 50))


def study(scale: Scale) -> Study:
    task = sensors(5, 3, 100, 64, 15, (2, 10)) if scale == "small" else tasks(scale)[-1]
    keys = {"smoke": (512, 1024), "small": (512, 1024, 2048), "paper": (512, 1024, 2048, 3072)}
    return Study(task, task.cases[-1], keys[scale], 8 if scale == "smoke" else 32)
