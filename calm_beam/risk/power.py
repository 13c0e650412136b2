"""The power of a test: how many examples it takes to accept a threshold whose losses are guessed, or were measured.

Only the threshold itself is looked at. Fixed sequence testing accepts the safer ones before it more easily; for
procedures that divide epsilon among K thresholds, or entries that are to hold together, divide epsilon as they do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from .pvalues import P_VALUES
from .sample_size import (
    COIN_P_VALUES,
    Losses,
    beta_losses,
    coin_examples_needed,
    coin_losses,
    exact_power,
    resampled_losses,
    simulated_examples_needed,
    simulated_power,
)

_MOST_EXAMPLES_COMPUTED = 10_000_000
_MOST_EXAMPLES_SIMULATED = 100_000
_POINTS_OF_A_CURVE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuessedLosses:
    """How the losses at one threshold may be distributed.

    Attributes:
      risk: Expected loss.
      std: Standard deviation.
      losses: Draws them.
      is_coin: Whether they are 0 or 1.
      is_signed: Whether some are negative.
    """

    risk: float
    std: float
    losses: Losses
    is_coin: bool = False
    is_signed: bool = False

    @classmethod
    def with_moments(cls, risk: float, std: float | None) -> Self:
        """Returns losses of 0 and 1, or with a standard deviation those of a beta distribution; as `beta_losses`."""
        if std is None:
            return cls(risk=risk, std=math.sqrt(risk * (1 - risk)), losses=coin_losses(risk), is_coin=True)
        return cls(risk=risk, std=std, losses=beta_losses(risk, std=std))

    @classmethod
    def measured(cls, losses: Sequence[float]) -> Self:
        """Returns draws from losses that were measured; as `resampled_losses`."""
        values = np.array(losses)
        return cls(
            risk=float(values.mean()),
            std=float(values.std()),
            losses=resampled_losses(losses),
            is_coin=bool(np.isin(values, (0, 1)).all()),
            is_signed=bool((values < 0).any()),
        )

    @property
    def title(self) -> str:
        """The guess in words."""
        return f"expected loss {self.risk:.4g}, deviation {self.std:.3g}"

    def fits(self, p_value: str) -> bool:
        """Returns whether a p-value is valid for such losses."""
        method = P_VALUES[p_value]
        return (self.is_coin or method.takes_fractions) and (not self.is_signed or method.takes_signed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The power of one p-value.

    Attributes:
      name: Of the p-value.
      needed: Examples at which the power is as large as was asked; None if more than `at_most`.
      at_most: Where the search ended.
      points: Pairs of a number of examples and the power there.
    """

    name: str
    needed: int | None
    at_most: int
    points: tuple[tuple[int, float], ...]

    def needed_in_words(self) -> str:
        """Returns how many examples are needed, as far as that is known."""
        return f"> {self.at_most:,}" if self.needed is None else f"{self.needed:,}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerQuestion:
    """What is asked of tests of one threshold.

    Attributes:
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      power: Probability of acceptance that is asked for.
      replications: Simulated calibrations, where some are needed.
      seed: Of the simulation.
    """

    delta: float
    epsilon: float
    power: float
    replications: int
    seed: int

    def curves(
        self,
        guess: GuessedLosses,
        p_values: Sequence[str],
        *,
        has_points: bool,
        simulating: Callable[[str], None] = lambda _: None,
    ) -> list[Curve]:
        """Returns the number of examples that each p-value needs and, if asked for, the power around it.

        Args:
          guess: The losses.
          p_values: Names of tests that fit them.
          has_points: Whether powers are computed.
          simulating: Called with the name of each p-value that is simulated, which may take a minute.
        """
        curves, powers = [], []
        for name in p_values:
            curve, power_of = self._needed(guess, name, simulating=simulating)
            curves.append(curve)
            powers.append(power_of)
        if not has_points:
            return curves
        found = [curve.needed or curve.at_most for curve in curves]
        grid = sorted({int(n) for n in np.geomspace(max(1, min(found) / 10), 1.5 * max(found), _POINTS_OF_A_CURVE)})
        return [
            dataclasses.replace(curve, points=tuple((n, power_of(n)) for n in grid if n <= curve.at_most))
            for curve, power_of in zip(curves, powers, strict=True)
        ]

    def _needed(
        self, guess: GuessedLosses, name: str, *, simulating: Callable[[str], None]
    ) -> tuple[Curve, Callable[[int], float]]:
        """Returns what a p-value needs, and its power by the number of examples."""
        test: dict[str, Any] = {"delta": self.delta, "epsilon": self.epsilon}
        power_of: Callable[[int], float]
        if guess.is_coin and name in COIN_P_VALUES:
            at_most = _MOST_EXAMPLES_COMPUTED
            needed = coin_examples_needed(name, risk=guess.risk, power=self.power, at_most=at_most, **test)
            power_of = functools.partial(_exact_power, name, guess, test)
        else:
            at_most = _MOST_EXAMPLES_SIMULATED
            test |= {"replications": self.replications, "seed": self.seed}
            simulating(name)
            needed = simulated_examples_needed(name, guess.losses, power=self.power, at_most=at_most, **test)
            power_of = functools.partial(_simulated_power, name, guess, test)
        return Curve(name=name, needed=needed, at_most=at_most, points=()), power_of


def _exact_power(name: str, guess: GuessedLosses, test: Mapping[str, Any], n: int) -> float:
    return exact_power(name, n=n, risk=guess.risk, **test)


def _simulated_power(name: str, guess: GuessedLosses, test: Mapping[str, Any], n: int) -> float:
    return simulated_power(name, guess.losses, n=n, **test)
