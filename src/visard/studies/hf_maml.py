"""HF-MAML and FedAvg before and after tuning: Tables V to X and Figures 1 to 3 of Gansekoele et al. 2024."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visard.studies import BENCHES, paper, scales
from visard.studies.plan import REAL, TRAINED_NORM, Column, Curves, Plan, Row, Scale, Table
from visard.studies.results import run_at

TAR = "tar@far=0.1"  # as in the paper; where a network is near 1 there, a scale takes another (tar)
IMPOSTORS = {"": "all clients", "own/": "the client itself"}  # prefix of the metric, and whose identities impostors are
# FedAvg with as many local steps as HF-MAML; the same as plain descent at HF-MAML's own rate: what alpha = 0 would be
SAME_STEPS, PLAIN = "local, same steps", "local, plain steps"
# HF-MAML with h differentiated, and without h; at alpha = 0.01 both are plain descent to a cosine of 0.997
EXACT, FIRST = "local, exact, alpha 0.1", "local, first order, alpha 0.1"
NOT_TRAINED = "not trained"  # the network as all others start from it
PARTITIONS = ("equal", "lognormal", "attributes")
HEADS = ("global", "local", "regularised")
WHO = {"trained": "clients", "later": "held_out"}
STATES = ("untuned", "statistics", "tuned")  # statistics: batch norm has seen the batches, no gradient was taken
# pictures of the clients in Table I: the S_i that the paper drew. With sigma = 3 one client would get nearly all.
TABLE_I = (
    166, 1864, 932, 118, 325, 3235, 34, 432, 2450, 278, 329, 488, 2757, 276, 356, 347, 5820, 5383, 1660, 969,
)  # fmt: skip
RATE, BETA, DELTA = 0.01, 0.1, 0.001  # learning rate of FedAvg and of tuning, and alpha; HF-MAML's step and probes
SGD = (
    "method.training.unit=iterations", "method.training.weight_decay=0", "method.training.schedule=constant",
    "method.training.clip=0",
    "method.training.partial=false",  # no batch of left-overs; HF-MAML's are thirds at clients below three batches
)  # fmt: skip
META = (f"method.training.beta={BETA}", f"method.training.delta={DELTA}")
ORDERS = {EXACT: "exact", FIRST: "first"}
# other ways to a model of a client's own, with FedAvg's training: one line each, because a reader asks for them
PERSONAL: dict[str, tuple[str, ...]] = {
    "Ditto": ("method.lam=0.1",),
    "FedRep": ("method.head_epochs=1",),
    "FedBABU": ("method.tune=body", "method.tune_epochs=1"),
}
C = 10.0  # of Eq. 4, which the paper does not give


def gradients(folder: Path) -> float:
    """Gradient evaluations of all clients in all rounds, in thousands."""
    return _total(folder, "gradients") / 1000


def samples(folder: Path) -> float:
    """Pictures that all clients drew in all rounds, in thousands; HF-MAML uses a third of them twice."""
    return _total(folder, "samples") / 1000


def _total(folder: Path, name: str) -> float:
    return sum(r.figures.get(name) or 0.0 for r in run_at(folder).rounds)


COST = (
    Column("gradients (thousand)", gradients, percent=False),
    Column("pictures drawn (thousand)", samples, percent=False),
)


def plan(scale: Scale, model: str = "") -> Plan:
    """Synthetic faces at `smoke`, CelebA from a network trained on 500 public people at `small`, the paper's own.

    `real`: CelebA, from the network in the file `model`, of which the last part trains.

    `small` wants the face set celeba-32 in the data folder: visard data import celeba FOLDER --size 32 --out celeba-32
    """
    known = scales("hf_maml")
    given = known[scale]
    first = given.get("pretrain")
    begun = (f"model.weights={model}", "method.head_start=means") if model else ()
    start = (Row("start", first["preset"], (*given["data"], *first["set"], *begun)),) if first else ()
    alphas = tuple(given.get("alphas", ()))
    rows = [_row(scale, given, p, *method_and_head) for p in PARTITIONS for method_and_head in _variants(p, alphas)]
    if model:
        rows += [_not_trained(_row(scale, given, p, "FedAvg", "local"), p) for p in PARTITIONS]
    printed = paper("hf_maml")
    tar = given.get("tar", TAR)
    tables = [
        _table(p, k, whose, printed, alphas, tar, bool(model))
        for whose in IMPOSTORS
        for k in ("mean", "std")
        for p in PARTITIONS
    ]
    names = tuple(row.name for row in rows)
    curves = tuple(f"equal {m} local" for m in ("FedAvg", "HF-MAML"))
    return Plan(
        BENCHES["hf-maml"],
        (*start, *rows),
        (*tables, _gains(8 if scale == "smoke" else 20, tar), Table("What it cost", names, COST)),
        curves=tuple(
            Curves(f"Figure {1 if who == 'clients' else 2}: {tar}, {state}, {group} clients", curves, path)
            for group, who in WHO.items()
            for state in STATES
            for path in (f"{who}.{state}/{tar}.mean",)
        ),
        notes=tuple(known["notes"]),
    )


def _heads(partition: str) -> tuple[str, ...]:
    return HEADS[:2] if partition == "equal" else HEADS  # as in the paper


def _exact(alpha: float) -> str:
    return f"local, exact, alpha {alpha:g}"


def _probed(alpha: float) -> str:
    """The paper's two probes with another alpha than the paper's."""
    return f"local, alpha {alpha:g}"


def _larger(alphas: tuple[float, ...]) -> dict[str, float]:
    """Rows with another alpha or order than HF-MAML's own, and their alpha."""
    probed = {_probed(alpha): alpha for alpha in alphas if alpha != RATE}
    return dict.fromkeys(ORDERS, 0.1) | {_exact(alpha): alpha for alpha in alphas} | probed


def _variants(partition: str, alphas: tuple[float, ...] = ()) -> list[tuple[str, str]]:
    """Methods and heads: the paper's, then those that tell meta-learning from its number of steps."""
    beside = [("FedAvg", SAME_STEPS), ("FedAvg", PLAIN), *(("HF-MAML", row) for row in _larger(alphas))]
    beside += [(method, "") for method in PERSONAL]
    return [*((m, h) for m in ("FedAvg", "HF-MAML") for h in _heads(partition)), *beside]


def _row(scale: Scale, given: dict[str, Any], partition: str, method: str, head: str) -> Row:
    norm = () if scale == REAL else (TRAINED_NORM,)
    begun = () if scale == "paper" else ("model.weights={start}/model.safetensors", *norm)
    alphas = tuple(given.get("alphas", ()))
    larger, orders = _larger(alphas), dict.fromkeys(map(_exact, alphas), "exact") | ORDERS
    split = "partition.split=[0.7,0.1,0.2]" if scale == "paper" else "partition.split=[0.6,0.0,0.4]"
    evaluation = (
        "evaluation.impostors=all", "evaluation.bootstrap=0", "evaluation.pairs=600", "evaluation.tuning.batches=5",
        f"evaluation.tuning.batch_size={given['tuned_on']}", f"evaluation.tuning.lr={RATE}",
        *(f"evaluation.tuning.{t}" for t in given["tuning"]),
        f"evaluation.every={given['every'] if partition == 'equal' and head == 'local' else 0}",
    )  # fmt: skip
    work = (f"method.rounds={given['rounds']}", f"method.training.batch_size={given['batch']}")
    shared, strength = str(head == "global").lower(), C if head == "regularised" else 0
    kind, size, margin = given["head"]
    head_set: tuple[str, ...] = (
        f"method.head.kind={kind}", f"method.head.scale={size}", f"method.head.margin={margin}",
    )  # fmt: skip
    if method != "FedBABU":
        head_set += (f"method.head_start={given['head_start']}",)
    if method not in PERSONAL:
        head_set += (f"method.share_head={shared}", f"method.regularisation={strength}")
    own: tuple[str, ...] = (
        *META, f"method.training.alpha={larger.get(head, RATE)}", f"method.training.steps={given['steps']}",
        f"method.training.order={orders.get(head, 'hessian-free')}",
    )  # fmt: skip
    if method != "HF-MAML":
        momentum, lr = (0, BETA) if head == PLAIN else (0.9, RATE)
        steps = given["steps"] * (1 if head in (SAME_STEPS, PLAIN) else 4)
        changed = (f"momentum={momentum}", f"lr={lr}", f"amount={steps}")
        own = (*SGD, *(f"method.training.{c}" for c in changed), *PERSONAL.get(method, ()))
    clients = [f"partition.{c}" for c in given["clients"][partition]]
    if partition == "lognormal" and scale != "smoke":
        clients.append(f"partition.shares={list(TABLE_I)}")
    settings = (*given["data"], *begun, split, *clients, *evaluation, *work, *head_set, *own)
    return Row(f"{partition} {method} {head}".rstrip(), method.lower(), settings)


def _not_trained(like: Row, partition: str) -> Row:
    """The network as all rows start from it, tested on the same clients: no rounds, and no head but that of tuning."""
    kept = ("data.", "model.", "partition.", "evaluation.", "engine.", "method.head.")
    own = [text for text in like.set if text.startswith(kept)]
    own += ["method.rounds=0", "method.training.augment.flip=false"]
    return Row(f"{partition} {NOT_TRAINED}", "pretrain", tuple(own))


def _table(
    partition: str, statistic: str, whose: str, printed: dict[str, dict[str, dict[str, dict[str, list[float]]]]],
    alphas: tuple[float, ...] = (), tar: str = TAR, given: bool = False,
) -> Table:  # fmt: skip
    """One of Tables V to VII (the mean over clients) or VIII to X (the standard deviation over clients)."""
    number = ("V", "VI", "VII", "VIII", "IX", "X")[PARTITIONS.index(partition) + 3 * (statistic == "std")]
    what = "mean over clients" if statistic == "mean" else "standard deviation over clients"
    columns = [
        Column(f"{group}, {state}", f"{who}.summary.{state}/{whose}{tar}.{statistic}")
        for state in STATES
        for group, who in WHO.items()
    ]
    if statistic == "std":
        worst = [(group, state, who) for state in ("untuned", "tuned") for group, who in WHO.items()]
        columns += [Column(f"worst {g}, {s}", f"{w}.summary.{s}/{whose}{tar}.worst") for g, s, w in worst]
    rows = tuple(f"{partition} {m} {h}".rstrip() for m, h in _variants(partition, alphas))
    shown = (
        {}
        if tar != TAR
        else {
            row: {
                f"{group}, {state}": printed[partition][statistic][state][row.removeprefix(f"{partition} ")][i]
                for state in ("untuned", "tuned")
                for i, group in enumerate(WHO)
            }
            for row in (f"{partition} {m} {h}" for m in ("FedAvg", "HF-MAML") for h in _heads(partition))
        }
    )
    compare = [(f"{partition} HF-MAML {h}", f"{partition} FedAvg {h}") for h in _heads(partition)]
    compare.append((f"{partition} HF-MAML local", f"{partition} FedAvg {SAME_STEPS}"))
    compare += [(f"{partition} HF-MAML {h}", f"{partition} FedAvg {PLAIN}") for h in ("local", *_larger(alphas))]
    if given:  # what training brought, before and after tuning, and what other ways to a model of one's own do
        compare += [(row, f"{partition} FedAvg local") for row in rows if row.split()[1] in PERSONAL]
        rows = (f"{partition} {NOT_TRAINED}", *rows)
        compare += [(row, rows[0]) for row in rows[1:] if row.endswith((" local", PLAIN))]
    if partition != "equal":
        compare += [(f"{partition} {m} regularised", f"{partition} {m} local") for m in ("FedAvg", "HF-MAML")]
    title = f"Table {number}: {tar}, {what}, {partition} partition, impostors of {IMPOSTORS[whose]}"
    return Table(title, rows, tuple(columns), shown, tuple(compare))


def _gains(clients: int, tar: str) -> Table:
    """Figure 3: every client of the attribute partition, tuned."""
    rows = ("attributes FedAvg local", "attributes HF-MAML local")
    paths = [" | ".join(f"{w}.figures.client-{n:03d}.tuned/{tar}" for w in WHO.values()) for n in range(clients)]
    columns = tuple(Column(f"client {n + 1}", path) for n, path in enumerate(paths))
    return Table(
        "Figure 3: each client of the attribute partition, tuned", rows, columns, compare=((rows[1], rows[0]),)
    )
