"""The program of a drawing process: `python -m visard.data.drawing.worker`, jobs on standard input."""

from __future__ import annotations

from typing import Any

import numpy as np

from visard.data.drawing.pool import serve
from visard.data.drawing.rendering import SyntheticSpec, render_rows


def answer(job: dict[str, Any]) -> bytes:
    """The pictures and then the attributes of rows start .. stop - 1 of a set."""
    spec = SyntheticSpec(**job["spec"])
    images, marks = render_rows(spec, np.arange(job["start"], job["stop"]))
    return images.tobytes() + marks.tobytes()


if __name__ == "__main__":
    serve(answer)
