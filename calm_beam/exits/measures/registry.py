"""The confidence measures by name."""

import functools
import types
from collections.abc import Mapping

from .classifier import CLASSIFIER
from .entropy import ENTROPY
from .measure import Measure, MeasureError, Need, import_measure, is_own
from .oracle import ORACLE
from .patience import PATIENCE
from .softmax import SOFTMAX
from .softmax_max import SOFTMAX_MAX
from .state import STATE
from .static import STATIC

MEASURES: Mapping[str, Measure] = types.MappingProxyType(
    {measure.name: measure for measure in (SOFTMAX, SOFTMAX_MAX, STATE, CLASSIFIER, ENTROPY, PATIENCE, ORACLE, STATIC)}
)


COMPARABLE = tuple(
    name for name, measure in MEASURES.items() if measure.needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)
)
"""Measures that can be served and have no setting; experiments compare them by default."""


def is_measure_name(name: str) -> bool:
    """Returns whether a name is one of `MEASURES`, or has the form of a user's measure; imports nothing."""
    return name in MEASURES or is_own(name)


@functools.cache
def measure_named(name: str) -> Measure:
    """Returns a measure by name; a user's measure is imported, which runs code.

    Raises:
      MeasureError: If there is no measure of this name.
    """
    if name in MEASURES:
        return MEASURES[name]
    if not is_own(name):
        raise MeasureError(f"confidence must be one of {', '.join(MEASURES)}, or module:function; got {name!r}.")
    return import_measure(name)
