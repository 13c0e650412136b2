"""Calibration over a grid without an order, such as thresholds and temperatures: one part chooses a path, one tests it.

Every setting is decoded by a run of its own (`calibrate --schedule=decay --tau=...`); their outputs are scored alike,
and one column of losses and of costs per setting comes here.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from calm_beam.risk.fwer import FwerResult, pareto_path, pareto_test
from calm_beam.risk.in_memory import p_values_of
from calm_beam.risk.loss_table import LossTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParetoChoice:
    """The cheapest setting proved safe.

    Attributes:
      chosen: Its index, or None: never exit.
      path: Settings that the first part found worth testing, safest first.
      test: What the second part said of all settings; those off the path were not tested.
      num_choosing: Units in the first part.
      num_testing: Units in the second part: the n of the promise.
    """

    chosen: int | None
    path: tuple[int, ...]
    test: FwerResult
    num_choosing: int
    num_testing: int


def pareto_calibration(
    losses: np.ndarray,
    costs: np.ndarray,
    *,
    keys: Sequence[str],
    delta: float,
    epsilon: float,
    p_value: str,
    salt: str,
    choosing_share: float = 0.5,
) -> ParetoChoice:
    """Returns the cheapest setting whose risk is proved to be at most delta, with probability at least 1 - epsilon.

    The units are split by a salted hash of their keys, before anything is known of them. The first part alone decides
    which settings are tested and in which order, by p-values and mean costs; the second part alone tests them.

    Args:
      losses: shape (units, settings), each in [0, 1], or in [-1, 1] for a p-value that takes signed losses.
      costs: shape (units, settings), finite; what to keep low, such as layers that an output used.
      keys: One per unit, distinct: ids of examples, or names of clusters.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the chosen setting breaks it, in (0, 1).
      p_value: A key of `P_VALUES`.
      salt: Decides the split, and the betting order; fixed before any loss is seen.
      choosing_share: Share of the units that choose the path, in (0, 1).

    Raises:
      ValueError: If shapes do not fit, keys repeat, a part would be empty, or a value is out of range.
      EvidenceError: If the p-value is for losses of 0 and 1, and there are others.

    Source: Laufer-Goldshtein et al. (2023), Efficiently controlling multiple risks with Pareto testing, Algorithm 1. In
      CALM, tau is set on validation data beforehand.
    """
    losses, costs = np.asarray(losses, np.float64), np.asarray(costs, np.float64)
    if losses.ndim != 2 or costs.shape != losses.shape or len(keys) != len(losses):
        raise ValueError(
            f"losses and costs must both have shape (units, settings), with one key per unit; got {losses.shape}, "
            f"{costs.shape} and {len(keys)} keys."
        )
    if len(set(keys)) != len(keys):
        raise ValueError("keys must be distinct: a unit in both parts would choose its own test.")
    if not 0 < choosing_share < 1:
        raise ValueError(f"choosing_share must be in (0, 1), got {choosing_share}.")
    num_choosing = round(choosing_share * len(keys))
    if not 0 < num_choosing < len(keys):
        raise ValueError(f"{len(keys)} units leave a part empty at choosing_share {choosing_share}. More are needed.")
    order = LossTable.of(keys, np.arange(len(keys))[:, None, None], salt=salt).in_order()[:, 0, 0]
    first, second = order[:num_choosing], order[num_choosing:]
    path = pareto_path(
        p_values_of(losses[first], p_value=p_value, delta=delta),
        costs=[math.fsum(column) / len(first) for column in costs[first].T],
    )
    test = pareto_test(p_values_of(losses[second], p_value=p_value, delta=delta), epsilon=epsilon, path=path)
    # On the front costs fall along the path, so the last one accepted is the cheapest.
    accepted = [index for index in path if test.rejected[index]]
    return ParetoChoice(
        chosen=accepted[-1] if accepted else None,
        path=path,
        test=test,
        num_choosing=len(first),
        num_testing=len(second),
    )
