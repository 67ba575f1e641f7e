"""Whole runs of FedFace: what the report draws, what the ledger says, and that all rows of its bench start alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.e2e.smoke import smoke
from tests.toys import noise_faces

import visard
from visard.config import load
from visard.data.partition import partition
from visard.engines.codec import size_of
from visard.report.run_folder import read_events, rounds
from visard.studies import fedface as bench
from visard.studies.plan import SCALES, check

LOGGED = [f"{which} class cosine {when} spread-out" for which in ("Mean", "Largest") for when in ("before", "after")]


def test_collapse_is_watched_in_every_round_and_drawn(tmp_path: Path) -> None:
    run = visard.run("fedface", overrides=smoke("fedface"), out=tmp_path / "run")
    done = rounds(read_events(run.folder / "events.jsonl"))
    assert len(done) == 2
    for r in done:
        assert {*LOGGED, "Feature variance", "loss"} <= set(r.figures)
    page = run.report.read_text()
    for name in (*LOGGED, "Feature variance"):
        assert f"{name} by round" in page, "the text of its chart"
    rows = json.loads((run.folder / "ledger.json").read_text())["rows"]
    vectors = [row for row in rows if row[5] == "class_vectors"]
    assert len(vectors) == 2 * 3, "one row of each of three clients in two rounds"
    assert {row[6] for row in vectors} == {size_of(torch.zeros(1, 16))}


def test_pretraining_sees_the_public_people_and_no_client_or_test_person(tmp_path: Path) -> None:
    """The network of celeba-pretrain starts every row: its people must be the public ones of the others."""
    faces = noise_faces(tmp_path / "faces", identities=60, images=5)
    few = {"public_identities": 20, "test_identities": 12}
    shares = {}
    for name, clients in (("celeba-pretrain", 1), ("celeba-fedface", 25), ("celeba-fedface-central", 25)):
        settings = load(name).partition
        assert (settings.public_identities, settings.test_identities) == (3000, 1000)
        people = {"identities": clients} if settings.identities else {}
        shares[name] = partition(faces, settings.model_copy(update={**few, "clients": clients, **people}), 7).content
    first, *others = shares.values()
    for other in others:
        assert other.public == first.public
        assert other.unseen == first.unseen
        held = {row for rows in other.clients.values() for row in rows.train}
        assert not held & set(first.public)
        assert len(held) == 25 * 5
    assert list(shares["celeba-fedface"].clients) == list(shares["celeba-fedface-central"].clients)


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_of_the_bench_is_a_valid_run(scale: str) -> None:
    plan = bench.plan(scale)  # type: ignore[arg-type]
    check(plan)
    for row in plan.rows:
        settings = load(row.preset, [text.replace("{pretrain}", "somewhere") for text in row.set])
        assert settings.method.name in ("pretrain", "central", "fedface", "fedavg")
        if settings.method.name == "fedface":
            assert settings.method.local.together is not None, "in one pass"  # type: ignore[attr-defined]
    assert plan.row("pretrain") == bench.Row("pretrain", "celeba-pretrain") or scale != "small"


def test_presets_of_the_baselines_say_what_they_show() -> None:
    fixed, free, collapse = (load(f"fedface-{n}").method for n in ("random-fixed", "random-trainable", "collapse"))
    assert (fixed.init, fixed.train_vectors, fixed.spread.weight) == ("random", False, 0)  # type: ignore[attr-defined]
    assert (free.init, free.train_vectors, free.spread.weight > 0) == ("random", True, True)  # type: ignore[attr-defined]
    assert (collapse.init, collapse.spread.weight) == ("mean", 0)  # type: ignore[attr-defined]
