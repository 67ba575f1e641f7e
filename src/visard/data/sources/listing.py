"""What an importer finds before any picture is decoded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visard.data.decoding import CENTRE, Crop

# saves more arrays beside the pictures: (row of each kept file) -> name of array -> values
Extras = Callable[[dict[str, int]], dict[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True)
class Listing:
    """The pictures of a source: file names inside `container` (a folder or zip) and what is known of each."""

    container: Path
    files: list[str]
    identity: list[str]
    attribute_names: list[str] = field(default_factory=list)
    attributes: npt.NDArray[np.int8] | None = None  # (files, attribute_names) in {-1, 0, 1}
    domains: list[str] | None = None  # of each file; the name of the importer by default
    crop: Crop = CENTRE
    extras: Extras | None = None
    info: dict[str, Any] = field(default_factory=dict)
