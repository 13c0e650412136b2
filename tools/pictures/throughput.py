"""A plot of tokens per second with exits relative to the full model, from the figures in docs/measurements.md."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from calm_beam.report.line_chart import BLACK, line_style, measure_line, saved_figure, tidy

_COMMAND = "python -m benchmarks.throughput"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """A line of the table.

    Attributes:
      prompts: Number of prompts at a time.
      measure: Confidence measure.
      layers: Decoder layers per token.
      gain: Tokens per second relative to the full model.
    """

    prompts: int
    measure: str
    layers: float
    gain: float


def read_rates(page: pathlib.Path) -> list[Rate]:
    """Returns the first table that follows the benchmark's command on a page.

    Raises:
      ValueError: If there is none.
    """
    _, found, rest = page.read_text(encoding="utf-8").partition(_COMMAND)
    table = re.search(r"^\| prompts at a time .*\n\|[-:|]+\n((?:\|.*\n)+)", rest, re.MULTILINE) if found else None
    if table is None:
        raise ValueError(f"{page}: has no table after {_COMMAND!r}.")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    return [
        Rate(prompts=int(prompts), measure=measure, layers=float(layers), gain=float(gain))
        for prompts, measure, _, layers, _, _, gain, *_ in rows
    ]


def draw(rates: Sequence[Rate], *, path: pathlib.Path) -> None:
    """Writes two panels, for about a quarter and about half of the layers: the gain over prompts at a time."""
    middle = sorted(rate.layers for rate in rates)[len(rates) // 2 - 1 : len(rates) // 2 + 1]
    halves = [
        ("a quarter", [rate for rate in rates if rate.layers <= middle[0]]),
        ("half", [rate for rate in rates if rate.layers >= middle[1]]),
    ]
    with saved_figure(str(path), height=3.2) as figure:
        for axes, (share, some) in zip(figure.subplots(1, 2, sharey=True), halves, strict=True):
            for measure in dict.fromkeys(rate.measure for rate in some):
                points = [(rate.prompts, rate.gain) for rate in some if rate.measure == measure]
                line = measure_line(measure, points)
                axes.plot(
                    [str(prompts) for prompts, _ in points],
                    [gain for _, gain in points],
                    label=line.name,
                    **line_style(line),
                )
            axes.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":", label="full model")
            low, high = min(rate.layers for rate in some), max(rate.layers for rate in some)
            axes.set_title(f"at {share} of the layers ({low:.1f} to {high:.1f} of 8)", fontsize="medium")
            axes.set_xlabel("prompts at a time")
            tidy(axes)
        figure.axes[0].set_ylabel("tokens a second;\nfull model = 1")
        figure.axes[0].set_ylim(bottom=0)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
