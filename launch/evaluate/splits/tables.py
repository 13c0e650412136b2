"""Repeated splits on the terminal, in the layout of the paper's Table 2, and as rows of a file."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from calm_beam.evaluation.files import spec_columns
from calm_beam.evaluation.outcomes import SplitResults, Spread, Summary, by_test
from calm_beam.launch.evaluate.output import Cell
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.risk.binomial_interval import binomial_interval


def summary_row(summary: Summary, results: SplitResults) -> dict[str, Cell]:
    """Returns every number of a summary by column."""
    low, high = binomial_interval(summary.exceeding, summary.trials)
    speedup = results.speedup(summary)
    return {
        "measure": summary.measure,
        **spec_columns(summary.spec),
        "trials": summary.trials,
        "threshold": summary.threshold,
        "never": summary.never,
        **_spread("test_risk", summary.test_risk),
        "exceeding": summary.exceeding,
        "exceeding_share": summary.exceeding / summary.trials,
        "exceeding_low": low,
        "exceeding_high": high,
        "proved_broken": summary.proved_broken,
        **_spread("layers", summary.layers),
        **_spread("flops_appendix_b", summary.flops_appendix_b),
        **_spread("flops_calm_table", summary.flops_calm_table),
        "speedup": speedup and speedup.factor.mean,
        "speedup_standard_error": speedup and speedup.factor.standard_error,
        **_spread("bleu", summary.bleu),
        **_spread("full_bleu", summary.full_bleu),
    }


def summary_tables(results: SplitResults, *, with_speedup: bool) -> Iterator[Table]:
    """Yields one table for each loss and its test: a block for each tolerance, a line for each measure."""
    for group in by_test(results.table):
        yield _table(group, results, with_speedup=with_speedup)


def _table(group: Sequence[Summary], results: SplitResults, *, with_speedup: bool) -> Table:
    spec = group[0].spec
    objective = spec.objective
    title = (
        f"{objective.consistency} consistency, {objective.metric} ({objective.loss} loss)\n"
        f"{spec.p_value}, {spec.procedure}, epsilon {spec.epsilon:g}"
    )
    table = PlainTable(title, padding=0)
    with_flops = any(summary.flops_appendix_b for summary in group)
    with_bleu = any(summary.bleu for summary in group)
    columns = [
        "delta",
        "measure",
        "threshold",
        f"layers\nof {results.num_layers}",
        *(["FLOPs r.\nApp. B", "FLOPs r.\nTable 2"] if with_flops else []),
        *(["speedup"] if with_speedup else []),
        "test\nrisk",
        "risk >\ndelta",
        *(["BLEU"] if with_bleu else []),
    ]
    for column in columns:
        is_name = column == "measure"
        # All columns fit into the 80 characters of a terminal, names of measures as a whole.
        table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, min_width=10 * is_name)
    deltas = list(dict.fromkeys(summary.spec.delta for summary in group))
    for delta in deltas:
        lines = [summary for summary in group if summary.spec.delta == delta]
        for index, summary in enumerate(lines):
            table.add_row(
                f"{delta:g}" if index == 0 else "",
                summary.measure,
                "never exit" if summary.threshold is None else f"{summary.threshold:g}",
                f"{summary.layers.mean:.2f}",
                *([_factor(summary.flops_appendix_b), _factor(summary.flops_calm_table)] if with_flops else []),
                *([_speedup_cell(summary, results)] if with_speedup else []),
                f"{summary.test_risk.mean:.4f}",
                f"{summary.exceeding}/{summary.trials}",
                *([f"{summary.bleu.mean:.1f}" if summary.bleu else ""] if with_bleu else []),
                end_section=index == len(lines) - 1,
            )
    return table


def _speedup_cell(summary: Summary, results: SplitResults) -> str:
    if summary.threshold is None:
        return "x1.00"
    speedup = results.speedup(summary)
    return "" if speedup is None else f"x{speedup.factor.mean:.2f}"


def _factor(spread: Spread | None) -> str:
    return "" if spread is None else f"x{spread.mean:.2f}"


def _spread(name: str, spread: Spread | None) -> dict[str, Cell]:
    mean, std = (None, None) if spread is None else (spread.mean, spread.std)
    return {name: mean, f"{name}_std": std}
