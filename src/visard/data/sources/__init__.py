"""Importers by name: each lists the pictures of one kind of source."""

from collections.abc import Callable

from visard.data.sources import bin as packed
from visard.data.sources import celeba, folder, ijb, lfw, parquet, recordio, rfw, webdataset
from visard.data.sources import folder as office31
from visard.data.sources.listing import Listing

# read(source: Path, **options) -> Listing
SOURCES: dict[str, Callable[..., Listing]] = {
    "bin": packed.read,
    "celeba": celeba.read,
    "folder": folder.read,
    "ijb": ijb.read,
    "lfw": lfw.read,
    "office31": office31.read_office31,
    "parquet": parquet.read,
    "recordio": recordio.read,
    "rfw": rfw.read,
    "webdataset": webdataset.read,
}

__all__ = ["SOURCES", "Listing"]
