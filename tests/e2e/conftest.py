"""One cache of synthetic faces for all end-to-end tests, and child processes that begin at once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    patch = pytest.MonkeyPatch()
    base = tmp_path_factory.getbasetemp().parent
    patch.setenv("VISARD_CACHE", str(base / "visard-cache"))
    patch.setenv("VISARD_DATA", str(base / "visard-data"))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _quick(quick_children: None) -> None:
    """In all of them."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
