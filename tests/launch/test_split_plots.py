"""The figures of repeated splits."""

import pathlib

import pytest

from calm_beam.calibration import all_specs
from calm_beam.evaluation.grid import GridRow
from calm_beam.evaluation.outcomes import Spread, Summary
from calm_beam.launch.evaluate.splits.plots import by_test, draw_curves, draw_tradeoff
from calm_beam.launch.plots import saved_figure

_SPECS = all_specs(consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.1, 0.2), epsilons=(0.1,))
_MEASURES = ("softmax", "softmax_max", "state", "classifier", "static", "softmax, schedule decay")


def _summaries() -> list[Summary]:
    return [
        Summary(
            measure=measure,
            spec=spec,
            trials=3,
            threshold=None,
            never=0,
            test_risk=Spread(mean=0.05, std=0.01),
            exceeding=0,
            proved_broken=0,
            layers=Spread(mean=3, std=0.1),
            flops_appendix_b=None,
            flops_calm_table=None,
            bleu=None,
            full_bleu=None,
        )
        for measure in _MEASURES
        for spec in _SPECS
    ]


def _grid() -> list[GridRow]:
    return [
        GridRow(
            measure=measure,
            threshold=threshold,
            consistency=spec.objective.consistency,
            metric="token_f1",
            loss=spec.objective.loss,
            n=10,
            risk=0.1,
            layers=4.0,
            flops_appendix_b=None,
            flops_calm_table=None,
            bleu=None,
            cut=0,
            examples=10,
            repeated=0,
            failed=0,
        )
        for measure in (*_MEASURES, "oracle")
        for threshold in (None, 0.5, 0.0)
        for spec in _SPECS[::2]
    ]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_every_measure_can_be_drawn(tmp_path: pathlib.Path, kind: str) -> None:
    """Those with styles of their own too, static layers and the oracle, one panel for each loss and its test."""
    groups = by_test(_summaries())
    assert [group[0].spec.objective.consistency for group in groups] == ["textual", "risk"]
    with saved_figure(str(tmp_path / f"curves.{kind}")) as figure:
        draw_curves(groups, num_layers=8, figure=figure)
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["delta", *_MEASURES]
    with saved_figure(str(tmp_path / f"tradeoff.{kind}")) as figure:
        draw_tradeoff(_grid(), figure=figure)
        assert len(figure.axes) == 2
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "static layers" in labels
    assert "oracle" in labels
