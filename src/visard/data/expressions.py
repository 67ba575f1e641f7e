"""Attribute expressions such as "Male & !(Wearing_Hat | Eyeglasses)", and the pictures that fit them.

Truth has three values, as in Kleene's logic: 1 true, -1 false, 0 unknown. So `&` is the minimum, `|` the
maximum and `!` the negative; a picture whose hat is unknown fits neither "Wearing_Hat" nor "!Wearing_Hat".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib import resources

import numpy as np
import numpy.typing as npt

from visard.data.faces import FaceSet
from visard.errors import UsageError, did_you_mean

Truth = npt.NDArray[np.int8]
TOKEN = re.compile(r"\s*(?:(?P<name>[\w.\-]+)|(?P<sign>[!&|()]))")
DEEPEST = 50


def expressions(name: str) -> tuple[str, ...]:
    """The list of that name in `attribute_clients.toml`: one expression a client."""
    lists = tomllib.loads((resources.files("visard") / "data" / "attribute_clients.toml").read_text())
    if name not in lists:
        raise UsageError(f"no list {name!r} of attribute expressions{did_you_mean(name, lists)}")
    return tuple(lists[name]["expressions"])


def matching(faces: FaceSet, expression: str) -> npt.NDArray[np.bool_]:
    """Whether each picture (N,) certainly fits `expression`."""
    return np.equal(evaluate(expression, faces.attribute_names, faces.attribute), 1)


def evaluate(expression: str, known: list[str], column: Callable[[str], Truth]) -> Truth:
    """The truth of `expression` for each picture, given the columns of the known attributes."""
    return _Parser(expression, known, column).parse()


class _Parser:
    """either := both ('|' both)* ; both := term ('&' term)* ; term := '!' term | '(' either ')' | name"""

    def __init__(self, text: str, known: list[str], column: Callable[[str], Truth]) -> None:
        self.text, self.known, self.column = text, known, column
        self.tokens: list[tuple[str, int]] = []
        self.next = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            match = TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise self._error(f"unexpected {text[at]!r}", at)
            kind = match.lastgroup or "name"
            self.tokens.append((match[kind], match.start(kind)))
            at = match.end()

    def _error(self, what: str, at: int) -> UsageError:
        return UsageError(f"attribute expression {self.text!r}: {what} at position {at + 1}")

    def _peek(self) -> tuple[str, int]:
        return self.tokens[self.next] if self.next < len(self.tokens) else ("", len(self.text))

    def _take(self, sign: str) -> bool:
        if self._peek()[0] != sign:
            return False
        self.next += 1
        return True

    def parse(self) -> Truth:
        value = self._either(0)
        token, at = self._peek()
        if token:
            raise self._error(f"expected '&' or '|' before {token!r}", at)
        return value

    def _either(self, depth: int) -> Truth:
        value = self._both(depth)
        while self._take("|"):
            value = np.maximum(value, self._both(depth))
        return value

    def _both(self, depth: int) -> Truth:
        value = self._term(depth)
        while self._take("&"):
            value = np.minimum(value, self._term(depth))
        return value

    def _term(self, depth: int) -> Truth:
        token, at = self._peek()
        if depth > DEEPEST:
            raise self._error("nested too deeply", at)
        if self._take("!"):
            return np.negative(self._term(depth + 1))
        if self._take("("):
            value = self._either(depth + 1)
            if not self._take(")"):
                raise self._error(f"missing ')' for the '(' opened at position {at + 1}", self._peek()[1])
            return value
        if not token or token in "&|)":
            raise self._error("expected the name of an attribute", at)
        if token not in self.known:
            raise self._error(f"unknown attribute {token!r}{did_you_mean(token, self.known)}", at)
        self.next += 1
        return self.column(token)
