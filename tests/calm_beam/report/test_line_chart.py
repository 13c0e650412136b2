"""Lines over numbers as drawings."""

import re
import xml.etree.ElementTree

import pytest

from calm_beam.report.document import SERIES
from calm_beam.report.line_chart import FULL, REFERENCE, Line, LineChart, around, legend


def _chart(*lines: Line, **changes: object) -> LineChart:
    return LineChart(**{"title": "T", "x_name": "x", "y_name": "y", "lines": lines, **changes})  # type: ignore[arg-type]


def _marks(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'transform="translate\(([\d.]+) ([\d.]+)\)"', svg)]


def test_points_lie_where_their_numbers_are() -> None:
    """Positions are proportional to numbers, larger ones are higher, and the drawing is well-formed."""
    svg = _chart(Line(name="a", points=[(0, 0), (1, 1), (2, 4)], style=0)).svg()
    xml.etree.ElementTree.fromstring(svg)
    (x0, y0), (x1, y1), (x2, y2) = _marks(svg)
    assert x2 - x0 == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert y0 - y2 == pytest.approx(4 * (y0 - y1), abs=0.4)
    assert "<title>a, 1: 1</title>" in svg


def test_equal_factors_are_equal_steps() -> None:
    """On a logarithmic scale, 1, 10 and 100 are equally spaced, and have ticks."""
    svg = _chart(Line(name="a", points=[(1, 0), (10, 1), (100, 2)], style=0), is_log=True).svg()
    (x0, _), (x1, _), (x2, _) = _marks(svg)
    assert x2 - x1 == pytest.approx(x1 - x0, abs=0.2)
    assert {">1<", ">10<", ">100<"} <= set(re.findall(r">\d+<", svg))


def test_a_single_point_and_a_flat_line_can_be_drawn() -> None:
    """A single point and a flat line are drawn without a division by zero."""
    for points in ([(3.0, 0.0)], [(3.0, 2.0)], [(1.0, -5.0), (2.0, -5.0)]):
        svg = _chart(Line(name="a", points=points, style=0)).svg()
        xml.etree.ElementTree.fromstring(svg)
        assert "nan" not in svg
        assert "inf" not in svg


def test_bands_and_whiskers_reach_as_far_as_they_say() -> None:
    """A band is one shape, whiskers are a line for each point; both are within the drawing."""
    ends = around([1.0, 2.0], [0.5, None])
    assert ends == [(0.5, 1.5), (2.0, 2.0)]
    band = _chart(Line(name="a", points=[(0, 1), (1, 2)], ends=ends, style=0, has_band=True)).svg()
    assert (band.count('class="band"'), band.count('class="whisker"')) == (1, 0)
    whiskers = _chart(Line(name="a", points=[(0, 1), (1, 2)], ends=ends, style=0)).svg()
    assert (whiskers.count('class="band"'), whiskers.count('class="whisker"')) == (0, 2)


def test_what_lines_are_compared_with() -> None:
    """A level has its name where lines are farther from it; a diagonal is where both numbers are equal."""
    falling = Line(name="a", points=[(0, 1.0), (1, 0.1)], style=0)
    rising = Line(name="a", points=[(0, 0.1), (1, 1.0)], style=0)
    assert 'text-anchor="end" y="' in _chart(falling, level=(1.0, "full")).svg()
    assert 'text-anchor="end" y="' not in _chart(rising, level=(1.0, "full")).svg()
    svg = _chart(Line(name="a", points=[(0.0, 0.0), (1.0, 1.0)], style=0), has_diagonal=True).svg()
    (line,) = re.findall(r'<line class="delta" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"/>', svg)
    assert [tuple(map(float, line[:2])), tuple(map(float, line[2:]))] == _marks(svg)


def test_names_of_others_stay_texts() -> None:
    """Names cannot change the direction of text or add elements; drawings have a name for screen readers."""
    name = "<script>\u202e"
    line = Line(name=name, points=[(0, 1), (1, 2)], style=0)
    for made in (_chart(line, title=name).figure(), legend([line])):
        assert "<script>" not in made
        assert "\u202e" not in made
    assert 'role="img" aria-label="' in _chart(line).svg()


def test_lines_are_told_apart_without_colours() -> None:
    """Compared lines have different marks; of many points only the line is drawn."""
    items = [legend([Line(name=str(style), points=[(0, 0), (1, 1)], style=style)]) for style in range(6)]
    marks = {re.search(r'd="[^"]+" t|<circle', item.partition("M1 8h26")[2])[0] for item in items}  # type: ignore[index]
    assert len(marks) == 6
    assert len(SERIES) == FULL + 1 == REFERENCE + 2
    many = _chart(Line(name="a", points=[(x, x) for x in range(100)], style=0)).svg()
    assert _marks(many) == []
