"""What a run tells of its workers at its end."""

from typing import NoReturn

from apache_beam.runners.runner import PipelineResult, PipelineState

from calm_beam.launch.run_metrics import RunMetrics, Spread, metrics_in_words, run_metrics


class _WithoutMetrics(PipelineResult):
    def metrics(self) -> NoReturn:
        raise NotImplementedError


def test_runners_without_metrics() -> None:
    """A runner that keeps no metrics gives None, and the summary says so."""
    assert run_metrics(_WithoutMetrics(PipelineState.DONE)) is None
    assert metrics_in_words(None, seconds=1.0) == "workers: this runner keeps no metrics."


def test_words() -> None:
    """Counts come with rates and shares, and one time is not "times"."""
    counters = {
        "decoded-prompts": 2000,
        "generated-tokens": 123456,
        "layer-rows": 1000,
        "padded-layer-rows": 250,
        "failed-prompts": 3,
    }
    spreads = {
        "decode-call-msec": Spread(count=16, total=40_000, largest=9_120),
        "model-load-msec": Spread(count=1, total=1_500, largest=1_500),
    }
    assert metrics_in_words(RunMetrics(counters=counters, spreads=spreads), seconds=50.0).splitlines() == [
        "workers: 2,000 prompts decoded (40.0 a second), 123,456 tokens, 1,000 layer rows, 25% of them padding; "
        "3 prompts failed.",
        "workers: decoding took 40.0 s in 16 calls, the longest 9.1 s; the model was loaded 1 time, in 1.5 s.",
    ]


def test_a_run_that_decoded_nothing() -> None:
    """Without anything counted there is no share to give, and nothing is divided by."""
    words = metrics_in_words(RunMetrics(counters={}, spreads={}), seconds=2.0)
    assert "0 prompts decoded (0.0 a second), 0 tokens, 0 layer rows; 0 prompts failed." in words
