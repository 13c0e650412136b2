"""Line charts as files, drawn with matplotlib in the colours and marks of pages."""

import contextlib
import importlib.util
import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import UsageError
from calm_beam.storage import replacing

from .line_chart import Line, LineChart
from .palette import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY = "#000000", "#777777"
# As pages draw them.
_MARKS = ("o", "s", "^", "D", "v", "P")
# Of a panel, in inches, and what legends and a title take beside panels.
_PANEL_WIDTH, _PANEL_HEIGHT, _AROUND = 3.6, 2.7, 1.0
# Longest line of a title or of the name of an axis, in characters.
_TITLE_WIDTH, _AXIS_WIDTH = 46, 42
_LEGEND_COLUMNS = 4


def check_plots_available() -> None:
    """Raises `UsageError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which is not installed: pip install 'calm-beam[plots]'.")


def write_figure(path: str, rows: Sequence[Sequence[LineChart]], *, title: str = "", note: str = "") -> None:
    """Writes charts as one file, which appears whole or not at all; equal charts give equal files.

    Args:
      path: Where to, ending in .svg, .png or .pdf.
      rows: The charts from top to bottom; the first row is the longest.
      title: Of the whole; empty for none.
      note: What a legend says before the names; empty for nothing.
    """
    width, height = _AROUND + _PANEL_WIDTH * len(rows[0]), _AROUND + _PANEL_HEIGHT * len(rows)
    with saved_figure(path, width=width, height=height) as figure:
        figure.suptitle(title)
        draw_charts(rows, figure, note=note)


def draw_charts(rows: Sequence[Sequence[LineChart]], figure: "Figure", *, note: str = "") -> None:
    """Draws charts on an empty figure; arguments as of `write_figure`.

    One legend is about all charts, unless they name their lines differently: then each has its own.
    """
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    found: dict[str, Any] = {}
    names = {tuple(line.name for line in chart.lines) for charts in rows for chart in charts}
    for line_of_axes, charts in zip(grid, rows, strict=True):
        for axes, chart in zip(line_of_axes, charts, strict=False):
            _draw_chart(axes, chart)
            handles, labels = axes.get_legend_handles_labels()
            found.update(zip(labels, handles, strict=True))
            if len(names) > 1:
                # Below, where it hides no line.
                axes.legend(fontsize="small", ncols=2, title=note, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        for axes in line_of_axes[len(charts) :]:
            axes.set_visible(False)
    if len(names) == 1:
        figure.legend(
            found.values(),
            found.keys(),
            title=note,
            loc="outside lower center",
            ncols=min(len(found), _LEGEND_COLUMNS),
            frameon=False,
        )


@contextlib.contextmanager
def saved_figure(path: str, *, width: float = 7.0, height: float = 4.0) -> "Iterator[Figure]":
    """Gives an empty figure, in inches, and writes it once the block has drawn on it.

    The file, .svg, .png or .pdf, appears whole or not at all; equal figures give equal files.
    """
    # Here, since it is an extra. Not through pyplot, which keeps state and looks for a display.
    import matplotlib
    from matplotlib.figure import Figure

    # Ids in the file come from its content, not from a random draw.
    with matplotlib.rc_context({"svg.hashsalt": "calm-beam", "font.size": 9.0}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        kind = os.path.splitext(path)[1][1:]
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=dates.get(kind))


def draw_line(axes: "Axes", line: Line) -> None:
    """Draws a line with its band or whiskers, under its name."""
    style = line_style(line)
    xs, ys = zip(*line.points, strict=True)
    if line.ends is None:
        axes.plot(xs, ys, label=line.name, **style)
        return
    lows, highs = zip(*line.ends, strict=True)
    if line.has_band:
        axes.plot(xs, ys, label=line.name, **style)
        axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.18, linewidth=0)
        return
    below, above = ([end - y for end, y in zip(ends, ys, strict=True)] for ends in (lows, highs))
    axes.errorbar(xs, ys, yerr=([-each for each in below], above), elinewidth=0.6, label=line.name, **style)


def line_style(line: Line) -> dict[str, Any]:
    """Returns how a line is drawn, as matplotlib takes it; a single point is larger."""
    return {
        "color": SERIES[line.style][0],
        "marker": _MARKS[line.style % len(_MARKS)],
        "markersize": 3 if len(line.points) > 1 else 6,
        "linestyle": "--" if line.is_dashed else "-",
        "linewidth": 1.2,
    }


def tidy(axes: "Axes") -> None:
    """Takes away the frame above and to the right, and lays a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_chart(axes: "Axes", chart: LineChart) -> None:
    if chart.has_diagonal:
        end = max(x for line in chart.lines for x, _ in line.points)
        axes.plot([0, end], [0, end], color=GREY, linestyle=":", linewidth=1, label=chart.x_name)
    for line in chart.lines:
        draw_line(axes, line)
    if chart.level is not None:
        value, name = chart.level
        axes.axhline(value, color=BLACK, linewidth=0.8, linestyle=":", label=name)
    if chart.is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(*chart.y_ends)
    axes.set_title(textwrap.fill(chart.title, _TITLE_WIDTH), fontsize="medium")
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(textwrap.fill(chart.y_name, _AXIS_WIDTH))
    tidy(axes)
