"""What is summed, of losses that can be checked by hand."""

import numpy as np

from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.log_capital import log_capital
from calm_beam.risk.statistics import IsFraction, LogCapital, Loss, SquaredLoss

_LOSSES = np.array([[0, LOSS_SCALE], [LOSS_SCALE // 2, 1]])


def test_statistics() -> None:
    """Losses, squares rounded up, and marks of what is neither 0 nor 1; shapes are kept."""
    assert Loss().values(_LOSSES).tolist() == _LOSSES.tolist()
    assert SquaredLoss().values(_LOSSES).tolist() == [[0, LOSS_SCALE], [LOSS_SCALE // 4, 1]]
    assert IsFraction().values(_LOSSES).tolist() == [[0, 0], [1, 1]]
    assert IsFraction().values(-_LOSSES).tolist() == [[0, 1], [1, 1]]
    bet = LogCapital(delta=0.1, share=0.3)
    assert bet.values(_LOSSES).tolist() == log_capital(_LOSSES, delta=0.1, share=0.3).tolist()


def test_equal_statistics_are_one_key() -> None:
    """A statistic that two specs need is summed once."""
    assert len({Loss(), Loss(), SquaredLoss(), LogCapital(delta=0.1, share=0.3), LogCapital(delta=0.1, share=0.3)}) == 3
    assert LogCapital(delta=0.1, share=0.3) != LogCapital(delta=0.2, share=0.3)
