"""The paper's decaying threshold: CALM, Eq. 5."""

from .schedule import Schedule

DECAY = Schedule(name="decay", meaning="falling by the paper's Eq. 5", decays=True, factors=lambda decay: (0.9, decay))
