"""How the threshold moves over the positions of an output."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way for the threshold to move.

    Attributes:
      name: What flags and manifests call it.
      meaning: What it does, in a few words.
      decays: Whether it has a temperature tau.
      factors: Makes scale and shift of 0.1 exp(-tau t / N), a number or an array over positions t: the threshold at t
        is clip(scale * threshold + shift, 0, 1).
    """

    name: str
    meaning: str
    decays: bool
    factors: Callable[[Any], tuple[Any, Any]]
