"""Tables of forecasts and experiments lose no head and no number at a terminal's usual width."""

import io

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.evaluation.device_forecast import DEVICES, device_forecast
from calm_beam.evaluation.performance import Estimate, Measured, Performance
from calm_beam.exits.measures import COMPARABLE
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.demo.embedded import MODEL
from calm_beam.launch.device_times import device_times_table
from calm_beam.launch.evaluate.experiments import _performance_table, _tradeoff_tables
from calm_beam.launch.terminal import PlainConsole
from calm_beam.precision import Precision


def _printed(*tables: object, width: int) -> str:
    stream = io.StringIO()
    console = PlainConsole(file=stream, width=width)
    for table in tables:
        console.print(table)
    return stream.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_times_on_a_device(device: str) -> None:
    """Times of thousands of microseconds are printed in full at 80 columns; at 40 they are cut (the twin)."""
    config = load_checkpoint(str(MODEL)).config
    table = device_times_table(device_forecast(config, device, Precision(), positions=10**6, rows=64))
    assert "…" not in _printed(table, width=80)
    assert "…" in _printed(table, width=40)


def test_measures_side_by_side() -> None:
    """With every measure that experiments compare, no head and no score is cut at 80 columns; at 40 some are."""
    score = Estimate(mean=0.1234, standard_error=0.0123, prompts=9)
    performance = Performance(
        layers=Estimate(mean=23.45, standard_error=0.1, prompts=9),
        similarity=score,
        quality=score,
        quality_change=score,
    )
    curves = {
        name: [
            Measured(rule=ExitRule(confidence=name), threshold=threshold, performance=performance)
            for threshold in (0.95, 0.0)
        ]
        for name in COMPARABLE
    }
    tables = [
        *_tradeoff_tables(curves, metric="rouge_l_unicode"),
        _performance_table("Bounds", {"static layer 12": performance}, metric="rouge_l_unicode", num_layers=24),
    ]
    text = _printed(*tables, width=80)
    assert "…" not in text
    assert text.count("23.45  0.1234") == 2 * len(COMPARABLE)
    assert all(name in text for name in COMPARABLE)
    assert "…" in _printed(*tables, width=40)
