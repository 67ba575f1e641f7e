"""The aggregation rules and postprocessors that settings can name."""

from __future__ import annotations

from visard.aggregation.compression import Compress
from visard.aggregation.outgoing import Clip, Postprocessor
from visard.aggregation.robust import Bulyan, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from visard.aggregation.rules import Mean, Rule
from visard.plugins import Registry

RULES: Registry[type[Rule]] = Registry(
    "aggregations",
    {rule.name: rule for rule in (Mean, Median, TrimmedMean, GeometricMedian, Krum, MultiKrum, Bulyan)},
    lambda value: isinstance(value, type) and issubclass(value, Rule),
    "aggregation rule",
)
POSTPROCESSORS: Registry[type[Postprocessor]] = Registry(
    "postprocessors",
    {"clip": Clip, "compress": Compress},
    lambda found: isinstance(found, type) and issubclass(found, Postprocessor),
)
