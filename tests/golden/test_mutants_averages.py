"""Means of figures over clients, with literal numbers."""

from __future__ import annotations

import pytest

from visard.core import mean_metrics


def test_a_figure_is_weighed_by_the_pictures_of_those_who_have_it() -> None:
    """a: (3 * 1 + 1 * 5) / 4; b: only the first client has it."""
    found = mean_metrics([({"a": 1.0, "b": 7.0}, 3), ({"a": 5.0}, 1)])
    assert found == pytest.approx({"a": 2.0, "b": 7.0})
