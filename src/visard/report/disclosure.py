"""What left each client: the ledger added up, and the sentence that it allows."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass

from visard.disclosure import Disclosure
from visard.errors import VisardError
from visard.report.run_folder import Run, mapping, number, whole
from visard.report.text import listing

PRIVATE = tuple(kind.value for kind in Disclosure if kind.private)
HARMLESS = tuple(kind.value for kind in Disclosure if not kind.private)
COLUMNS = ("stage", "round", "client", "message", "field", "kind", "bytes", "encrypted")
POOL = "pool"  # the stage of data that moved to one place before the first round
FINAL = "final"  # the stage of the last evaluation
EVALUATION = "/evaluation"  # how the stage of an evaluation between rounds ends


@dataclass
class Line:
    """One field of one message, added up over rounds and clients."""

    stage: str
    message: str
    field: str
    kind: str
    encrypted: bool
    bytes: int = 0
    times: int = 0
    clients: set[str] = dataclasses.field(default_factory=set)


@dataclass(frozen=True)
class Moved:
    """Bytes by kind on one occasion (pooling, rounds, evaluation), and how often a client took part in it."""

    kinds: dict[str, int]
    visits: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def each(self, kind: str) -> float:
        """Mean bytes of a kind each time that a client took part."""
        return self.kinds.get(kind, 0) / max(1, self.visits)


@dataclass(frozen=True)
class Leaving:
    """The ledger of a run, added up."""

    lines: list[Line]
    words: dict[str, str]  # kind -> in words
    pool: Moved
    rounds: Moved
    evaluation: Moved
    encrypted: dict[str, bool]  # kind -> every byte of it encrypted
    by_round: dict[tuple[str, int], dict[str, int]]  # (stage, round) -> kind -> bytes, evaluation included
    pooled: list[str]  # kinds that moved to one place

    @property
    def kinds(self) -> list[str]:
        """All kinds of which something left, the largest first."""
        sums = self.bytes
        return sorted((kind for kind in sums if sums[kind]), key=lambda kind: (-sums[kind], kind))

    @property
    def bytes(self) -> dict[str, int]:
        """kind -> bytes, on every occasion."""
        sums: Counter[str] = Counter()
        for moved in (self.pool, self.rounds, self.evaluation):
            sums.update(moved.kinds)
        return dict(sums)

    @property
    def per_visit(self) -> float | None:
        """Mean bytes that left a client in a round; None if the ledger has no round."""
        return self.rounds.total / self.rounds.visits if self.rounds.visits else None

    def name(self, kind: str) -> str:
        """A kind in words, short: what stands before a colon in its description."""
        return self.words.get(kind, kind.replace("_", " ")).split(":")[0]


def add_up(run: Run) -> Leaving | None:
    """The ledger of a run, or None if it has none; a malformed one is an error that names the row."""
    if run.ledger is None:
        return None
    path = run.folder / "ledger.json"
    columns, rows = run.ledger.get("columns", list(COLUMNS)), run.ledger.get("rows", [])
    if not isinstance(columns, list) or not set(COLUMNS) <= {c for c in columns if isinstance(c, str)}:
        raise VisardError(f"{path}: the columns must be {', '.join(COLUMNS)}")
    if not isinstance(rows, list):
        raise VisardError(f"{path}: the rows are not a list")
    at = [columns.index(c) for c in COLUMNS]
    lines: dict[tuple[str, ...], Line] = {}
    by_round: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    moved: dict[str, Counter[str]] = defaultdict(Counter)
    visits: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    readable: set[str] = set()
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise VisardError(f"{path}: row {i} does not fit the columns")
        stage, round_, client, message, field, kind, bytes_, secret = (row[j] for j in at)
        left, when = whole(bytes_), whole(round_)
        if left is None or left < 0 or when is None:
            raise VisardError(f"{path}: row {i} has no valid round or bytes")
        stage, client, kind = str(stage), str(client), str(kind)
        key = (stage, str(message), str(field), kind, str(secret is True))
        line = lines.setdefault(key, Line(stage, str(message), str(field), kind, secret is True))
        line.bytes, line.times = line.bytes + left, line.times + 1
        line.clients.add(client)
        if secret is not True:
            readable.add(kind)
        occasion = _occasion(stage)
        moved[occasion][kind] += left
        visits[occasion].add((stage, when, client))
        if stage not in (POOL, FINAL):
            by_round[stage.removesuffix(EVALUATION), when][kind] += left
    said = run.ledger.get("pooled", [])
    pool, rounds, evaluation = (Moved(dict(moved[o]), len(visits[o])) for o in (POOL, "round", "evaluation"))
    return Leaving(
        lines=sorted(lines.values(), key=lambda line: (line.stage != POOL, -line.bytes)),
        words={str(k): str(v) for k, v in mapping(run.ledger.get("kinds")).items()},
        pool=pool,
        rounds=rounds,
        evaluation=evaluation,
        encrypted={line.kind: line.kind not in readable for line in lines.values()},
        by_round={place: dict(kinds) for place, kinds in by_round.items()},
        # A kind under the pool's stage was pooled, whatever the list says: the page must not understate.
        pooled=sorted({*(str(k) for k in (said if isinstance(said, list) else [said])), *pool.kinds}),
    )


def _occasion(stage: str) -> str:
    if stage == POOL:
        return POOL
    return "evaluation" if stage == FINAL or stage.endswith(EVALUATION) else "round"


@dataclass(frozen=True)
class Verdict:
    """What the ledger allows the page to say."""

    level: str  # good | caution | alarm
    title: str
    text: str


def judge(leaving: Leaving | None, finished: bool = True) -> Verdict:
    """The sentence over the ledger. It promises only what the rows show."""
    if leaving is None:
        text = "This folder has no ledger.json, so the page cannot say what left a client."
        return Verdict("caution", "No ledger", text)
    sent = Counter(leaving.rounds.kinds) + Counter(leaving.evaluation.kinds)  # without those of 0 bytes
    left = [kind for kind in PRIVATE if kind in sent]
    if leaving.pooled or left:
        parts = []
        if leaving.pooled:
            parts.append(f"{listing(leaving.pooled).capitalize()} of all clients were pooled in one place.")
        if left:
            parts.append(f"{listing(left).capitalize()} left the clients during the run.")
        parts.append("This run is for comparison: it does not keep the data at home.")
        return Verdict("alarm", "Private data left the clients", " ".join(parts))
    unknown = [kind for kind in leaving.kinds if kind not in HARMLESS]
    if unknown:
        text = f"This page does not know the kinds {listing(unknown)}. Judge them from the table."
        return Verdict("caution", "Unknown kinds left the clients", text)
    if declared := [kind for kind in PRIVATE if kind in leaving.bytes]:
        text = f"Messages of this method have fields for {listing(declared)}; in this run they were empty."
        return Verdict("caution", "Private kinds are declared", text)
    title = "Pictures, features and labels never left a client"
    partly = "" if finished else " This holds for the rounds that the ledger covers."
    if not leaving.lines:
        return Verdict("good", title, "Nothing left a client in this run: the ledger is empty." + partly)
    text = f"What left: {listing([leaving.name(kind) for kind in leaving.kinds])}."
    if "class_vectors" in leaving.kinds and not leaving.encrypted["class_vectors"]:
        text += " Class vectors went unencrypted: each one stands for one identity."
    return Verdict("good", title, text + partly)


def bytes_of(leaving: Leaving | None, kind: str) -> float | None:
    """Bytes of a kind on every occasion; None without a ledger."""
    return None if leaving is None else number(leaving.bytes.get(kind, 0))
