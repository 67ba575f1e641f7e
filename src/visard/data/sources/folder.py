"""A folder (or zip) with one folder of pictures per identity, or per domain and identity."""

from pathlib import Path

from visard.data.decoding import Crop, is_picture, open_container
from visard.data.sources.listing import Listing
from visard.errors import UsageError


def read(source: Path, *, crop: int | None = None, domains: bool = False) -> Listing:
    """List `source`/<identity>/**/<picture>, or `source`/<domain>/<identity>/**/<picture> with `domains`.

    Each picture keeps its centre square of `crop` pixels (by default as large as fits).
    """
    if crop is not None and crop < 1:
        raise UsageError(f"crop = {crop}: must be at least 1 pixel")
    levels = 2 if domains else 1
    container = open_container(source)
    found = [(name.split("/"), name) for name in container.names() if is_picture(name)]
    container.close()
    inside = sorted((parts[:levels], name) for parts, name in found if len(parts) > levels)
    if not inside:
        layout = "<domain>/<identity>/<picture>" if domains else "<identity>/<picture>"
        raise UsageError(f"{source} holds no pictures as {layout}")
    return Listing(
        container=source,
        files=[name for _, name in inside],
        identity=["/".join(parts) for parts, _ in inside],
        domains=[parts[0] for parts, _ in inside] if domains else None,
        crop=Crop(crop),
        info={"crop": crop},
    )
