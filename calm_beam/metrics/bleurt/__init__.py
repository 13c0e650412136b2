"""BLEURT: a BERT that was trained to judge how well a text says what its reference says.

Reads the published checkpoints as they are; they do not come with calm-beam. Source: Sellam et al. (2020), "BLEURT:
learning robust metrics for text generation"; Pu et al. (2021), "Learning compact metrics for MT" (BLEURT-20).
"""

from .checkpoint import BleurtError as BleurtError
from .checkpoint import checkpoint_fingerprint as checkpoint_fingerprint
from .metric import Bleurt as Bleurt
from .metric import load_bleurt as load_bleurt
