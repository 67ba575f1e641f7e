"""A party's policy: what it allows, whatever the server says. It is a TOML file (`visard client --policy FILE`).

methods     methods that it takes part in, by the names that runs give them
kinds       kinds of data that may leave (weights, class_vectors, statistic, metric, count, ...)
runs        ids of runs, servers: fingerprints of their CA; empty: any
known       fingerprints of the keys of other parties: only these count as parties, in sums that they sign
[bounds]    of every request: rounds, steps, learning rate, batch, pictures, parties, distance of weights, ...
[weights]   start: digests of the weights that a run may begin with; frozen: entries that must stay the same
[protect]   batch_norm_at_home, secure_aggregation, and a budget of differential privacy: dp_epsilon, dp_delta
[retention] days without a request after which the states of a run are removed
[require]   settings of the run -> what they must be: a value, { at_least = x }, { at_most = x } or { one_of = [...] }
[local]     settings that this party sets itself, in place of what the run says
[plugins]   allow = ["package.module", ...]: plug-ins of these modules may be imported, others never are

A run that differs, or that lacks a setting named here, is refused before anything leaves this party. The content of
requests, such as weights, is checked at every request (`deployment.guard`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from visard.disclosure import Disclosure
from visard.errors import PublicError, UsageError, did_you_mean
from visard.files import parse_toml, read_text

WORDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": lambda value, bound: isinstance(value, int | float) and value >= bound,
    "at_most": lambda value, bound: isinstance(value, int | float) and value <= bound,
    "one_of": lambda value, allowed: value in allowed,
}
OWN = "keys"  # folders of a party, which no server may choose
WEAK = "insecure_keys"  # only a party itself may allow them
SAFE = ("weights", "metric", "count", "ciphertext", "public_key")  # kinds that a policy allows unless it says otherwise


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Between(Table):
    """Two bounds of a number, both allowed."""

    at_least: float = Field(ge=0)
    at_most: float = Field(ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Between:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least = {self.at_least:g} is above at_most = {self.at_most:g}")
        return self


class Bounds(Table):
    """`[bounds]`: checked at every request."""

    rounds: int = Field(default=1000, ge=1)  # at most, over all stages of a run
    requests: int = Field(default=20_000, ge=1)  # at most, of one run
    runs: int = Field(default=50, ge=1)  # at most, that this party has not forgotten
    steps: Between = Between(at_least=1, at_most=100_000)  # gradient steps of a request that trains
    lr: Between = Between(at_least=1e-6, at_most=1.0)  # learning rate of a request that trains
    batch: int = Field(default=4, ge=1)  # at least, pictures of a gradient step
    pictures: int = Field(default=8, ge=1)  # at least, training pictures behind a reply
    parties: int = Field(default=2, ge=1)  # at least, in an average, as the run says
    rows: int = Field(default=1_000_000, ge=1)  # at most, of class vectors in a request
    distance: float = Field(default=0.75, gt=0)  # of weights from those of the request before, relative to their norm


class Start(Table):
    """`[weights]`: what a request may carry."""

    start: tuple[str, ...] = ()  # digests of the weights that a run may begin with; none: any
    frozen: tuple[str, ...] = ()  # patterns of entries (trunk.*) that never change in a run

    @field_validator("start")
    @classmethod
    def _digests(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        for digest in found:
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise ValueError("a digest has 64 hexadecimal digits: visard client policy --start FILE writes it")
        return found


class Protect(Table):
    """`[protect]`: protection that a run must have."""

    batch_norm_at_home: bool = False  # no entry of batch norm leaves, not even its scale and shift
    secure_aggregation: bool = False  # the server sees sums alone
    dp_epsilon: float | None = Field(default=None, gt=0)  # most that all runs together may spend (aggregation.dp)
    dp_delta: float = Field(default=1e-5, gt=0, lt=1)


class Retention(Table):
    """`[retention]`: how long the states of runs are kept."""

    days: float | None = Field(default=None, gt=0)  # after the last request of a run; none: until visard client forget


class Plugins(Table):
    """`[plugins]`: modules that may be imported."""

    allow: tuple[str, ...] = ()


class Policy(Table):
    """What a party allows."""

    methods: tuple[str, ...] = Field(min_length=1)
    kinds: tuple[str, ...] = SAFE
    runs: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
    weights: Start = Start()
    protect: Protect = Protect()
    retention: Retention = Retention()
    require: dict[str, Any] = Field(default_factory=dict)
    local: dict[str, Any] = Field(default_factory=dict)
    plugins: Plugins = Plugins()

    @field_validator("kinds")
    @classmethod
    def _known(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        known = [kind.value for kind in Disclosure]
        for name in found:
            if name not in known:
                raise ValueError(f"unknown kind {name!r}{did_you_mean(name, known)}")
        return found

    @field_validator("known")
    @classmethod
    def _fingerprints(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        for text in found:
            if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
                raise ValueError("a fingerprint has 64 hexadecimal digits: visard keys show writes it")
        return found

    @field_validator("require", "local")
    @classmethod
    def _plain(cls, found: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(found, allow_nan=False)
        except TypeError:
            raise ValueError("holds a date or a time, which no setting is") from None
        except ValueError:
            raise ValueError("holds inf or nan, which no setting is") from None
        return found

    @field_validator("require")
    @classmethod
    def _words(cls, found: dict[str, Any]) -> dict[str, Any]:
        for name, leaf in leaves(found):
            for word, bound in leaf.items() if isinstance(leaf, dict) else ():
                if not isinstance(bound, list if word == "one_of" else int | float):
                    raise ValueError(f"{name}: {word} = {bound!r}")
        return found

    @classmethod
    def load(cls, path: Path) -> Policy:
        """From a file; one clear line for what is wrong with it."""
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--policy {path}: {error}") from None
        tree = parse_toml(text, f"--policy {path}")
        if "methods" not in tree and tree.keys() <= {"require", "local", "plugins"}:
            raise UsageError(f'--policy {path}: name the methods that are allowed: methods = ["fedavg"]')
        return cls.parse(tree, f"--policy {path}")

    @classmethod
    def parse(cls, tree: dict[str, Any], where: str) -> Policy:
        """From plain values; one clear line for what is wrong with them."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            path, text = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                text = f"unknown entry{did_you_mean(str(problem['loc'][-1]), _entries(problem['loc'][:-1]))}"
            raise UsageError(f"{where}: {path}: {text[0].lower()}{text[1:]}") from None

    def to_toml(self) -> str:
        """As a file holds it."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def allows(self, kind: Disclosure) -> bool:
        """Whether this kind may leave; the kinds of a secure sum may where weights may leave in the clear."""
        return kind.value in self.kinds or (kind in SUMMED and Disclosure.weights.value in self.kinds)

    @property
    def sums_only(self) -> bool:
        """Whether weights may leave only in sums. A policy with known parties needs this: only sums name parties."""
        return self.protect.secure_aggregation or bool(self.known)

    def check_kinds(self, kinds: frozenset[Disclosure], what: str) -> None:
        """Refuse kinds that are not allowed to leave; the error says what to do."""
        for kind in Disclosure:
            if kind in kinds and not self.allows(kind):
                hint = STATISTIC if kind is Disclosure.statistic else ""
                raise PublicError(f"{what} {kind.value}, a kind that this party does not allow to leave{hint}")

    def check_method(self, run: Mapping[str, Any]) -> None:
        """Refuse a run of another method; a plug-in is identified by its module, not by its own name."""
        section = run.get("method")
        name = section.get("name") if isinstance(section, Mapping) else None
        if name not in self.methods:
            raise PublicError(f"this party does not take part in {str(name)[:100]!r} (methods of its policy)")

    def applied(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the run with this party's own."""
        return _merged(without_folders(settings), self.local)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse complete settings that are not as required."""
        for name, wanted in leaves(self.require):
            value: Any = settings
            for part in name.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    raise PublicError(f"this party has requirements for {name}, which the run does not have")
                value = value[part]
            rules = wanted.items() if isinstance(wanted, dict) else [("", wanted)]
            for word, bound in rules:
                if not (WORDS[word](value, bound) if word else value == bound):
                    raise PublicError(
                        f"this party requires {name} {word.replace('_', ' ') or '='} {bound}, the run has {value}"
                    )
        allowed = {name for part in (self.require, self.local) for name, _ in leaves(part)}
        for name, value in leaves(settings):
            if name.split(".")[-1] == WEAK and value and name not in allowed:
                raise PublicError(f"the run sets {name}: this party does not allow keys that can be broken")
        aggregation = settings.get("aggregation")
        if self.protect.secure_aggregation and not (isinstance(aggregation, Mapping) and aggregation.get("secure")):
            raise PublicError("this party requires secure aggregation, which the run has not (aggregation.secure)")
        if self.known and not (isinstance(aggregation, Mapping) and aggregation.get("signed")):
            raise PublicError(
                "this party counts only parties that it knows (known), which needs aggregation.secure = true and "
                "aggregation.signed = true"
            )
        dp = aggregation.get("dp") if isinstance(aggregation, Mapping) else None
        if self.protect.dp_epsilon is not None and not dp:
            raise PublicError("this party requires differential privacy, which the run has not (aggregation.dp)")
        if self.protect.dp_epsilon is not None and isinstance(dp, Mapping) and dp.get("unit", "client") != "client":
            raise PublicError(
                "this party has a budget for all that it has together (protect.dp_epsilon), and the run hides single "
                "people (aggregation.dp.unit)"
            )


SUMMED = frozenset({Disclosure.masked, Disclosure.share, Disclosure.public_key, Disclosure.ciphertext})
STATISTIC = (
    ": allow it there, start the run from given weights (model.weights), where batch norm stays frozen, or take a "
    "network without batch norm (tiny_nobn, spherenet20)"
)


def _entries(path: tuple[int | str, ...]) -> list[str]:
    """The entries that a table of a policy has."""
    kind: Any = Policy
    for part in path:
        kind = kind.model_fields[part].annotation
    return list(kind.model_fields)


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, whatever file holds them."""
    found = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        found.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.reshape(-1).numpy())
    return found.hexdigest()


def without_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the folders of key files that they name."""
    return {k: without_folders(v) if isinstance(v, Mapping) else v for k, v in settings.items() if k != OWN}


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and their values; a table of WORDS is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and not (value and value.keys() <= WORDS.keys()):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(tree)
    for key, value in over.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return found
