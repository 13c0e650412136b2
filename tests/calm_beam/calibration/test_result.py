"""From totals to thresholds, against a loop written here."""

import hashlib
import math
import re
from typing import Any

import numpy as np
import pytest

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.result import RiskRow, choose_thresholds, risk_rows
from calm_beam.manifest import Calibration, PlannedTest
from calm_beam.outputs.totals import CalibrationTotals, objectives_of
from calm_beam.risk.evidence import EvidenceError
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import P_VALUES, hoeffding_p_value, p_values_of
from tests.calm_beam.calibration.builders import build_plan, build_totals
from tests.plans import all_specs

_GRID = (0.9, 0.6, 0.3, 0.0)


def _specs(**changes: Any) -> tuple[PlannedTest, ...]:
    values: dict[str, Any] = {
        "consistencies": ("textual",),
        "metrics": ("token_f1",),
        "deltas": (0.3,),
        "epsilons": (0.05,),
        "risk_loss": "relu",
        "p_value": "hoeffding",
    }
    return all_specs(**{**values, **changes})


_MANY = _specs(consistencies=("textual", "risk"), deltas=(0.1, 0.3), epsilons=(0.05, 0.2))


def _run(losses: np.ndarray, specs: tuple[PlannedTest, ...]) -> tuple[tuple[RiskRow, ...], tuple[Calibration, ...]]:
    """Calibrates on losses of shape (examples, objectives, thresholds)."""
    plan = build_plan(specs, _GRID[: losses.shape[2]])
    rows = risk_rows(build_totals(losses, layout_of(plan)), plan, num_layers=4)
    return rows, choose_thresholds(rows, plan, num_layers=4)


def _constant(*risks: float, n: int = 100) -> np.ndarray:
    return np.broadcast_to(np.array(risks), (n, 1, len(risks)))


def test_path_ends_at_the_first_failure() -> None:
    """Nothing below the first failure is tested, though its p-value would pass."""
    rows, (entry,) = _run(_constant(0.0, 0.125, 0.5, 0.0), _specs())
    assert [row.tested for row in rows] == [True, True, True, False]
    assert [row.rejected for row in rows] == [True, True, False, False]
    assert rows[3].p_value < 0.05
    assert (entry.threshold, entry.layers, entry.risk) == (0.6, 3.5, 0.125)
    assert [step.threshold for step in entry.path] == [0.9, 0.6, 0.3]
    assert (entry.procedure, entry.p_value) == ("fixed_sequence", "hoeffding")


def test_never_exit() -> None:
    """If the safest threshold fails, the choice is to use all layers, at no risk."""
    rows, (entry,) = _run(_constant(0.5, 0.0), _specs())
    assert (entry.threshold, entry.layers, entry.risk) == (None, 4, 0.0)
    assert len(entry.path) == 1
    assert [row.rejected for row in rows] == [False, False]


def test_end_of_grid() -> None:
    """If every threshold passes, the last one is chosen."""
    _, (entry,) = _run(_constant(0.0, 0.0, 0.0, 0.0), _specs())
    assert (entry.threshold, entry.layers) == (0.0, 2.5)
    assert all(step.rejected for step in entry.path)
    assert len(entry.path) == 4


def test_a_p_value_equal_to_epsilon_passes() -> None:
    """The rule is p <= epsilon, as the manifest's reader demands."""
    p_value = float(hoeffding_p_value(12.5, n=100, delta=0.25))
    _, (entry,) = _run(_constant(0.125), _specs(deltas=(0.25,), epsilons=(p_value,)))
    assert entry.path[0].p_value == p_value
    assert entry.threshold == 0.9
    _, (entry,) = _run(_constant(0.125), _specs(deltas=(0.25,), epsilons=(math.nextafter(p_value, 0),)))
    assert entry.threshold is None


def test_no_examples() -> None:
    """Without examples there is an error, not a risk."""
    plan = build_plan(_specs(), _GRID)
    with pytest.raises(ValueError, match="Is the calibration set empty"):
        risk_rows(CalibrationTotals.zero(layout_of(plan)), plan, num_layers=4)


def test_the_lowest_rejected_threshold_is_chosen_whatever_came_before() -> None:
    """A procedure that continues after a failure may choose a threshold below an unsafe one."""
    rows, (entry,) = _run(_constant(0.0, 0.5, 0.0, 0.5), _specs(procedure="bonferroni"))
    assert all(row.tested for row in rows)
    assert [step.rejected for step in entry.path] == [True, False, True, False]
    assert (entry.threshold, entry.procedure) == (0.3, "bonferroni")
    _, (entry,) = _run(_constant(0.0, 0.5, 0.0, 0.5), _specs())
    assert entry.threshold == 0.9


@pytest.mark.parametrize("p_value", P_VALUES)
def test_every_p_value_gets_what_it_needs(p_value: str) -> None:
    """By plan, layout and totals, each p-value is that of the single losses."""
    losses = np.random.default_rng(3).integers(0, 2, size=(60, 1, 4)).astype(float) * [1, 1, 0, 1]
    specs = _specs(p_value=p_value, deltas=(0.6, 0.7))
    rows, _ = _run(losses, specs)
    order = np.argsort([hashlib.sha256(f"salt\n{unit}".encode()).digest()[:16] for unit in range(60)])
    expected = [p_values_of(losses[order, 0], p_value=p_value, delta=delta).tolist() for delta in (0.6, 0.7)]
    assert [[row.p_value for row in rows[:4]], [row.p_value for row in rows[4:]]] == expected
    assert len({row.p_value for row in rows}) > 2


def test_signed_losses() -> None:
    """A mean below 0 is reported as it is; the signed loss gains room where the paper's loss counts 0."""
    losses = np.tile([[[-1.0, -0.5]], [[0.0, 1.0]]], (100, 1, 1))
    rows, (entry,) = _run(losses, _specs(consistencies=("risk",), risk_loss="signed", p_value="signed_mixture"))
    assert [row.risk for row in rows] == [-0.5, 0.25]
    assert [row.loss_sum for row in rows] == [-100 * LOSS_SCALE, 50 * LOSS_SCALE]
    assert (entry.threshold, entry.loss, entry.risk) == (0.9, "signed", -0.5)
    rows, (entry,) = _run(np.maximum(losses, 0), _specs(consistencies=("risk",)))
    assert [row.risk for row in rows] == [0, 0.5]


def test_fractions_are_no_coins() -> None:
    """The binomial p-value refuses losses between 0 and 1, and says what to use instead."""
    message = (
        "exact_binomial is for losses of 0 and 1 only, but at one threshold 100 of 100 losses lie in between. Take "
        "hoeffding_bentkus, or a metric such as exact_match."
    )
    with pytest.raises(EvidenceError, match=re.escape(message)):
        _run(_constant(0.0, 0.5), _specs(p_value="exact_binomial"))


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_brute_force(seed: int) -> None:
    """Rows and choices equal those of a plain loop over the losses (dyadic, so that sums are exact)."""
    generator = np.random.default_rng(seed)
    shape = (80, 2, len(_GRID))
    is_bad = generator.random(shape) < np.linspace(0.02, 0.5, len(_GRID))
    losses = np.where(is_bad, generator.integers(0, 257, shape) / 256, 0)
    rows, entries = _run(losses, _MANY)
    place = 0
    for spec, entry in zip(_MANY, entries, strict=True):
        of_spec = losses[:, objectives_of(_MANY).index(spec.objective)]
        chosen, open_ = None, True
        for k, threshold in enumerate(_GRID):
            risk = sum(of_spec[:, k].tolist()) / 80
            p_value = math.exp(-2 * 80 * max(0, spec.delta - risk) ** 2)
            row = rows[place]
            place += 1
            assert (row.consistency, row.metric) == (spec.objective.consistency, spec.objective.metric)
            assert (row.delta, row.epsilon) == (spec.delta, spec.epsilon)
            assert (row.threshold, row.n, row.risk, row.layers) == (threshold, 80, risk, 4 - k / 2)
            assert row.loss_sum == sum(of_spec[:, k].tolist()) * 2**32
            assert row.p_value == pytest.approx(p_value, rel=1e-12)
            assert row.tested == open_
            open_ = open_ and p_value <= spec.epsilon
            assert row.rejected == open_
            chosen = threshold if open_ else chosen
        assert entry.threshold == chosen
        assert (entry.delta, entry.epsilon) == (spec.delta, spec.epsilon)
    assert place == len(rows)


def test_loops_differ_in_their_choices() -> None:
    """The brute-force test above has several outcomes, so it can fail."""
    generator = np.random.default_rng(0)
    is_bad = generator.random((80, 2, 4)) < np.linspace(0.02, 0.5, 4)
    _, entries = _run(np.where(is_bad, generator.integers(0, 257, (80, 2, 4)) / 256, 0), _MANY)
    assert len({entry.threshold for entry in entries}) > 1
