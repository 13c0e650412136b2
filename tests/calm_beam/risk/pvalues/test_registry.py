"""The names that a manifest may carry, and what each asks for."""

import numpy as np
import pytest

from calm_beam.risk.evidence import Evidence, IsFraction, LogCapital, Loss, SquaredLoss
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.pvalues import P_VALUES


def test_names() -> None:
    """The registry holds these names, and nobody can add to it."""
    assert list(P_VALUES) == [
        "hoeffding",
        "hoeffding_bentkus",
        "exact_binomial",
        "empirical_bernstein",
        "signed_mixture",
        "wsr",
        "star_bets",
    ]
    with pytest.raises(TypeError, match="does not support item assignment"):
        P_VALUES["clt"] = P_VALUES["wsr"]  # type: ignore[index]


def test_needs() -> None:
    """Only what a p-value needs is gathered: sums of one kind or two, one for every bet, or a table."""
    needs = {name: method.statistics(0.1) for name, method in P_VALUES.items()}
    assert needs["hoeffding"] == needs["hoeffding_bentkus"] == (Loss(),)
    assert needs["exact_binomial"] == (Loss(), IsFraction())
    assert needs["empirical_bernstein"] == (Loss(), SquaredLoss())
    assert [(bet.delta, bet.share) for bet in needs["signed_mixture"] if isinstance(bet, LogCapital)] == [
        (0.1, share) for share in (0.01, 0.03, 0.1, 0.3, 0.6, 0.95)
    ]
    assert needs["wsr"] == needs["star_bets"] == ()
    assert [name for name, method in P_VALUES.items() if method.needs_table] == ["wsr", "star_bets"]
    assert [name for name, method in P_VALUES.items() if method.takes_signed] == ["signed_mixture", "wsr", "star_bets"]


@pytest.mark.parametrize("name", P_VALUES)
def test_any_evidence_gives_one_p_value_per_threshold(name: str) -> None:
    """Values lie in [0, 1]; no loss at all is better evidence than loss at delta's level."""
    method = P_VALUES[name]
    coins = np.random.default_rng(0).random((400, 1)) < [0.0, 0.1, 0.9]
    fixed = coins.astype(np.int64) * LOSS_SCALE
    sums = {statistic: statistic.values(fixed).sum(axis=0) for statistic in method.statistics(0.2)}
    evidence = Evidence(n=400, sums=sums, table=fixed if method.needs_table else None)
    p_values = method.p_values(evidence, 0.2, 0.05)
    assert p_values.shape == (3,)
    assert 0 <= p_values[0] < p_values[1] < 0.05
    assert p_values[2] > 0.9
