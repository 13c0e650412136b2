"""When a calibration that is watched may stop, in worlds in which that is known."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from calm_beam.risk.expected_stop import expected_stop, looks_at
from calm_beam.risk.fixed_point import to_signed_fixed_point
from calm_beam.risk.pvalues.betting import BETS, signed_mixture_p_value

_TEST: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05}


def _columns(*risks: float, examples: int = 1000) -> np.ndarray:
    """Returns losses of 0 and 1, of which a share is 1 at each threshold."""
    losses = np.zeros((examples, len(risks)))
    for column, risk in enumerate(risks):
        losses[: round(risk * examples), column] = 1
    return to_signed_fixed_point(losses)


def _first_proof(examples: int) -> int:
    """Returns after how many examples without any loss the p-value is small enough."""
    p_values = [float(signed_mixture_p_value(np.zeros((n, 1)), delta=0.1)[0]) for n in range(1, examples)]
    return 1 + next(index for index, p_value in enumerate(p_values) if p_value <= 0.05)


def test_without_losses_the_proof_comes_at_a_known_example() -> None:
    """Where no example loses anything, every calibration stops where the p-value reaches epsilon."""
    needed = _first_proof(200)
    found = expected_stop(_columns(0.0), looks=range(1, 201), **_TEST)
    assert found.place == 0
    assert found.shares == (needed / 200,) * 3
    assert sum(BETS.values()) == pytest.approx(1)


def test_the_last_threshold_that_is_proved_decides() -> None:
    """Thresholds above delta are never proved, and none behind them is, however safe."""
    looks = looks_at(20_000, first=20)
    found = expected_stop(_columns(0.0, 0.05, 0.2, 0.0), looks=looks, **_TEST)
    assert found.place == 1
    assert found.shares is not None
    safer = expected_stop(_columns(0.0), looks=looks, **_TEST)
    assert safer.shares is not None
    assert safer.shares[0] < found.shares[0] < 1


def test_what_cannot_be_proved_saves_nothing() -> None:
    """At a risk above delta, or with too few examples, there is no threshold and no share."""
    for losses, looks in ((_columns(0.2), (5000,)), (_columns(0.0), (3,))):
        found = expected_stop(losses, looks=looks, **_TEST)
        assert (found.place, found.shares) == (-1, None)


def test_closer_to_delta_takes_more_examples() -> None:
    """And the interval holds the median."""
    medians = []
    for risk in (0.01, 0.03, 0.05, 0.07):
        found = expected_stop(_columns(risk), looks=looks_at(50_000, first=500), **_TEST)
        assert found.shares is not None
        median, low, high = found.shares
        assert low <= median <= high
        medians.append(median)
    assert medians == sorted(medians)
    assert medians[0] < medians[-1]


def test_one_seed_gives_one_answer() -> None:
    """Another gives nearly the same."""
    looks = looks_at(10_000, first=100)
    first, again, other = (
        expected_stop(_columns(0.05, examples=5000), looks=looks, seed=seed, **_TEST) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.shares is not None
    assert other.shares is not None
    assert other.shares[0] == pytest.approx(first.shares[0], rel=0.25)


def test_looks_end_with_all_examples() -> None:
    """They ascend, none is later than 5 % after the one before or a round after it, and there are few."""
    for examples, first in ((1, 1), (10, 20), (1000, 7), (10**9, 1000)):
        looks = looks_at(examples, first=first)
        assert looks[-1] == examples
        assert all(
            before < after <= max(before + first, math.ceil(1.05 * before))
            for before, after in itertools.pairwise(looks)
        )
        assert len(looks) < 400
