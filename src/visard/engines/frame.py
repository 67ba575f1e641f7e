"""The first bytes of an encoded message (see `codec`), as a process reads them that has no torch."""

from __future__ import annotations

import json
import struct

from visard.processes import Data

PREFIX = struct.Struct("<4sBI")
MAX_HEADER = 2**21  # of the tree, and of the list of tensors: what is built from one takes up to 30 times its bytes
ALIGNED = 16  # bytes: what the C library allocates begins at a multiple of these


def largest_at(data: Data, limit: int = MAX_HEADER) -> int:
    """Where in an encoded message its largest tensor begins, as its first bytes say; 0 where they are none, or more
    than the limit."""
    try:
        start = PREFIX.size + int(PREFIX.unpack_from(data)[2]) + 8
        end = start + int.from_bytes(data[start - 8 : start], "little")
        listed = json.loads(bytes(data[start : min(end, start + limit)]))
        places = [entry["data_offsets"] for entry in listed.values()]
        return int(end + max(places, key=lambda place: place[1] - place[0])[0])
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0
