"""Random splits: the parts of each unit, and sums over parts."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from calm_beam.evaluation.splits import Splits, SplitTotals
from calm_beam.outputs.totals import Layout
from calm_beam.risk.losses import to_signed_fixed_point
from tests.plans import all_specs

_SPLITS = Splits(trials=30, calibration_share=0.8, seed=3)
_SPECS = all_specs(
    consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.1, 0.3), epsilons=(0.05,), p_value=None
)
_LAYOUT = Layout.of(_SPECS, thresholds=3)


def test_membership_depends_on_seed_trial_and_key_alone() -> None:
    """Membership does not depend on other keys, order, or the number of trials; another seed splits differently."""
    keys = [f"row-{index}" for index in range(40)]
    parts = _SPLITS.parts(keys)
    np.testing.assert_array_equal(_SPLITS.parts(keys[::-1]), parts[::-1])
    np.testing.assert_array_equal(_SPLITS.parts(keys[7:8]), parts[7:8])
    fewer = dataclasses.replace(_SPLITS, trials=5)
    np.testing.assert_array_equal(fewer.parts(keys)[:, :5], parts[:, :5])
    assert (dataclasses.replace(_SPLITS, seed=4).parts(keys) != parts).any()
    assert parts[:, -1].all()


def test_shares_and_independence() -> None:
    """Of 4,000 keys, each trial takes 80 % within chance, and two trials agree as often as independent ones."""
    parts = _SPLITS.parts([f"row-{index}" for index in range(4000)])[:, :-1]
    shares = parts.mean(axis=0)
    # Four standard deviations of a share.
    assert np.abs(shares - 0.8).max() < 4 * np.sqrt(0.16 / 4000)
    agreement = (parts[:, :-1] & parts[:, 1:]).mean(axis=0)
    assert np.abs(agreement - 0.64).max() < 4 * np.sqrt(0.64 * 0.36 / 4000)


def _units(count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = [f"row-{index}" for index in range(count)]
    losses = to_signed_fixed_point(rng.uniform(size=(count, 2, 3)))
    return keys, losses, rng.integers(0, 50, size=(count, 2, 4))


def test_parts_against_a_loop() -> None:
    """Calibration and test part of every trial have the sums and numbers of their units."""
    keys, losses, counts = _units(25)
    totals = SplitTotals.of_units(keys, losses, counts=counts, layout=_LAYOUT, splits=_SPLITS)
    values = _LAYOUT.values(losses)
    for trial in range(_SPLITS.trials):
        member = [bool(_SPLITS.parts([key])[0, trial]) for key in keys]
        inside, outside = np.flatnonzero(member), np.flatnonzero(~np.array(member))
        for objective in _LAYOUT.objectives:
            calibration, test = totals.calibration_part(trial, objective), totals.test_part(trial, objective)
            assert (calibration.n, test.n) == (len(inside), len(outside))
            for row, (of, statistic) in enumerate(_LAYOUT.rows):
                if of == objective:
                    np.testing.assert_array_equal(calibration.sums[statistic], values[inside, row].sum(axis=0))
                    np.testing.assert_array_equal(test.sums[statistic], values[outside, row].sum(axis=0))
        np.testing.assert_array_equal(totals.test_counts(trial), counts[outside].sum(axis=0))
    np.testing.assert_array_equal(totals.whole_counts(), counts.sum(axis=0))
    assert totals.calibration_part(-1, _LAYOUT.objectives[0]).n == 25


@pytest.mark.parametrize("order", [1, -1])
def test_sums_do_not_depend_on_sharding_or_order(order: int) -> None:
    """Three shards, merged in either order, give the totals of all units at once; empty totals add nothing."""
    keys, losses, counts = _units(25)
    whole = SplitTotals.of_units(keys, losses, counts=counts, layout=_LAYOUT, splits=_SPLITS)
    shards = [
        SplitTotals.of_units(keys[part::3], losses[part::3], counts=counts[part::3], layout=_LAYOUT, splits=_SPLITS)
        for part in range(3)
    ][::order]
    assert functools.reduce(SplitTotals.merge, shards, SplitTotals.zero(_LAYOUT, _SPLITS, count_rows=2)) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"calibration_share": 80.0}, r"calibration_share must be in \(0, 1\), got 80\.0\..*for 80 % pass 0\.8"),
        ({"calibration_share": 1.0}, r"calibration_share must be in \(0, 1\), got 1\.0"),
    ],
)
def test_impossible_splits_are_refused(changes: dict[str, Any], message: str) -> None:
    """Both parts need examples, and there must be at least one split."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_SPLITS, **changes)
