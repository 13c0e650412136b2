"""Which runner executes a pipeline, and what its failures say."""

from collections.abc import Callable

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.examples import DataError
from calm_beam.launch.runners import PipelineError, first_cause, is_local, make_runner, run_pipeline


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ([], "in_memory"),
        (["--direct_num_workers=1"], "in_memory"),
        (["--direct_num_workers=2"], "multi_processing"),
        (["--direct_num_workers=0"], "multi_processing"),
        (["--direct_num_workers=2", "--direct_running_mode=multi_threading"], "multi_threading"),
    ],
)
def test_workers_mean_processes(flags: list[str], mode: str) -> None:
    """More than one worker (0: one per core) means processes, unless a mode is given."""
    options = PipelineOptions(flags)
    assert isinstance(make_runner(options), FnApiRunner)
    assert options.view_as(DirectOptions).direct_running_mode == mode


@pytest.mark.parametrize("runner", ["DirectRunner", "FnApiRunner", "BundleBasedDirectRunner"])
def test_local_runners_are_ours(runner: str) -> None:
    """Every name of a local runner gives the in-process one: Beam's own would try to download a binary."""
    options = PipelineOptions([f"--runner={runner}"])
    assert is_local(options)
    assert isinstance(make_runner(options), FnApiRunner)


def test_other_runners_are_beams() -> None:
    """Another runner is made by Beam, and does not share this machine's disk."""
    options = PipelineOptions(["--runner=PortableRunner"])
    assert not is_local(options)
    assert type(make_runner(options)).__name__ == "PortableRunner"


def test_unknown_runners_are_named() -> None:
    """A runner that Beam does not know is a ValueError with its name."""
    with pytest.raises(ValueError, match="NoRunner"):
        make_runner(PipelineOptions(["--runner=NoRunner"]))


_TRACE = """Traceback (most recent call last):
  File "worker.py", line 1, in process
ValueError: the first of two

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "worker.py", line 2, in process
    raise DataError(
"""


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("", "the pipeline failed without a message"),
        ("  something odd\nhappened  ", "something odd\nhappened"),
        ("DataError: a.jsonl, line 2: bad", "a.jsonl, line 2: bad"),
        ("calm_beam.examples.DataError: bad: really", "bad: really"),
        ("OSError: [Errno 28] No space left on device: '/x'", "OSError: [Errno 28] No space left on device: '/x'"),
        (_TRACE + "calm_beam.examples.DataError: bad [while running 'Read/Parse']", "bad"),
        (_TRACE + "calm_beam.metrics.registry.MetricError: m [while running 'A [B] C-ptransform-12']\n\n", "m"),
        (_TRACE + "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED", "XlaRuntimeError: RESOURCE_EXHAUSTED"),
        ("RuntimeError: " + _TRACE + "calm_beam.decoding.generate.DecodeError: example x: no", "example x: no"),
        ("plain words [while running 'X']", "plain words"),
    ],
)
def test_first_cause(trace: str, message: str) -> None:
    """The last error of a trace is told: our own in its words alone, others with their type."""
    assert first_cause(trace) == message


def test_brackets_in_a_message_survive() -> None:
    """Only Beam's suffix is cut."""
    assert first_cause("DataError: got keys ['a'] [while running 'Parse']") == "got keys ['a']"


def _fail(_: int) -> None:
    raise DataError("a.jsonl, line 3: bad")


def _fail_strangely(_: int) -> None:
    raise KeyError("what")


def _cause(function: Callable[[int], None]) -> str:
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([1]) | beam.Map(function)
    with pytest.raises(PipelineError) as caught:
        run_pipeline(pipeline)
    return str(caught.value)


def test_our_failures_speak_for_themselves() -> None:
    """What a worker raises on purpose arrives in its words, without Beam's."""
    assert _cause(_fail) == "a.jsonl, line 3: bad"


def test_other_failures_keep_their_type() -> None:
    """An error whose message says little without its type is told with it, as `first_cause` promises."""
    message = _cause(_fail_strangely)
    assert message.startswith("KeyError: ")
    assert "what" in message


def _interrupt(_: int) -> None:
    raise RuntimeError("KeyboardInterrupt")


def test_ctrl_c_stays_one() -> None:
    """What Beam makes of an interrupt is one again, so that the command ends as interrupted and not as failed."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([1]) | beam.Map(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(pipeline)


def test_success_is_silent() -> None:
    """A pipeline that succeeds raises nothing."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([1]) | beam.Map(str)
    run_pipeline(pipeline)
