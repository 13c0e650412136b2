"""Calibration over a grid without an order, such as thresholds and temperatures: one part chooses a path, one tests it.

A hash of each unit's name draws the part that it is in, by itself, before anything is known of it: sizes vary like a
binomial, which voids nothing, since they and the losses are independent, and each test knows its own n. Wherever a set
is split in two, one part of which chooses what the other one tests, the split is checked here.
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
    """Refuses to split units that cannot be told apart, or by no share.

    Args:
      keys: One per unit.
      share: Name and value of the chance of a unit to be in one of the parts, in (0, 1).
      fault: What a unit in both parts would do.

    Raises:
      ValueError: If keys repeat, or the share is out of range.
    """
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be distinct: a unit in both parts would {fault}.")
    name, value = share
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value}. For 30 % pass 0.3.")


def check_parts(choosing: int, testing: int, *, verb: str) -> None:
    """Refuses parts of a set one of which is empty.

    Args:
      choosing: Units that choose.
      testing: Units of the other part.
      verb: What these do with what was chosen.

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
"""The parts of a set, by the names that their sums have in totals."""
MOST_BY_THEMSELVES = 6
"""Variants of which each is tested by itself by default: of more, a part of the set chooses what the rest tests."""
SELECTION_SHARE = 0.3
"""The share of it that chooses then: a path needs less evidence to be chosen than to be proved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParetoChoice:
    """The cheapest place of a grid proved safe.

    Attributes:
      chosen: Its index, or None: never exit.
      path: Places that the first part found worth testing, safest first.
      test: What the second part said of all places; those off the path were not tested.
    """

    chosen: int | None
    path: tuple[int, ...]
    test: FwerResult


def variants_plan(
    variants: Sequence[Variant], *, selection_share: float | None = None, objective: str | None = None
) -> ParetoPlan:
    """Returns how several variants are tested: by a rule that their number decides, and no loss.

    Each by itself costs a divided epsilon, and a part of the set that chooses costs its units. In simulations the
    former proves more, of up to nine variants (docs/measurements.md, "Lists of variants").

    Args:
      variants: The ways of decoding.
      selection_share: The share of the set that chooses, where it is named.
      objective: As in `ParetoPlan`.

    Raises:
      ManifestError: If they are not two or more different ones, or the share is none.
    """
    if selection_share is None and len(variants) > MOST_BY_THEMSELVES:
        selection_share = SELECTION_SHARE
    return ParetoPlan(variants=tuple(variants), choosing_share=selection_share, objective=objective)


def part_of(unit: str, *, salt: str, selection_share: float) -> str:
    """Returns which part of a set a unit is in, `CHOOSING` or `TESTING`.

    Args:
      unit: Its name, which no other has: id of an example, or name of a cluster.
      salt: Fixed before any loss is seen.
      selection_share: Chance of being in the part that chooses, in (0, 1).
    """
    return CHOOSING if is_drawn(unit, salt=f"{salt}/pareto", share=selection_share) else TESTING


def pareto_choice(choosing: np.ndarray, testing: np.ndarray, *, costs: Sequence[float], epsilon: float) -> ParetoChoice:
    """Returns the cheapest place whose risk is proved to be at most delta, with probability at least 1 - epsilon.

    Args:
      choosing: shape (places,). p-values of the part that chooses the path.
      testing: shape (places,). p-values of the part that tests it.
      costs: What to keep low, at every place; from the part that chooses.
      epsilon: Allowed probability that the chosen place breaks the tolerance, in (0, 1).

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
    """Returns the cheapest place of a grid proved safe, given every single loss and cost.

    The units are split before anything is known of them. The first part alone decides what is tested and in which
    order, by p-values and mean costs; the second part alone tests it. `calibrate --tau=1,4` does the same with sums.

    Args:
      losses: shape (units, places), each in [0, 1], or in [-1, 1] for a p-value that takes signed losses.
      costs: shape (units, places), finite; what to keep low, such as layers that all tokens of an output used.
      keys: One per unit, distinct: ids of examples, or names of clusters.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the choice breaks it, in (0, 1).
      p_value: A key of `P_VALUES`; none that bets on the units one after the other.
      salt: Decides the split; fixed before any loss is seen.
      selection_share: Chance of a unit to be in the part that chooses, in (0, 1).
      sizes: shape (units, places), positive in sum; what costs are counted by, such as tokens. None counts units.

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
