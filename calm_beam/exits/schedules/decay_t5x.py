"""The formula of the released T5X code.

As released, that code's sampler never passes the position, so that t is always 0: at any tau, it decodes with a
constant threshold. To reproduce its outputs, take `constant`.
"""

from .schedule import Schedule

DECAY_T5X = Schedule(
    name="decay_t5x",
    meaning="falling by the formula in the released T5X code (which itself, as released, decodes with a constant one)",
    decays=True,
    factors=lambda decay: (0.9 + decay, 0.0),
)
