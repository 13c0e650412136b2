"""What a run will cost, as a page: what it takes, how that changes with the workers, and when it may stop."""

import dataclasses
from collections.abc import Callable, Sequence

from calm_beam.evaluation.cost import CONFIDENCE, Cost, Interval, Job, Pilot, forecast
from calm_beam.manifest.versions import certifying_versions
from calm_beam.text import counted

from .document import Cell, Document, Section, number, paragraphs, sentence, software_fact, table, tiles
from .line_chart import FULL, Line, LineChart, plots

# How many times as many workers are looked at too.
_FACTORS = (0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRow:
    """Text about when a sequential run may stop.

    Attributes:
      kind: What the losses are.
      metric: Name of the metric.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      chosen: The pilot's threshold.
      proved: The threshold that is to be proved.
      examples: How many it takes.
      between: Their interval; empty for none.
      saved: Share of the examples.
    """

    kind: str
    metric: str
    delta: float
    epsilon: float
    chosen: str
    proved: str
    examples: str
    between: str
    saved: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostInWords:
    """Text about the cost of a run.

    Attributes:
      rows: What it takes: names, what is expected, and intervals.
      assumed: What that rests on.
      stops: When a sequential run may stop.
      notes: What that rests on.
      facts: What else was asked for, by name.
    """

    rows: Sequence[tuple[str, str, str]]
    assumed: Sequence[str]
    stops: Sequence[StopRow]
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]


def cost_page(
    pilot: Pilot,
    job: Job,
    cost: Cost,
    *,
    words: CostInWords,
    price: float | None,
    shards_of: Callable[[int], int],
) -> str:
    """Returns the page.

    Args:
      pilot: What was measured.
      job: What is planned.
      cost: What that takes.
      words: The same as text.
      price: Of an hour of a worker; None if nobody said.
      shards_of: Returns into how many shards so many workers would have it divided.
    """
    unit, seconds = unit_of(cost.seconds.value)
    clock = cost.seconds.times(1 / seconds)
    between = (
        "" if clock.low is None or clock.high is None else f"{short_number(clock.low)} to {short_number(clock.high)}"
    )
    versions = certifying_versions()
    sections = [
        Section(
            title="What it takes",
            content=table(
                ("what", "expected", f"{CONFIDENCE:.0%} interval"),
                [(Cell(name), expected, interval) for name, expected, interval in words.rows],
                label="Table of costs",
            )
            + paragraphs(words.assumed),
        ),
        _workers(pilot, job, price=price, shards_of=shards_of),
        Section(title="A sequential run: when it may stop", content=_stops(words.stops) + paragraphs(words.notes)),
    ]
    return Document(
        kind="plan",
        title="what a run will cost",
        made=f"calm-beam {versions['calm-beam']}",
        heading="What the run will cost",
        opening=sentence(
            "",
            counted(job.examples, "example"),
            " on ",
            counted(job.workers, "worker"),
            f" {'takes' if job.examples == 1 else 'take'} about ",
            f"{short_number(clock.value)} {unit}",
            f" by the clock; {between} with {CONFIDENCE:.0%} confidence." if between else " by the clock.",
        )
        + tiles([(expected, name) for name, expected, _ in words.rows[:4]]),
        sections=sections,
        about="What was asked for",
        facts=[
            *words.facts,
            ("Examples", f"{job.examples:,}"),
            ("Workers", f"{job.workers:,}, {job.workers_per_machine} on a machine"),
            ("Shards", f"{job.num_shards:,}"),
            ("Speedup", f"{job.speedup:g} times the pilot's"),
            software_fact(versions),
        ],
        fewer="Plan from a pilot with fewer entries.",
    ).text()


def unit_of(seconds: float) -> tuple[str, int]:
    """Returns the unit in which a time is best read, and its seconds."""
    for name, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def short_number(value: float, digits: int = 3) -> str:
    """Returns a number with so many digits, without an exponent.

    >>> short_number(1234.5), short_number(0.01234), short_number(1e-6)
    ('1,234', '0.0123', '0')
    """
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if value >= 1e-4 else "0"


def _workers(pilot: Pilot, job: Job, *, price: float | None, shards_of: Callable[[int], int]) -> Section:
    """Returns what fewer or more workers would take."""
    counts = sorted({max(1, round(job.workers * factor)) for factor in _FACTORS})
    jobs = [
        job if workers == job.workers else dataclasses.replace(job, workers=workers, num_shards=shards_of(workers))
        for workers in counts
    ]
    costs = [forecast(pilot, each) for each in jobs]
    unit, length = unit_of(costs[counts.index(job.workers)].seconds.value)
    charts = [_chart("Time", f"{unit} by the clock", job, counts, [cost.seconds.times(1 / length) for cost in costs])]
    if price is None:
        charts.append(
            _chart("Work", "hours of all workers", job, counts, [cost.worker_seconds.times(1 / 3600) for cost in costs])
        )
    else:
        charts.append(
            _chart("Money", "at that price", job, counts, [cost.worker_seconds.times(price / 3600) for cost in costs])
        )
    names = ("workers", "shards", f"{unit} by the clock", "hours of all workers", *([] if price is None else ["money"]))
    rows = [
        (
            number(each.workers, ",d"),
            number(each.num_shards, ",d"),
            _cell(found.seconds.value / length),
            _cell(found.worker_seconds.value / 3600),
            *([] if price is None else [_cell(found.worker_seconds.value * price / 3600)]),
        )
        for each, found in zip(jobs, costs, strict=True)
    ]
    return Section(
        title="With fewer or more workers",
        lead=f"Bands: the {CONFIDENCE:.0%} intervals. Workers that wait for the last shard are paid too.",
        content=plots(charts) + table(names, rows, label="Table of workers"),
    )


def _chart(title: str, name: str, job: Job, counts: Sequence[int], found: Sequence[Interval]) -> LineChart:
    points = [(float(workers), each.value) for workers, each in zip(counts, found, strict=True)]
    has_intervals = all(each.low is not None and each.high is not None for each in found)
    return LineChart(
        title=title,
        x_name="workers",
        y_name=name,
        lines=[
            Line(
                name="forecast",
                points=points,
                ends=[(each.low or 0.0, each.high or 0.0) for each in found] if has_intervals else None,
                style=0,
                has_band=True,
            ),
            Line(name="what was asked for", points=[points[counts.index(job.workers)]], style=FULL),
        ],
        is_log=len(counts) > 1,
        y_ends=(0.0, None),
    )


def _stops(stops: Sequence[StopRow]) -> str:
    if not stops:
        return ""
    names = (
        "promise",
        "δ",
        "ε",
        "pilot's threshold",
        "to be proved",
        "examples needed",
        f"{CONFIDENCE:.0%} of runs",
        "saved",
    )
    rows = [
        (
            f"{row.kind}, {row.metric}",
            number(row.delta, "g"),
            number(row.epsilon, "g"),
            row.chosen,
            row.proved,
            row.examples,
            row.between,
            row.saved,
        )
        for row in stops
    ]
    return table(names, rows, label="Table of stops")


def _cell(value: float) -> Cell:
    return Cell(short_number(value), value)
