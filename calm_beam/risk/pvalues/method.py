"""The type of a p-value: a function with its requirements, checks of its arguments and rounding upwards.

A published p-value is never below the exact one.
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
    """A p-value: the losses it is valid for, the statistics it needs, and its function.

    Attributes:
      name: Its name in flags and manifests.
      takes_signed: Whether it is valid for losses in [-1, 1]; otherwise for losses in [0, 1] only.
      takes_fractions: Whether it is valid for losses between 0 and 1; otherwise for losses of 0 and 1 only.
      statistics: Function from delta to the statistics to sum.
      needs_table: Whether it needs every single loss, in an order fixed beforehand.
      p_values: Function from evidence, delta and the level epsilon that the test is planned at to one p-value per
        threshold. Most do not depend on the level, and every one is valid at all levels.
      log_capital: Function from evidence and delta to the logarithm of a capital whose expected value under the null is
        at most its start, and whose inverse is the p-value; None if the p-value is computed otherwise.
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
        """Whether it may be tested while examples come in: the least p-value of all looks is then a p-value too.

        Other p-values hold for a number of examples that was fixed beforehand.
        """
        return self.log_capital is not None


# No sum of losses distinguishes smaller tolerances, and quotients by them would leave the range of float64.
_LEAST_DELTA = 1e-280
# Largest relative error of a computed argument: 16 roundings of 2^-53.
_ARGUMENT = 2.0**-49
# The least p-value that we publish. 0 would be certainty, and some processors flush numbers far below this to 0.
LEAST = 1e-300


def require_n_and_delta(n: int, delta: float) -> tuple[int, float]:
    """Returns both as int and float, after checking their ranges."""
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
    """Returns the sums as float64, after checking that n values in [0, 1] can have them.

    Args:
      sums: Any shape.
      n: Number of summands.
      name: Name of the sums for the message, as the caller wrote it.
      meaning: What they are, for callers who passed something else.
    """
    checked = np.asarray(sums, dtype=np.float64)
    is_inside = (checked >= 0) & (checked <= n)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(f"{where} must be in [0, {n}] for n = {n}, got {float(checked[index])}. {meaning}")
    return checked


def require_loss_sum(loss_sum: ArrayLike, *, n: int, delta: float) -> tuple[np.ndarray, int, float]:
    """Returns the arguments of most p-values, after checking them."""
    count, delta = require_n_and_delta(n, delta)
    meaning = "It is the sum of n losses in [0, 1], not their mean."
    return require_sums(loss_sum, n=count, name="loss_sum", meaning=meaning), count, delta


def exp_upper(exponents: np.ndarray, *, factor: float = 1.0) -> np.ndarray:
    """Returns min(1, factor e^exponent), rounded up.

    Args:
      exponents: Any shape, at most 0, each with a relative error of at most 2^-49.
      factor: Exact, and above 0.

    Returns:
      The same shape, in (0, 1]: exceeds the exact value by a share of 2^-49, plus 2^-48 times the exponent.
    """
    return rounded_up(factor * elementary.exp(exponents * (1 - _ARGUMENT)))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """Returns p-values from values with a relative error of at most 2^-50, rounded up.

    The result lies in [1e-300, 1].
    """
    return np.asarray(np.clip(values * (1 + 2 * elementary.RELATIVE_ERROR), LEAST, 1.0))
