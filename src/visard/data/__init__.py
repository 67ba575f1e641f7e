"""Face data: sets on disk, importers, partitions into clients, augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visard.data.faces import ClientData, FaceSet, FaceSetWriter, FaceView, Federation

__all__ = ["ClientData", "FaceSet", "FaceSetWriter", "FaceView", "Federation"]


def __getattr__(name: str) -> Any:
    """Import on first use: the processes that draw synthetic faces need none of it and start in half the time."""
    if name not in __all__:
        raise AttributeError(f"module 'visard.data' has no attribute {name!r}")
    from visard.data import faces

    return getattr(faces, name)
