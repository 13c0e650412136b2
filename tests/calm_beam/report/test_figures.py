"""Charts as files."""

import pathlib

import pytest
from matplotlib.figure import Figure

from calm_beam.report.document import SERIES
from calm_beam.report.line_chart import FULL, Line, LineChart, around, draw_charts, write_figure
from calm_beam.report.splits_page import write_split_figures
from tests.calm_beam.report.split_results import MEASURES, split_results


def _chart(*names: str, **changes: object) -> LineChart:
    lines = [
        Line(name=name, points=[(1, 0.5), (10, 1)], ends=around([0.5, 1], [0.1, None]), style=style, has_band=not style)
        for style, name in enumerate(names)
    ]
    return LineChart(**{"title": "T", "x_name": "x", "y_name": "y", "lines": lines, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_every_measure_can_be_drawn(tmp_path: pathlib.Path, kind: str) -> None:
    """Every measure, static layers and the oracle can be drawn; each file has its format, the same each time."""
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_split_figures(str(tmp_path / name), [kind], results=split_results())
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert set(written[0]) == {f"splits_curves.{kind}", f"splits_tradeoff.{kind}"}
    assert written[0] == written[1]
    if kind == "svg":
        curves, tradeoff = (content.decode() for _, content in sorted(written[0].items()))
        names = {name.replace("static", "static layers") for name in MEASURES}
        assert all(curves.count(f"<!-- {name} -->") == 1 for name in names)
        # Two losses, each with its test.
        assert curves.count(", token_f1: ") == 2
        assert "<!-- oracle -->" in tradeoff


def test_charts_share_a_legend_unless_their_lines_differ() -> None:
    """Lines with equal names share one legend, with what they are compared with; others have one in every panel."""
    figure = Figure()
    draw_charts([[_chart("a", "b", level=(1.0, "full"), has_diagonal=True), _chart("a", "b")]], figure, note="N")
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == ["a", "b", "full", "x"]
    assert legend.get_title().get_text() == "N"
    other = Figure()
    draw_charts([[_chart("a"), _chart("b")], [_chart("c")]], other)
    assert not other.legends
    legends = [axes.get_legend() for axes in other.axes if axes.get_visible()]
    assert [[text.get_text() for text in each.get_texts()] for each in legends if each] == [["a"], ["b"], ["c"]]


def test_a_panel_says_what_the_drawing_of_a_page_says() -> None:
    """Names, ends, scale and colours of a panel are those of the page's chart."""
    figure = Figure()
    draw_charts([[_chart("a", "b", is_log=True, y_ends=(0.0, 2.0))]], figure)
    (axes,) = figure.axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("T", "x", "y")
    assert (axes.get_xscale(), axes.get_ylim()) == ("log", (0.0, 2.0))
    assert axes.get_lines()[0].get_color() == SERIES[0][0]
    assert len(SERIES) == FULL + 1


def test_a_single_point_can_be_drawn(tmp_path: pathlib.Path) -> None:
    """A single point, as in experiments with one number for each way of exiting, can be drawn."""
    line = Line(name="full model", points=[(4.0, 1.0)], ends=[(1.0, 1.0)], style=FULL)
    write_figure(str(tmp_path / "one.pdf"), [[_chart("a", lines=[line])]], title="All")
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
