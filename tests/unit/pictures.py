"""Small generated pictures for the tests of readers."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image


def png(seed: int, side: int = 16) -> bytes:
    """A PNG file of noise that `pixels(seed, side)` gives back."""
    return encode(pixels(seed, side))


def pixels(seed: int, side: int = 16) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def encode(array: npt.NDArray[np.uint8], form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, form)
    return buffer.getvalue()
