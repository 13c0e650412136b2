"""When a calibration that is watched while examples come in would have proved a threshold: a forecast by simulation.

The test is that of `signed_mixture`, whose capital may be looked at after every round: by Ville's inequality it is ever
as large as 1 / epsilon with probability epsilon at most, if the risk exceeds delta.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from calm_beam.risk.elementary import log_capital
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.pvalues.betting import BETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedStop:
    """What simulated calibrations come to.

    Attributes:
      place: Index in the testing order of the last threshold that so many of them prove by their end as were asked for;
        -1 for none.
      shares: The share of all examples after which that threshold is proved: in the median calibration, and the ends of
        the interval that 90 % of them are in. A calibration that does not prove it takes all. None where `place` is -1.
    """

    place: int
    shares: tuple[float, float, float] | None


def expected_stop(
    fixed_losses: np.ndarray,
    *,
    delta: float,
    epsilon: float,
    looks: Sequence[int],
    power: float = 0.9,
    replications: int = 200,
    seed: int = 0,
) -> ExpectedStop:
    """Returns how far calibrations go that stop at the threshold which a whole one is expected to prove.

    Each simulated calibration draws its examples from the pilot's, with weights of its own: the pilot is a sample too,
    so that others may be better or worse. Thresholds are tested in their order until one is not proved.

    Args:
      fixed_losses: shape (examples, thresholds), int64 in units of 2^-32. The pilot's, in the testing order.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level, in (0, 1).
      looks: Numbers of examples after which there is a look, ascending; the last is that of all.
      power: Share of whole calibrations that have to prove the threshold.
      replications: Number of simulated calibrations, at least 1.
      seed: Of the draws.

    Source: simulation; Ville (1939) for the test, Rubin (1981), "The Bayesian bootstrap", for the weights.
    """
    examples, thresholds = fixed_losses.shape
    # [bettors, examples, thresholds]
    grown = np.stack([log_capital(fixed_losses, delta=delta, share=share) / LOSS_SCALE for share in BETS])
    starts = np.log(np.array(list(BETS.values())))[:, None, None]
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(examples), size=replications)
    capital = np.zeros((len(BETS), replications, thresholds))
    needed = np.full((replications, thresholds), np.inf)
    seen = 0
    for look in looks:
        # How often each of the pilot's examples is drawn in this round.
        counts = rng.multinomial(look - seen, weights)
        capital += counts.astype(float) @ grown
        wealth = np.logaddexp.reduce(capital + starts, axis=0)
        needed[(wealth >= -math.log(epsilon)) & np.isinf(needed)] = look
        seen = look
    # A threshold is reached once all before it are proved too.
    reached = np.maximum.accumulate(needed, axis=1)
    proved = np.isfinite(reached).mean(axis=0) >= power
    if not proved[0]:
        return ExpectedStop(place=-1, shares=None)
    place = int(np.flatnonzero(proved)[-1])
    shares = np.minimum(reached[:, place], seen) / seen
    low, median, high = np.quantile(shares, (0.05, 0.5, 0.95), method="inverted_cdf")
    return ExpectedStop(place=place, shares=(float(median), float(low), float(high)))


def looks_at(examples: int, *, first: int) -> tuple[int, ...]:
    """Returns after how many examples there is a look: after every round at first, later when there are 5 % more.

    Args:
      examples: All.
      first: Examples of a round.

    >>> looks_at(1000, first=400)
    (400, 800, 1000)
    """
    looks = []
    look = min(first, examples)
    while look < examples:
        looks.append(look)
        look += max(first, first * int(0.05 * look / first))
    return (*looks, examples)
