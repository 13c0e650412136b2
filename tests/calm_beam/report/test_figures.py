"""The figures of repeated splits."""

import pathlib

import pytest

from calm_beam.evaluation.outcomes import by_test
from calm_beam.report.figures import saved_figure
from calm_beam.report.splits_figures import draw_curves, draw_tradeoff
from tests.calm_beam.report.split_results import MEASURES, grid_rows, split_summaries


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_every_measure_can_be_drawn(tmp_path: pathlib.Path, kind: str) -> None:
    """Those with styles of their own too, static layers and the oracle, one panel for each loss and its test."""
    groups = by_test(split_summaries())
    assert [group[0].spec.objective.consistency for group in groups] == ["textual", "risk"]
    with saved_figure(str(tmp_path / f"curves.{kind}")) as figure:
        draw_curves(groups, num_layers=8, figure=figure)
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["delta", *MEASURES]
    with saved_figure(str(tmp_path / f"tradeoff.{kind}")) as figure:
        draw_tradeoff(grid_rows(), figure=figure)
        assert len(figure.axes) == 2
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "static layers" in labels
    assert "oracle" in labels
