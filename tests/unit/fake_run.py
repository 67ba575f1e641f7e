"""Writes run folders that look like real ones, without training anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from visard.report.run_folder import EventLog

CONFIG = """\
# visard run fedavg
name = "{name}"
seed = {seed}

[data]
source = "synthetic"
identities = 5000
size = 64

[partition]
kind = "lognormal"
clients = {clients}

[model]
name = "tiny"
embedding = 128

[method]
name = "{method}"
rounds = {rounds}
lr = {lr}
local_epochs = 1

[engine]
name = "local"
min_replies = 16

[numerics]
precision = "bf16"

[evaluation]
every = 5
far = [0.01, 0.001, 0.0001]
"""


def verification(
    rng: np.random.Generator, skill: float, genuine: int = 9000, impostors: int = 60_000
) -> dict[str, Any]:
    """A 1:1 result, as `visard.evaluation` writes it, from normally distributed scores."""
    g = np.clip(rng.normal(0.18 + 0.4 * skill, 0.15, genuine), -1, 1)
    i = np.clip(rng.normal(0.05, 0.12, impostors), -1, 1)
    thresholds = np.unique(np.quantile(i, 1 - np.geomspace(1 / impostors, 1, 200)))[::-1]
    far = [float((i >= t).mean()) for t in thresholds]
    tar = [float((g >= t).mean()) for t in thresholds]
    at = int(np.argmin(np.abs(np.array(far) - 1 + np.array(tar))))
    accuracy = float(max((np.mean(g >= t) + np.mean(i < t)) / 2 for t in thresholds))
    eer = (far[at] + 1 - tar[at]) / 2
    points, intervals = [], {"accuracy": interval(accuracy, 0.006), "eer": interval(eer, 0.003)}
    for target in (0.01, 0.001, 0.0001):
        t = float(np.sort(i)[::-1][int(target * impostors)])
        rate = float((g > t).mean())
        intervals[f"tar/{target:g}"] = interval(rate, 0.012)
        points.append(
            {
                "far": target,
                "tar": rate,
                "far_reached": target,
                "threshold": t,
                "genuine_accepted": int(rate * genuine),
                "impostors_accepted": int(target * impostors),
                "rule": "conservative",
                "unreliable": target * impostors < 10,
            }
        )
    edges = np.linspace(-1, 1, 101)
    return {
        "genuine": genuine,
        "impostors": impostors,
        "rule": "conservative",
        "tar": points,
        "eer": eer,
        "eer_threshold": float(thresholds[at]),
        "auc": float(1 - eer**1.5),
        "curve": {"far": far, "tar": tar, "threshold": thresholds.tolist()},
        "histogram": {
            "genuine": np.histogram(g, edges)[0].tolist(),
            "impostor": np.histogram(i, edges)[0].tolist(),
        },
        "accuracy": accuracy,
        "accuracy_std": 0.004,
        "intervals": intervals,
    }


def interval(value: float, half: float) -> dict[str, Any]:
    return {"low": value - half, "high": value + half, "level": 0.95, "replicates": 200, "unit": "identity"}


def identification(skill: float) -> dict[str, Any]:
    """A 1:N result, as `visard.evaluation` writes it."""
    return {
        "gallery": 1000,
        "mated": 4000,
        "unmated": 500,
        "template": "mean",
        "rank": {str(k): float(min(1, 0.35 + 0.5 * skill + 0.07 * np.log(k))) for k in (1, 5, 10)},
        "tpir": [
            {"fpir": f, "tpir": 0.3 * skill + 0.5 * f, "fpir_reached": f, "threshold": 0.4, "unreliable": f * 500 < 10}
            for f in (0.1, 0.01)
        ],
    }


def flat(v: dict[str, Any], i: dict[str, Any]) -> dict[str, float]:
    """The figures of an evaluation event."""
    return (
        {"accuracy": v["accuracy"]}
        | {f"tar@far={p['far']:g}": p["tar"] for p in v["tar"]}
        | {"eer": v["eer"], "auc": v["auc"], "rank1": i["rank"]["1"]}
    )


def summary(values: dict[str, float]) -> dict[str, Any]:
    v = np.array(list(values.values()))
    names = list(values)
    return {
        "mean": float(v.mean()),
        "std": float(v.std()),
        "worst": float(v.min()),
        "worst_client": names[int(v.argmin())],
        "best": float(v.max()),
        "best_client": names[int(v.argmax())],
        "gap": float(np.ptp(v)),
        "jain": float(v.sum() ** 2 / (len(v) * (v**2).sum())),
    }


def write_run(
    folder: Path,
    *,
    name: str = "fedavg-celestial",
    method: str = "fedavg",
    seed: int = 0,
    clients: int = 20,
    rounds: int = 30,
    stages: tuple[str, ...] = ("federate",),
    skill: float = 1.0,
    stop_after: int | None = None,
    finished: bool = True,
    pooled: bool = False,
    encrypted: bool = False,
    generic: bool = True,
    synthetic: bool = True,
    sets: tuple[str, ...] = ("unseen",),
) -> Path:
    """A run folder in the documented layout; `stop_after` ends it without metrics and without a ledger."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        CONFIG.format(name=name, seed=seed, clients=clients, method=method, rounds=rounds, lr=0.1 + seed / 20)
    )
    ids = [f"client-{i:03d}" for i in range(clients)]
    bias = rng.normal(0, 0.04, clients)
    log = EventLog(folder / "events.jsonl")
    machine = {"system": "Linux", "cpu": "x86-64", "cores": 2, "torch": "2.13.0", "threads": 2}
    data = {
        "pictures": 60_000,
        "identities": 5000,
        "size": 64,
        "name": "synthetic-5000",
        "fingerprint": "9f2c61d04b7e88aa",
        "tested": "77aa9e10c2d34f56",
    }
    plan = [{"name": s, "rounds": rounds // len(stages)} for s in stages]
    log.write(
        "run_started",
        name=name,
        method=method,
        seed=seed,
        version="0.1.0",
        machine=machine,
        clients=clients,
        classes=4000,
        parameters=612_345,
        synthetic=synthetic,
        resumed=False,
        data=data,
        stages=plan,
    )
    rows: list[list[Any]] = []
    if pooled:
        rows += [
            ["pool", 0, c, "Pooled", k, k, n, False]
            for c in ids
            for k, n in (("pictures", 36_864_000), ("labels", 24_000))
        ]
    step = 0
    for stage in plan:
        log.write("stage_started", stage=stage["name"], rounds=stage["rounds"])
        for r in range(stage["rounds"]):
            if stop_after is not None and step >= stop_after:
                break
            level = skill * (1 - np.exp(-(step + 1) / 9))
            losses = {
                c: float(14 * np.exp(-step / 11) + 1.4 + 4 * b + rng.normal(0, 0.15))
                for c, b in zip(ids, bias, strict=True)
            }
            gone = {ids[7]} if step in (4, 19) else set()
            bad = {ids[3]} if step == 11 else set()
            for c in sorted(gone):
                log.write("missing", stage=stage["name"], round=r, client=c, reason="no reply within 120 s")
            for c in sorted(bad):
                reason = "has values that are not finite in stem.conv.weight"
                log.write(
                    "refused",
                    stage=stage["name"],
                    round=r,
                    client=c,
                    message="Up",
                    field="theta",
                    reason=reason,
                )
            there = [c for c in ids if c not in gone | bad]
            up = 0
            if not pooled:
                kinds = [("theta", "weights", 2_449_380), ("n", "count", 8), ("loss", "metric", 8)]
                if encrypted:
                    kinds = [
                        ("theta", "weights", 2_449_380),
                        ("moments", "ciphertext", 786_432),
                        ("key", "public_key", 512),
                    ]
                for c in there:
                    rows += [[stage["name"], r, c, "Up", f, k, n, k == "ciphertext"] for f, k, n in kinds]
                up = len(there) * sum(n for *_, n in kinds)
            log.write(
                "round",
                stage=stage["name"],
                round=r,
                step=step,
                seconds=float(rng.normal(14.2, 0.7)),
                bytes_up=up,
                bytes_down=0 if pooled else clients * 2_449_380,
                asked=clients,
                replied=len(there),
                figures={
                    "loss": float(np.mean(list(losses.values()))),
                    "drift": float(0.9 * np.exp(-step / 20) + 0.1),
                },
                clients={c: {"loss": losses[c]} for c in there},
            )
            if step % 5 == 4 and step + 1 < rounds:
                v, i = verification(rng, level, 900, 20_000), identification(level)
                personal = {c: float(np.clip(0.55 + 0.35 * level + b, 0, 1)) for c, b in zip(ids, bias, strict=True)}
                if not pooled:
                    rows += [
                        [f"{stage['name']}/evaluation", r, c, "Scores", "figures", "metric", 64, False] for c in ids
                    ]
                log.write(
                    "evaluation",
                    stage=stage["name"],
                    round=r,
                    step=step,
                    seconds=6.1,
                    generic={s: flat(v, i) for s in sets} if generic else {},
                    clients={
                        "tar@far=0.01": summary(personal),
                        "rank1": summary({c: min(1, p + 0.04) for c, p in personal.items()}),
                    },
                )
            step += 1
    log.write("warning", text="bf16 is slow on this processor; fp32 would be as fast")
    if stop_after is not None:
        if finished:
            log.write("run_stopped", reason="interrupted by the user")
        return folder
    log.write("run_finished", seconds=471.3)
    personal = {c: float(np.clip(0.55 + 0.35 * skill + b, 0, 1)) for c, b in zip(ids, bias, strict=True)}
    metrics = {
        "name": name,
        "method": method,
        "seed": seed,
        "generic": {
            s: {
                "verification": verification(rng, skill - 0.1 * k),
                "identification": identification(skill - 0.1 * k),
            }
            for k, s in enumerate(sets)
        }
        if generic
        else {},
        "clients": {
            "figures": {
                c: {"tar@far=0.01": p, "rank1": min(1.0, p + 0.04), "eer": 0.3 - 0.25 * p} for c, p in personal.items()
            },
            "summary": {
                "tar@far=0.01": summary(personal),
                "rank1": summary({c: min(1.0, p + 0.04) for c, p in personal.items()}),
            },
        },
        "training": {"loss": 1.41},
        "communication": {"rounds": step, "bytes_up": sum(row[6] for row in rows), "bytes_down": 0},
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    if not pooled:
        rows += [["final", 0, c, "Scores", "figures", "metric", 64, False] for c in ids]
    ledger = {
        "columns": ["stage", "round", "client", "message", "field", "kind", "bytes", "encrypted"],
        "rows": rows,
        "kinds": {
            "weights": "network weights",
            "count": "counts such as the number of pictures",
            "metric": "figures such as a loss or an accuracy",
            "ciphertext": "encrypted numbers",
            "public_key": "public keys",
            "pictures": "pictures of faces",
            "labels": "identity labels of pictures",
        },
        "totals": {},
        "pooled": ["labels", "pictures"] if pooled else [],
    }
    (folder / "ledger.json").write_text(json.dumps(ledger))
    return folder
