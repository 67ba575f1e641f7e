"""An aggregation rule of one's own: the median of each coordinate (Yin et al. 2018, Algorithm 1).

visard has it as `median`, which reads the replies piece by piece; this one is as short as a rule can be.

visard run --plugin examples/median.py fedavg --set aggregation.rule=coordinate-median
"""

from dataclasses import dataclass

import torch

from visard.aggregation.rules import Gathered, Rule
from visard.core import Weights
from visard.plugins import register


@register("aggregations", "coordinate-median")
@dataclass(frozen=True)
class CoordinateMedian(Rule):
    """Every coordinate by itself, every client alike: fewer than half of the clients cannot move it far."""

    name = "coordinate-median"
    title = "the median of each coordinate, all clients alike"

    def begin(self, sent: Weights | None) -> Gathered:
        return Medians()


class Medians:
    """All values of one field; of an even number of clients the mean of the middle two."""

    def __init__(self) -> None:
        self.values: list[Weights] = []

    def add(self, weights: Weights, n: float) -> None:
        self.values.append(weights)

    def result(self) -> Weights:
        return {key: median(torch.stack([value[key] for value in self.values])) for key in self.values[0]}


def median(values: torch.Tensor) -> torch.Tensor:
    """Of (clients, ...) over the clients; counters (whole numbers) go on with the largest."""
    if not values.is_floating_point():
        return values.amax(0)
    ordered, half = values.sort(0).values, len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
