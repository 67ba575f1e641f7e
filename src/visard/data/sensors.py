r"""A synthetic multi-user sensor set: what several users' motion sensors might say of the same activities.

    z = c_k + e        an execution of activity k in a latent space: its centre, and what varies each time
    x = G_u tanh(A z + B_u z) + o_u + noise

A is common, B_u (how user u moves), G_u (gain of each channel) and o_u (offset) are the user's own: a shift between
users that a network trained on some of them meets at another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visard.data.readings import write_readings
from visard.data.synthetic import cache_folder

VERSION = "1"
LATENT = 12
SPREAD, PERSONAL, OFFSET, GAIN, NOISE = 0.9, 0.35, 0.5, 0.25, 0.3  # sizes of e, B_u, o_u, log G_u and the noise
USER, ROWS = 1, 2  # streams of random numbers


def draw(
    classes: int, rows: int, size: int, users: tuple[str, ...], seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`rows` readings (size,) of each class and user; values, classes and users. The same seed gives the same."""
    common = np.random.default_rng(seed)
    centres = common.normal(size=(classes, LATENT))
    A = common.normal(size=(LATENT, size)) / np.sqrt(LATENT)
    values, labels, owners = [], [], []
    for number in range(len(users)):
        own = np.random.default_rng([seed, USER, number])
        B = PERSONAL * own.normal(size=A.shape) / np.sqrt(LATENT)
        gain, offset = np.exp(GAIN * own.normal(size=size)), OFFSET * own.normal(size=size)
        rng = np.random.default_rng([seed, ROWS, number])
        label = np.repeat(np.arange(classes), rows)
        z = centres[label] + SPREAD * rng.normal(size=(len(label), LATENT))
        x = gain * np.tanh(z @ (A + B)) + offset + NOISE * rng.normal(size=(len(label), size))
        values.append(x.astype(np.float32))
        labels.append(label)
        owners.append(np.full(len(label), number))
    return np.concatenate(values), np.concatenate(labels), np.concatenate(owners)


def cached_sensors(classes: int, rows: int, size: int, users: tuple[str, ...], seed: int) -> Path:
    """The folder of such a set, made on first use."""
    text = f"{classes} {rows} {size} {users} {seed} {VERSION}"
    out = cache_folder() / f"sensors-{classes}x{rows}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if not out.is_dir():
        values, labels, owners = draw(classes, rows, size, users, seed)
        names = [f"activity-{k}" for k in range(classes)]
        write_readings(out, values, names, labels, users, owners, {"kind": "sensors", "synthetic": True})
    return out
