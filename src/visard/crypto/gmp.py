"""gmpy2, or a clear line where it is not installed. The only place that imports it."""

from __future__ import annotations

from typing import Any

from visard.errors import UsageError


class _Absent:
    def __getattr__(self, name: str) -> Any:
        raise UsageError("encryption needs gmpy2: pip install 'visard[crypto]'")


def _load() -> Any:
    try:
        import gmpy2
    except ImportError:
        return _Absent()
    return gmpy2


gmp = _load()
