"""Settings of a run: TOML to typed values, unknown keys refused, `--set a.b=c`, presets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from visard import methods
from visard.aggregation.rules import RULES, Mean, Rule
from visard.core import Method
from visard.data.catalog import DataSettings
from visard.data.partition_kinds import PartitionSettings
from visard.errors import UsageError, did_you_mean
from visard.methods.scoring import Tuning
from visard.numerics import Numerics


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    """`[model]`: the backbone."""

    name: str = "tiny"
    embedding: int | None = Field(default=None, ge=2, le=4096)  # None: the network's own default
    weights: str | None = None  # a model file to start from
    class_vectors: str | None = None  # a file of class vectors of the public identities, which a run leaves behind


class EngineSettings(Section):
    """`[engine]`: where client steps run; never changes results."""

    kind: Literal["auto", "local", "pool", "flower"] = "auto"  # auto: a pool where there are cores and clients for it
    workers: int | None = Field(default=None, ge=1)  # of pool and flower; None: cores / numerics.threads_per_step
    server: str | None = None  # flower: state folder of the `visard server` whose parties do the steps; None: simulated
    wait: float = Field(default=300.0, ge=0)  # seconds to wait for parties that are not connected
    timeout: float = Field(default=3600.0, gt=0, le=1e6)  # seconds of one client step; at most eleven days
    min_replies: float = Field(default=0.5, ge=0, le=1)  # share of the asked clients that a round needs

    @model_validator(mode="after")
    def _fits_together(self) -> EngineSettings:
        if self.server is not None and self.kind != "flower":
            raise ValueError(f"a server needs kind = flower, not {self.kind}")
        return self


class EvaluationSettings(Section):
    """`[evaluation]`: what is tested, and how often."""

    every: int = Field(default=5, ge=0)  # rounds between evaluations; 0 = only at the end
    pairs: int = Field(default=6000, ge=20)  # balanced pairs for the ten-fold accuracy
    far: tuple[float, ...] = (0.1, 0.01, 0.001)
    bootstrap: int = Field(default=200, ge=0)  # resamples for confidence intervals of the final figures
    flip: bool = False  # add the features of the mirrored picture
    clients: bool = True  # test every client on its own held-out pictures
    impostors: Literal["own", "all"] = "own"  # all: clients test against the test pictures of all parties (simulated)
    client_benchmarks: bool = False  # let clients test their personal models on the unseen people too
    tuning: Tuning = Tuning()  # test clients' models before and after tuning


class Settings(Section):
    """Everything that determines a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str = "run"
    seed: int = Field(default=0, ge=0, lt=2**63)
    method: Method[Any]
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings(clients=10)
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    numerics: Numerics = Numerics()
    evaluation: EvaluationSettings = EvaluationSettings()
    aggregation: Rule = Mean()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is None (TOML has no word for it)."""
        plain = self.model_dump(mode="json", exclude={"method", "aggregation"})
        plain["method"] = {"name": self.method.name, **dataclasses.asdict(self.method)}  # type: ignore[call-overload]
        if self.aggregation != Mean():  # the plain mean goes without saying
            plain["aggregation"] = {"rule": self.aggregation.name, **dataclasses.asdict(self.aggregation)}
        tidy: dict[str, Any] = _tidy({k: plain[k] for k in type(self).model_fields if k in plain})
        return tidy

    def to_toml(self) -> str:
        """The complete `config.toml`, which reproduces the run."""
        return f"# visard run config.toml\n{tomli_w.dumps(self.to_dict())}"

    def fingerprint(self) -> str:
        """A hash of all that results depend on; the name and the engine are not among it."""
        content = {k: v for k, v in self.to_dict().items() if k not in ("name", "engine")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def presets() -> dict[str, str]:
    """Name -> text of the presets inside the package."""
    folder = resources.files("visard") / "presets"
    found = (f for f in folder.iterdir() if f.name.endswith(".toml"))
    return {f.name.removesuffix(".toml"): f.read_text() for f in sorted(found, key=lambda f: f.name)}


def load(source: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a preset's name or a TOML file, changed by `a.b=c` overrides."""
    text, where = _read(str(source))
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    tree.setdefault("name", Path(str(source)).stem)
    for override in overrides:
        _override(tree, override)
    return parse(tree, where)


def parse(tree: dict[str, Any], where: str = "settings") -> Settings:
    """Typed settings from plain values; one clear line for the first thing that is wrong."""
    section = tree.get("method")
    if not isinstance(section, dict) or "name" not in section:
        raise UsageError(f"{where}: [method] needs a name{did_you_mean('', methods.METHODS)}")
    kind = methods.find(str(section["name"]))
    fields = {k: v for k, v in section.items() if k != "name"}
    _check_keys(kind, fields, "method", where)
    _check_keys(Settings, {k: v for k, v in tree.items() if k not in ("method", "aggregation")}, "", where)
    rule, of_rule = _rule(tree.get("aggregation", {}), where)
    try:
        method = TypeAdapter(kind).validate_python(fields)
        aggregation = TypeAdapter(rule).validate_python(of_rule)
        return Settings.model_validate({**tree, "method": method, "aggregation": aggregation})
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_problem(error, bool(fields))}") from None


def _rule(section: Any, where: str) -> tuple[type[Rule], dict[str, Any]]:
    """The class of an aggregation rule, and its settings."""
    if not isinstance(section, dict):
        raise UsageError(f"{where}: [aggregation] must be a section with a rule")
    name = str(section.get("rule", Mean.name))
    if name not in RULES:
        raise UsageError(f"{where}: unknown aggregation rule {name!r}{did_you_mean(name, RULES)}")
    fields = {k: v for k, v in section.items() if k != "rule"}
    _check_keys(RULES[name], fields, "aggregation", where)
    return RULES[name], fields


def _read(source: str) -> tuple[str, str]:
    known = presets()
    if source in known:
        return known[source], f"preset {source}"
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        raise UsageError(f"no preset or file {source!r}{did_you_mean(source, known)}")
    try:
        return path.read_text(), str(path)
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: give its config.toml, or --resume with --out {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _override(tree: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {text}: must look like section.key=value")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {text}: {key} is a value, not a section")
    try:
        tree[keys[-1]] = tomllib.loads(f"x = {value.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        tree[keys[-1]] = value.strip()  # a bare word is text


def _check_keys(kind: Any, values: dict[str, Any], path: str, where: str) -> None:
    """Refuse unknown keys, at every depth, naming the nearest known one."""
    if dataclasses.is_dataclass(kind):
        known = {f.name: getattr(f.default, "__class__", None) for f in dataclasses.fields(kind)}
    else:
        known = {name: field.annotation for name, field in kind.model_fields.items()}
    for key, value in values.items():
        if key not in known:
            full = f"{path}.{key}".lstrip(".")
            raise UsageError(f"{where}: unknown setting {full}{did_you_mean(key, known)}")
        inner = known[key]
        nested = dataclasses.is_dataclass(inner) or (isinstance(inner, type) and issubclass(inner, BaseModel))
        if nested and isinstance(value, dict):
            _check_keys(inner, value, f"{path}.{key}".lstrip("."), where)


def _first_problem(error: ValidationError, method: bool) -> str:
    problem = error.errors(include_url=False)[0]
    path = ".".join(str(p) for p in problem["loc"])
    if method and error.title not in ("Settings",):
        path = f"method.{path}".rstrip(".")
    shown = repr(problem.get("input"))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{path} = {shown}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _tidy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tidy(v) for k, v in value.items() if v is not None}
    return [_tidy(v) for v in value] if isinstance(value, list | tuple) else value
