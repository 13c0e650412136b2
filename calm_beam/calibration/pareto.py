"""Calibration over a grid without an order, such as thresholds and temperatures: one part chooses a path, one tests it.

A hash of each unit's name decides which part the unit is in, independently of all others and before anything is known
of it. Part sizes therefore vary like a binomial. That voids nothing, since sizes and losses are independent and each
test uses its own n. Wherever one part of a set chooses what another part tests, the split is checked here.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from calm_beam.inputs.set_parts import is_drawn
from calm_beam.manifest import ParetoPlan, Variant
from calm_beam.risk.fwer import FwerResult, pareto_path, pareto_test
from calm_beam.risk.pvalues import P_VALUES, p_values_of


def check_split(*, keys: Sequence[str], share: tuple[str, float], fault: str) -> None:
    """Refuses to split units whose keys repeat, or by a share out of range.

    Args:
      keys: One per unit.
      share: Name and value of the probability that a unit is in one of the parts, in (0, 1).
      fault: What would go wrong if a unit were in both parts, for the message.

    Raises:
      ValueError: If keys repeat, or the share is out of range.
    """
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be distinct: a unit in both parts would {fault}.")
    name, value = share
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value}. For 30 % pass 0.3.")


def check_parts(choosing: int, testing: int, *, verb: str) -> None:
    """Refuses a split with an empty part.

    Args:
      choosing: Units that choose.
      testing: Units of the other part.
      verb: What the other part does with the choice, for the message.

    Raises:
      ValueError: If a part is empty.
    """
    if not (choosing and testing):
        raise ValueError(
            f"of {choosing + testing} units, {choosing} were drawn to choose what the other {testing} {verb}. "
            "Both parts need some: take more examples."
        )


CHOOSING, TESTING = "choosing", "testing"
PARTS = (CHOOSING, TESTING)
"""The names of the parts of a set in totals."""
MOST_BY_THEMSELVES = 6
"""Up to this many variants are each tested by default; with more, a part of the set chooses what the rest tests."""
SELECTION_SHARE = 0.3
"""The share of the set that then chooses: choosing a path needs less evidence than proving it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParetoChoice:
    """The cheapest point of a grid proved safe.

    Attributes:
      chosen: Index of the point, or None: never exit.
      path: Points that the first part found worth testing, safest first.
      test: Result of the second part for all points; those off the path were not tested.
    """

    chosen: int | None
    path: tuple[int, ...]
    test: FwerResult


def variants_plan(
    variants: Sequence[Variant], *, selection_share: float | None = None, objective: str | None = None
) -> ParetoPlan:
    """Returns how several variants are tested: by a rule that depends on their number alone, and on no loss.

    Testing each variant by itself divides epsilon; a selection part uses up units. In simulations the former proves
    more for up to nine variants (docs/measurements.md, "Lists of variants").

    Args:
      variants: The variants.
      selection_share: The share of the set that chooses, if named.
      objective: The cost to minimise, as in `ParetoPlan`.

    Raises:
      ManifestError: If there are fewer than two variants, two are equal, or the share is not one.
    """
    if selection_share is None and len(variants) > MOST_BY_THEMSELVES:
        selection_share = SELECTION_SHARE
    return ParetoPlan(variants=tuple(variants), choosing_share=selection_share, objective=objective)


def part_of(unit: str, *, salt: str, selection_share: float) -> str:
    """Returns which part of a set a unit is in, `CHOOSING` or `TESTING`.

    Args:
      unit: Its unique name: id of an example, or name of a cluster.
      salt: Fixed before any loss is seen.
      selection_share: Chance of being in the part that chooses, in (0, 1).
    """
    return CHOOSING if is_drawn(unit, salt=f"{salt}/pareto", share=selection_share) else TESTING


def pareto_choice(choosing: np.ndarray, testing: np.ndarray, *, costs: Sequence[float], epsilon: float) -> ParetoChoice:
    """Returns the cheapest point whose risk is proved to be at most delta, with probability at least 1 - epsilon.

    Args:
      choosing: shape (points,). p-values of the part that chooses the path.
      testing: shape (points,). p-values of the part that tests it.
      costs: Cost to minimise, at every point; from the part that chooses.
      epsilon: Allowed probability that the chosen point breaks the tolerance, in (0, 1).

    Raises:
      ValueError: If shapes do not fit, or a value is out of range.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1. In
      CALM, tau is set on validation data beforehand.
    """
    path = pareto_path(choosing, costs=costs)
    test = pareto_test(testing, epsilon=epsilon, path=path)
    # On the front costs fall along the path, so the last one accepted is the cheapest.
    accepted = [index for index in path if test.rejected[index]]
    return ParetoChoice(chosen=accepted[-1] if accepted else None, path=path, test=test)


def pareto_calibration(
    losses: np.ndarray,
    costs: np.ndarray,
    *,
    keys: Sequence[str],
    delta: float,
    epsilon: float,
    p_value: str,
    salt: str,
    selection_share: float = 0.5,
    sizes: np.ndarray | None = None,
) -> ParetoChoice:
    """Returns the cheapest point of a grid proved safe, given every single loss and cost.

    The units are split before anything is known of them. The first part alone decides, by p-values and mean costs,
    which points are tested and in which order. The second part alone tests them. `calibrate --tau=1,4` does the same
    with sums.

    Args:
      losses: shape (units, points), each in [0, 1], or in [-1, 1] for a p-value that takes signed losses.
      costs: shape (units, points), finite; the cost to minimise, such as layers that all tokens of an output used.
      keys: One per unit, distinct: ids of examples, or names of clusters.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the choice breaks it, in (0, 1).
      p_value: A key of `P_VALUES`; not one that bets on the units one after the other.
      salt: Decides the split; fixed before any loss is seen.
      selection_share: Probability that a unit is in the part that chooses, in (0, 1).
      sizes: shape (units, points), positive in sum; denominators of costs, such as tokens. None counts units.

    Raises:
      ValueError: If shapes do not fit, keys repeat, a part is empty, or a value is out of range.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: as `pareto_choice`.
    """
    losses, costs = np.asarray(losses, np.float64), np.asarray(costs, np.float64)
    sizes = np.ones_like(costs) if sizes is None else np.asarray(sizes, np.float64)
    if losses.ndim != 2 or not costs.shape == sizes.shape == losses.shape or len(keys) != len(losses):
        raise ValueError(
            f"losses, costs and sizes must have shape (units, places), with one key per unit; got {losses.shape}, "
            f"{costs.shape}, {sizes.shape} and {len(keys)} keys."
        )
    share = ("selection_share", selection_share)
    check_split(keys=keys, share=share, fault="choose its own test")
    if P_VALUES[p_value].needs_table:
        raise ValueError(
            f"p_value {p_value} bets on single losses in an order, which is not kept here. Take another one."
        )
    parts = np.array([part_of(key, salt=salt, selection_share=selection_share) for key in keys])
    first, second = parts == CHOOSING, parts == TESTING
    check_parts(int(first.sum()), int(second.sum()), verb="test")
    return pareto_choice(
        p_values_of(losses[first], p_value=p_value, delta=delta),
        p_values_of(losses[second], p_value=p_value, delta=delta),
        costs=[
            math.fsum(column) / math.fsum(counted)
            for column, counted in zip(costs[first].T, sizes[first].T, strict=True)
        ],
        epsilon=epsilon,
    )
