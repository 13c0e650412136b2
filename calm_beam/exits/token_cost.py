"""What a token costs by the layer where it leaves: one sum, whatever it is made of and counted in.

    cost = output + layers gone through * layer + layers skipped * skipped + exit tests * test

In seconds that were measured (`evaluation/serving_speed.py`) or are forecast of a device
(`evaluation/device_forecast.py`), in operations (`evaluation/flops.py`), or in layers. What is cheapest at the same
promise differs between them: a test of logits may cost as much as several layers.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Self

from .measures import Need
from .rule import ExitRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """What a token costs, in any unit.

    Attributes:
      layers: Decoder depth L.
      layer: A layer that it goes through.
      skipped: A layer that it skips, whose keys and values are made of what is passed on.
      output: All that a token costs besides, the head that gives it included.
      tests: An exit test, by what its measure needs; nothing for needs that are not there.
    """

    layers: int
    layer: float
    skipped: float = 0.0
    output: float = 0.0
    tests: Mapping[Need, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_layers(cls, layers: int) -> Self:
        """Returns the cost that counts layers, and nothing else."""
        return cls(layers=layers, layer=1.0)

    def full(self) -> float:
        """Returns what a token of the full model costs, which tests nothing."""
        return self.layers * self.layer + self.output

    def at(self, layer: int, rule: ExitRule) -> float:
        """Returns what a token costs that leaves at a layer.

        Args:
          layer: From 1 to L.
          rule: How exits are decided: what is tested, and where.
        """
        test = self.tests.get(rule.measure().needs, 0.0)
        return (
            self.output
            + layer * self.layer
            + (self.layers - layer) * self.skipped
            + tests_at(layer, rule, layers=self.layers) * test
        )

    def at_mean(self, layers: float, rule: ExitRule) -> float:
        """Returns what tokens cost on average that leave at a mean layer, between the two nearest that may exit.

        Exact for a measure of logits whose exits are at equal distances up to the last layer; else an approximation,
        since a mean does not tell how many tests there were.

        Args:
          layers: From the lowest layer that may exit to L.
          rule: How exits are decided.
        """
        exits = rule.exit_layers(self.layers)
        below = max((each for each in exits if each <= layers), default=exits[0])
        above = min((each for each in exits if each >= layers), default=exits[-1])
        share = (layers - below) / (above - below) if above > below else 0.0
        return (1 - share) * self.at(below, rule) + share * self.at(above, rule)


def tests_at(layer: int, rule: ExitRule, *, layers: int) -> int:
    """Returns how many exit tests a token pays for that leaves at a layer.

    A test of logits that lets a token out gives the token, so that one fewer is paid. The last layer is never tested.

    Args:
      layer: From 1 to L.
      rule: How exits are decided.
      layers: Decoder depth L.
    """
    *tested, _ = rule.exit_layers(layers)
    tests = bisect.bisect_right(tested, layer)
    gives_token = rule.measure().needs is Need.LOGITS and layer < layers
    return max(0, tests - gives_token)
