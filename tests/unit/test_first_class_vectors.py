"""Class vectors that a client makes itself have nothing that was sent to agree with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visard.engines.reply_checks import refusal
from visard.methods.fedface import Down, FedFace, Up


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (torch.zeros(1, 4), None),
        (torch.zeros(3, 4), None),
        (torch.zeros(1, 5), "has shape (1, 5), a feature has 4 numbers"),
        (torch.zeros(4), "has shape (4,), a feature has 4 numbers"),
        (torch.zeros(1, 1, 4), "has shape (1, 1, 4), a feature has 4 numbers"),
    ],
)
def test_they_are_rows_as_long_as_a_feature(w: Tensor, reason: str | None) -> None:
    wrong = refusal(FedFace().local, Down({}, None, 0.1), Up({}, w, 2, 0.5), pictures=2, embedding=4)
    assert wrong == (None if reason is None else ("w", reason))
