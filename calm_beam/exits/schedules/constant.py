"""The same threshold at every position."""

from .schedule import Schedule

CONSTANT = Schedule(name="constant", meaning="the same everywhere", decays=False, factors=lambda _: (1.0, 0.0))
