"""The results of a test of a model: each protocol, errors by group, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from visard.data.faces import FaceSet
from visard.evaluation.arrays import Result, structured
from visard.evaluation.benchmarks import Groups, TemplateTest, TenFolds
from visard.evaluation.groups import GroupErrors
from visard.evaluation.identification import Identification
from visard.evaluation.metrics import doubts, values
from visard.evaluation.protocols import SetVerification
from visard.evaluation.verification import Verification
from visard.files import plain, whole
from visard.text import NBSP, plural

NAMED = 3  # pairs that a sentence names


@dataclass(frozen=True)
class Left(Result):
    """Pictures of the source that an importer skipped, and the pairs of files that cannot be compared without them."""

    pictures: int = 0
    pairs: int = 0
    files: tuple[tuple[str, str], ...] = ()  # of the first of these pairs

    def __str__(self) -> str:
        """In a sentence; empty if nothing is missing."""
        if not self.pairs:
            return ""
        named = "; ".join(f"{a} with {b}" for a, b in self.files[:NAMED])
        more = f" ({named}{' and others' if self.pairs > NAMED else ''})" if named else ""
        cost = f"{plural(self.pairs, 'pair')} could not be compared{more}"
        return f"{plural(self.pictures, 'picture')} of the source skipped: {cost}."


@dataclass(frozen=True, repr=False)
class Evaluated(Result):
    """The results of the protocols that were asked for; None for the others."""

    verification: SetVerification | Verification | None = None
    identification: Identification | None = None
    lfw: TenFolds | None = None
    rfw: Groups | None = None
    ijb: TemplateTest | None = None
    groups: dict[str, GroupErrors] = field(default_factory=dict)  # by domain, by each attribute
    left: Left = Left()

    def to_dict(self) -> dict[str, Any]:
        """The results as plain values."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("groups", "left")}
        kept: dict[str, Any] = {name: plain(value) for name, value in found.items() if value is not None}
        kept |= {"groups": plain(self.groups)} if self.groups else {}
        return kept | ({"left": plain(self.left)} if self.left != Left() else {})

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Evaluated:
        """The result that `to_dict` made plain, or one test of a run's metrics.json."""
        found: Evaluated = structured(cls, {f.name: record[f.name] for f in fields(cls) if f.name in record})
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about these metrics: near chance, wide intervals, small groups, lost pairs."""
        of_groups = [text for errors in self.groups.values() for text in errors.warnings]
        return (*doubts(self.to_dict()), *of_groups, *([str(self.left)] if str(self.left) else []))

    def __repr__(self) -> str:
        lines = []
        for v in values(self.to_dict()):
            spread = "" if v.low is None else f" ({v.metric.text(v.low)} to {v.metric.text(v.high)})"
            lines.append(f"  {v.name} {v.metric.text(v.value)}{spread}{f'  {v.doubt}' if v.doubt else ''}")
        if self.lfw is not None:
            lines.append(f"  lfw: accuracy {self.lfw.accuracy:.4f} ± {self.lfw.accuracy_std:.4f}")
        if self.rfw is not None:
            lines += [f"  rfw {name}: accuracy {found.accuracy:.4f}" for name, found in self.rfw.groups.items()]
        if self.ijb is not None:
            lines += [f"  ijb: {name} {value:.4f}" for name, value in self.ijb.mean.items() if value is not None]
        lines += [repr(errors) for errors in self.groups.values()]
        lines = [line.replace(NBSP, " ") for line in lines]
        return "\n".join(["Evaluated", *lines, *doubts(self.to_dict()), *([str(self.left)] if str(self.left) else [])])


def left_out(faces: FaceSet, lost: tuple[tuple[str, str], ...], pairs: int) -> Left:
    """What an import left out, and the `pairs` lost by it, some of which `lost` names."""
    return Left(whole(faces.info.get("skipped_count")) or 0, pairs, lost) if pairs else Left()
