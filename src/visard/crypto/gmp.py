"""gmpy2 from the extra `crypto`; the first use fails with one line if it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from visard.errors import UsageError


class _Absent:
    def __getattr__(self, name: str) -> Any:
        raise UsageError("encryption needs gmpy2: pip install 'visard[crypto]'")


try:
    gmp: Any = importlib.import_module("gmpy2")
except ImportError:
    gmp = _Absent()
