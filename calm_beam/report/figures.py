"""Figures as files, drawn with matplotlib."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from calm_beam.errors import UsageError
from calm_beam.exits.measures import COMPARABLE
from calm_beam.storage import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by readers who are colour-blind too (Okabe and Ito, "Color universal design", 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BLACK, GREY = "#000000", "#777777"


def check_plots_available() -> None:
    """Raises `UsageError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib, which is not installed: pip install 'calm-beam[plots]'.")


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


def measure_style(name: str, *, index: int = 0) -> dict[str, Any]:
    """Returns how a measure is drawn, the same in all figures.

    Args:
      name: A confidence measure, or another name that needs a colour too.
      index: Of that other name among its like, from 0.
    """
    if name == "static":
        return {"color": GREY, "marker": "s", "linestyle": "--", "markersize": 3}
    if name == "oracle":
        return {"color": BLACK, "marker": "*", "linestyle": "none", "markersize": 9}
    colour = COMPARABLE.index(name) if name in COMPARABLE else len(COMPARABLE) + index
    return {"color": COLOURS[colour % len(COLOURS)], "marker": "."}


def tidy(axes: "Axes") -> None:
    """Takes away the frame above and to the right, and lays a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
