"""Metrics of decoding."""

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.decoding.engine import Work
from calm_beam.launch.runners.run import Spread, run_metrics
from calm_beam.transforms.metrics import DecodeMetrics

_WORK = Work(prompts=2, tokens=6, layer_rows=36, projection_rows=15, certified_rows=9, fill_rows=4, padded_rows=12)


class _Count(beam.DoFn):
    def __init__(self) -> None:
        self._metrics = DecodeMetrics()

    def process(self, seconds: float) -> None:
        self._metrics.count_call(_WORK, seconds=seconds)
        self._metrics.count_failures(1)
        self._metrics.count_taken_over(7)
        self._metrics.count_loads([30, 20] if seconds > 1 else [])


def test_counts_become_metrics() -> None:
    """Counters add up over calls, and times are spreads in milliseconds."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([0.25, 1.5]) | beam.ParDo(_Count())
    metrics = run_metrics(pipeline.run())
    assert metrics is not None
    assert metrics.counters == {
        "decoded-prompts": 4,
        "generated-tokens": 12,
        "layer-rows": 72,
        "padded-layer-rows": 24,
        "projection-rows": 30,
        "certified-rows": 18,
        "taken-over-prompts": 14,
        "failed-prompts": 2,
    }
    assert metrics.spreads == {
        "decode-call-msec": Spread(count=2, total=1750, largest=1500),
        "model-load-msec": Spread(count=2, total=50, largest=30),
    }


class _MeasureOnce(beam.DoFn):
    def setup(self) -> None:
        self._metrics = DecodeMetrics()
        self._msecs = [30]

    def process(self, _: int) -> None:
        measured, self._msecs = self._msecs, []
        self._metrics.count_loads(measured)


def test_what_was_not_measured_is_no_spread() -> None:
    """A bundle that is run again and then measures nothing has no spread, whose extremes would be undefined."""
    for flags, found in (([], [30]), (["--direct_runner_bundle_repeat=1"], [])):
        pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(flags))
        _ = pipeline | beam.Create([1]) | beam.ParDo(_MeasureOnce())
        metrics = run_metrics(pipeline.run())
        assert metrics is not None
        assert [spread.largest for spread in metrics.spreads.values()] == found
