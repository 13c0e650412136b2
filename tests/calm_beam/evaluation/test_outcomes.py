"""Choices and results of trials, against calibrations and means computed by hand."""

import dataclasses
import pathlib

import numpy as np
import pytest

from calm_beam.evaluation.outcomes import (
    GridRow,
    LaneCounts,
    TrialOutcome,
    grid_rows,
    lane_counts,
    read_grid,
    read_trials,
    summaries,
    trial_outcomes,
    write_grid,
    write_trials,
)
from calm_beam.evaluation.splits import OutputCounter, Splits, SplitTotals
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import PlannedTest
from calm_beam.outputs.totals import Layout
from calm_beam.risk.fwer import fixed_sequence_test
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.pvalues import excess_p_values, p_values_of
from tests.plans import all_specs

_THRESHOLDS = (0.9, 0.5, 0.0)
_SPLITS = Splits(trials=12, calibration_share=0.7, seed=1)
_SPECS = all_specs(consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.08, 0.3), epsilons=(0.1,))
_COUNTER = OutputCounter(max_decode_length=8, end_ids=(1,), rule=ExitRule())
_UNITS = 150


def _losses() -> np.ndarray:
    """Returns losses that grow down the grid; those of risk consistency are signed."""
    rng = np.random.default_rng(0)
    textual = rng.uniform(size=(_UNITS, 1, 3)) * np.array([0.05, 0.3, 0.9])
    return np.concatenate([textual, textual - rng.uniform(size=(_UNITS, 1, 1)) * 0.2], axis=1)


def _counts() -> np.ndarray:
    """Returns counts of five tokens per output, with layers 8, 6, 4 and 1 of the full model and the thresholds.

    Every tenth output has one more layer.
    """
    layers = np.array([40, 30, 20, 5]) + 5 * (np.arange(_UNITS) % 10 == 0)[:, None]
    return np.stack([np.full_like(layers, 5), layers, np.zeros_like(layers)], axis=1)


def _totals() -> SplitTotals:
    keys = [str(index) for index in range(_UNITS)]
    layout = Layout.of(_SPECS, thresholds=3)
    return SplitTotals.of_units(keys, to_signed_fixed_point(_losses()), counts=_counts(), layout=layout, splits=_SPLITS)


def _outcomes(specs: tuple[PlannedTest, ...] = _SPECS) -> list[TrialOutcome]:
    return trial_outcomes(
        "softmax", _totals(), specs=specs, thresholds=_THRESHOLDS, count_rows=_COUNTER.rows, num_layers=8
    )


def test_every_trial_against_a_calibration_in_memory() -> None:
    """Threshold, test risk, layers and the p-value of an excess are those of the losses in each part."""
    parts = _SPLITS.parts([str(index) for index in range(_UNITS)])
    outcomes = _outcomes()
    assert len(outcomes) == len(_SPECS) * 12
    for outcome in outcomes:
        spec, member = outcome.spec, parts[:, outcome.trial]
        losses = _losses()[:, int(spec.objective.is_signed)]
        p_values = p_values_of(losses[member], p_value=spec.p_value, delta=spec.delta)
        place = int(fixed_sequence_test(p_values, epsilon=0.1).last_rejected())
        assert outcome.threshold == (None if place < 0 else _THRESHOLDS[place])
        assert (outcome.n_calibration, outcome.n_test) == (member.sum(), (~member).sum())
        test = losses[~member][:, place] if place >= 0 else np.zeros((~member).sum())
        assert outcome.test_risk == pytest.approx(test.mean(), abs=1e-8)
        assert outcome.layers == pytest.approx(_counts()[~member, 1, place + 1].sum() / (5 * (~member).sum()))
        excess = excess_p_values(
            test, p_value="hoeffding_bentkus", delta=spec.delta, is_signed=spec.objective.is_signed
        )
        assert outcome.excess_p_value == pytest.approx(float(excess), abs=1e-6)
        assert (outcome.flops_appendix_b, outcome.bleu) == (None, None)


def test_trials_differ_and_never_exit_is_a_result() -> None:
    """A tolerance that the first threshold breaks gives no threshold, all layers and no loss."""
    strict = tuple(dataclasses.replace(spec, delta=0.001, p_value="hoeffding_bentkus") for spec in _SPECS[:1])
    layout_specs = (*_SPECS, *strict)
    keys = [str(index) for index in range(_UNITS)]
    layout = Layout.of(layout_specs, thresholds=3)
    totals = SplitTotals.of_units(
        keys, to_signed_fixed_point(_losses()), counts=_counts(), layout=layout, splits=_SPLITS
    )
    never = trial_outcomes(
        "softmax", totals, specs=strict, thresholds=_THRESHOLDS, count_rows=_COUNTER.rows, num_layers=8
    )
    assert {(outcome.threshold, outcome.test_risk) for outcome in never} == {(None, 0.0)}
    assert all(8 <= outcome.layers <= 9 and not outcome.exceeds for outcome in never)
    (summary,) = summaries(never)
    assert (summary.threshold, summary.never, summary.trials) == (None, 12, 12)
    assert len({outcome.test_risk for outcome in _outcomes()}) > 12


def test_summaries() -> None:
    """Means and standard deviations over the trials of each spec, and how many exceed delta."""
    outcomes = _outcomes()
    found = summaries(outcomes)
    assert [summary.spec for summary in found] == list(_SPECS)
    for summary in found:
        group = [outcome for outcome in outcomes if outcome.spec == summary.spec]
        risks = [outcome.test_risk for outcome in group]
        assert summary.test_risk.mean == pytest.approx(np.mean(risks))
        assert summary.test_risk.std == pytest.approx(np.std(risks, ddof=1))
        assert summary.exceeding == sum(risk > summary.spec.delta for risk in risks)
        assert summary.proved_broken <= summary.exceeding
        assert summary.threshold in [outcome.threshold for outcome in group]
        assert summary.flops_appendix_b is None


def test_an_excess_shows() -> None:
    """Losses of 1 at a tolerance of 0.5 exceed it, and prove it; 0.4 does neither."""
    (outcome, *_) = _outcomes()
    spec = dataclasses.replace(outcome.spec, delta=0.5)
    above = dataclasses.replace(outcome, spec=spec, test_risk=1.0, excess_p_value=1e-9)
    assert above.exceeds
    assert above.is_proved_broken
    below = dataclasses.replace(outcome, spec=spec, test_risk=0.4, excess_p_value=1.0)
    assert not below.exceeds
    assert not below.is_proved_broken


def test_an_empty_part_is_refused() -> None:
    """With one example, one of the two parts is empty."""
    layout = Layout.of(_SPECS, thresholds=3)
    totals = SplitTotals.of_units(
        ["a"], to_signed_fixed_point(_losses()[:1]), counts=_counts()[:1], layout=layout, splits=_SPLITS
    )
    with pytest.raises(DataError, match=r"trial 0 has .* needs both\. Take more examples"):
        trial_outcomes("softmax", totals, specs=_SPECS, thresholds=_THRESHOLDS, count_rows=_COUNTER.rows, num_layers=8)


def test_counts_of_a_lane() -> None:
    """Counts of a branch are ratios of sums, and None without counts."""
    rows = ("tokens", "layers", "cut", "flops_appendix_b", "flops_calm_table", "flops_full")
    counts = np.array([[10, 10], [80, 25], [1, 2], [400, 100], [400, 200], [400, 400]])
    assert lane_counts(counts, rows, lane=1) == LaneCounts(
        layers=2.5, flops_appendix_b=4.0, flops_calm_table=2.0, bleu=None, cut=2
    )
    assert lane_counts(np.zeros((3, 1), np.int64), rows[:3], lane=0).layers is None


def test_the_whole_set_at_every_threshold() -> None:
    """Every branch has its layers and its mean under every loss; the full model loses nothing."""
    rows = list(grid_rows("softmax", _totals(), thresholds=_THRESHOLDS, count_rows=_COUNTER.rows, num_layers=8))
    assert [(row.threshold, row.consistency) for row in rows] == [
        (threshold, consistency) for threshold in (None, *_THRESHOLDS) for consistency in ("textual", "risk")
    ]
    risks = np.array([row.risk for row in rows]).reshape(4, 2)
    np.testing.assert_allclose(risks, [[0, 0], *_losses().mean(axis=0).T], atol=1e-8)
    assert [row.layers for row in rows[::2]] == pytest.approx([8.1, 6.1, 4.1, 1.1])
    assert {(row.measure, row.n) for row in rows} == {("softmax", _UNITS)}


def test_files_give_back_what_was_written(tmp_path: pathlib.Path) -> None:
    """Trials and grid read back from Parquet unchanged, with "never exit" and missing numbers."""
    outcomes = [dataclasses.replace(outcome, threshold=None, bleu=31.25) for outcome in _outcomes()[:3]]
    outcomes += _outcomes()[3:6]
    write_trials(str(tmp_path / "trials.parquet"), outcomes)
    assert read_trials(str(tmp_path / "trials.parquet")) == outcomes
    row = GridRow(
        measure="state",
        threshold=None,
        consistency="textual",
        metric="token_f1",
        loss="dissimilarity",
        n=3,
        risk=0.125,
        layers=8.0,
        flops_appendix_b=None,
        flops_calm_table=1.0,
        bleu=None,
        cut=0,
        examples=3,
        repeated=1,
        failed=0,
    )
    write_grid(str(tmp_path / "grid.parquet"), [row, dataclasses.replace(row, threshold=0.5)])
    assert read_grid(str(tmp_path / "grid.parquet")) == [row, dataclasses.replace(row, threshold=0.5)]
