"""A bench over run folders that look like real ones, with everything in it: paper, failures, figures, curves."""

from __future__ import annotations

from pathlib import Path

from fake_run import write_run

from visard.studies.execute import Job, Outcome
from visard.studies.plan import Column, Curves, Figure, Plan, Row, Table, check
from visard.studies.results import Results, collect

EVIL = "<script>alert(1)</script> | **b**"
AUC = Column("AUC", "generic.unseen.verification.auc")
TAR = Column("TAR @ FAR 0.01", "generic.unseen.verification.tar.0.01")
SENT = Column("sent, MB", lambda folder: len(folder.name) / 3, percent=False)
SKILLS = {"plain": 0.5, "better": 0.8, "best <b>": 0.95}


def sample(out: Path, seeds: tuple[int, ...] = (0, 1, 2), lost: tuple[tuple[str, int], ...] = ()) -> Results:
    """The results of a bench of four rows, one of which fails, in the folder `out`; `lost` (row, seed) fail too."""
    rows = (*(Row(name, "fedavg") for name in SKILLS), Row("broken", "local"))
    names = tuple(row.name for row in rows)
    plan = Plan(
        "A bench with everything",
        rows,
        (
            Table(
                "Unseen people",
                names,
                (AUC, TAR, SENT),
                paper={"plain": {"AUC": 91.2}, "better": {"AUC": 95.0, "TAR @ FAR 0.01": 71.25}},
                compare=(("better", "plain"), ("best <b>", "better"), ("broken", "plain")),
            ),
        ),
        (
            Figure(
                "AUC by number of clients",
                "clients",
                AUC,
                {"ours": ((1.0, "plain"), (10.0, "better"), (100.0, "best <b>")), "lost": ((1.0, "broken"),)},
                paper={"ours": ((1.0, 90.0), (100.0, 97.0))},
            ),
        ),
        (Curves("Rank-1 of clients", names, "clients.rank1.mean"),),
        (EVIL,),
    )
    check(plan)
    outcomes = []
    for seed in seeds:
        for row in rows:
            job = Job(row, seed, out / "runs")
            if row.name == "broken" or (row.name, seed) in lost:
                outcomes.append(Outcome(job, "failed", f"no good replies {EVIL}"))
                continue
            write_run(
                job.folder, name=row.name, seed=seed, rounds=10, skill=SKILLS[row.name], clients=8, sets=("unseen",)
            )
            outcomes.append(Outcome(job, "finished"))
    return collect(plan, outcomes, bench="sample", scale="smoke", seeds=seeds, command="visard bench sample", out=out)
