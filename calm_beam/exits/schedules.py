"""Schedules: how the threshold moves over the positions of an output. Standard library only: manifests read this."""

import dataclasses
import types
from collections.abc import Callable, Mapping
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


SCHEDULES: Mapping[str, Schedule] = types.MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule(name="constant", meaning="the same everywhere", decays=False, factors=lambda _: (1.0, 0.0)),
            # CALM, Eq. 5 (decaying threshold).
            Schedule(
                name="decay",
                meaning="falling by the paper's Eq. 5",
                decays=True,
                factors=lambda decay: (0.9, decay),
            ),
            # As released, that code's sampler never passes the position, so that t is always 0: whatever its tau, it
            # decodes with a constant threshold. To repeat what it does, take `constant`.
            Schedule(
                name="decay_t5x",
                meaning="falling by the formula in the released T5X code (which itself, as released, decodes with a "
                "constant one)",
                decays=True,
                factors=lambda decay: (0.9 + decay, 0.0),
            ),
        )
    }
)
