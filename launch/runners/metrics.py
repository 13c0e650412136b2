"""What the workers of a run counted, collected from Beam and told at its end."""

import dataclasses
from collections.abc import Mapping

from apache_beam.metrics.metric import MetricResults, MetricsFilter
from apache_beam.runners.runner import PipelineResult

from calm_beam.text import counted
from calm_beam.transforms.metrics import CLIPPED_SCORES, EMPTY_REFERENCES, NAMESPACE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity that was measured several times.

    Attributes:
      count: How often.
      total: The sum.
      largest: The largest value.
    """

    count: int
    total: int
    largest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Counters and measurements by name, summed over steps and workers; the names carry the units."""

    counters: Mapping[str, int]
    spreads: Mapping[str, Spread]


def run_metrics(result: PipelineResult) -> RunMetrics | None:
    """Returns the metrics of a run that has ended; None if its runner keeps none."""
    try:
        found = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
    except NotImplementedError:
        return None
    counters: dict[str, int] = {}
    for metric in found[MetricResults.COUNTERS]:
        name = metric.key.metric.name
        # A job service's zero comes as None.
        counters[name] = counters.get(name, 0) + (metric.result or 0)
    spreads: dict[str, Spread] = {}
    for metric in found[MetricResults.DISTRIBUTIONS]:
        name, new = metric.key.metric.name, metric.result
        # Of a bundle that measured nothing: its extremes are None.
        if new is None or not new.count:
            continue
        old = spreads.get(name, Spread(count=0, total=0, largest=0))
        spreads[name] = Spread(
            count=old.count + new.count, total=old.total + new.sum, largest=max(old.largest, new.max)
        )
    return RunMetrics(counters=counters, spreads=spreads)


def metrics_in_words(metrics: RunMetrics | None, *, seconds: float) -> str:
    """Returns how many prompts the workers of a run decoded.

    Args:
      metrics: Of `run_metrics`.
      seconds: How long the run took, for rates.
    """
    if metrics is None:
        return "workers: this runner keeps no metrics."
    names = ("decoded-prompts", "failed-prompts", "taken-over-prompts")
    prompts, failed, stored = (metrics.counters.get(name, 0) for name in names)
    return (
        f"workers: {counted(prompts, 'prompt')} decoded ({prompts / seconds:.1f} a second), {failed:,} failed, "
        f"{stored:,} {'was' if stored == 1 else 'were'} stored already."
    )


def work_in_words(metrics: RunMetrics | None) -> str:
    """Returns what the workers of a run computed, and how long that took; nothing if their runner does not say."""
    if metrics is None:
        return ""
    counters, spreads = metrics.counters, metrics.spreads
    names = ("generated-tokens", "layer-rows", "padded-layer-rows", "projection-rows")
    tokens, rows, padded, projections = (counters.get(name, 0) for name in names)
    certified = counters.get("certified-rows", 0)
    calls = spreads.get("decode-call-msec", Spread(count=0, total=0, largest=0))
    loads = spreads.get("model-load-msec", Spread(count=0, total=0, largest=0))
    return "\n".join(
        [
            f"workers: {counted(tokens, 'token')} of the full model, {counted(rows, 'layer row')} and {padded:,} of "
            f"padding, {counted(projections, 'projection')}"
            # The exact head then made those that a certified one had left open.
            + (f" and {certified:,} by the certified head." if certified else "."),
            f"workers: decoding took {calls.total / 1000:.1f} s in {counted(calls.count, 'call')}, the longest "
            f"{calls.largest / 1000:.1f} s; the model was loaded {counted(loads.count, 'time')}, "
            f"in {loads.total / 1000:.1f} s.",
        ]
    )


def clipped_in_words(metrics: RunMetrics | None) -> str:
    """Returns a line on scores that metrics have clipped to [0, 1]; nothing if there were none.

    A step that a runner repeats counts again, which is why the count stands in no manifest.
    """
    clipped = 0 if metrics is None else metrics.counters.get(CLIPPED_SCORES, 0)
    return (
        f"workers: {counted(clipped, 'score')} of a metric lay outside [0, 1] and "
        f"{'was' if clipped == 1 else 'were'} clipped."
        if clipped
        else ""
    )


def empty_references_in_words(metrics: RunMetrics | None) -> str:
    """Returns a caution of references that are empty; nothing if there were none. Counts as in `clipped_in_words`."""
    empty = 0 if metrics is None else metrics.counters.get(EMPTY_REFERENCES, 0)
    if not empty:
        return ""
    return (
        f"caution: {counted(empty, 'example')} {'has' if empty == 1 else 'have'} an empty reference, from which "
        "only an empty output gets a score. If these are answers that are missing, take the examples out: they make "
        "risks look small."
    )
