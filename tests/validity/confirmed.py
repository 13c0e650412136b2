"""Simulates thresholds that are chosen on a sweep and confirmed as served, and counts the errors.

Serving loses more here than the sweep shows: a share of all losses is hidden from the sweep. So thresholds whose risk
as served is delta look safe, and are chosen often. Only the confirming tests, of two safer thresholds and the chosen
one in sequence, prevent a broken promise. Two twins err: one tests the units that have chosen again, the other
continues after a failed test.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from calm_beam.calibration.confirmation import confirming_places
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES

from .methods import registered_p_values
from .suite import SEED, draws, most_misses
from .worlds import WORLDS, World

HIDDEN = 0.3
"""Share of losses that the sweep does not show."""
EAGER = "fixed_sequence, level 0.5"
"""Choosing at another level than epsilon, which the tests that confirm do not rest on."""
_EAGER_LEVEL = 0.5

CONFIRMED_WORLDS = tuple(dataclasses.replace(world, n=2 * world.n) for world in WORLDS)
"""Those of the suite, with as many units that choose as that confirm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfirmedOutcome:
    """The outcome of one combination in one world.

    Attributes:
      world: Name of the world.
      p_value: Name of the p-value, of either test.
      procedure: How thresholds were chosen.
      epsilon: Level of the confirming tests.
      replications: Number of calibrations.
      chosen: Calibrations in which a threshold to be confirmed has a risk, as served, not below delta.
      errors: Calibrations in which one was also confirmed, by units that chose nothing.
      repeated: Calibrations in which the units that chose one would have confirmed it.
      unordered: Calibrations in which one would have been confirmed if each were tested despite earlier failures.
    """

    world: str
    p_value: str
    procedure: str
    epsilon: float
    replications: int
    chosen: int
    errors: int
    repeated: int
    unordered: int

    @property
    def is_valid(self) -> bool:
        """Whether chance explains the outcome."""
        return self.errors <= most_misses(self.replications, self.epsilon)


def run_confirmed_world(world: World, *, replications: int, seed: int = SEED) -> list[ConfirmedOutcome]:
    """Returns the outcomes of every p-value and procedure in a world, half of whose units choose."""
    counts: dict[tuple[str, str], np.ndarray] = {}
    rng = np.random.default_rng(seed + 1)
    half = world.n // 2
    for served in draws(world, replications=replications, seed=seed):
        shown = served[:half] * (rng.uniform(size=served[:half].shape) >= HIDDEN)
        for name in P_VALUES:
            by_units = [registered_p_values(name, each, delta=world.delta) for each in (shown, served[half:])]
            again = registered_p_values(name, served[:half], delta=world.delta)
            if again is None:
                continue
            choosing, confirming = by_units
            assert choosing is not None
            assert confirming is not None
            for procedure, chosen in _choices(choosing, epsilon=world.epsilon):
                wrong = (chosen >= 0) & world.is_null[chosen]
                found, repeated = (_small(each, chosen, epsilon=world.epsilon) for each in (confirming, again))
                held = [np.logical_and.accumulate(each, axis=-1) for each in (found, repeated)]
                counts.setdefault((name, procedure), np.zeros(4, int))
                counts[name, procedure] += [(wrong & each).any(axis=-1).sum() for each in (True, *held, found)]
    return [
        ConfirmedOutcome(
            world=world.name,
            p_value=name,
            procedure=procedure,
            epsilon=world.epsilon,
            replications=replications,
            chosen=int(chosen),
            errors=int(errors),
            repeated=int(repeated),
            unordered=int(unordered),
        )
        for (name, procedure), (chosen, errors, repeated, unordered) in counts.items()
    ]


def _choices(p_values: np.ndarray, *, epsilon: float) -> list[tuple[str, np.ndarray]]:
    """Returns the places to be confirmed that each procedure chooses in every calibration; -1 for none."""
    levels = {**dict.fromkeys(PROCEDURES, epsilon), EAGER: _EAGER_LEVEL}
    accepted = {
        name: PROCEDURES[name.split(",")[0]](p_values, epsilon=level).rejected for name, level in levels.items()
    }
    return [
        (name, confirming_places(p_values, rejected, epsilon=epsilon, holdout_share=0.5))
        for name, rejected in accepted.items()
    ]


def _small(p_values: np.ndarray, places: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Returns at which places the p-values are at most epsilon; meaningless at -1."""
    found: np.ndarray = np.take_along_axis(p_values, places, axis=-1) <= epsilon
    return found


def confirmed_table(outcomes: Sequence[ConfirmedOutcome]) -> str:
    """Returns the largest shares over p-values and procedures in per cent, as a Markdown table by world."""
    lines = [
        "| world | ε, % | chosen wrongly | confirmed by others | confirmed by those who chose |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(outcome.world for outcome in outcomes):
        some = [outcome for outcome in outcomes if outcome.world == name]
        shares = [
            100 * max(getattr(outcome, count) / outcome.replications for outcome in some)
            for count in ("chosen", "errors", "repeated")
        ]
        lines.append(f"| {name} | {100 * some[0].epsilon:g} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    return "\n".join(lines) + "\n"
