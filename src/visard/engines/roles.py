"""Which node may play which role: a registered key lets a party in, but not into another party's place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from visard.errors import UsageError, VisardError
from visard.files import read_json, write_json

FILE = "roles.json"  # beside the public keys of the nodes: node -> its roles
NAME = re.compile(r"[\w.~-]{1,100}")  # of a role
ONLINE = "nodes.json"  # in the state folder of a running server: Flower's number of a node -> node


@dataclass(frozen=True)
class Roles:
    """Node -> the roles that belong to it. A node that is not here may take what belongs to nobody."""

    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner: dict[str, str] = {}
        for node, roles in self.of.items():
            for role in roles:
                if owner.setdefault(role, node) != node:
                    raise UsageError(f"the role {role} belongs to {owner[role]} and to {node}: it can have one key")

    def refusal(self, node: str, role: str) -> str | None:
        """Why a node may not play a role, or None."""
        if role in self.of.get(node, ()):
            return None
        for owner, roles in self.of.items():
            if role in roles:
                return f"{node} claims to be {role}, which belongs to the key of {owner}"
        if node in self.of:
            return f"{node} claims to be {role}, but its key is for {', '.join(self.of[node])}"
        return None

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, {node: list(roles) for node, roles in self.of.items()})

    @classmethod
    def load(cls, folder: Path) -> Roles:
        """The roles in a key folder or a server's state folder; none if there is no file."""
        if not (folder / FILE).exists():
            return cls()
        found = read_json(folder / FILE)
        good = isinstance(found, dict) and all(
            isinstance(roles, list) and all(isinstance(r, str) for r in roles) for roles in found.values()
        )
        if not good:
            raise VisardError(f'{folder / FILE} must say which roles each node has: {{"node-1": ["house-1"]}}')
        return cls({node: tuple(roles) for node, roles in found.items()})


def parse_roles(texts: Iterable[str], nodes: int) -> Roles:
    """Roles from the words NODE=ROLE of the command line."""
    of: dict[str, tuple[str, ...]] = {}
    for text in texts:
        number, _, role = text.partition("=")
        if not number.isdigit() or not 1 <= int(number) <= nodes or not NAME.fullmatch(role):
            raise UsageError(f"--role {text}: must be NODE=ROLE with a node from 1 to {nodes}, for example 1=house-1")
        node = f"node-{int(number)}"
        of[node] = (*of.get(node, ()), role)
    return Roles(of)


def tell_nodes(state: Path, numbers: Mapping[int, str], roles: Roles) -> None:
    """A starting server leaves behind, for the runs on its machine, who its nodes are and what they may be."""
    roles.save(state)
    write_json(state / ONLINE, {str(number): node for number, node in numbers.items()})


def read_nodes(state: Path) -> tuple[dict[int, str], Roles]:
    """What `tell_nodes` left."""
    return {int(number): str(node) for number, node in read_json(state / ONLINE).items()}, Roles.load(state)
