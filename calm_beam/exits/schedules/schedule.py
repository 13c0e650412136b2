"""The type of threshold schedules: how the threshold changes over the positions of an output."""

import dataclasses
from collections.abc import Callable
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
