"""Repeated splits as a page: whether tolerances were kept, curves, the trade-off, and what every trial chose."""

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calm_beam.evaluation.outcomes import (
    PROOF_LEVEL,
    GridRow,
    SplitResults,
    Spread,
    Summary,
    TrialOutcome,
    by_test,
    full_score,
    objectives_of_grid,
    score_in_words,
)
from calm_beam.manifest import Objective, PlannedTest
from calm_beam.risk.counts import binomial_interval
from calm_beam.risk.rules import split_tail, tail_in_words
from calm_beam.storage import joined
from calm_beam.text import counted

from .document import (
    Cell,
    Document,
    Section,
    details,
    number,
    paragraphs,
    sentence,
    short_place,
    software_fact,
    table,
    threshold_cell,
    tiles,
)
from .line_chart import Line, LineChart, measure_line, plots, write_figure

_Row = tuple[str | Cell, ...]

# Of more trials, or thresholds of measures, the files have to do.
_MOST_ROWS = 5000
# Of trials that all chose differently.
_MOST_CHOICES = 24


def splits_page(provenance: Mapping[str, Any], results: SplitResults) -> str:
    """Returns the page; `provenance` is what `splits.json` has."""
    asked, grid = results.table, results.grid
    splits = provenance["splits"]
    worst = max(summary.exceeding for summary in asked)
    broken = sum(summary.proved_broken for summary in asked)
    measures = counted(len(dict.fromkeys(summary.measure for summary in asked)), "measure")
    opening = [
        sentence(
            "In ",
            counted(splits["trials"], "random split"),
            " of ",
            counted(grid[0].examples, "example"),
            f", {measures} chose thresholds on about {splits['calibration_share']:.0%} of them, and were tried on the "
            "rest. It lost more than δ in at most ",
            f"{worst} of {counted(asked[0].trials, 'trial')}",
            " of any line below.",
            warns=broken > 0,
        ),
        tiles(
            [
                (f"{grid[0].examples:,}", "examples"),
                (f"{splits['trials']:,}", "random splits"),
                (
                    f"{broken:,} of {sum(summary.trials for summary in asked):,}",
                    "trials of all rows whose test part alone proves a risk above δ",
                ),
                (f"{grid[0].repeated:,}", "repeated inputs"),
            ],
            loud=["repeated inputs"] if grid[0].repeated else [],
        ),
        paragraphs(
            [
                "An evaluation describes, and promises nothing. Settle the tolerance and the measure that you will "
                "serve before you calibrate the promise, on other examples.",
            ]
        ),
    ]
    specs = list(dict.fromkeys(summary.spec for summary in asked))
    return Document(
        kind="evaluation",
        title=short_place(provenance["model"]["uri"]),
        made=f"calm-beam {provenance['software']['calm-beam']}",
        heading="What thresholds are worth on other examples",
        opening="".join(opening),
        sections=[
            _curves(results),
            _tradeoff(grid),
            _tolerances(results, notes=list(split_notes(results, max_decode_length=provenance["max_decode_length"]))),
            _choices([trial for trial in results.trials if trial.spec in specs]),
            _whole_set(grid),
        ],
        about="How it was measured",
        facts=_facts(provenance),
        fewer="Evaluate fewer tolerances, or with fewer trials.",
    ).text()


def split_notes(results: SplitResults, *, max_decode_length: int) -> Iterator[str]:
    """Yields how to read the tables, and what they do not show, a sentence or two each."""
    summaries, grid = results.table, results.grid
    trials = summaries[0].trials
    worst = max(summary.exceeding for summary in summaries)
    low, high = binomial_interval(worst, trials)
    yield (
        f"Means over {trials} random splits; threshold: the middle one. Layers, operations, risk and BLEU are of the "
        "test part alone."
    )
    if any(summary.spec.p_value == "hoeffding_bentkus" for summary in summaries):
        yield (
            "Splits keep sums of losses, and are tested by hoeffding_bentkus. star_bets, the default of a calibration, "
            "sees every loss, and often proves a lower threshold from the same examples."
        )
    if any(summary.flops_appendix_b for summary in summaries):
        yield (
            "Operations are compared with the full model's, exit tests included: those that each token took. The "
            "column next to it counts as Table 2 of the CALM paper seems to: every token with the tests of its "
            "output's deepest one."
        )
    yield (
        f"risk > delta: trials whose mean loss on the test part exceeds delta, at most {worst} of the {trials} "
        f"trials of a row (95 % interval of that share: {low:.1%} to {high:.1%}, were trials independent; they share "
        "their examples). "
        "The mean loss of a test part is an estimate itself: it may exceed delta where the true risk, which the "
        "guarantee is about, does not."
    )
    broken = sum(summary.proved_broken for summary in summaries)
    tests = sum(summary.trials for summary in summaries)
    yield (
        f"The test part alone proves (level {PROOF_LEVEL:g}) a risk above delta in {broken} of "
        f"{counted(tests, 'trial')} of all "
        "rows."
    )
    full = next((summary.full_bleu for summary in summaries if summary.full_bleu), None)
    if full is not None:
        yield f"BLEU of the full model: {full.mean:.1f}. BLEU is reported, and never tested."
    outputs = grid[0].examples - grid[0].failed
    full_cut = next(row.cut for row in grid if row.threshold is None)
    yield (
        f"Outputs cut at {counted(max_decode_length, 'token')}: {full_cut} of the full model's {outputs}, at most "
        f"{max(row.cut for row in grid)} at any threshold of any measure."
    )


def write_split_figures(directory: str, kinds: Sequence[str], *, results: SplitResults) -> None:
    """Writes the charts of the page as files: `splits_curves` and `splits_tradeoff`, once of each kind.

    Args:
      directory: Where to.
      kinds: Endings of names, as `write_figure` takes them.
      results: What was found.
    """
    groups = by_test(results.curves)
    tests = [_curve_charts(group, results) for group in groups]
    risks = [
        dataclasses.replace(risk, title=_test(group[0].spec)) for group, (risk, _) in zip(groups, tests, strict=True)
    ]
    curves = [risks, [dataclasses.replace(layers, title="") for _, layers in tests]]
    for kind in kinds:
        note = "line: mean over trials; band: ± one standard deviation of single trials"
        of_grid = "line: mean over all examples"
        write_figure(joined(directory, f"splits_curves.{kind}"), curves, note=note if _has_curves(results) else of_grid)
        write_figure(joined(directory, f"splits_tradeoff.{kind}"), [_tradeoff_charts(results.grid)])


def _curves(results: SplitResults) -> Section:
    parts = []
    for group in by_test(results.curves):
        charts = _curve_charts(group, results)
        parts.append(f'<h3 class="subject">{html.escape(_test(group[0].spec))}</h3>{plots(charts)}')
    lead = "Lines: means over trials, of the test parts. Bands: a standard deviation of single trials up and down."
    return Section(
        title=f"Risk and layers over the {'tolerance' if _has_curves(results) else 'threshold'}",
        lead=lead if _has_curves(results) else "One tolerance is no curve. Lines: means over all examples.",
        content="".join(parts),
    )


def _has_curves(results: SplitResults) -> bool:
    """Returns whether there is anything to draw over the tolerance."""
    return len({summary.spec.delta for summary in results.curves}) > 1


def _curve_charts(group: Sequence[Summary], results: SplitResults) -> tuple[LineChart, LineChart]:
    """Returns risk and layers of one test: over delta, or over the threshold where there is one delta alone."""
    charts = _over_delta if _has_curves(results) else _over_threshold
    return charts(group, results)


def _over_threshold(group: Sequence[Summary], results: SplitResults) -> tuple[LineChart, LineChart]:
    """Returns risk and layers over the threshold, on all examples."""
    spec = group[0].spec
    lines: dict[str, list[Line]] = {"risk": [], "layers": []}
    for place, measure in enumerate(dict.fromkeys(summary.measure for summary in group)):
        rows = [
            (row.threshold, row)
            for row in results.grid
            if row.measure == measure and row.objective == spec.objective and row.threshold is not None
        ]
        for field, drawn in lines.items():
            points = [(threshold, float(getattr(row, field))) for threshold, row in rows]
            drawn.append(measure_line(measure, points, place=place))
    risk = LineChart(
        title="Risk",
        x_name="threshold λ",
        y_name="mean loss",
        lines=lines["risk"],
        level=(spec.delta, "δ"),
    )
    return risk, _layers_chart(lines["layers"], results.num_layers, x_name="threshold λ")


def _over_delta(group: Sequence[Summary], results: SplitResults) -> tuple[LineChart, LineChart]:
    """Returns test risk and layers over delta, of the summaries of one test.

    Source: CALM, "Additional Results" (empirical consistency and efficiency gains per choice of delta).
    """
    lines: dict[str, list[Line]] = {"test_risk": [], "layers": []}
    for place, measure in enumerate(dict.fromkeys(summary.measure for summary in group)):
        of_measure = sorted((each for each in group if each.measure == measure), key=lambda each: each.spec.delta)
        for field, drawn in lines.items():
            spreads: list[Spread] = [getattr(each, field) for each in of_measure]
            drawn.append(
                measure_line(
                    measure,
                    [(each.spec.delta, spread.mean) for each, spread in zip(of_measure, spreads, strict=True)],
                    place=place,
                    spreads=[spread.std for spread in spreads],
                    has_band=True,
                )
            )
    risk = LineChart(
        title="Risk",
        x_name="tolerance δ",
        y_name="mean loss on the test part",
        lines=lines["test_risk"],
        has_diagonal=True,
        caption="dashed: δ itself",
    )
    return risk, _layers_chart(lines["layers"], results.num_layers, x_name="tolerance δ")


def _layers_chart(lines: Sequence[Line], num_layers: int, *, x_name: str) -> LineChart:
    return LineChart(
        title="Layers",
        x_name=x_name,
        y_name=f"decoder layers per token, of {num_layers}",
        lines=lines,
        y_ends=(0.0, num_layers * 1.04),
        level=(float(num_layers), "full model"),
    )


def _tradeoff(grid: Sequence[GridRow]) -> Section:
    return Section(
        title="Quality at fewer layers",
        lead="Every threshold of the grid, on all examples. Point at a mark to see which; the last table has all.",
        content=plots(_tradeoff_charts(grid)),
    )


def _tradeoff_charts(grid: Sequence[GridRow]) -> list[LineChart]:
    """Returns mean score over layers at every threshold of every measure, a chart for each loss.

    Source: CALM, Figure 3 (validation empirical performance-efficiency tradeoffs).
    """
    charts = []
    for objective in objectives_of_grid(grid):
        rows = [row for row in grid if row.objective == objective]
        full = full_score(objective)
        lines = []
        for place, measure in enumerate(dict.fromkeys(row.measure for row in rows)):
            line = [row for row in rows if row.measure == measure and row.threshold is not None]
            lines.append(
                measure_line(
                    measure,
                    [(row.layers, full - row.risk) for row in line],
                    place=place,
                    words=[f"λ {row.threshold:g}: {row.layers:.2f} layers, {full - row.risk:.4f}" for row in line],
                )
            )
        charts.append(
            LineChart(
                title=_objective(objective),
                x_name="decoder layers per token",
                y_name=score_in_words(objective),
                lines=lines,
                level=(full, "full model"),
            )
        )
    return charts


def _tolerances(results: SplitResults, *, notes: Sequence[str]) -> Section:
    summaries, num_layers = results.table, results.num_layers
    with_tests = _have_several_tests([summary.spec for summary in summaries])
    with_flops = any(summary.flops_appendix_b for summary in summaries)
    with_bleu = any(summary.bleu for summary in summaries)
    names = (
        "loss",
        "δ",
        "measure",
        "threshold",
        f"layers of {num_layers}",
        "layers saved",
        *(["operations", "as in Table 2"] if with_flops else []),
        *(["speedup"] if results.speedups else []),
        "test risk",
        "risk > δ",
        *(["BLEU"] if with_bleu else []),
        *(["test"] if with_tests else []),
    )
    rows: list[_Row] = [
        (
            _objective(summary.spec.objective),
            number(summary.spec.delta, "g"),
            summary.measure,
            threshold_cell(summary.threshold),
            number(summary.layers.mean, ".2f"),
            number(1 - summary.layers.mean / num_layers, ".0%"),
            *([_change(summary.flops_appendix_b), _change(summary.flops_calm_table)] if with_flops else []),
            *([_speedup(summary, results)] if results.speedups else []),
            number(summary.test_risk.mean, ".4f"),
            Cell(f"{summary.exceeding} of {summary.trials}", summary.exceeding),
            *([number(None if summary.bleu is None else summary.bleu.mean, ".1f")] if with_bleu else []),
            *([_tested_by(summary.spec)] if with_tests else []),
        )
        for summary in summaries
    ]
    return Section(
        title="At the tolerances that were asked for",
        lead="Means over trials, of the test parts; threshold: the middle one of those that trials chose. "
        "Click on the head of a column to sort by it.",
        content=table(names, rows, label="Table of tolerances") + paragraphs(notes),
    )


def _choices(trials: Sequence[TrialOutcome]) -> Section:
    """Returns how many trials of each line chose which threshold, and every trial."""
    chosen = sorted({trial.threshold for trial in trials if trial.threshold is not None}, reverse=True)
    few: list[float | None] = [None, *chosen] if any(trial.threshold is None for trial in trials) else [*chosen]
    lines: dict[tuple[PlannedTest, str], list[TrialOutcome]] = {}
    for trial in trials:
        lines.setdefault((trial.spec, trial.measure), []).append(trial)
    content = ""
    if len(few) <= _MOST_CHOICES:
        with_tests = _have_several_tests([spec for spec, _ in lines])
        thresholds = ("never exit" if each is None else f"λ {each:g}" for each in few)
        names = ("loss", "δ", "measure", *thresholds, *(["test"] if with_tests else []))
        rows: list[_Row] = [
            (
                _objective(spec.objective),
                number(spec.delta, "g"),
                measure,
                *(_share(sum(trial.threshold == each for trial in line), of=len(line)) for each in few),
                *([_tested_by(spec)] if with_tests else []),
            )
            for (spec, measure), line in lines.items()
        ]
        content = table(names, rows, label="Table of choices")
    every = details("Every trial", table(*_every(trials[:_MOST_ROWS]), label="Table of all trials"))
    return Section(
        title="What each trial chose",
        lead=f"Trials that chose each threshold, the darker the more.{_rest(trials, 'splits_trials.parquet')}",
        content=content + every,
    )


def _every(trials: Sequence[TrialOutcome]) -> tuple[Sequence[str], list[_Row]]:
    with_tests = _have_several_tests([trial.spec for trial in trials])
    names = ("loss", "δ", "measure", "trial", "threshold", "layers", "test risk", "n", "n tested")
    return (*names, *(["test"] if with_tests else [])), [
        (
            _objective(trial.spec.objective),
            number(trial.spec.delta, "g"),
            trial.measure,
            number(trial.trial, "d"),
            threshold_cell(trial.threshold),
            number(trial.layers, ".2f"),
            Cell(f"{trial.test_risk:.4f}".replace("-", "−") + (" > δ" if trial.exceeds else ""), trial.test_risk),
            number(trial.n_calibration, ",d"),
            number(trial.n_test, ",d"),
            *([_tested_by(trial.spec)] if with_tests else []),
        )
        for trial in trials
    ]


def _whole_set(grid: Sequence[GridRow]) -> Section:
    names = ("loss", "measure", "threshold", "layers", "risk", "BLEU", "outputs cut", "failed")
    rows: list[_Row] = [
        (
            _objective(row.objective),
            row.measure,
            threshold_cell(row.threshold),
            number(row.layers, ".2f"),
            number(row.risk, ".4f"),
            number(row.bleu, ".1f"),
            number(row.cut, ",d"),
            number(row.failed, ",d"),
        )
        for row in grid[:_MOST_ROWS]
    ]
    return Section(
        title="The whole set at every threshold",
        lead=_rest(grid, "splits_grid.csv").strip(),
        content=details("All numbers", table(names, rows, label="Table of the whole set")),
    )


def _rest(rows: Sequence[object], name: str) -> str:
    """Returns where the rows stand that a page does not show; empty if it shows all."""
    if len(rows) <= _MOST_ROWS:
        return ""
    return f" The page lists {_MOST_ROWS:,} of {len(rows):,}: all are in {name}."


def _facts(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, splits = provenance["model"], provenance["splits"]
    facts = [
        ("Model", f"{short_place(model['uri'])} ({counted(model['layers'], 'decoder layer')})"),
        ("Model fingerprint", model["fingerprint"]),
        ("Examples from", ", ".join(map(short_place, provenance["data"]))),
    ]
    for measure in provenance["measures"]:
        rule = ", ".join(f"{name} {value}" for name, value in measure["rule"].items() if value is not None)
        facts.append((f"Measure {measure['name']}", rule))
    if provenance["cluster_key"] is not None:
        facts.append(("Clusters named by", provenance["cluster_key"]))
    return [
        *facts,
        ("Splits", f"{splits['trials']}, calibration share {splits['calibration_share']:g}, seed {splits['seed']}"),
        ("Longest outputs", counted(provenance["max_decode_length"], "token")),
        ("On failing examples", provenance["on_error"]),
        software_fact(provenance["software"]),
    ]


def _objective(objective: Objective) -> str:
    loss, _ = split_tail(objective.loss)
    relu = " (relu)" if objective.consistency == "risk" and loss == "relu" else ""
    return f"{objective.consistency}{relu}{tail_in_words(objective.loss)}, {objective.metric}"


def _test(spec: PlannedTest) -> str:
    return f"{_objective(spec.objective)}: {_tested_by(spec)}"


def _tested_by(spec: PlannedTest) -> str:
    return f"{spec.p_value}, {spec.procedure}, ε = {spec.epsilon:g}"


def _have_several_tests(specs: Sequence[PlannedTest]) -> bool:
    """Returns whether one loss is tested in several ways, so that lines have to say by which."""
    return len({(spec.objective, _tested_by(spec)) for spec in specs}) > len({spec.objective for spec in specs})


def _change(reduction: Spread | None) -> Cell:
    """Returns how many operations more or fewer there are than those of the full model."""
    return Cell("") if reduction is None else number(1 / reduction.mean - 1, "+.0%")


def _speedup(summary: Summary, results: SplitResults) -> Cell:
    if summary.threshold is None:
        return Cell("×1.00", 1.0)
    found = results.speedup(summary)
    return Cell("") if found is None else Cell(f"×{found.factor.mean:.2f}", found.factor.mean)


def _share(count: int, *, of: int) -> Cell:
    """Returns a cell with a number of trials, of a colour that says how many of all they are."""
    if not count:
        return Cell("", kind="heat")
    return Cell(str(count), count, kind=f"heat h{min(4, 1 + 4 * count // (of + 1))}")
