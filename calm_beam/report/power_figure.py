"""The power of a calibration over its number of examples, drawn with matplotlib."""

import dataclasses
from collections.abc import Mapping, Sequence

from .figures import saved_figure

_MOST_PANELS_IN_A_ROW = 3
_PANEL_INCHES = (4.8, 4.2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The power of one p-value.

    Attributes:
      name: Of the p-value.
      needed: Examples at which the power is as large as was asked; None if more than `at_most`.
      at_most: Where the search ended.
      points: Pairs of a number of examples and the power there.
    """

    name: str
    needed: int | None
    at_most: int
    points: tuple[tuple[int, float], ...]


def write_power_figure(path: str, panels: Mapping[str, Sequence[Curve]], *, target: float, title: str) -> None:
    """Writes the plot.

    Args:
      path: Where to, ending in .svg, .png or .pdf.
      panels: Curves by the panel's title.
      target: The power asked for, drawn as a line.
      title: Of the whole.
    """
    columns = min(len(panels), _MOST_PANELS_IN_A_ROW)
    rows = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    with saved_figure(path, width=columns * width, height=rows * height) as figure:
        figure.suptitle(f"Probability that the threshold is accepted ({title})")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis, (panel, curves) in zip(axes.flat, panels.items(), strict=False):
            axis.set_title(panel, fontsize="medium")
            axis.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
            for curve in curves:
                label = f"{curve.name}: {curve.needed:,}" if curve.needed else f"{curve.name}: > {curve.at_most:,}"
                axis.plot(*zip(*curve.points, strict=True), marker=".", markersize=4, linewidth=1.2, label=label)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.set_ylim(-0.02, 1.02)
            axis.grid(visible=True, which="major", color="0.9")
            axis.set_xlabel("examples")
            # Below, where it hides no curve.
            axis.legend(
                fontsize="small", ncols=2, title="examples needed", loc="upper center", bbox_to_anchor=(0.5, -0.17)
            )
        for axis in axes[:, 0]:
            axis.set_ylabel("power")
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
