"""The p-values by name, with what each needs to have been gathered."""

import dataclasses
import types
from collections.abc import Callable, Mapping

import numpy as np

from calm_beam.risk.evidence import Evidence, EvidenceError, IsFraction, LogCapital, Loss, SquaredLoss, Statistic
from calm_beam.risk.fixed_point import loss_sum_upper

from . import star_bets, wsr
from .empirical_bernstein import empirical_bernstein_p_value
from .exact_binomial import exact_binomial_p_value
from .hoeffding import hoeffding_p_value
from .hoeffding_bentkus import hoeffding_bentkus_p_value
from .signed_mixture import BETS, mixture_log_capital, mixture_p_value


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
    return wsr.table_p_value(evidence.table, delta=delta)


def _star_bets(evidence: Evidence, delta: float, epsilon: float) -> np.ndarray:
    assert evidence.table is not None
    return star_bets.table_p_value(evidence.table, delta=delta, epsilon=epsilon)


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
            takes_signed=True, statistics=_bets, p_values=_signed_mixture, log_capital=_signed_mixture_log_capital
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
