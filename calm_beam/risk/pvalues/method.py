"""What a p-value is and what it owes: it is a function with what it needs, checks its arguments and rounds outwards.

What is published as a p-value is never below the exact one.
"""

import dataclasses
import operator
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
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


# No sum of losses tells smaller tolerances apart, and quotients by them would leave the range of float64.
_LEAST_DELTA = 1e-280
# What a computed argument may be wrong by, as a share of it: 16 roundings of 2^-53.
_ARGUMENT = 2.0**-49
# The least p-value that we publish. 0 would be certainty, and far below are numbers that some processors take for 0.
LEAST = 1e-300


def require_n_and_delta(n: int, delta: float) -> tuple[int, float]:
    """Returns both with their types made plain, having checked their ranges."""
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"n must be an integer, got {n!r}.") from None
    if count < 1:
        raise ValueError(f"n must be at least 1, got {count}. Is the calibration set empty?")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}. Tolerances are fractions: for 5 % pass delta=0.05.")
    return count, max(float(delta), _LEAST_DELTA)


def require_sums(sums: ArrayLike, *, n: int, name: str, meaning: str) -> np.ndarray:
    """Returns the sums as float64, having checked that n values in [0, 1] can have them.

    Args:
      sums: Any shape.
      n: Number of summands.
      name: What to call the sums in the message, as the caller wrote it.
      meaning: What they are, for who passed something else.
    """
    checked = np.asarray(sums, dtype=np.float64)
    is_inside = (checked >= 0) & (checked <= n)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(f"{where} must be in [0, {n}] for n = {n}, got {float(checked[index])}. {meaning}")
    return checked


def require_loss_sum(loss_sum: ArrayLike, *, n: int, delta: float) -> tuple[np.ndarray, int, float]:
    """Returns the arguments that most p-values have, checked."""
    count, delta = require_n_and_delta(n, delta)
    meaning = "It is the sum of n losses in [0, 1], not their mean."
    return require_sums(loss_sum, n=count, name="loss_sum", meaning=meaning), count, delta


def exp_upper(exponents: np.ndarray, *, factor: float = 1.0) -> np.ndarray:
    """Returns min(1, factor e^exponent), rounded up.

    Args:
      exponents: Any shape, at most 0, each right to a share of 2^-49.
      factor: Exact, and above 0.

    Returns:
      The same shape, in (0, 1]: above the exact value by a share of 2^-49 and of 2^-48 times the exponent.
    """
    return rounded_up(factor * elementary.exp(exponents * (1 - _ARGUMENT)))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns values that are right to 2^-50 of themselves as p-values that are none too small.

    They lie in [1e-300, 1].
    """
    return np.asarray(np.clip(values * (1 + 2 * elementary.RELATIVE_ERROR), LEAST, 1.0))
