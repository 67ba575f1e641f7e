"""Lines of a party's or a server's record that make no sense."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from visard.deployment import ledger_check
from visard.errors import VisardError

REPLY = {"client": "a", "stage": "s", "round": 1, "ask": 0}


@pytest.mark.parametrize("change", [{"round": float("inf")}, {"ask": "x"}, {"header": float("nan")}, {"parts": [[1]]}])
def test_a_reply_that_makes_no_sense_is_one_line(change: dict[str, Any]) -> None:
    line: Any = SimpleNamespace(path=Path("sent.rows"), place=3, record=REPLY)
    assert ledger_check._entry(line).round == 1
    line.record = REPLY | change
    with pytest.raises(VisardError, match="line 3: is not the record of a reply"):
        ledger_check._entry(line)
    line.record = {"open": [["a", "s", float("inf"), 0]]}
    with pytest.raises(VisardError, match="line 3: is not the record of an end"):
        ledger_check._places(line, "x")
