"""Testing many thresholds at once, so that the chance of accepting any bad one (the FWER) is at most epsilon.

Each procedure takes p-values in testing order and returns which nulls "the risk at this threshold exceeds delta" are
rejected. Any choice among the rejected thresholds, by any criterion, is then safe with probability at
least 1 - epsilon. The procedure has to be settled before the losses are seen. `PROCEDURES` has them by the
names that flags and manifests use.

Pareto testing is for grids that have no order: one part of the data chooses a path through a grid of settings, the
other tests along it. A grid over several settings, such as exit threshold and temperature, has no natural order from
safe to risky. Any order is allowed as long as the losses that test it are not those that chose it.
"""

import dataclasses
import math
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.losses import require_unit_interval

_DEFAULT_STARTS = 4
# Weights such as 20 times 0.05 add up to 1 only approximately.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FwerResult:
    """The hypotheses that were tested and those that were rejected, in testing order.

    Leading axes, if any, are separate calibrations, each tested by itself.

    Attributes:
      rejected: shape (..., thresholds), bool. Thresholds found safe. Rejecting none is a result too: never exit.
      tested: shape (..., thresholds), bool. Thresholds whose p-values the decision rests on; includes all rejected
        ones.
    """

    rejected: np.ndarray
    tested: np.ndarray

    def __post_init__(self) -> None:
        assert self.rejected.shape == self.tested.shape
        assert not (self.rejected & ~self.tested).any()

    def last_rejected(self) -> np.ndarray:
        """Returns the index of the last rejected hypothesis: with descending thresholds, the lowest that is safe.

        Returns:
          Shape (...), int; -1 where none is rejected.

        Source: CALM Algorithm 1 (the last rejected threshold is returned).

        >>> FwerResult(rejected=np.array([True, False, True]), tested=np.ones(3, bool)).last_rejected()
        array(2)
        """
        indices = np.arange(self.rejected.shape[-1])
        return np.asarray(np.max(np.where(self.rejected, indices, -1), axis=-1, initial=-1))


def fixed_sequence_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns the result of testing in order up to the first hypothesis whose p-value exceeds epsilon.

    Controls the chance of any false rejection (the FWER) at epsilon, however the p-values depend on each other and
    without dividing epsilon among them, because a false rejection needs the first true null of the sequence to be
    rejected. It holds only if the order was fixed before the losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order: descending thresholds.
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      All hypotheses before the first failure are rejected; those and the failure itself are tested.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1] (also after the first failure), or if
        `epsilon` is out of range.

    Source: CALM Algorithm 1 (calibrating CALM), sec. "Efficient fixed sequence testing"; Bauer (1991).

    >>> fixed_sequence_test([0.001, 0.05, 0.2, 0.01], epsilon=0.05).rejected
    array([ True,  True, False, False])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    rejected = np.logical_and.accumulate(checked <= epsilon, axis=-1)
    # The first is always tested, each other one if the one before it was rejected.
    tested = np.ones_like(rejected)
    tested[..., 1:] = rejected[..., :-1]
    return FwerResult(rejected=rejected, tested=tested)


def multi_start_test(p_values: ArrayLike, *, epsilon: float, starts: Sequence[int] | None = None) -> FwerResult:
    """Returns the result of fixed sequence tests from several starting points, each at its share of epsilon.

    Every test runs to its own first failure, past later starting points too. One early failure then does not hide
    the rest of the grid; the price is that every p-value has to be as small as epsilon divided by the number of
    starting points. Controls the FWER at epsilon however the p-values depend on each other (union bound over the
    tests), if order and starting points were fixed before the losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order.
      epsilon: Allowed probability of any false rejection, in (0, 1).
      starts: Indices at which tests start, distinct, each in [0, thresholds). None spreads up to four evenly, the first
        at 0.

    Returns:
      The hypotheses that any of the tests rejected or tested.

    Raises:
      TypeError: If a start is not an integer.
      ValueError: If `starts` is empty, repeats an index or leaves the sequence, or if `fixed_sequence_test` would raise
        it.

    Source: Angelopoulos et al. (2021), Learn then Test, Algorithm 1 (fixed sequence testing; J are our starts).

    >>> multi_start_test([0.3, 0.01, 0.02, 0.03], epsilon=0.05, starts=[0, 1]).rejected
    array([False,  True,  True, False])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    indices = _even_starts(size) if starts is None else _checked_starts(starts, size)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    for start in indices:
        part = fixed_sequence_test(checked[..., start:], epsilon=epsilon / len(indices))
        rejected[..., start:] |= part.rejected
        tested[..., start:] |= part.tested
    return FwerResult(rejected=rejected, tested=tested)


def _even_starts(size: int) -> list[int]:
    count = min(_DEFAULT_STARTS, size)
    return [index * size // count for index in range(count)]


def _checked_starts(starts: Sequence[int], size: int) -> list[int]:
    indices = [operator.index(start) for start in starts]
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < size for index in indices):
        raise ValueError(f"starts must be one or more different places in [0, {size}), got {indices}.")
    return indices


def fallback_test(p_values: ArrayLike, *, epsilon: float, weights: ArrayLike | None = None) -> FwerResult:
    """Returns the result of the fallback procedure.

    Each hypothesis starts with its weight times epsilon. A rejected hypothesis passes the whole level it was tested at
    to the next; otherwise the next is tested at its own share alone. With all the weight on the first this is fixed
    sequence testing; with the weight on several starting points it rejects at least what `multi_start_test` does.
    Controls the FWER at epsilon however the p-values depend on each other, if order and weights were fixed before the
    losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order.
      epsilon: Allowed probability of any false rejection, in (0, 1).
      weights: shape (thresholds,), each at least 0, adding up to at most 1. None divides 1 evenly.

    Returns:
      The rejected hypotheses; all with a positive share were tested.

    Raises:
      ValueError: If `weights` has another shape, is negative or NaN or adds up to more than 1; if `p_values` has no
        axis or holds NaN or values outside [0, 1]; if `epsilon` is out of range.

    Source: Wiens (2003), a fixed sequence Bonferroni procedure; Wiens and Dmitrienko (2005), the fallback procedure.

    >>> fallback_test([0.01, 0.03, 0.9, 0.04, 0.01], epsilon=0.05).rejected
    array([ True, False, False, False,  True])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    shares = np.full(size, 1.0 / max(size, 1)) if weights is None else _checked_weights(weights, size)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    handed_on = np.zeros(checked.shape[:-1])
    for index, share in enumerate(shares):
        weight = np.minimum(handed_on + share, 1.0)
        tested[..., index] = weight > 0
        rejected[..., index] = (weight > 0) & (checked[..., index] <= epsilon * weight)
        handed_on = np.where(rejected[..., index], weight, 0.0)
    return FwerResult(rejected=rejected, tested=tested)


def _checked_weights(weights: ArrayLike, size: int) -> np.ndarray:
    checked = np.asarray(weights, dtype=np.float64)
    if checked.shape != (size,):
        raise ValueError(f"weights must have one entry per threshold, shape ({size},), got {checked.shape}.")
    # Written this way because every comparison with NaN is false.
    if not (checked >= 0).all() or not math.fsum(checked) <= 1 + _ROUNDING:
        raise ValueError(f"weights must be at least 0 and add up to at most 1, got {checked.tolist()}.")
    return checked


def holm_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns the result of Holm's step-down procedure.

    The least p-value has to be at most epsilon / K for K thresholds, the next epsilon / (K - 1), and so on to the first
    that is not. Controls the FWER at epsilon however the p-values depend on each other, in any order.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      The rejected hypotheses; all are tested, since every p-value affects the order.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.

    >>> holm_test([0.04, 0.01, 0.02, 0.5], epsilon=0.05).rejected
    array([False,  True, False, False])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    order = np.argsort(checked, axis=-1, kind="stable")
    passes = np.take_along_axis(checked, order, axis=-1) <= epsilon / (size - np.arange(size))
    rejected = np.zeros(checked.shape, dtype=bool)
    np.put_along_axis(rejected, order, np.logical_and.accumulate(passes, axis=-1), axis=-1)
    return FwerResult(rejected=rejected, tested=np.ones_like(rejected))


def bonferroni_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns the result of rejecting p-values of at most epsilon divided by their number.

    Controls the FWER at epsilon however the p-values depend on each other, in any order (union bound). Finer grids cost
    power, which fixed sequence testing avoids.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      The rejected hypotheses; all are tested.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: Angelopoulos et al. (2021), Learn then Test, sec. on Bonferroni correction; Dunn (1961).

    >>> bonferroni_test([0.04, 0.01, 0.02, 0.5], epsilon=0.05).rejected
    array([False,  True, False, False])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    rejected = checked <= epsilon / max(checked.shape[-1], 1)
    return FwerResult(rejected=rejected, tested=np.ones_like(rejected))


class Procedure(Protocol):
    """The signature of every function in `PROCEDURES`."""

    def __call__(self, p_values: ArrayLike, *, epsilon: float) -> FwerResult:
        """Returns the result of the test; see `fixed_sequence_test`."""
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


def pareto_path(p_values: ArrayLike, *, costs: ArrayLike) -> tuple[int, ...]:
    """Returns the settings worth testing, safest first, as the first part of the data sees them.

    A setting is left out if another one is at least as good in every p-value and in cost, and better in one of them.

    Args:
      p_values: shape (settings,) or (objectives, settings), each in [0, 1]. From the first part of the data.
      costs: shape (settings,). Cost to minimise, such as mean layers; from the first part, or known beforehand.

    Returns:
      Indices of the settings on the Pareto front, by ascending p-value (the largest over objectives). Of equal settings
      only the first is kept.

    Raises:
      ValueError: If shapes differ, a p-value is NaN or outside [0, 1], or a cost is not finite.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1.

    >>> pareto_path([0.001, 0.9, 0.004, 0.2], costs=[7.0, 2.0, 5.0, 6.0])
    (0, 2, 1)
    """
    evidence = np.atleast_2d(require_unit_interval(p_values, name="p_values"))
    prices = np.asarray(costs, dtype=np.float64)
    if evidence.ndim != 2 or prices.shape != evidence.shape[1:]:
        raise ValueError(
            "p_values must have shape (settings,) or (objectives, settings) and costs (settings,), got "
            f"{np.shape(p_values)} and {prices.shape}."
        )
    if not np.isfinite(prices).all():
        index = int(np.argmin(np.isfinite(prices)))
        raise ValueError(f"costs[{index}] must be finite, got {float(prices[index])}.")
    # Any strict weak order that puts a dominating setting before those it dominates works; this one is the path.
    sums = np.array([math.fsum(column) for column in evidence.T])
    order = np.lexsort((prices, sums, evidence.max(axis=0)))
    criteria = np.vstack([evidence, prices])
    path: list[int] = []
    for index in order:
        if not (criteria[:, path] <= criteria[:, [index]]).all(axis=0).any():
            path.append(int(index))
    return tuple(path)


def pareto_test(p_values: ArrayLike, *, epsilon: float, path: Sequence[int]) -> FwerResult:
    """Returns the result of a fixed sequence test along a path, in the grid's own order.

    Controls the FWER at epsilon if the losses behind `p_values` are independent of those that chose the path.

    Args:
      p_values: shape (..., settings), each in [0, 1]. From the second part of the data, with settings in their own
        order; with several objectives the largest p-value of each setting, which is a p-value for "one of the risks
        exceeds its tolerance".
      epsilon: Allowed probability of any false rejection, in (0, 1).
      path: Distinct indices of settings, in testing order, as `pareto_path` returns them.

    Returns:
      The rejected and tested settings, in their own order; those off the path are neither.

    Raises:
      TypeError: If an index is not an integer.
      ValueError: If the path repeats an index or leaves the grid, or if `fixed_sequence_test` would raise it.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1.

    >>> pareto_test([0.01, 0.3, 0.04, 0.0], epsilon=0.05, path=(0, 2, 1)).rejected
    array([ True, False,  True, False])
    """
    checked = _require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    indices = [operator.index(index) for index in path]
    if len(set(indices)) != len(indices) or not all(0 <= index < size for index in indices):
        raise ValueError(f"path must hold different places in [0, {size}), got {indices}.")
    along = fixed_sequence_test(checked[..., indices], epsilon=epsilon)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    rejected[..., indices] = along.rejected
    tested[..., indices] = along.tested
    return FwerResult(rejected=rejected, tested=tested)


def _require_arguments(p_values: ArrayLike, *, epsilon: float) -> np.ndarray:
    """Returns the p-values as float64, after checking them and epsilon.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      The same shape.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: ours.

    >>> _require_arguments([0, 0.5], epsilon=0.05)
    array([0. , 0.5])
    """
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon must be in (0, 1), got {epsilon}. It is a probability: for 95 % confidence pass epsilon=0.05."
        )
    checked = np.asarray(p_values, dtype=np.float64)
    if checked.ndim == 0:
        raise ValueError(f"p_values must have shape (..., thresholds), got the single number {p_values!r}.")
    is_inside = (checked >= 0) & (checked <= 1)
    if not is_inside.all():
        index = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        raise ValueError(f"p_values[{', '.join(map(str, index))}] must be in [0, 1], got {float(checked[index])}.")
    return checked
