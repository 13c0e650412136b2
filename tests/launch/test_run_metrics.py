"""The summary of workers' metrics at the end of a run."""

from typing import NoReturn

from apache_beam.runners.runner import PipelineResult, PipelineState

from calm_beam.launch.runners.run import RunMetrics, Spread, metrics_in_words, run_metrics, work_in_words


class _WithoutMetrics(PipelineResult):
    def metrics(self) -> NoReturn:
        raise NotImplementedError


def test_runners_without_metrics() -> None:
    """A runner that keeps no metrics gives None, and the summary says so."""
    assert run_metrics(_WithoutMetrics(PipelineState.DONE)) is None
    assert metrics_in_words(None, seconds=1.0) == "workers: this runner keeps no metrics."
    assert work_in_words(None) == ""


def test_words() -> None:
    """Counts come with rates, and one time is not "times"."""
    counters = {
        "decoded-prompts": 2000,
        "generated-tokens": 123456,
        "layer-rows": 1000,
        "padded-layer-rows": 250,
        "projection-rows": 4000,
        "taken-over-prompts": 1500,
        "failed-prompts": 3,
    }
    spreads = {
        "decode-call-msec": Spread(count=16, total=40_000, largest=9_120),
        "model-load-msec": Spread(count=1, total=1_500, largest=1_500),
    }
    certified = RunMetrics(counters={**counters, "certified-rows": 90_000}, spreads=spreads)
    assert "4,000 projections and 90,000 by the certified head." in work_in_words(certified)
    metrics = RunMetrics(counters=counters, spreads=spreads)
    assert metrics_in_words(metrics, seconds=50.0) == (
        "workers: 2,000 prompts decoded (40.0 a second), 3 failed, 1,500 were stored already."
    )
    assert work_in_words(metrics).splitlines() == [
        "workers: 123,456 tokens of the full model, 1,000 layer rows and 250 of padding, 4,000 projections.",
        "workers: decoding took 40.0 s in 16 calls, the longest 9.1 s; the model was loaded 1 time, in 1.5 s.",
    ]


def test_a_run_that_decoded_nothing() -> None:
    """If nothing was counted, no prompt was decoded, and what else was computed is 0."""
    nothing = RunMetrics(counters={}, spreads={})
    assert metrics_in_words(nothing, seconds=2.0) == "workers: 0 prompts decoded (0.0 a second)."
    assert "0 tokens of the full model, 0 layer rows and 0 of padding, 0 projections." in work_in_words(nothing)
