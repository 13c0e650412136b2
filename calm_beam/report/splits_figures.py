"""Repeated splits as figures: risk and layers over the whole range of delta, and the trade-off over the grid."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from calm_beam.evaluation.grid import GridRow, full_score, objectives_of_grid, score_in_words
from calm_beam.evaluation.outcomes import Summary

from .figures import BLACK, GREY, measure_style, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 3.6


def draw_curves(groups: Sequence[Sequence[Summary]], *, num_layers: int, figure: "Figure") -> None:
    """Draws test risk and layers over delta, with the standard deviation over trials.

    Source: CALM, "Additional Results" (empirical consistency and efficiency gains per choice of delta).
    """
    above, below = figure.subplots(2, len(groups), sharex="col", squeeze=False)
    for index, group in enumerate(groups):
        _draw_risk(above[index], group)
        _draw_layers(below[index], group, num_layers=num_layers)
    above[0].set_ylabel("mean loss on the test part")
    below[0].set_ylabel("decoder layers per token")
    handles, labels = above[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title="line: mean over trials; band: ± one standard deviation of single trials",
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
    )


def _draw_risk(axes: "Axes", group: Sequence[Summary]) -> None:
    spec = group[0].spec
    deltas = sorted({summary.spec.delta for summary in group})
    axes.plot([0, deltas[-1]], [0, deltas[-1]], color=GREY, linestyle=":", linewidth=1, label="delta")
    _draw_bands(axes, group, field="test_risk")
    kind = spec.objective.consistency_in_words()
    axes.set_title(f"{kind}, {spec.objective.metric}\n{spec.p_value}", fontsize="medium")
    tidy(axes)


def _draw_layers(axes: "Axes", group: Sequence[Summary], *, num_layers: int) -> None:
    _draw_bands(axes, group, field="layers")
    axes.set_ylim(0, num_layers + 0.3)
    axes.set_xlabel("delta")
    tidy(axes)


def _draw_bands(axes: "Axes", group: Sequence[Summary], *, field: str) -> None:
    for index, measure in enumerate(dict.fromkeys(summary.measure for summary in group)):
        line = sorted((each for each in group if each.measure == measure), key=lambda each: each.spec.delta)
        deltas = [each.spec.delta for each in line]
        spreads = [getattr(each, field) for each in line]
        style = measure_style(measure, index=index)
        axes.plot(deltas, [spread.mean for spread in spreads], linewidth=1.2, label=measure, **style)
        axes.fill_between(
            deltas,
            [spread.mean - spread.std for spread in spreads],
            [spread.mean + spread.std for spread in spreads],
            color=style["color"],
            alpha=0.18,
            linewidth=0,
        )


def draw_tradeoff(grid: Sequence[GridRow], *, figure: "Figure") -> None:
    """Draws mean score against layers over every measure's grid.

    Source: CALM, Figure 3 (validation empirical performance-efficiency tradeoffs).
    """
    objectives = objectives_of_grid(grid)
    all_axes = figure.subplots(1, len(objectives), squeeze=False)[0]
    for axes, objective in zip(all_axes, objectives, strict=True):
        rows = [row for row in grid if row.objective == objective]
        full = full_score(objective)
        axes.axhline(full, color=BLACK, linewidth=0.8, linestyle=":", label="full model")
        for index, measure in enumerate(dict.fromkeys(row.measure for row in rows)):
            line = [row for row in rows if row.measure == measure and row.threshold is not None]
            axes.plot(
                [row.layers for row in line],
                [full - row.risk for row in line],
                linewidth=1.2,
                label=f"{measure} layers" if measure == "static" else measure,
                **measure_style(measure, index=index),
            )
        axes.set_xlabel("decoder layers per token")
        axes.set_ylabel(score_in_words(objective))
        tidy(axes)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
