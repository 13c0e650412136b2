"""What decoding counts."""

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.examples import Example
from calm_beam.generations import Generation, Output
from calm_beam.launch.run_metrics import Spread, run_metrics
from calm_beam.transforms.metrics import DecodeCounts, DecodeMetrics

_EXAMPLE = Example(
    id="a",
    has_own_id=True,
    input=None,
    input_ids=(5,),
    references=(),
    cluster=None,
    file_index=0,
    line=1,
)


def _output(*exit_layers: int) -> Output:
    return Output(
        text="", tokens=(7,) * len(exit_layers), exit_layers=exit_layers, confidences=(0.5,) * len(exit_layers)
    )


def _generation(*outputs: Output, failure: str | None = None) -> Generation:
    return Generation(example=_EXAMPLE, truncated=False, duplicate=False, failure=failure, outputs=outputs)


# Of four layers: three lanes of 3, 2 and 1 tokens, and one prompt that failed.
_GENERATIONS = (
    _generation(_output(4, 4, 4), _output(2, 4), _output(1)),
    _generation(failure="the model gave logits that are not finite"),
)


def test_counts_of_a_call() -> None:
    """Every lane runs all layers as long as the longest; what is beyond its own end is padding."""
    counts = DecodeCounts.of_generations(_GENERATIONS, seconds=0.5)
    assert counts == DecodeCounts(prompts=2, tokens=6, layer_rows=3 * 3 * 4, padded_rows=(1 + 2) * 4, seconds=0.5)


class _Count(beam.DoFn):
    def __init__(self) -> None:
        self._metrics = DecodeMetrics()

    def process(self, seconds: float) -> None:
        self._metrics.count_call(DecodeCounts.of_generations(_GENERATIONS, seconds=seconds))
        self._metrics.count_failures(_GENERATIONS)
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
        "failed-prompts": 2,
    }
    assert metrics.spreads == {
        "decode-call-msec": Spread(count=2, total=1750, largest=1500),
        "model-load-msec": Spread(count=2, total=50, largest=30),
    }
