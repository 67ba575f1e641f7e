"""Windows: small features are painted in a part of the picture that follows the pose, not in all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .shapes import Plane, Traits


@dataclass(frozen=True)
class Window:
    """A box of `height` x `width` pixels with its own corner in each picture."""

    row: list[int]
    column: list[int]
    height: int
    width: int

    def cut(self, plane: Plane) -> Plane:
        """The box of each picture, from (B, ..., S, S)."""
        out = np.empty((*plane.shape[:-2], self.height, self.width), dtype=plane.dtype)
        for box, one, r, c in zip(out, plane, self.row, self.column, strict=True):
            box[...] = one[..., r : r + self.height, c : c + self.width]
        return out

    def paste(self, plane: Plane, boxes: Plane) -> None:
        """Put the boxes back."""
        for one, box, r, c in zip(plane, boxes, self.row, self.column, strict=True):
            one[..., r : r + self.height, c : c + self.width] = box

    def add(self, plane: Plane, boxes: Plane) -> None:
        """Add the boxes to what is there."""
        for one, box, r, c in zip(plane, boxes, self.row, self.column, strict=True):
            one[..., r : r + self.height, c : c + self.width] += box


def window(
    t: Traits, point: tuple[Plane | float, Plane | float, float], share: tuple[float, float], size: int
) -> Window:
    """Box around the face point (u, v, w); `share` is its height and width in parts of the picture.

    The corner depends on the picture's own traits alone, so it is the same in every batch.
    """
    u, v, w = point
    x = u * t["cos_yaw"] + w * t["sin_yaw"]
    y = v * t["cos_pitch"] - (w * t["cos_yaw"] - u * t["sin_yaw"]) * t["sin_pitch"]
    across = x * t["cos_roll"] - y * t["sin_roll"] + t["shift_x"]
    down = y * t["cos_roll"] + x * t["sin_roll"] + t["shift_y"]
    height, width = (min(size, int(np.ceil(part * size))) for part in share)
    row = np.rint((down / t["scale"] + 1.0) * (0.5 * size) - 0.5 * height)[:, 0, 0]
    column = np.rint((across / t["scale"] + 1.0) * (0.5 * size) - 0.5 * width)[:, 0, 0]
    rows = np.clip(row, 0, size - height).astype(np.int64).tolist()
    return Window(rows, np.clip(column, 0, size - width).astype(np.int64).tolist(), height, width)
