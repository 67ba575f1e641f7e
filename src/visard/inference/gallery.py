"""A gallery of enrolled people in a safetensors file: a template of each, and features to choose a threshold.

It is filled from the pictures of a folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save, save_file

from visard.at_rest import Key, refuse_encrypted
from visard.data.listing import printable
from visard.data.removal import Receipt
from visard.errors import UsageError, VisardError, did_you_mean, one_line
from visard.evaluation.arrays import unit_rows
from visard.evaluation.roc import allowed
from visard.files import file_digest, open_file, replacing, unfinished
from visard.inference.model import FaceModel, load_model
from visard.inference.photos import ALIGNMENTS, Photos
from visard.inference.search import Exact, Floats, Index, Ints
from visard.models.inputs import Inputs

KIND, VERSION = "visard gallery", 1
PROBES = 4096  # enrolled pictures that are kept for thresholds
COMPARISONS = 1 << 22  # impostor scores that a threshold is read off
ABOUT = ("model", "model_file", "order", "mean", "std", "size", "align", "flip")
TENSORS: dict[str, npt.DTypeLike] = {
    "templates": np.float32,  # (people, E), length one
    "pictures": np.int64,  # (people,), enrolled of each
    "probes": np.float32,  # (<= PROBES, E), a sample of the enrolled pictures, length one
    "owner": np.int64,  # (<= PROBES,), whom each shows
    "names": np.uint8,  # JSON
}


class Match(NamedTuple):
    """An enrolled person and the cosine of its template."""

    name: str
    score: float


class Threshold(NamedTuple):
    """Accept if score >= value. `unreliable`: the rate rests on fewer than ten comparisons."""

    value: float
    rate: float | None  # None: the value was given
    comparisons: int
    unreliable: bool


@dataclass(frozen=True, eq=False)
class Gallery:
    """The enrolled people; `about` names the model and its input settings, so that queries use the same."""

    names: tuple[str, ...]
    templates: Floats
    pictures: Ints
    probes: Floats
    owner: Ints
    about: dict[str, str]

    @classmethod
    def enrol(cls, people: Sequence[str], features: Any, about: dict[str, str]) -> Gallery:
        """From the features (n, E) of pictures and the person of each; template = normalised mean of unit features."""
        if not len(people):
            raise UsageError("no person to enrol")
        names, owner, count = np.unique(np.array(people, object).astype(str), return_inverse=True, return_counts=True)
        rows = unit_rows(features, "pictures")
        order = np.argsort(owner, kind="stable")
        sums = np.add.reduceat(rows[order], np.cumsum(count) - count, axis=0, dtype=np.float64)
        empty = ~sums.any(axis=1)
        if empty.any():
            raise VisardError(f"the features of {names[np.argmax(empty)]} cancel to zero")
        kept = _some(len(rows), PROBES)
        templates = unit_rows(sums, "templates")
        return cls(tuple(names.tolist()), templates, count.astype(np.int64), rows[kept], owner[kept], dict(about))

    def __len__(self) -> int:
        return len(self.names)

    def with_more(self, other: Gallery) -> Gallery:
        """Both galleries' people; their models must be the same and their names different."""
        for key in ABOUT:
            if key != "model_file" and self.about.get(key) != other.about.get(key):
                raise UsageError(f"the gallery was made with another {key}: enrol everyone anew")
        if twice := sorted(set(self.names) & set(other.names)):
            raise UsageError(f"{twice[0]} is enrolled already ({len(twice)} of the new names are)")
        # pictures of either part are kept in proportion to their number
        total = int(self.pictures.sum() + other.pictures.sum())
        mine = min(len(self.probes), round(PROBES * int(self.pictures.sum()) / total))
        old = _some(len(self.probes), mine if total > PROBES else PROBES)
        new = _some(len(other.probes), PROBES - len(old))
        return replace(
            self,
            names=self.names + other.names,
            templates=np.concatenate([self.templates, other.templates]),
            pictures=np.concatenate([self.pictures, other.pictures]),
            probes=np.concatenate([self.probes[old], other.probes[new]]),
            owner=np.concatenate([self.owner[old], other.owner[new] + len(self)]),
        )

    def index(self, build: Callable[[Floats], Index] = Exact) -> Index:
        """Something to search the templates with: `visard.inference.search.Exact` or `Sketch`."""
        return build(self.templates)

    def identify(self, features: Any, k: int = 5, index: Index | None = None) -> list[list[Match]]:
        """The k best people for each row of features (Q, E), best first."""
        rows = unit_rows(features, "pictures")
        if rows.shape[1] != self.templates.shape[1]:
            raise UsageError(f"features of {rows.shape[1]} dimensions, the gallery has {self.templates.shape[1]}")
        scores, found = (index or self.index()).search(rows, k)
        return [
            [Match(self.names[p], float(s)) for s, p in zip(values, people, strict=True)]
            for values, people in zip(scores, found, strict=True)
        ]

    def comparison_threshold(self, far: float) -> Threshold:
        """For one picture against one enrolled person: `far` of the enrolled pictures' scores with others reach it."""
        # all people, or some of them if they are many
        taken = _some(len(self), max(1, COMPARISONS // max(1, len(self.probes))))
        scores = self.probes @ self.templates[taken].T
        return _threshold(scores[self.owner[:, None] != taken[None, :]], far)

    def pair_threshold(self, far: float) -> Threshold:
        """For one picture against another: `far` of the pairs of enrolled pictures of two people reach it."""
        taken = _some(len(self.probes), math.isqrt(2 * COMPARISONS))
        rows, owner = self.probes[taken], self.owner[taken]
        once = np.triu(owner[:, None] != owner[None, :], 1)
        return _threshold((rows @ rows.T)[once], far)

    def search_threshold(self, fpir: float) -> Threshold:
        """For a search: the share `fpir` of the enrolled pictures, without their own person, finds a match above it."""
        if len(self) < 2:
            return _threshold(np.empty(0, np.float32), fpir)
        probes = self.probes[: max(64, (1 << 30) // len(self))]
        scores, found = self.index().search(probes, 2)
        mine = found == self.owner[: len(probes), None]
        return _threshold(scores[np.arange(len(probes)), np.where(mine[:, 0], 1, 0)], fpir)

    def load_model(self, path: str | Path | None = None) -> FaceModel:
        """The model that the gallery was made with, from where it was or from `path`; another one is refused."""
        inputs = Inputs.of_spec(self.about, "the gallery")
        where = Path(path or self.about["model_file"])
        if path is None and not where.is_file():
            raise UsageError(f"the model that made this gallery is no longer at {where}: name it (--model)")
        about = self.about
        model = load_model(where, size=inputs.size, order=about["order"], mean=about["mean"], std=about["std"])
        if model.fingerprint != about["model"]:
            raise UsageError(f"{where} is not the model that made this gallery ({Path(about['model_file']).name})")
        return model

    def without(self, people: Iterable[str]) -> Gallery:
        """The gallery without these people: their templates, and the pictures of them that thresholds are read off."""
        gone = set(people)
        if unknown := sorted(gone - set(self.names)):
            raise UsageError(f"{unknown[0]!r} is not enrolled{did_you_mean(unknown[0], self.names)}")
        kept = np.array([name not in gone for name in self.names])
        if not kept.any():
            raise UsageError("that is everyone in the gallery: delete its file instead")
        probes = kept[self.owner]
        return replace(
            self,
            names=tuple(name for name in self.names if name not in gone),
            templates=self.templates[kept],
            pictures=self.pictures[kept],
            probes=self.probes[probes],
            owner=(np.cumsum(kept) - 1)[self.owner[probes]],
        )

    def save(self, path: str | Path, key: Key | None = None) -> None:
        """Write the gallery, encrypted if a key is given; the file appears when it is complete."""
        names = np.frombuffer(json.dumps(self.names, ensure_ascii=True).encode(), np.uint8)
        tensors = {key: np.ascontiguousarray(getattr(self, key)) for key in TENSORS if key != "names"}
        # all in one entry: safetensors writes several in random order
        about = json.dumps({"kind": KIND, "version": VERSION, **self.about}, sort_keys=True)
        everything, metadata = {**tensors, "names": names}, {"gallery": about}
        with replacing(path := Path(path)) as beside:
            if key is None:
                save_file(everything, str(beside), metadata)
            else:
                with beside.open("wb") as file:
                    file.writelines(key.chunks(save(everything, metadata), _what(path)))

    @classmethod
    def load(cls, path: str | Path, key: Key | None = None) -> Gallery:
        """Read a gallery; one clear line if the file is anything else, or encrypted with another key or none."""
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"no gallery at {path}")
        try:
            with _reading(path, key) as file:
                about = json.loads((file.metadata() or {}).get("gallery", "{}"))
                if not isinstance(about, dict) or about.get("kind") != KIND:
                    raise VisardError(f"{path} is no gallery")
                if about.get("version") != VERSION:
                    raise VisardError(f"{path} has format {about.get('version')}, this visard reads {VERSION}")
                found = {key: file.get_tensor(key) for key in TENSORS}
            names = json.loads(found.pop("names").tobytes())
        except VisardError:
            raise
        except Exception as error:  # other people's headers fail in more ways than the library documents
            raise VisardError(f"{path} is not a readable gallery: {one_line(error)[:160]}") from None
        gallery = cls(
            tuple(names) if isinstance(names, list) else (), **found, about={k: str(about.get(k, "")) for k in ABOUT}
        )
        if problem := gallery._problem():
            raise VisardError(f"{path} is damaged: {problem}")
        return gallery

    def _problem(self) -> str:
        people, probes = len(self.names), len(self.owner) if self.owner.ndim == 1 else -1
        width = self.templates.shape[1] if self.templates.ndim == 2 else -1
        shapes = {"templates": (people, width), "pictures": (people,), "probes": (probes, width), "owner": (probes,)}
        for key, shape in shapes.items():
            tensor = getattr(self, key)
            if tensor.shape != shape or tensor.dtype != TENSORS[key]:
                return f"{key} is {tensor.dtype} {tensor.shape}"
        if not people or not all(isinstance(name, str) for name in self.names) or len(set(self.names)) != people:
            return "its names are not people, each once"
        if self.pictures.min() < 1 or self.pictures.max() >= 2**40:
            return "it says of a person that no pictures were enrolled"
        if self.about["align"] not in ALIGNMENTS:
            return f"its alignment is {self.about['align'][:40]!r}"
        if probes and not (self.owner.min() >= 0 and self.owner.max() < people):
            return "a picture shows no face"
        for rows in (self.templates, self.probes):
            if not np.all(np.abs(np.einsum("nd,nd->n", rows, rows) - 1) < 1e-3):
                return "a template has not length one"
        return ""


def remove_people(path: Path, people: Sequence[str], receipt: Receipt, key: Key | None = None) -> int:
    """Take people out of a gallery file, which a new one replaces in one step; how many are left."""
    known = Gallery.load(path, key)
    left = known.without(people)
    receipt.before = {path.name: file_digest(path)}
    gone = {"templates": len(known) - len(left), "probes": len(known.probes) - len(left.probes)}
    receipt.removed = {"people": gone["templates"], "pictures": int(known.pictures.sum() - left.pictures.sum())}
    receipt.look("templates", "the gallery", gone["templates"], gone["templates"])
    receipt.look("features of pictures that thresholds are read off", "the gallery", gone["probes"], gone["probes"])
    receipt.write("begun")  # nothing is removed if the receipt cannot be written
    stale = unfinished(path)
    for file in stale:
        file.unlink(missing_ok=True)
    receipt.look("files of an interrupted writer", "beside the gallery", len(stale), len(stale))
    receipt.look("search indexes", "the gallery", 0, 0)  # they are made of the templates when one searches
    left.save(path, key)
    receipt.after = {path.name: file_digest(path)}
    receipt.write("done")
    return len(left)


def _what(path: Path) -> str:
    """The name that an encrypted gallery is bound to, so that it cannot replace another one."""
    return f"gallery {path.name}"


class _Decrypted:
    """The content of a safetensors file that is in memory; its tensors are views of it."""

    def __init__(self, content: bytearray) -> None:
        self._start = 8 + int.from_bytes(content[:8], "little")
        self._header, self._content = json.loads(content[8 : self._start]), content

    def metadata(self) -> dict[str, str]:
        metadata: dict[str, str] = self._header["__metadata__"]
        return metadata

    def get_tensor(self, key: str) -> npt.NDArray[Any]:
        begin, end = self._header[key]["data_offsets"]
        content = memoryview(self._content)[self._start + begin : self._start + end]
        return np.frombuffer(content, TENSORS[key]).reshape(self._header[key]["shape"])


@contextmanager
def _reading(path: Path, key: Key | None) -> Iterator[Any]:
    """The tensors of a gallery file: from the disk, or decrypted in memory."""
    if key is not None:
        with open_file(path) as encrypted:
            content = key.decrypt(encrypted, _what(path), path)
        yield _Decrypted(content)
        return
    refuse_encrypted(path)
    with safe_open(path, framework="numpy") as file:
        yield file


def _some(count: int, most: int) -> Ints:
    """All of `count` rows, or `most` random ones, rising; always the same."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, max(0, most), replace=False))


def _threshold(strangers: Floats, rate: float) -> Threshold:
    """The smallest threshold that at most `rate` of the strangers' scores reach."""
    if not 0 < rate <= 1:
        raise UsageError(f"rate {rate}: must be above 0 and at most 1")
    n = len(strangers)
    if not n:
        raise UsageError("a threshold cannot be found in a gallery of fewer than two people: give one")
    k = allowed(rate, n)
    if k >= n:
        return Threshold(-1.0, rate, n, False)
    largest = np.partition(strangers, n - k - 1)[n - k - 1]  # the first that must stay below
    return Threshold(float(np.nextafter(largest, np.float32(2))), rate, n, rate * n < 10)


def person_of(name: str) -> str:
    """Whom a file shows: its outermost folder, or its own name without a number at the end (anna_2.jpg -> anna)."""
    folder, slash, _ = name.partition("/")
    if slash:
        return folder
    stem = Path(name).stem
    return re.sub(r"[_ ]\(?\d+\)?$", "", stem) or stem


def enrol_folder(
    folder: Path,
    model: FaceModel,
    *,
    align: str | None = None,
    flip: bool = False,
    min_norm: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Gallery, list[tuple[str, str]]]:
    """A gallery of the people in a folder (or zip), and the pictures that could not be used with the reason.

    Either a folder for each person, or pictures named by person: anna.jpg, or anna_1.jpg and anna_2.jpg. They are
    aligned as the model wants it, unless `align` says otherwise. Those with features shorter than `min_norm` are left
    out: the network recognises little in them.
    """
    align = align or model.align
    found = model.embed(Photos(folder), align=align, flip=flip, say=say, progress=progress)
    _say_crowded(found.crowded, say)
    norm = found.norm
    if len(norm):
        say(f"length of the features: {norm.min():.1f} to {norm.max():.1f}, median {np.median(norm):.1f}")
    good = norm >= min_norm
    skipped = [*found.skipped, *((found.files[k], f"its feature has length {norm[k]:.1f}, below {min_norm:g}")
                                 for k in np.flatnonzero(~good))]  # fmt: skip
    if not good.any():
        file, reason = skipped[0]
        raise UsageError(f"{folder}: not one of {len(skipped)} pictures could be used ({file}: {reason})")
    about = {key: model.spec[key] for key in ("order", "mean", "std", "size")}
    about |= {"model": model.fingerprint, "model_file": str(model.path.absolute()) if model.path else ""}
    about |= {"align": align, "flip": str(int(flip))}
    people = [printable(person_of(found.files[k])) for k in np.flatnonzero(good)]
    return Gallery.enrol(people, found.features[good], about), [(printable(file), reason) for file, reason in skipped]


def _say_crowded(files: Sequence[str], say: Callable[[str], None]) -> None:
    """Name the pictures of which only the main face was taken."""
    shown = ", ".join(map(printable, files[:5])) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    if files:
        say(f"more than one face, the main one is used: {shown}")


def features_of(
    files: Iterable[Path],
    model: FaceModel,
    *,
    align: str | None = None,
    flip: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Floats:
    """Features (n, E) of picture files, cut as the model wants; one that cannot be used is an error that names it."""
    named = list(files)
    for path in named:
        if path.is_dir() or path.suffix.lower() == ".zip":
            raise UsageError(f"{path} is a folder or a zip file: name the pictures, for example {path}/*.jpg")
    found = model.embed(Photos(named), align=align, flip=flip)
    for file, reason in found.skipped:
        raise (VisardError if Path(file).is_file() else UsageError)(f"{file}: {reason}")
    _say_crowded(found.crowded, say)
    return found.features
