"""The procedures by the names that flags and manifests use."""

import types
from collections.abc import Mapping
from typing import Protocol

from numpy.typing import ArrayLike

from .bonferroni import bonferroni_test
from .fallback import fallback_test
from .fixed_sequence import fixed_sequence_test
from .holm import holm_test
from .multi_start import multi_start_test
from .result import FwerResult


class Procedure(Protocol):
    """What every function in `PROCEDURES` looks like."""

    def __call__(self, p_values: ArrayLike, *, epsilon: float) -> FwerResult:
        """Returns what is rejected; see `fixed_sequence_test`."""
        ...


PROCEDURES: Mapping[str, Procedure] = types.MappingProxyType(
    {
        "fixed_sequence": fixed_sequence_test,
        "multi_start": multi_start_test,
        "fallback": fallback_test,
        "holm": holm_test,
        "bonferroni": bonferroni_test,
    }
)
