"""Importers by name: each lists the pictures of one kind of source. A new one is a file here and its line below."""

from collections.abc import Callable

from visard.data.listing import Listing
from visard.plugins import Registry

# read(source: Path, **options) -> Listing
SOURCES: Registry[Callable[..., Listing]] = Registry(
    "importers",
    {
        "bin": "visard.data.sources.bin:read",
        "celeba": "visard.data.sources.celeba:read",
        "folder": "visard.data.sources.folder:read",
        "ijb": "visard.data.sources.ijb:read",
        "lfw": "visard.data.sources.lfw:read",
        "office31": "visard.data.sources.folder:read_office31",
        "parquet": "visard.data.sources.parquet:read",
        "recordio": "visard.data.sources.recordio:read",
        "rfw": "visard.data.sources.lfw:read_rfw",
        "webdataset": "visard.data.sources.webdataset:read",
    },
)
