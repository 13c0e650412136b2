"""The comparison of betting stakes: its cases, and its count of needed examples."""

import math

import numpy as np
import pytest

from benchmarks import stakes
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import p_values_of
from calm_beam.risk.pvalues.signed_mixture import BETS

_IN_USE = [dict(BETS)]


def test_candidates_are_mixtures_and_one_is_in_use() -> None:
    """Each candidate has a capital of 1 and stakes that cannot lose everything; production's is among them."""
    assert all(math.fsum(mixture.values()) == pytest.approx(1) for mixture in stakes.CANDIDATES.values())
    assert all(0 < share < 1 for mixture in stakes.CANDIDATES.values() for share in mixture)
    assert [dict(mixture) for mixture in stakes.CANDIDATES.values()].count(dict(BETS)) == 1


@pytest.mark.parametrize("kind", ["coin", "zero-inflated", "ROUGE-like", "signed"])
def test_simulated_risks_are_as_stated(kind: str) -> None:
    """The mean of a simulated loss is the stated share of delta."""
    case = stakes.simulated(kind, delta=0.1, share=0.8)
    assert case.weights.min() > 0
    assert case.weights.sum() == pytest.approx(1)
    assert case.values @ case.weights / LOSS_SCALE == pytest.approx(0.08, abs=1e-9)


def test_stored_losses_keep_their_distribution() -> None:
    """A threshold whose mean is a tenth to 0.95 of delta becomes a case with the same values; others are left out."""
    losses = np.array([[0.0, 0.0, 0.5], [0.0, 0.25, 0.5], [0.0, 0.25, 0.5], [0.0, -0.5, 0.5], [0.0, 0.4, 0.5]])
    (case,) = stakes.stored("signed", losses, delta=0.1)
    assert case.share == pytest.approx(0.8)
    assert (case.values / LOSS_SCALE).round(6).tolist() == [-0.5, 0.0, 0.25, 0.4]
    assert case.weights.tolist() == [0.2, 0.2, 0.4, 0.2]


def test_counts_until_the_p_value_of_production_is_small_enough() -> None:
    """For losses without chance, the count is the round in which p_values_of first reaches epsilon, or the limit."""
    case = stakes.Case(kind="none", share=0.0, delta=0.1, values=np.array([0]), weights=np.array([1.0]))
    needed = stakes.examples_needed(case, _IN_USE, orders=3, size=10, limit=1000, seed=1)
    rounds = np.arange(10, 1010, 10)
    p_values = np.array([p_values_of(np.zeros(n), p_value="signed_mixture", delta=0.1) for n in rounds])
    expected = [rounds[np.argmax(p_values <= epsilon)] for epsilon in (0.05, 0.0025)]
    assert needed.tolist() == [expected]
    assert stakes.examples_needed(case, _IN_USE, orders=3, size=10, limit=20, seed=1).tolist() == [[20, 20]]
    assert stakes.power(case, _IN_USE, n=int(expected[0]), replications=5, seed=1).tolist() == [1.0]
    assert stakes.power(case, _IN_USE, n=int(expected[0]) - 10, replications=5, seed=1).tolist() == [0.0]


def test_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark runs without a calibration, and marks the candidate in use."""
    assert stakes.main(["--orders=2", "--round=500", "--limit=1000", "--replications=4", "--details"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(in use) |") >= 4
    assert "| coin, delta 0.02, risk 0.20 delta | 0.05 |" in printed
