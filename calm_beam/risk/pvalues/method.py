"""What a p-value is: a function, and what it needs to have been gathered."""

import dataclasses
from collections.abc import Callable

import numpy as np

from calm_beam.risk.evidence import Evidence, Statistic


@dataclasses.dataclass(frozen=True, kw_only=True)
class PValueMethod:
    """A p-value: what it can be used on, what it needs, how it is computed.

    Attributes:
      name: What flags and manifests call it.
      takes_signed: Whether it is valid for losses in [-1, 1]; otherwise for losses in [0, 1] only.
      takes_fractions: Whether it is valid for losses between 0 and 1; otherwise for losses of 0 and 1 only.
      statistics: Given delta, what is to be summed.
      needs_table: Whether it needs every single loss, in an order fixed beforehand.
      p_values: Given evidence, delta and the level epsilon that the test is planned at, one p-value per threshold. Most
        do not depend on the level, and every one is valid at all levels.
      log_capital: Given evidence and delta, the logarithm of a capital that nobody can expect to win, of which the
        p-value is the inverse; None if it is made otherwise.
    """

    name: str
    takes_signed: bool = False
    takes_fractions: bool = True
    statistics: Callable[[float], tuple[Statistic, ...]]
    needs_table: bool = False
    p_values: Callable[[Evidence, float, float], np.ndarray]
    log_capital: Callable[[Evidence, float], np.ndarray] | None = None

    @property
    def is_anytime(self) -> bool:
        """Whether it may be looked at while examples come in: the least of all looks is then a p-value too.

        Others hold for a number of examples that was fixed beforehand.
        """
        return self.log_capital is not None
