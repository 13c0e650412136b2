"""Which engine computes the rows of a batch."""

from collections.abc import Mapping, Sequence

from calm_beam.exits.rule import ExitRule
from calm_beam.model.interface import EarlyExitModel

from .engine import Engine, Placed
from .native_engine import NativeEngine
from .weights import Weights
from .xla_engine import XlaEngine


def engine_for(
    model: EarlyExitModel,
    rule: ExitRule,
    *,
    weights: Weights,
    placed: Placed,
    lanes: int,
    steps: int,
    places: Mapping[int, int],
    prefixes: Mapping[int, Sequence[int]],
    row_sizes: tuple[int, ...],
) -> Engine:
    """Returns that of native code where the model and the machine have one; arguments are those of `XlaEngine`."""
    if weights.native is not None:
        return NativeEngine(
            model,
            rule,
            weights=weights,
            decoder=weights.native,
            placed=placed,
            lanes=lanes,
            steps=steps,
            places=places,
            prefixes=prefixes,
            row_sizes=row_sizes,
        )
    return XlaEngine(
        model,
        rule,
        weights=weights,
        placed=placed,
        lanes=lanes,
        steps=steps,
        places=places,
        prefixes=prefixes,
        row_sizes=row_sizes,
    )
