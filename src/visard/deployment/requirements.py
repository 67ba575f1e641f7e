"""What a party insists on, whatever the server of a run says: a TOML file of its own (`visard client --require`).

[require]   settings of the run -> what they must be: a value, { at_least = x }, { at_most = x } or { one_of = [...] }
[local]     settings that this party sets itself, in place of what the run says
[plugins]   allow = ["package.module", ...]: plug-ins of these modules may be imported, others never are

A run that differs is refused before anything of this party leaves, and so is one without a setting that is named.
Without a word in the file, keys that can be broken are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visard.errors import PublicError, UsageError
from visard.files import parse_toml

WORDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": lambda value, bound: isinstance(value, int | float) and value >= bound,
    "at_most": lambda value, bound: isinstance(value, int | float) and value <= bound,
    "one_of": lambda value, allowed: value in allowed,
}
OWN = "keys"  # folders of a party: no server chooses them
WEAK = "insecure_keys"  # only a party itself may allow them


@dataclass(frozen=True)
class Requirements:
    require: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Requirements:
        """From a file; one clear line for what is wrong with it."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--require {path}: {error}") from None
        tree = parse_toml(text, f"--require {path}")
        tables = ("require", "local", "plugins")
        if wrong := sorted(k for k in tree if k not in tables or not isinstance(tree[k], dict)):
            raise UsageError(
                f"--require {path}: {wrong[0]}: there are only the tables [require], [local] and [plugins]"
            )
        plugins = tree.get("plugins", {})
        modules = plugins.get("allow", [])
        if plugins.keys() - {"allow"} or not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
            raise UsageError(f'--require {path}: [plugins] must look like allow = ["package.module"]')
        for name, leaf in _leaves(tree.get("require", {})):
            for word, bound in leaf.items() if isinstance(leaf, dict) else ():
                if not isinstance(bound, list if word == "one_of" else int | float):
                    raise UsageError(f"--require {path}: {name}: {word} = {bound!r}")
        return cls(tree.get("require", {}), tree.get("local", {}), plugins)

    def applied(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the run as they are at this party."""
        return _merged(without_folders(settings), self.local)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse complete settings that are not as required."""
        for name, wanted in _leaves(self.require):
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
        allowed = {name for part in (self.require, self.local) for name, _ in _leaves(part)}
        for name, value in _leaves(settings):
            if name.split(".")[-1] == WEAK and value and name not in allowed:
                raise PublicError(f"the run sets {name}: this party does not allow keys that can be broken")


def without_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the folders of key files that they name."""
    return {k: without_folders(v) if isinstance(v, Mapping) else v for k, v in settings.items() if k != OWN}


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and what is said of them; a table of WORDS is said of its name."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and not (value and value.keys() <= WORDS.keys()):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(tree)
    for key, value in over.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return found
