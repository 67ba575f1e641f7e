"""Office-31 (or any set like it): the same classes seen by several cameras, <domain>/[images/]<class>/<picture>."""

from pathlib import Path

from visard.data.containers import Files, open_container
from visard.data.decoding import Crop, is_picture
from visard.data.sources.listing import Listing, number
from visard.errors import UsageError


def read(source: Path, *, crop: int | None = None) -> Listing:
    """List the pictures; a class is one identity in all domains. Each keeps its centre square of `crop` pixels."""
    if crop is not None and crop < 1:
        raise UsageError(f"crop = {crop}: must be at least 1 pixel")
    container = open_container(source)
    found = [([p for p in name.split("/") if p != "images"], name) for name in container.names() if is_picture(name)]
    inside = sorted((parts, name) for parts, name in found if len(parts) == 3)
    if not inside:
        container.close()
        raise UsageError(f"{source} holds no pictures as <domain>/<class>/<picture>")
    files = [name for _, name in inside]
    identity, names = number(parts[1] for parts, _ in inside)
    return Listing(
        pictures=Files(container, files),
        files=files,
        identity=identity,
        names=names,
        domains=[parts[0] for parts, _ in inside],
        crop=Crop(crop),
        info={"crop": crop},
    )
