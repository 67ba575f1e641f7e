"""The data sets and settings of the bench of encrypted MMD at each scale."""

from __future__ import annotations

from visard.bench.encrypted_mmd import Case, Study, Task, names
from visard.bench.plan import Scale

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


def tasks(scale: Scale) -> tuple[Task, ...]:
    if scale == "smoke":
        return (sensors(3, 4, 20, 16, 8, (3, 5)),)
    if scale == "small":
        return widar((4, 64), (4, 10)), office("office-caltech", "mlp128", (4, 64), (4, 20))
    return widar((4, 64), (20, 50)), office("office31", "resnet18", (4, 64), (20, 50)), pamap2((20, 50))


def study(scale: Scale) -> Study:
    if scale == "smoke":
        task = tasks(scale)[0]
        return Study(task, task.cases[-1], (512, 1024))
    if scale == "small":
        task = sensors(5, 3, 100, 64, 15, (2, 10))
        return Study(task, task.cases[-1], (512, 1024, 2048))
    task = pamap2((20, 50))
    return Study(task, task.cases[-1], (512, 1024, 2048, 3072))


SAME = (
    "none: the pre-trained network as it is; every other row of a case starts from it. central: plain data in one "
    "place and the exact Gaussian kernel. fitted: the same with the fitted quadratic. lambda 0: the same batches "
    "without alignment. encrypted: packed, with the fitted quadratic.",
    "The target predicts all that it has; its labels serve this test alone.",
    "Keys have 512 bits unless a row says otherwise, which only a test may use: decryption is exact, so predictions do "
    "not depend on the key; real sets with L = 64 travel under CKKS. Seconds are wall time with all parties one after "
    "the other.",
)
NOTES: dict[Scale, tuple[str, ...]] = {
    "smoke": (
        *SAME,
        "Synthetic users and small batches: the figures say that everything runs and how costs differ.",
    ),
    "small": (
        *SAME,
        "Needs two sets: visard data import widar DIR, visard data import office-caltech DIR. Office-Caltech10 has ten "
        "classes as SURF words, the paper's Office-31 has 31 classes as pictures. Room 2 has two users here.",
        "Settings were chosen on other transfers: users 10, 11, 12 to 9 (room 1 to 3), 7, 8, 9 to 17 (3 to "
        "1), 1, 6 to 9 (2 to 3), and the nine other pairs of Office-Caltech10.",
        "Costs and Figure 6 are on synthetic users with a network like the paper's for PAMAP2 (1,188 parameters).",
    ),
    "paper": (
        *SAME,
        "Needs three sets: visard data import widar | pamap2 | office31 DIR. resnet18 starts from nothing, the paper's "
        "from ImageNet: give its weights with --set model.weights=FILE on the rows called none.",
    ),
}
