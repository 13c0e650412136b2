"""Watching the risk while a model serves: a test that may look after every loss, forever.

A bettor who believes that the risk exceeds delta multiplies what is staked by 1 + bet (loss - delta) on every loss. If
the expected next loss, given all before it, is at most delta, the capital is a supermartingale, and the chance that it
ever reaches 1 / alpha is at most alpha (Ville's inequality), however long the stream is and however often it is looked
at. Losses in clusters are no such stream, though their mean may be below delta: take one mean loss per cluster.

Two things make for a quick alarm. There are several bettors, since the best bet depends on how far the risk has moved
and on how the losses spread. And none of them stakes everything at the start: a little of what is kept back is added
with every loss, so that a drift after a long good time is found by fresh money, although old stakes are long lost.
"""

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np

from calm_beam import elementary
from calm_beam.risk.fixed_point import LOSS_SCALE, to_signed_fixed_point
from calm_beam.risk.unit_interval import require_signed_unit_interval, require_unit_interval

# Shares of the largest bet that cannot lose everything, from slow drifts to sudden failure.
_SHARES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
# Nobody is let have more: long bad streams do not leave the range of float64, and good ones still make it less.
_RICHEST = 2.0**1000
# A trillion. Beyond, what is staked anew with each loss would be lost in rounding.
_MOST_LOSSES = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskMonitor:
    """The state of the test: small, and a value, so that it can be stored and taken up again.

    Attributes:
      delta: Risk tolerance, in (0, 1).
      alpha: Chance of ever raising a false alarm, in (0, 1).
      is_signed: Whether losses lie in [-1, 1] and not in [0, 1].
      n: Losses seen.
      loss_sum: Their sum in units of 2^-32, each rounded up.
      stakes: What the bettors have at stake, in multiples of their starting capitals.
      alarm_at: Number of the loss at which the alarm was raised, from 1; None before. An alarm stays.

    Source: Ville (1939); Shafer (2021), "Testing by betting"; staking bit by bit is the mixture over starting times of
    Shin, Ramdas and Rinaldo (2023), "E-detectors", with weights that add up to 1.

    >>> RiskMonitor.start(delta=0.1, alpha=0.05).observe([0.0] * 50 + [1.0] * 10).alarm_at
    56
    """

    delta: float
    alpha: float
    is_signed: bool
    n: int
    loss_sum: int
    stakes: tuple[float, ...]
    alarm_at: int | None

    def __post_init__(self) -> None:
        for name, value in (("delta", self.delta), ("alpha", self.alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value!r:.40}. It is a fraction: for 5 % pass 0.05.")
        if not isinstance(self.is_signed, bool):
            raise ValueError(f"is_signed must be true or false, got {self.is_signed!r:.40}.")
        n = _require_count("n", self.n)
        if n > _MOST_LOSSES:
            raise ValueError(f"n must be at most {_MOST_LOSSES}, which no stream has; got {n!r:.40}.")
        lowest = -n * LOSS_SCALE if self.is_signed else 0
        if not lowest <= _require_count("loss_sum", self.loss_sum, lowest=lowest) <= n * LOSS_SCALE:
            raise ValueError(
                f"loss_sum must be in [{lowest}, {n * LOSS_SCALE}] for n = {n}, got {self.loss_sum!r:.40}."
            )
        stakes = self.stakes
        if len(stakes) != len(_SHARES) or not all(
            isinstance(value, float) and 0 <= value <= _RICHEST for value in stakes
        ):
            raise ValueError(f"stakes must be {len(_SHARES)} numbers from 0 to {_RICHEST:g}, got {stakes!r:.200}.")
        if self.alarm_at is not None and not 1 <= _require_count("alarm_at", self.alarm_at) <= n:
            raise ValueError(f"alarm_at must be in [1, {n}] for n = {n}, got {self.alarm_at!r:.40}.")

    @classmethod
    def start(cls, *, delta: float, alpha: float, is_signed: bool = False) -> Self:
        """Returns the monitor that has seen nothing.

        Args:
          delta: Risk tolerance, in (0, 1).
          alpha: Chance of ever raising a false alarm, in (0, 1).
          is_signed: Whether losses lie in [-1, 1] and not in [0, 1].

        Raises:
          ValueError: If a number is out of range.

        Source: ours.
        """
        stakes = (0.0,) * len(_SHARES)
        return cls(delta=delta, alpha=alpha, is_signed=is_signed, n=0, loss_sum=0, stakes=stakes, alarm_at=None)

    def observe(self, losses: Iterable[float]) -> Self:
        """Returns the monitor after some more losses, in the order in which they came.

        The same stream gives the same state, bit for bit, on every machine and however it is cut into parts. Losses
        after an alarm count in `n` and `loss_sum`; the alarm stays.

        Args:
          losses: Each in [0, 1], or in [-1, 1] for signed ones.

        Raises:
          ValueError: If a loss is NaN or out of range; nothing of the part is then taken in.

        Source: as the class.
        """
        require = require_signed_unit_interval if self.is_signed else require_unit_interval
        checked = require(list(losses), name="losses")
        stakes, alarm_at = np.array(self.stakes), self.alarm_at
        kept = kept_back(np.arange(self.n, self.n + checked.size + 1))
        for index, loss in enumerate(checked):
            before, after = kept[index : index + 2]
            stakes = grown_stakes(stakes, loss, fresh=before - after, delta=self.delta, is_signed=self.is_signed)
            if alarm_at is None and capital_of(stakes, kept=after) >= 1 / self.alpha:
                alarm_at = self.n + index + 1
        return dataclasses.replace(
            self,
            n=self.n + checked.size,
            loss_sum=self.loss_sum + int(to_signed_fixed_point(checked).sum()),
            stakes=tuple(stakes.tolist()),
            alarm_at=alarm_at,
        )

    @property
    def mean_loss(self) -> float | None:
        """The mean of all losses so far; None before the first."""
        return self.loss_sum / LOSS_SCALE / self.n if self.n else None

    @property
    def capital(self) -> float:
        """What the bettors have together now, having started with 1: the evidence against "the risk is at most delta".

        The alarm is raised when it first reaches 1 / alpha. What a bettor has beyond 2^1000 is not counted.
        """
        return float(capital_of(np.array(self.stakes), kept=float(kept_back(np.array(self.n)))))

    def to_dict(self) -> dict[str, object]:
        """Returns the state as plain JSON values; numbers read back exactly."""
        return {**dataclasses.asdict(self), "stakes": list(self.stakes)}

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Self:
        """Returns the state that `to_dict` gave.

        Raises:
          ValueError: If a key is missing or unknown, or a value cannot be.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if value.keys() != names:
            raise ValueError(
                f"a monitor's state has the keys {', '.join(sorted(names))}; "
                f"missing: {sorted(names - value.keys())}, unknown: {sorted(value.keys() - names)}."
            )
        stakes = value["stakes"]
        if not isinstance(stakes, list):
            raise ValueError(f"stakes must be a list, got {stakes!r:.100}.")
        return cls(**{**value, "stakes": tuple(stakes)})  # type: ignore[arg-type]


def grown_stakes(stakes: np.ndarray, losses: np.ndarray, *, fresh: float, delta: float, is_signed: bool) -> np.ndarray:
    """Returns what is at stake after one more loss.

    Sums and products only, which every machine rounds alike.

    Args:
      stakes: shape (..., bettors). Before the loss, in multiples of the starting capitals.
      losses: shape (...). The loss, of one stream or of several.
      fresh: Share of the starting capitals that is staked anew before the loss.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1].

    Returns:
      Shape (..., bettors), each at most 2^1000.

    Source: as `RiskMonitor`.
    """
    # The factor is least at the least loss there can be, 0 or -1, and still positive there.
    bets = np.array(_SHARES) / (delta + 1 if is_signed else delta)
    return np.minimum((stakes + fresh) * (1 + bets * (np.asarray(losses)[..., None] - delta)), _RICHEST)


def capital_of(stakes: np.ndarray, *, kept: float) -> np.ndarray:
    """Returns all capital, at stake and kept back, in multiples of the starting capital.

    Args:
      stakes: shape (..., bettors).
      kept: Share kept back.

    Returns:
      Shape (...).

    Source: as `RiskMonitor`.
    """
    # An accumulation adds from left to right, by definition.
    return np.asarray(np.add.accumulate(stakes, axis=-1)[..., -1] / len(_SHARES) + kept)


def kept_back(numbers: np.ndarray) -> np.ndarray:
    """Returns the share of the capital not yet staked after so many losses.

    It falls so slowly that a drift at loss T is met with about 1 / (T log^2 T): the delay grows with log T only.

    Args:
      numbers: Any shape, whole numbers from 0 on.

    Returns:
      The same shape, in (0, 1], falling.

    Source: ours.
    """
    return 1 / (1 + elementary.log(1.0 + numbers))


def _require_count(name: str, value: object, *, lowest: int = 0) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or number < lowest:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r:.40}.")
    return number
