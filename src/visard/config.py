"""Settings of a run: TOML to typed values, unknown keys refused, `--set a.b=c`, presets."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from visard import plugins
from visard.aggregation.dp import Privacy
from visard.aggregation.optimisers import OPTIMISERS
from visard.aggregation.outgoing import Postprocessor
from visard.aggregation.registries import POSTPROCESSORS, RULES
from visard.aggregation.rules import Mean, Rule
from visard.core import Method
from visard.data.partition_kinds import PartitionSettings
from visard.data.sources.catalog import DataSettings
from visard.data.sources.scaling import scaled
from visard.errors import UsageError, did_you_mean
from visard.evaluation.metrics import FAR
from visard.files import parse_toml, read_text
from visard.methods import METHODS
from visard.methods.scoring import Tuning
from visard.models.cut import HOW
from visard.numerics import Numerics
from visard.plugins import Registry
from visard.presets import presets

HEADING = "# visard run config.toml"  # the first line of the config.toml of a run
CHOSEN = ("method", "aggregation", "outgoing")  # sections that name a class, whose settings are its fields


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Section):
    """`[model]`: the backbone."""

    name: str = "tiny"
    embedding: int | None = Field(default=None, ge=2, le=4096)  # None: the network's own default
    weights: str | None = None  # a model file to start from
    class_vectors: str | None = None  # a file of class vectors of the public identities, as a run writes it
    train: str = "all"  # or the last part: tail (by a rule), last:K layers, from:LAYER; or factors of rank R: lora:R
    fresh: bool = False  # the part that trains forgets the given weights and begins at random, by the run's seed
    cache: Literal["fp32", "fp16", "off"] = (
        "fp32"  # how the activations of the frozen part are stored; off: computed each time
    )
    cache_in: Literal["disk", "memory"] = "disk"  # where they are stored; in memory they are gone when the run ends
    frozen_norm: bool | None = None  # whether batch norm keeps its statistics; None: see Settings.frozen_norm

    @field_validator("train")
    @classmethod
    def _says_what_trains(cls, how: str) -> str:
        if not HOW.fullmatch(how):
            raise ValueError(
                "must be all, tail, last:K, from:LAYER (visard models cuts NAME lists the layers) or lora:R"
            )
        return how

    @property
    def is_cut(self) -> bool:
        """Whether a part of the network is frozen, or all of it with factors beside it."""
        return self.train != "all"

    @property
    def rank(self) -> int:
        """Of the factors that train (LoRA); 0: parts of the network train."""
        kind, _, value = self.train.partition(":")
        return int(value) if kind == "lora" else 0

    @property
    def stored_in(self) -> Literal["disk", "memory"] | None:
        """Where the frozen part's activations are kept; None: nowhere."""
        return self.cache_in if self.is_cut and not self.rank and self.cache != "off" else None


class EngineSettings(Section):
    """`[engine]`: where client steps run; never changes results."""

    kind: Literal["auto", "local", "pool", "flower"] = "auto"  # auto: a pool where there are cores and clients for it
    workers: int | None = Field(default=None, ge=1)  # of pool and flower; None: cores / numerics.threads_per_step
    workers_per_device: int = Field(default=1, ge=1, le=64)  # of the pool, where numerics.device is no CPU
    server: str | None = None  # flower: state folder of the `visard server` whose parties do the steps; None: simulated
    wait: float = Field(default=300.0, ge=0)  # seconds to wait for parties that are not connected
    timeout: float = Field(default=3600.0, gt=0, le=1e6)  # seconds of one client step; at most eleven days
    encrypt_with: str | None = None  # a key file: checkpointed states and class vectors are encrypted with it
    watchers: tuple[str, ...] | None = None  # trackers and plug-ins that follow the run
    min_replies: float = Field(default=0.5, ge=0, le=1)  # share of the asked clients that a round needs
    max_identities: int = Field(default=100_000, ge=1)  # largest total over parties with their own pictures

    @model_validator(mode="after")
    def _fits_together(self) -> EngineSettings:
        if self.server is not None and self.kind != "flower":
            raise ValueError(f"a server needs kind = flower, not {self.kind}")
        return self


class EvaluationSettings(Section):
    """`[evaluation]`: what is tested, and how often."""

    every: int = Field(default=5, ge=0)  # rounds between evaluations; 0 = only at the end
    pairs: int = Field(default=6000, ge=20)  # balanced pairs for the ten-fold accuracy
    far: tuple[Annotated[float, Field(gt=0, le=1)], ...] = FAR  # false accept rates to give TAR at
    bootstrap: int = Field(default=200, ge=0)  # resamples for confidence intervals of the final metrics
    flip: bool = False  # add the features of the mirrored picture
    clients: bool = True  # test every client on its own held-out pictures
    impostors: Literal["own", "all"] = "own"  # all: clients test against the test pictures of all parties (simulated)
    client_benchmarks: bool = False  # let clients test their personal models on the unseen people too
    tuning: Tuning = Tuning()  # test clients' models before and after tuning
    # errors by group at one threshold: "domain" or names of attributes; by domain where the test pictures have several
    by: tuple[str, ...] | None = None
    fmr: float = Field(default=1e-3, gt=0, lt=1)  # false match rate of everyone together at that threshold


class Stated(Section):
    """`[parties.NAME]`: what the operator states of a party; it counts for at most this, whatever it claims."""

    pictures: int | None = Field(default=None, ge=1)
    identities: int | None = Field(default=None, ge=1)


class Settings(Section):
    """Everything that determines a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str = "run"
    seed: int = Field(default=0, ge=0, lt=2**63)
    plugins: tuple[str, ...] = ()  # files and modules that the settings take things from; files with a digest
    method: Method[Any]
    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings(clients=10)
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    numerics: Numerics = Numerics()
    evaluation: EvaluationSettings = EvaluationSettings()
    aggregation: Rule = Mean()
    outgoing: tuple[Postprocessor, ...] = ()  # what happens to replies before they leave a client
    parties: dict[str, Stated] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.engine.encrypt_with is not None and self.model.stored_in == "disk":
            raise ValueError(
                "a key (--encrypt-with) does not protect activations on disk, which are as personal as pictures: "
                "set model.cache_in=memory or model.cache=off"
            )
        if self.model.fresh and (self.model.rank or not self.model.is_cut):
            raise ValueError(
                f"model.fresh needs a part that trains: model.train = tail, last:K or from:LAYER, not "
                f"{self.model.train}"
            )
        if self.model.rank and self.model.frozen_norm is False:
            raise ValueError(f"model.frozen_norm = false: batch norm does not train with {self.model.train}")
        if self.model.rank and self.method.trains_norm():
            raise ValueError(f"method.batch_norm is about batch norm, which does not train with {self.model.train}")
        packed = next((p for p in self.outgoing if p.last), None)
        rule = self.aggregation
        if getattr(rule, "dp", None) is not None and getattr(self.method, "shows", frozenset)():
            raise ValueError(
                f"method.negatives = {self.method.negatives}: clients show them one by one, so no noise of "  # type: ignore[attr-defined]
                "aggregation.dp covers them: take method.negatives = public, or none"
            )
        if getattr(self.method, "in_turn", 1) > 1 and (other := rule.beyond_mean()):
            raise ValueError(f"method.in_turn: clients go on from the weights of single others, so leave out {other}")
        if getattr(getattr(rule, "dp", None), "unit", "client") == "person":
            self._fits_people(packed)
        summed = getattr(packed, "to", "") == "int8" and getattr(rule, "dp", None) is None
        if packed and getattr(rule, "secure", False) and not summed:
            raise ValueError(
                f"outgoing: {packed.name} sends weights in another form, of which aggregation.secure can make no sum "
                '(it can of compress with to = "int8", without aggregation.dp)'
            )
        return self

    def _fits_people(self, packed: Postprocessor | None) -> None:
        """Refuse settings with which a client cannot do a step for one person alone."""
        method, person = self.method, "aggregation.dp.unit = person"
        if getattr(method, "negatives", "public") != "public":
            raise ValueError(
                f"{person}: a head with one person alone learns nothing: keep them away from public people "
                "(method.negatives = public, partition.public_identities)"
            )
        if getattr(method, "share_head", False):
            raise ValueError(f"{person}: heads stay at home, leave out method.share_head")
        if getattr(method, "batch_norm", "average") != "average":
            raise ValueError(f"{person}: batch norm that stays at home would be each person's own (method.batch_norm)")
        if packed is not None:
            raise ValueError(f"{person}: clients send the sum over their people, leave out {packed.name} of outgoing")

    _note: str = PrivateAttr(default="")  # how these settings came about, for the reader

    def with_note(self, note: str) -> Settings:
        """The same settings with a note."""
        self._note = note
        return self

    @property
    def note(self) -> str:
        """What a run prints about its settings when it begins; usually empty."""
        return self._note

    @property
    def real_parties(self) -> bool:
        """Whether the clients are parties of a deployment."""
        return self.engine.server is not None or self.partition.kind == "parties"

    @property
    def frozen_norm(self) -> bool:
        """Whether batch norm keeps its statistics in training: as set, or where weights are given.

        By default not where the method has settings about these statistics, such as FedBN's.
        """
        if self.model.rank:
            return True
        asked = self.model.frozen_norm
        return asked if asked is not None else self.model.weights is not None and not self.method.trains_norm()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None is left out, because TOML has no word for it."""
        plain = self.model_dump(mode="json", exclude={"method", "aggregation", "outgoing"})
        plain["data"] = self.data.to_dict()
        if self.frozen_norm or self.model.weights is not None:
            plain["model"]["frozen_norm"] = self.frozen_norm
        else:
            del plain["model"]["frozen_norm"]
        left_out: tuple[str, ...] = () if self.model.is_cut else ("train",)  # the default is left out: all of it trains
        if not self.model.fresh:
            left_out += ("fresh",)
        if not self.model.is_cut or self.model.rank:
            left_out += ("cache", "cache_in")  # there are no activations to keep
        plain["model"] = {k: v for k, v in plain["model"].items() if k not in left_out}
        plain["method"] = {"name": METHODS.name_of(self.method), **dataclasses.asdict(self.method)}  # type: ignore[call-overload]
        if self.aggregation != Mean():  # the default is left out: the plain mean
            plain["aggregation"] = {"rule": RULES.name_of(self.aggregation), **dataclasses.asdict(self.aggregation)}
            if isinstance(self.aggregation, Mean) and not self.aggregation.secure:
                for name in Mean.OF_SECURE:  # settings of what is off
                    del plain["aggregation"][name]
            if (optimiser := self.aggregation.optimiser) is not None:
                plain["aggregation"]["optimiser"]["name"] = OPTIMISERS.name_of(optimiser)
        if self.outgoing:
            plain["outgoing"] = [{"name": POSTPROCESSORS.name_of(p), **dataclasses.asdict(p)} for p in self.outgoing]
        for name in ("plugins", "parties"):
            if not plain[name]:
                del plain[name]
        tidy: dict[str, Any] = _tidy({k: plain[k] for k in type(self).model_fields if k in plain})
        return tidy

    def to_toml(self) -> str:
        """The complete `config.toml`, which reproduces the run."""
        return f"{HEADING}\n{tomli_w.dumps(self.to_dict())}"

    def fingerprint(self, rounds: bool = True) -> str:
        """A hash of all settings that results depend on: not the name, the engine and the place of plug-ins.

        Without `rounds`: of all that stays the same when a run is extended by more rounds.
        """
        content = {k: v for k, v in self.to_dict().items() if k not in ("name", "engine")}
        content["model"].pop("cache_in", None)
        del content["numerics"]["device"]  # a run may go on elsewhere
        _leave_out_later(content, self.frozen_norm)
        if not rounds and not self.method.fixed_length():
            content["method"] = {k: v for k, v in content["method"].items() if k != "rounds"}
        if self.plugins:
            content["plugins"] = plugins.digests(self.plugins)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# (path, value) of settings that came after runs were made, and the value at which each changes nothing
LATER: tuple[tuple[str, Any], ...] = (
    ("numerics.deterministic", False),
    ("evaluation.fmr", EvaluationSettings.model_fields["fmr"].default),
    ("evaluation.tuning.between", "test"),
    ("evaluation.tuning.flip", True),
    ("aggregation.dp.unit", "client"),
    ("partition.exclude", []),
    ("partition.without", []),
    ("method.mask_absent", True),
    ("method.in_turn", 1),
    ("method.refresh_head", False),
    ("method.target_batch", 0),
    ("method.target_dropout", True),
    ("method.target_entropy", 0),
    ("method.negatives_by.correction", 1.0),
    ("method.clustering.min_quality", 0),
    ("method.clustering.min_separation", -1),
    ("method.clustering.apart", 0),
    ("method.contrast.norm", "running"),
    ("method.personalise.vectors", "kept"),
)
LATER_OF_METHODS: dict[str, tuple[tuple[str, Any], ...]] = {
    "pretrain": (("method.head_start", "random"),),
    "fedface": (("method.vectors_lr", None),),
    "fedfr-da": (("method.participation", 1),),
    "hf-maml": (("method.training.momentum", 0),),
}


def _leave_out_later(content: dict[str, Any], frozen_norm: bool) -> None:
    """Leave settings of later versions out where they change nothing, so that earlier runs can be resumed."""
    method = content["method"]
    if not frozen_norm:
        content["model"].pop("frozen_norm", None)
    if method.get("negatives") == "none":
        del method["negatives"], method["negatives_by"]
    for path, value in (*LATER, *LATER_OF_METHODS.get(method["name"], ())):
        *sections, name = path.split(".")
        section = content
        for part in sections:
            section = section.get(part, {})
        if name in section and section[name] == value:
            del section[name]
    for part in method.values():
        if isinstance(part, dict) and "amount" in part and part.get("optimiser") == "sgd":
            del part["optimiser"]


def load(source: str | Path, overrides: Sequence[str] = (), own: Sequence[str | Path] = ()) -> Settings:
    """Settings from a preset, a TOML file or a method's name, changed by `a.b=c` overrides; `own` are plug-ins.

    A file may come from anywhere: what it names as plug-in is imported only if `own` or an override names it too.
    """
    recorded = plugins.load(own)
    said: dict[str, Any] = {}
    for override in overrides:
        _override(said, override)
    plugins.trust(plugins.modules_in(said))
    text, where = _read(str(source))
    tree = parse_toml(text, where)
    if str(source) not in presets() and str(source) not in METHODS:
        plugins.doubt(tree, where)
        if "plugins" not in said and _plugins(tree, where):
            tree["plugins"] = plugins.confirmed(tree["plugins"], where)
        recorded = [plugin for plugin in recorded if plugin not in plugins.modules_in(tree)]  # it says so already
    tree.setdefault("name", Path(str(source).rpartition(":")[2]).stem)
    model = tree.get("model")
    if text.startswith(HEADING) and isinstance(model, dict) and "weights" in model:
        model.setdefault("frozen_norm", False)  # a complete file of an older visard, which knew nothing else
    preset = copy.deepcopy(tree)
    for override in overrides:
        _override(tree, override)
    note = ""
    if (
        str(source) in presets()
        and isinstance(tree.get("data", {}), dict)
        and isinstance(tree.get("partition", {}), dict)
    ):
        given = {override.partition("=")[0].strip() for override in overrides}
        tree["partition"], note = scaled(preset, tree.get("data", {}), tree.get("partition", {}), given)
    if recorded:
        tree["plugins"] = list(dict.fromkeys([*tree.get("plugins", []), *recorded]))
    return parse(tree, where).with_note(note)


def parse(tree: dict[str, Any], where: str = "settings") -> Settings:
    """Typed settings from plain values; one clear line for the first mistake."""
    tree = {**tree, "plugins": plugins.load(_plugins(tree, where))}
    method = _chosen(METHODS, tree, "method", "name", None, where)
    for odd in [key for key in tree if key not in _known(Settings)]:
        if places := [*_places(type(method), odd, "method."), *_places(Settings, odd)]:
            raise UsageError(f"{where}: unknown setting {odd} (did you mean {places[0]!r}?)")
    _check_keys(Settings, {k: v for k, v in tree.items() if k not in CHOSEN}, "", where)
    rule = _aggregation(tree.get("aggregation", {}), where)
    outgoing = _outgoing(tree.get("outgoing", []), where)
    try:
        found = Settings.model_validate({**tree, "method": method, "aggregation": rule, "outgoing": outgoing})
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_problem(error, '')}") from None
    return found.model_copy(update={"aggregation": rule.between_parties()}) if found.real_parties else found


def _plugins(tree: dict[str, Any], where: str) -> list[str]:
    listed = tree.get("plugins", [])
    if not isinstance(listed, list) or not all(isinstance(plugin, str) for plugin in listed):
        raise UsageError(f"{where}: plugins = {str(listed)[:60]}: must be a list of files or modules")
    return listed


def _chosen(registry: Registry[Any], tree: dict[str, Any], path: str, key: str, default: str | None, where: str) -> Any:
    """An object of the class that a section names by its `key`, with the section's other settings."""
    section = tree.get(path, {})
    if not isinstance(section, dict) or not (name := section.get(key, default)):
        raise UsageError(f"{where}: [{path}] needs a {key}{did_you_mean('', registry)}")
    kind: Any = registry.find(str(name))
    return checked(kind, {k: v for k, v in section.items() if k != key}, path, where)


def checked(kind: Any, fields: dict[str, Any], path: str, where: str) -> Any:
    """Settings of a kind from plain values; one clear line for the first that is unknown or out of bounds."""
    _check_keys(kind, fields, path, where)
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_problem(error, f'{path}.'.lstrip('.'))}") from None
    except UsageError as error:  # of what settings check themselves; such a line may begin with a setting inside
        inside = re.split(r"[.: ]", str(error), maxsplit=1)[0]
        names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        raise UsageError(f"{where}: {path}.{error}" if path and inside in names else str(error)) from None


def _aggregation(section: Any, where: str) -> Rule:
    """The rule that a section names, with an optimiser that is a name, or a table with a name and settings, and with
    the settings of differential privacy."""
    given: dict[str, Any] = section if isinstance(section, dict) else {}
    named, name, optimiser = given.get("optimiser"), given.get("rule", Mean.name), None
    if (dp := given.get("dp")) is not None:
        if name != Mean.name and name in RULES:
            raise UsageError(f"{where}: aggregation.rule = {name}: the noise of aggregation.dp is for the mean alone")
        if not isinstance(dp, dict):
            raise UsageError(f"{where}: aggregation.dp = {str(dp)[:60]}: must be a section, for example dp.epsilon = 8")
        section = given = given | {"dp": checked(Privacy, dp, "aggregation.dp", where)}
    if named is not None:
        section = {k: v for k, v in given.items() if k != "optimiser"}
        tree = {"aggregation.optimiser": {"name": named} if isinstance(named, str) else named}
        optimiser = _chosen(OPTIMISERS, tree, "aggregation.optimiser", "name", None, where)
    if given.get("secure") and name != Mean.name and name in RULES:
        raise UsageError(f"{where}: aggregation.rule = {name} needs single replies, which aggregation.secure hides")
    rule: Rule = _chosen(RULES, {"aggregation": section}, "aggregation", "rule", Mean.name, where)
    return dataclasses.replace(rule, optimiser=optimiser)


def _outgoing(listed: Any, where: str) -> tuple[Postprocessor, ...]:
    """The postprocessors that a list of names, or of tables with a name and settings, asks for."""
    if not isinstance(listed, list):
        raise UsageError(f"{where}: outgoing = {str(listed)[:60]}: must be a list, for example [[outgoing]]")
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in listed]
    found = [_chosen(POSTPROCESSORS, {"outgoing": entry}, "outgoing", "name", None, where) for entry in entries]
    if early := [p for p in found[:-1] if p.last]:
        raise UsageError(
            f"{where}: outgoing: {early[0].name} must be the last: nothing after it can read what it sends"
        )
    return tuple(found)


def _read(source: str) -> tuple[str, str]:
    known = presets()
    if source in known:
        return known[source], f"preset {source}"
    if source in METHODS:  # of a plug-in: those of visard have presets
        return f"[method]\nname = {json.dumps(source)}\n", f"method {source}"
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        raise UsageError(f"no preset or file {source!r}{did_you_mean(source, [*known, *METHODS])}")
    try:
        return read_text(path), str(path)
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
        tree[keys[-1]] = parse_toml(f"x = {value.strip()}", "--set")["x"]
    except UsageError:
        tree[keys[-1]] = value.strip()  # a bare word is text


def _check_keys(kind: Any, values: dict[str, Any], path: str, where: str) -> None:
    """Refuse unknown keys, at every depth, naming the nearest known one."""
    known = _known(kind)
    for key, value in values.items():
        if key not in known:
            full = f"{path}.{key}".lstrip(".")
            raise UsageError(f"{where}: unknown setting {full}{did_you_mean(key, known)}")
        inner, name = known[key], f"{path}.{key}".lstrip(".")
        if _has_settings(inner) and isinstance(value, dict):
            _check_keys(inner, value, name, where)
        for part in get_args(inner):  # a list or a table of sections
            named = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {}
            listed = [(name, v) for v in value] if isinstance(value, list) else named.items()
            for place, entry in listed if _has_settings(part) else ():
                if isinstance(entry, dict):
                    _check_keys(part, entry, place, where)


def _known(kind: Any) -> dict[str, Any]:
    """Name -> type of each setting of a kind."""
    if dataclasses.is_dataclass(kind):
        return {f.name: getattr(f.default, "__class__", None) for f in dataclasses.fields(kind)}
    return {name: field.annotation for name, field in kind.model_fields.items()}


def _places(kind: Any, key: str, path: str = "") -> Iterator[str]:
    """Where a kind has a setting of this name, at any depth."""
    for name, inner in _known(kind).items():
        if name == key:
            yield path + name
        elif _has_settings(inner):
            yield from _places(inner, key, f"{path}{name}.")


def _has_settings(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _first_problem(error: ValidationError, section: str) -> str:
    problem = error.errors(include_url=False)[0]
    said = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"] and not section:  # about several sections
        return said
    path = (section + ".".join(str(p) for p in problem["loc"])).rstrip(".")
    if isinstance(problem.get("input"), dict) and problem["type"] == "value_error":  # about several settings of it
        return f"{path}: {said}"
    shown = repr(problem.get("input"))
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{path} = {shown}: {said[0].lower()}{said[1:]}"


def _tidy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tidy(v) for k, v in value.items() if v is not None}
    return [_tidy(v) for v in value] if isinstance(value, list | tuple) else value
