"""Which engine computes the rows of a batch."""

from calm_beam.model.interface import EarlyExitModel

from .branches import Branches
from .cpu.engine import NativeEngine
from .engine import Engine, Slots
from .weights import Weights
from .xla.engine import XlaEngine


def engine_for(model: EarlyExitModel, branches: Branches, *, weights: Weights, slots: Slots) -> Engine:
    """Returns that of native code where the model and the machine have one; arguments are those of `XlaEngine`."""
    engine = XlaEngine if weights.native is None else NativeEngine
    return engine(model, branches, weights=weights, slots=slots)
