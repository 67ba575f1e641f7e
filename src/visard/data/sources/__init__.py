"""Importers by name: each lists the pictures of one kind of source."""

from collections.abc import Callable

from visard.data.sources import celeba, folder, lfw
from visard.data.sources.listing import Listing

# read(source: Path, **options) -> Listing
SOURCES: dict[str, Callable[..., Listing]] = {"celeba": celeba.read, "folder": folder.read, "lfw": lfw.read}

__all__ = ["SOURCES", "Listing"]
