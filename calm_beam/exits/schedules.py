"""Threshold schedules: how the threshold changes over the positions of an output.

Standard library only: manifests are checked by these names.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A threshold schedule.

    Attributes:
      name: Name in flags and manifests.
      meaning: A short description.
      decays: Whether it has a temperature tau.
      factors: Returns scale and shift, given 0.1 exp(-tau t / N), a number or an array over positions t: the threshold
        at t is clip(scale * threshold + shift, 0, 1).
    """

    name: str
    meaning: str
    decays: bool
    factors: Callable[[Any], tuple[Any, Any]]


CONSTANT = Schedule(name="constant", meaning="the same everywhere", decays=False, factors=lambda _: (1.0, 0.0))

# The paper's decaying threshold: CALM, Eq. 5.
DECAY = Schedule(name="decay", meaning="falling by the paper's Eq. 5", decays=True, factors=lambda decay: (0.9, decay))

# The formula of the released T5X code. As released, that code's sampler never passes the position, so that t is always
# 0: at any tau, it decodes with a constant threshold. To reproduce its outputs, take `constant`.
DECAY_T5X = Schedule(
    name="decay_t5x",
    meaning="falling by the formula in the released T5X code (which itself, as released, decodes with a constant one)",
    decays=True,
    factors=lambda decay: (0.9 + decay, 0.0),
)

SCHEDULES: Mapping[str, Schedule] = types.MappingProxyType(
    {schedule.name: schedule for schedule in (CONSTANT, DECAY, DECAY_T5X)}
)
"""The threshold schedules by name."""
