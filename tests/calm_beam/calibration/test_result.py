"""From totals to thresholds, against a loop written here."""

import math

import numpy as np
import pytest

from calm_beam.calibration.result import RiskRow, calibrate, risk_rows
from calm_beam.calibration.specs import Objective, Spec, all_specs, objectives_of
from calm_beam.calibration.totals import CalibrationTotals
from calm_beam.manifest import Calibration
from calm_beam.risk.totals import RiskTotals

_GRID = (0.9, 0.6, 0.3, 0.0)
_SPECS = all_specs(consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.1, 0.3), epsilons=(0.05, 0.2))


def _totals(losses: np.ndarray) -> CalibrationTotals:
    """Totals of losses of shape (examples, objectives, thresholds); threshold k takes 4 - k / 2 layers."""
    _, objectives, thresholds = losses.shape
    risk = RiskTotals.zero(objectives=objectives, thresholds=thresholds)
    for example in losses:
        risk = risk.add(example)
    return CalibrationTotals(
        risk=risk,
        layer_sums=(40, *(40 - 5 * place for place in range(thresholds))),
        token_counts=(10,) * (thresholds + 1),
    )


def _run(losses: np.ndarray, specs: tuple[Spec, ...]) -> tuple[tuple[RiskRow, ...], tuple[Calibration, ...]]:
    grid = _GRID[: losses.shape[2]]
    rows = risk_rows(_totals(losses), specs, thresholds=grid, p_value="hoeffding", num_layers=4)
    return rows, calibrate(rows, specs=specs, p_value="hoeffding", num_layers=4)


def _spec(*, delta: float = 0.3, epsilon: float = 0.05) -> tuple[Spec, ...]:
    return (Spec(objective=Objective("textual", "token_f1"), delta=delta, epsilon=epsilon),)


def _constant(*risks: float, n: int = 100) -> np.ndarray:
    return np.broadcast_to(np.array(risks), (n, 1, len(risks)))


def test_path_ends_at_the_first_failure() -> None:
    """Nothing below the first failure is tested, though its p-value would pass."""
    rows, (entry,) = _run(_constant(0.0, 0.125, 0.5, 0.0), _spec())
    assert [row.tested for row in rows] == [True, True, True, False]
    assert [row.rejected for row in rows] == [True, True, False, False]
    assert rows[3].p_value < 0.05
    assert (entry.threshold, entry.layers, entry.risk) == (0.6, 3.5, 0.125)
    assert [step.threshold for step in entry.path] == [0.9, 0.6, 0.3]
    assert (entry.procedure, entry.p_value) == ("fixed_sequence", "hoeffding")


def test_never_exit() -> None:
    """If the safest threshold fails, the choice is to use all layers, at no risk."""
    rows, (entry,) = _run(_constant(0.5, 0.0), _spec())
    assert (entry.threshold, entry.layers, entry.risk) == (None, 4, 0.0)
    assert len(entry.path) == 1
    assert [row.rejected for row in rows] == [False, False]


def test_end_of_grid() -> None:
    """If every threshold passes, the last one is chosen."""
    _, (entry,) = _run(_constant(0.0, 0.0, 0.0, 0.0), _spec())
    assert (entry.threshold, entry.layers) == (0.0, 2.5)
    assert all(step.rejected for step in entry.path)
    assert len(entry.path) == 4


def test_a_p_value_equal_to_epsilon_passes() -> None:
    """The rule is p <= epsilon, as the manifest's reader demands."""
    p_value = math.exp(-2 * 100 * 0.125**2)
    _, (entry,) = _run(_constant(0.125), _spec(delta=0.25, epsilon=p_value))
    assert entry.path[0].p_value == p_value
    assert entry.threshold == 0.9
    _, (entry,) = _run(_constant(0.125), _spec(delta=0.25, epsilon=math.nextafter(p_value, 0)))
    assert entry.threshold is None


def test_no_examples() -> None:
    """No examples, no risk: an error, not a promise."""
    empty = CalibrationTotals.zero(objectives=1, thresholds=4)
    with pytest.raises(ValueError, match="Is the calibration set empty"):
        risk_rows(empty, _spec(), thresholds=_GRID, p_value="hoeffding", num_layers=4)


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_brute_force(seed: int) -> None:
    """Rows and choices equal those of a plain loop over the losses (dyadic, so that sums are exact)."""
    generator = np.random.default_rng(seed)
    shape = (80, 2, len(_GRID))
    is_bad = generator.random(shape) < np.linspace(0.02, 0.5, len(_GRID))
    losses = np.where(is_bad, generator.integers(0, 257, shape) / 256, 0)
    rows, entries = _run(losses, _SPECS)
    place = 0
    for spec, entry in zip(_SPECS, entries, strict=True):
        of_spec = losses[:, objectives_of(_SPECS).index(spec.objective)]
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
    """The brute-force test above meets several outcomes, so that it can fail."""
    generator = np.random.default_rng(0)
    is_bad = generator.random((80, 2, 4)) < np.linspace(0.02, 0.5, 4)
    _, entries = _run(np.where(is_bad, generator.integers(0, 257, (80, 2, 4)) / 256, 0), _SPECS)
    assert len({entry.threshold for entry in entries}) > 1
