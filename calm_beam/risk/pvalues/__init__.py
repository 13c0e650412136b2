"""p-values for the null "the risk at this threshold exceeds delta": a table by name, and functions of given losses.

Each is valid for any i.i.d. losses in its range: under the null, P(p <= u) <= u for every u. The p-value to use has to
be settled before the losses are seen; the least of several p-values is not a p-value.

The functions of given losses serve simulations, benchmarks, verifications and small jobs.

The opposite question is whether losses prove that the risk exceeds delta. A p-value for "the risk exceeds delta"
becomes one for "the risk is at most delta" by reversing the losses: a loss L in [0, 1] turns into 1 - L, and
the tolerance into 1 - delta. Signed losses are first mapped to [0, 1].
"""

import types
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.evidence import Evidence
from calm_beam.risk.evidence import EvidenceError as EvidenceError
from calm_beam.risk.losses import (
    require_signed_unit_interval,
    require_unit_interval,
    to_fixed_point,
    to_signed_fixed_point,
)

from .method import PValueMethod
from .of_sums import EMPIRICAL_BERNSTEIN, EXACT_BINOMIAL, HOEFFDING, HOEFFDING_BENTKUS
from .of_sums import empirical_bernstein_p_value as empirical_bernstein_p_value
from .of_sums import exact_binomial_p_value as exact_binomial_p_value
from .of_sums import hoeffding_bentkus_p_value as hoeffding_bentkus_p_value
from .of_sums import hoeffding_p_value as hoeffding_p_value
from .signed_mixture import SIGNED_MIXTURE
from .signed_mixture import signed_mixture_p_value as signed_mixture_p_value
from .star_bets import STAR_BETS
from .star_bets import star_bets_p_value as star_bets_p_value
from .wsr import WSR
from .wsr import wsr_p_value as wsr_p_value

_METHODS = (HOEFFDING, HOEFFDING_BENTKUS, EXACT_BINOMIAL, EMPIRICAL_BERNSTEIN, SIGNED_MIXTURE, WSR, STAR_BETS)

P_VALUES: Mapping[str, PValueMethod] = types.MappingProxyType({method.name: method for method in _METHODS})


def why_not_watched(name: str) -> str | None:
    """Returns why a p-value may not be tested after every round, and which one to use; None if it may.

    Args:
      name: A key of `P_VALUES`.
    """
    if P_VALUES[name].is_anytime:
        return None
    anytime = " or ".join(other for other, method in P_VALUES.items() if method.is_anytime)
    return (
        f"p_value {name} holds for a number of examples that is fixed beforehand. Looked at after every round, until "
        f"it is small, it accepts what is not safe more often than epsilon. Take {anytime}"
    )


def p_values_of(losses: ArrayLike, *, p_value: str, delta: float, epsilon: float = 0.05) -> np.ndarray:
    """Returns the p-values that a calibration with these losses would compute, bit for bit.

    Args:
      losses: shape (n, ...), each in [0, 1], or in [-1, 1] for a p-value that takes signed losses. Along the first axis
        in betting order, which only some p-values use.
      p_value: A key of `P_VALUES`.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level that the test is planned at, in (0, 1); only `star_bets` uses it.

    Returns:
      Shape (...), values in [0, 1].

    Raises:
      ValueError: If there are no losses, one is NaN or out of range, or `delta` is.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours.

    >>> p_values_of([[0.0, 1.0]] * 29, p_value="exact_binomial", delta=0.1).round(4)
    array([0.0471, 1.    ])
    """
    method = P_VALUES[p_value]
    fixed = to_signed_fixed_point(losses) if method.takes_signed else to_fixed_point(losses)
    if fixed.ndim == 0 or not len(fixed):
        raise ValueError(f"losses must have shape (n, ...) with n at least 1, got {fixed.shape}.")
    evidence = Evidence.of(fixed, method.statistics(delta), table=fixed if method.needs_table else None)
    return method.p_values(evidence, delta, epsilon)


def excess_p_values(losses: ArrayLike, *, p_value: str, delta: float, is_signed: bool = False) -> np.ndarray:
    """Returns p-values of the null "the risk is at most delta": a small one is evidence that the risk is larger.

    Args:
      losses: shape (n, ...), each in [0, 1], or in [-1, 1] if signed; along the first axis in betting order.
      p_value: A key of `P_VALUES`; every one that is valid for the losses is valid for them reversed.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1].

    Returns:
      Shape (...), values in [0, 1].

    Raises:
      ValueError: If there are no losses, one is NaN or out of range, or `delta` is.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: ours; see the module docstring.

    >>> excess_p_values([[0.0, 1.0]] * 29, p_value="exact_binomial", delta=0.9).round(4)
    array([1.    , 0.0471])
    """
    if is_signed:
        reversed_losses = (1 - require_signed_unit_interval(losses, name="losses")) / 2
        return p_values_of(reversed_losses, p_value=p_value, delta=(1 - delta) / 2)
    return p_values_of(1 - require_unit_interval(losses, name="losses"), p_value=p_value, delta=1 - delta)
