"""Greedy decoding with early exits, at every threshold of a grid."""

from .sweep import SweepDecoder as SweepDecoder
from .sweep import SweepResult as SweepResult
