"""Contact sheets of sample pictures, as PNG inside the page. Synthetic faces only."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visard.errors import UsageError, VisardError
from visard.report.words import esc, plural

Samples = NDArray[np.uint8] | Mapping[str, NDArray[np.uint8]]
COLUMNS, MOST, MOST_SHEETS, GAP = (
    8,
    32,
    12,
    2,
)  # pictures a row, a sheet; sheets a page; pixels between pictures


def contact_sheet(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures (N, H, W, 3) side by side on one white sheet."""
    if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8 or not len(pictures):
        raise UsageError(
            f"sample pictures must be uint8 of shape (N, H, W, 3), not {pictures.dtype} of {pictures.shape}"
        )
    n, h, w, _ = pictures.shape
    columns = min(COLUMNS, n)
    rows = -(-n // columns)
    sheet = np.full((rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * (h + GAP), (i % columns) * (w + GAP)
        sheet[y : y + h, x : x + w] = picture
    return sheet


def kept_samples(folder: Path) -> NDArray[np.uint8] | None:
    """The sample pictures that a run on synthetic faces left in its folder."""
    path = folder / "samples.npy"
    if not path.exists():
        return None
    try:
        pictures: NDArray[np.uint8] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise VisardError(f"{path}: cannot be read: {error}") from None
    return pictures


def data_uri(sheet: NDArray[np.uint8]) -> str:
    """The sheet as a PNG in a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def sample_figures(samples: Samples) -> str:
    """One figure for each client (or one for all)."""
    sheets = samples if isinstance(samples, Mapping) else {"": samples}
    more = len(sheets) - MOST_SHEETS
    figures = []
    for client, pictures in list(sheets.items())[:MOST_SHEETS]:
        sheet = contact_sheet(np.asarray(pictures[:MOST]))
        shown = min(len(pictures), MOST)
        of = f" of {esc(client, 60)}" if client else ""
        caption = f"<figcaption>{esc(client, 60)}</figcaption>" if client else ""
        size = f'width="{sheet.shape[1]}" height="{sheet.shape[0]}"'
        alt = f"{plural(shown, 'synthetic face')}{of}"
        image = f'<img src="{data_uri(sheet)}" {size} alt="{alt}">'
        figures.append(f'<figure class="sheet">{image}{caption}</figure>')
    rest = f'<p class="note">And {plural(more, "more client")}.</p>' if more > 0 else ""
    return f'<div class="sheets">{"".join(figures)}</div>{rest}'
