"""Importers by name: each lists the pictures of one kind of source. A new one is a file here and its line below."""

from collections.abc import Callable

from visard.data.listing import Listing
from visard.data.sources import bin as packed
from visard.data.sources import celeba, folder, ijb, lfw, parquet, recordio, webdataset

# read(source: Path, **options) -> Listing
SOURCES: dict[str, Callable[..., Listing]] = {
    "bin": packed.read,
    "celeba": celeba.read,
    "folder": folder.read,
    "ijb": ijb.read,
    "lfw": lfw.read,
    "office31": folder.read_office31,
    "parquet": parquet.read,
    "recordio": recordio.read,
    "rfw": lfw.read_rfw,
    "webdataset": webdataset.read,
}
