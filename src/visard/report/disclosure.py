"""What left each client: the totals of the ledger, a verdict in one sentence, and how the page shows both."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass

from visard.disclosure import Disclosure
from visard.engines.records import files_of, read_records
from visard.errors import VisardError
from visard.files import json_list, mapping, whole
from visard.report.html import esc, table
from visard.report.run_folder import Run
from visard.text import count, listing, plural, size

PRIVATE = tuple(kind.value for kind in Disclosure if kind.private)
HARMLESS = tuple(kind.value for kind in Disclosure if not kind.private)
COLUMNS = ("stage", "round", "client", "message", "field", "kind", "bytes", "encrypted")
POOL = "pool"  # the stage of data that moved to one place before the first round
FINAL = "final"  # the stage of the last evaluation
NOT_ACCEPTED = ("refused", "late", "repeated", "failed")
# the verdict for a ledger without private kinds, which claims only what the ledger shows
DECLARED = "By the declared types, no pictures, features or labels left a client"
RECORDED = "The server's record has no pictures, features or labels"
TEMPLATES = "; class vectors did, which are face templates"
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
class Evidence:
    """What is known beside the rows of accepted replies: who keeps the records, and which replies were not accepted."""

    parties: bool = False  # the clients are other people's machines; else all is a simulation in one place
    others: dict[str, int] = dataclasses.field(default_factory=dict)  # replies that were not accepted, by outcome
    bytes: int = 0  # of these, and of replies in general where they are of parties: as they came over the wire
    kinds: frozenset[str] = frozenset()  # in these
    unread: int = 0  # of these, how many have a content that could not be read
    broken: str = ""  # why the record of replies cannot be relied on

    @property
    def text(self) -> str:
        """A sentence on replies that were not accepted; empty if there are none."""
        if not self.others:
            return ""
        what = listing([f"{count(n)} {outcome}" for outcome, n in sorted(self.others.items())])
        return f"Beside what was accepted, {what}: {size(self.bytes)} that left in vain, in no row above."


def read_evidence(run: Run) -> Evidence:
    """The replies that were not accepted, from the record of replies."""
    parties = bool(mapping(run.config.get("engine")).get("server"))
    others, kinds, places = Counter[str](), set[str](), set[tuple[object, ...]]()
    left = unread = 0
    try:
        for line in read_records(files_of(run.folder / "checkpoint", "received")):
            record = line.record
            outcome = record.get("outcome", record["event"])
            place = tuple(str(record.get(name)) for name in ("client", "stage", "round", "ask"))
            if outcome == "read" and place in places:
                outcome = "repeated"  # the run was stopped and did the round again
            if outcome == "read":
                places.add(place)
            if outcome not in NOT_ACCEPTED:
                continue
            others[outcome] += 1
            parts = [part for part in json_list(record.get("parts")) if isinstance(part, list) and len(part) == 3]
            kinds |= {str(kind) for _, kind, amount in parts if amount}
            over_the_wire = record["event"] == "reply"
            wire = (whole(record.get("header")) or 0) + (whole(record.get("payload")) or 0)
            left += wire if over_the_wire else sum(whole(amount) or 0 for _, _, amount in parts)
            unread += over_the_wire and not parts and bool(whole(record.get("payload")))
    except VisardError as error:
        return Evidence(parties, broken=str(error))
    return Evidence(parties, dict(others), left, frozenset(kinds), unread)


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
    evidence: Evidence = Evidence()

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
        """The short name of a kind: its description up to the colon."""
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
        tested = stage == FINAL or stage.endswith(EVALUATION)
        occasion = POOL if stage == POOL else "evaluation" if tested else "round"
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
        evidence=read_evidence(run),
    )


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the ledger."""

    level: str  # good | caution | alarm
    title: str
    text: str


def judge(leaving: Leaving | None, finished: bool = True) -> Verdict:
    """The verdict on the ledger, which claims only what the rows show."""
    if leaving is None:
        text = "This folder has no ledger.json, so the page cannot say what left a client."
        return Verdict("caution", "No ledger", text)
    sent = Counter(leaving.rounds.kinds) + Counter(leaving.evaluation.kinds)  # without those of 0 bytes
    evidence = leaving.evidence
    left = [kind for kind in PRIVATE if kind in sent or kind in evidence.kinds]
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
    if evidence.broken:
        return Verdict("caution", "The record of replies is broken", f"{evidence.broken}. This page promises nothing.")
    if evidence.unread:
        many = plural(evidence.unread, "reply", "replies")
        text = f"The content of {many} could not be read, so this page cannot say what was in it. {evidence.text}"
        return Verdict("caution", "Replies of unknown content left the clients", text)
    title = RECORDED if evidence.parties else DECLARED
    partly = "" if finished else " This holds for the rounds that the ledger covers."
    if not leaving.lines:
        return Verdict("good", title, "The ledger is empty: no reply was accepted in this run." + partly)
    text, level = f"What left: {listing([leaving.name(kind) for kind in leaving.kinds])}.", "good"
    if "class_vectors" in leaving.kinds and not leaving.encrypted["class_vectors"]:
        level, title = "caution", title + TEMPLATES
        text += " Class vectors went unencrypted: each one stands for one identity."
    if evidence.text:
        text += f" {evidence.text}"
    text += " A kind is what the method declares a field to be; docs/privacy.md says what each can reveal."
    if evidence.parties:
        text += " This is the server's record: each party can check it against its own with visard ledger compare."
    return Verdict(level, title, text + partly)


LOCK = (
    '<svg viewBox="0 0 16 16" aria-hidden="true"><rect x="3" y="7" width="10" height="7" rx="1.5"/>'
    '<path d="M5 7V5a3 3 0 0 1 6 0v2" fill="none" stroke="currentColor" stroke-width="1.6"/></svg>'
)


def encryption(secret: bool) -> str:
    if secret:
        return f'<span class="chip secret">{LOCK}encrypted</span>'
    return '<span class="chip">readable by the server</span>'


def flow(leaving: Leaving, clients: int | None, down: float | None, verdict: Verdict) -> str:
    """Clients, server, and between them a lane for each kind: what it is, how much, encrypted or not."""
    moved = [
        (kind, occasion.each(kind), when, encryption(leaving.encrypted.get(kind, False)))
        for occasion, when in (
            (leaving.pool, "per client, once, before the first round"),
            (leaving.rounds, "per client and round"),
            (leaving.evaluation, "per client and evaluation"),
        )
        for kind in sorted(occasion.kinds, key=lambda k: -occasion.kinds[k])
        if occasion.kinds[kind]
    ]
    largest = max((n for _, n, *_ in moved), default=0) or 1
    lanes = []
    for kind, n, when, secret in moved:
        width = 2 + 8 * (n / largest) ** 0.4  # a small message stays visible beside the weights
        danger = " danger" if verdict.level == "alarm" and kind in (*PRIVATE, *leaving.pooled) else ""
        lanes.append(_lane(kind.replace("_", " "), f"{size(n)} {when}", width, danger, secret))
    if not lanes:
        lanes.append('<li class="lane none"><span class="what">nothing</span></li>')
    if down:
        lanes.append(_lane("back from the server", f"{size(down)} per client and round", 4, " back"))
    home = "stay here: pictures, features, labels" if verdict.title.startswith(DECLARED) else "hold the pictures"
    who = plural(clients, "client") if clients else "Clients"
    readable = [leaving.name(k) for k in leaving.kinds if not leaving.encrypted.get(k)]
    sees = "can read: " + ", ".join(readable) if readable else "can read nothing"
    return (
        f'<div class="flow"><div class="party"><b>{who}</b><span>{home}</span></div>'
        f'<ul class="lanes" aria-label="What leaves a client">{"".join(lanes)}</ul>'
        f'<div class="party"><b>Server</b><span>{esc(sees)}</span></div></div>'
    )


def _lane(name: str, amount: str, width: float, style: str = "", more: str = "") -> str:
    what = f'<span class="what"><b>{esc(name, 40)}</b>{more}</span>'
    arrow = '<span class="arrow" aria-hidden="true"></span>'
    return f'<li class="lane{style}" style="--w:{width:.1f}px">{what}{arrow}<span class="amount">{amount}</span></li>'


def ledger_table(leaving: Leaving) -> str:
    """The ledger added up over rounds and clients."""
    rows = [
        [
            f"{esc(line.message, 40)}.{esc(line.field, 40)}",
            esc(line.kind.replace("_", " "), 40),
            encryption(line.encrypted),
            "before round 1" if line.stage == POOL else esc(line.stage, 30),
            count(len(line.clients)),
            count(line.times),
            size(line.bytes / line.times),
            size(line.bytes),
        ]
        for line in leaving.lines
    ]
    head = ["Field", "Kind", "Encrypted", "Stage", "Clients", "Times", "Each", "In all"]
    return table(head, rows, "The ledger, added up over rounds and clients", 4)
