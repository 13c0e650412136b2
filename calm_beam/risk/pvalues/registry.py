"""The p-values by name, with what each needs to have been gathered; and any of them of losses that are at hand.

Such losses are those of simulations, benchmarks, verifications and small jobs.

The opposite question is whether losses prove that the risk exceeds delta. A p-value for "the risk exceeds delta"
becomes one for "the risk is at most delta" when good and bad change places: a loss L in [0, 1] turns into 1 - L, and
the tolerance into 1 - delta. Signed losses are brought to [0, 1] on the way.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.evidence import Evidence, EvidenceError, IsFraction, LogCapital, Loss, SquaredLoss, Statistic
from calm_beam.risk.fixed_point import (
    loss_sum_upper,
    require_signed_unit_interval,
    require_unit_interval,
    to_fixed_point,
    to_signed_fixed_point,
)

from .betting import BETS, mixture_log_capital, mixture_p_value, star_bets_of_table, wsr_of_table
from .loss_sums import empirical_bernstein_p_value, exact_binomial_p_value, hoeffding_bentkus_p_value, hoeffding_p_value


@dataclasses.dataclass(frozen=True, kw_only=True)
class PValueMethod:
    """A p-value: what it can be used on, what it needs, how it is computed.

    Attributes:
      takes_signed: Whether it is valid for losses in [-1, 1]; otherwise for losses in [0, 1] only.
      takes_fractions: Whether it is valid for losses between 0 and 1; otherwise for losses of 0 and 1 only.
      statistics: Given delta, what is to be summed.
      needs_table: Whether it needs every single loss, in an order fixed beforehand.
      p_values: Given evidence, delta and the level epsilon that the test is planned at, one p-value per threshold. Most
        do not depend on the level, and every one is valid at all levels.
      log_capital: Given evidence and delta, the logarithm of a capital that nobody can expect to win, of which the
        p-value is the inverse; None if it is made otherwise.
    """

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


def _hoeffding(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_p_value(_upper(evidence, Loss()), n=evidence.n, delta=delta)


def _hoeffding_bentkus(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_bentkus_p_value(_upper(evidence, Loss()), n=evidence.n, delta=delta)


def _exact_binomial(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    fractions = int(evidence.sums[IsFraction()].max())
    if fractions:
        raise EvidenceError(
            f"exact_binomial is for losses of 0 and 1 only, but at one threshold {fractions} of {evidence.n} losses "
            "lie in between. Take hoeffding_bentkus, or a metric such as exact_match."
        )
    return exact_binomial_p_value(_upper(evidence, Loss()), n=evidence.n, delta=delta)


def _empirical_bernstein(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    squares = _upper(evidence, SquaredLoss())
    return empirical_bernstein_p_value(_upper(evidence, Loss()), squares, n=evidence.n, delta=delta)


def _bets(delta: float) -> tuple[LogCapital, ...]:
    return tuple(LogCapital(delta=delta, share=share) for share in BETS)


def _signed_mixture(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return mixture_p_value(_capitals(evidence, delta))


def _signed_mixture_log_capital(evidence: Evidence, delta: float) -> np.ndarray:
    return mixture_log_capital(_capitals(evidence, delta))


def _capitals(evidence: Evidence, delta: float) -> np.ndarray:
    return np.stack([evidence.sums[bet] for bet in _bets(delta)])


def _wsr(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    assert evidence.table is not None
    return wsr_of_table(evidence.table, delta=delta)


def _star_bets(evidence: Evidence, delta: float, epsilon: float) -> np.ndarray:
    assert evidence.table is not None
    return star_bets_of_table(evidence.table, delta=delta, epsilon=epsilon)


def _upper(evidence: Evidence, statistic: Statistic) -> np.ndarray:
    return loss_sum_upper(evidence.sums[statistic])


P_VALUES: Mapping[str, PValueMethod] = types.MappingProxyType(
    {
        "hoeffding": PValueMethod(statistics=lambda _: (Loss(),), p_values=_hoeffding),
        "hoeffding_bentkus": PValueMethod(statistics=lambda _: (Loss(),), p_values=_hoeffding_bentkus),
        "exact_binomial": PValueMethod(
            takes_fractions=False, statistics=lambda _: (Loss(), IsFraction()), p_values=_exact_binomial
        ),
        "empirical_bernstein": PValueMethod(
            statistics=lambda _: (Loss(), SquaredLoss()), p_values=_empirical_bernstein
        ),
        "signed_mixture": PValueMethod(
            takes_signed=True,
            statistics=_bets,
            p_values=_signed_mixture,
            log_capital=_signed_mixture_log_capital,
        ),
        "wsr": PValueMethod(takes_signed=True, statistics=lambda _: (), needs_table=True, p_values=_wsr),
        "star_bets": PValueMethod(takes_signed=True, statistics=lambda _: (), needs_table=True, p_values=_star_bets),
    }
)


def why_not_watched(name: str) -> str | None:
    """Returns why a p-value may not be looked at after every round, and what to take; None if it may.

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
        in betting order, which only some p-values look at.
      p_value: A key of `P_VALUES`.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level that the test is planned at, in (0, 1), which only `star_bets` looks at.

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
    """Returns p-values of the null "the risk is at most delta": a small one is evidence that it is larger.

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
