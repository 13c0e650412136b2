"""The cost of a token by its exit layer: one sum, in any unit.

    cost = output + layers run * layer + layers skipped * skipped + exit tests * test

The unit is seconds, measured (`evaluation/serving_speed.py`) or forecast for a device
(`evaluation/device_forecast.py`), operations (`evaluation/flops.py`), or layers. The cheapest rule at the same
guarantee depends on the unit: a test of logits may cost as much as several layers.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Self

from .measures import Need
from .rule import ExitRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """The costs that make up the cost of a token, in any unit.

    Attributes:
      layers: Decoder depth L.
      layer: Cost of a layer that is run.
      skipped: Cost of a skipped layer, whose keys and values are filled by state propagation.
      output: All other costs of a token, including the head that predicts it.
      tests: Cost of an exit test, by the need of its measure; 0 for needs that are missing.
    """

    layers: int
    layer: float
    skipped: float = 0.0
    output: float = 0.0
    tests: Mapping[Need, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_layers(cls, layers: int) -> Self:
        """Returns costs that count layers, and nothing else."""
        return cls(layers=layers, layer=1.0)

    def full(self) -> float:
        """Returns the cost of a token of the full model, which has no exit tests."""
        return self.layers * self.layer + self.output

    def at(self, layer: int, rule: ExitRule) -> float:
        """Returns the cost of a token that exits at a layer.

        Args:
          layer: From 1 to L.
          rule: How exits are decided: by which measure, at which layers.
        """
        test = self.tests.get(rule.measure().needs, 0.0)
        return (
            self.output
            + layer * self.layer
            + (self.layers - layer) * self.skipped
            + tests_at(layer, rule, layers=self.layers) * test
        )

    def at_mean(self, layers: float, rule: ExitRule) -> float:
        """Returns the mean cost of tokens with a mean exit layer, interpolated between the two nearest exit layers.

        Exact for a measure of logits whose exits are at equal distances up to the last layer; else an approximation,
        since a mean does not determine the number of tests.

        Args:
          layers: From the lowest exit layer to L.
          rule: How exits are decided.
        """
        exits = rule.exit_layers(self.layers)
        below = max((each for each in exits if each <= layers), default=exits[0])
        above = min((each for each in exits if each >= layers), default=exits[-1])
        share = (layers - below) / (above - below) if above > below else 0.0
        return (1 - share) * self.at(below, rule) + share * self.at(above, rule)


def tests_at(layer: int, rule: ExitRule, *, layers: int) -> int:
    """Returns how many exit tests a token that exits at a layer pays for.

    With a measure of logits, the test at the exit gives the token, so that it costs nothing extra. The last layer is
    never tested.

    Args:
      layer: From 1 to L.
      rule: How exits are decided.
      layers: Decoder depth L.
    """
    *tested, _ = rule.exit_layers(layers)
    tests = bisect.bisect_right(tested, layer)
    gives_token = rule.measure().needs is Need.LOGITS and layer < layers
    return max(0, tests - gives_token)
