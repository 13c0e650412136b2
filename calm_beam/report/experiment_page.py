"""Experiments on a sample of prompts as pages: curves, and all numbers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .document import Cell, Document, Section, number, paragraphs, sentence, short_place, software_fact, table
from .line_chart import FULL, REFERENCE, Line, LineChart, around, measure_line, plots

if TYPE_CHECKING:
    from calm_beam.evaluation.performance import Measured, Performance
    from calm_beam.evaluation.sensitivity import Sensitivity

_Row = Mapping[str, str | int | float | None]

_HEADINGS = {
    "propagation": "What the cache of skipped layers does",
    "sensitivity": "What one wrong token does",
    "tradeoff": "Quality at fewer layers",
}


def experiment_page(
    name: str,
    *,
    headline: Sequence[str],
    notes: str,
    charts: Sequence[LineChart],
    rows: Sequence[_Row],
    provenance: Mapping[str, Any],
) -> str:
    """Returns the page.

    Args:
      name: Of the experiment.
      headline: What it found: parts of a sentence, of which every second one is a number that matters.
      notes: How to read the numbers.
      charts: What it found, drawn.
      rows: Every number, one mapping from column to value a line, all with the same columns.
      provenance: Contents of its JSON other than the rows.
    """
    flags = provenance["flags"]
    layers = provenance["model"]["layers"]
    return Document(
        kind=f"evaluation: {name}",
        title=short_place(str(flags["checkpoint"])),
        made=f"calm-beam {provenance['software']['calm-beam']}",
        heading=_HEADINGS[name],
        opening=sentence(*headline) + paragraphs([provenance["sample"], notes]),
        sections=[
            Section(
                title="Curves",
                lead="Point at a mark to see its numbers, as the table has. Bars and bands: ± one standard error.",
                content=plots(charts),
            ),
            Section(title="All numbers", lead="Click on the head of a column to sort by it.", content=_numbers(rows)),
        ],
        about="How it was measured",
        facts=[
            ("Model", f"{short_place(str(flags['checkpoint']))} ({layers} decoder layers)"),
            ("Model fingerprint", provenance["model"]["fingerprint"]),
            ("Flags", ", ".join(f"{name} {_short(value)}" for name, value in flags.items() if value is not None)),
            software_fact(provenance["software"]),
        ],
        fewer="Take fewer thresholds or positions.",
    ).text()


def propagation_charts(found: "Sequence[Measured]", *, metric: str) -> list[LineChart]:
    """Returns scores over layers, a single point for every way of filling the cache."""
    fields = [("Similarity", "score against the full model's output", "similarity")]
    if found[0].performance.quality is not None:
        fields.insert(
            0, ("Change of quality", "score against the references, minus the full model's", "quality_change")
        )
    styles = {name: place for place, name in enumerate(dict.fromkeys(map(propagation_name, found[1:])))}
    return [
        LineChart(
            title=title,
            x_name="decoder layers per token",
            y_name=f"{metric}, {label}",
            lines=[
                Line(
                    name=propagation_name(measured),
                    points=[(measured.performance.layers.mean, score.mean)],
                    ends=around([score.mean], [score.standard_error]),
                    style=styles[propagation_name(measured)] % FULL if measured.rule else FULL,
                )
                for measured, score in ((each, getattr(each.performance, field)) for each in found)
            ],
        )
        for title, label, field in fields
    ]


def propagation_name(measured: "Measured") -> str:
    """Returns what a way of filling the cache is called."""
    rule = measured.rule
    if rule is None:
        return "full model"
    if rule.token_from == "last_layer":
        return f"noisy cache, {rule.confidence} {measured.threshold:g}"
    return f"oracle, {rule.state_propagation}"


def sensitivity_charts(found: "Sequence[Sensitivity]", labels: Mapping[str, str], *, metric: str) -> list[LineChart]:
    """Returns the similarity of outputs over the position of the wrong token, and of how many prompts it is the mean.

    Args:
      found: Every kind at every position.
      labels: What kinds are called.
      metric: Of the similarity.
    """
    first = next(iter(labels))
    lines = []
    for place, (kind, label) in enumerate(labels.items()):
        points = [point for point in found if point.kind == kind]
        lines.append(
            Line(
                name=label,
                points=[(point.position, point.similarity.mean) for point in points],
                ends=around(
                    [point.similarity.mean for point in points], [point.similarity.standard_error for point in points]
                ),
                style=place,
                has_band=True,
            )
        )
    return [
        LineChart(
            title="Similarity after one wrong token",
            x_name="position of the replaced token",
            y_name=f"{metric} against the unperturbed output",
            lines=lines,
        ),
        LineChart(
            title="Prompts",
            x_name="position of the replaced token",
            y_name="prompts whose output is that long",
            # The same for every kind.
            lines=[
                Line(
                    name="prompts",
                    points=[(point.position, point.similarity.prompts) for point in found if point.kind == first],
                    style=REFERENCE,
                )
            ],
            y_ends=(0.0, None),
        ),
    ]


def tradeoff_charts(full: "Measured", curves: "Mapping[str, Sequence[Measured]]", *, metric: str) -> list[LineChart]:
    """Returns scores over layers, a line for every measure.

    Args:
      full: The full model.
      curves: By measure, what was found at each of its thresholds.
      metric: Of the scores.
    """
    fields = [("Similarity", "score against the full model's output", "similarity")]
    if full.performance.quality is not None:
        fields.insert(0, ("Quality", "score against the references", "quality"))
    return [
        LineChart(
            title=title,
            x_name="decoder layers per token",
            y_name=f"{metric}, {label}",
            lines=[_tradeoff_line(name, found, field=field) for name, found in curves.items()],
            level=(getattr(full.performance, field).mean, "full model"),
        )
        for title, label, field in fields
    ]


def _tradeoff_line(name: str, found: "Sequence[Measured]", *, field: str) -> Line:
    scores = [getattr(measured.performance, field) for measured in found]
    layers = [measured.performance.layers.mean for measured in found]
    return measure_line(
        name,
        [(x, score.mean) for x, score in zip(layers, scores, strict=True)],
        spreads=[score.standard_error for score in scores],
        words=[
            f"λ {measured.threshold:g}: {x:.2f} layers, {score.mean:.4f}"
            for measured, x, score in zip(found, layers, scores, strict=True)
        ],
    )


def _numbers(rows: Sequence[_Row]) -> str:
    """Returns all rows, without columns in which nothing stands, or one word wherever something does: a flag has it."""
    first, *others = rows[0]
    columns = [first, *(name for name in others if _tells_apart({row[name] for row in rows} - {None}))]
    cells = [[_cell(row[name]) for name in columns] for row in rows]
    for line in cells:
        line[0] = line[0] if line[0].text else Cell("full model")
    return table([_in_words(name) for name in columns], cells, label="Table of all numbers")


def _tells_apart(values: set[str | int | float | None]) -> bool:
    return len(values) > 1 or any(not isinstance(value, str) for value in values)


def _cell(value: str | int | float | None) -> Cell:
    return number(value) if isinstance(value, (int, float)) else Cell(value or "")


def _in_words(column: str) -> str:
    return column.replace("_standard_error", " ±").replace("_", " ")


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_short, value))
    if isinstance(value, str):
        return short_place(value) or "none"
    return str(value)


def propagation_headline(similarities: Sequence[float], *, metric: str) -> tuple[str, ...]:
    """Returns what the page of propagation says first, as `experiment_page` takes it."""
    return (
        "Outputs of which exits have changed the cache alone score ",
        f"{min(similarities):.3f} to {max(similarities):.3f} {metric}",
        " against the full model’s outputs.",
    )


def sensitivity_headline(points: "Sequence[Sensitivity]", *, metric: str) -> tuple[str, ...]:
    """Returns what the page of sensitivity says first: its points are of one kind."""
    first, last = points[0], points[-1]
    return (
        "After one wrong token at position ",
        str(first.position),
        ", outputs score ",
        f"{first.similarity.mean:.3f} {metric}",
        f" against the unperturbed ones{'.' if first is last else '; at position '}",
        *([] if first is last else [str(last.position), ", ", f"{last.similarity.mean:.3f}", "."]),
    )


def tradeoff_headline(full: "Performance", oracle: "Performance", *, metric: str) -> tuple[str, ...]:
    """Returns what the page of the trade-off says first."""
    scores = [each.similarity if each.quality is None else each.quality for each in (full, oracle)]
    against = "the full model’s outputs" if full.quality is None else "the references"
    return (
        "The full model uses ",
        f"{full.layers.mean:g} layers",
        " and scores ",
        f"{scores[0].mean:.3f} {metric}",
        f" against {against}. The oracle, which exits as early as the last layer’s token allows, uses ",
        f"{oracle.layers.mean:.2f}",
        " and scores ",
        f"{scores[1].mean:.3f}",
        ".",
    )
