"""Which ways of exiting to compare by cost and quality.

Source: CALM, "Experimental Results", Figure 3 (empirical performance-efficiency tradeoffs).
"""

import dataclasses
from collections.abc import Sequence

from calm_beam.exits.rule import ExitRule

from .performance import Variant


def tradeoff_variants(
    rule: ExitRule, confidences: Sequence[str], *, thresholds: Sequence[float], num_layers: int
) -> tuple[Variant, ...]:
    """Returns every confidence measure over the grid, then the static layers and the oracle.

    Args:
      rule: Schedule, state propagation and exit layers of the measures; static layers and oracle have no schedule.
      confidences: The measures.
      thresholds: The grid, in the order to measure it.
      num_layers: Decoder depth L.
    """
    measures = [
        Variant(rule=dataclasses.replace(rule, confidence=confidence), thresholds=tuple(thresholds))
        for confidence in confidences
    ]
    static = dataclasses.replace(rule, confidence="static", schedule="constant", tau=None, patience=None)
    layers = tuple(layer / num_layers for layer in reversed(rule.exit_layers(num_layers)))
    oracle = dataclasses.replace(static, confidence="oracle")
    return (*measures, Variant(rule=static, thresholds=layers), Variant(rule=oracle, thresholds=(1.0,)))
