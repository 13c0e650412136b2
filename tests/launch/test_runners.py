"""Which runner executes a pipeline, and how its failures are reported."""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Callable

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, PortableOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.inputs.examples import DataError
from calm_beam.launch.flags import FlagParser, UsageError, parse_flags
from calm_beam.launch.job_service import start_job_service
from calm_beam.launch.runners import (
    PipelineError,
    first_cause,
    is_local,
    make_runner,
    may_report_progress,
    run,
    run_pipeline,
)
from calm_beam.launch.runners.run import tell_open_ports


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


@pytest.mark.parametrize("name", ["PortableRunner", "FlinkRunner", "SparkRunner"])
def test_other_runners_are_beams(name: str) -> None:
    """Another runner is Beam's, does not share this machine's disk, and knows its own flags."""
    flags = [f"--runner={name}", "--flink_master=m", "--spark_master_url=u", "--job_endpoint=embed"]
    _, options = parse_flags(FlagParser(prog="test"), flags)
    assert not is_local(options)
    assert type(make_runner(options)).__name__ == name


def test_jobs_of_a_job_service_keep_their_workers() -> None:
    """Jobs of a job service keep their workers unless a flag says otherwise; Flink would end them after each step."""
    flags = ["--runner=FlinkRunner", "--job_endpoint=embed"]
    kept, given = PipelineOptions(flags), PipelineOptions([*flags, "--environment_cache_millis=5"])
    make_runner(kept)
    make_runner(given)
    assert kept.view_as(PortableOptions).environment_cache_millis == 10_000
    assert int(given.view_as(PortableOptions).environment_cache_millis) == 5


def test_prism_is_a_program_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Beam makes Prism's runner from the program, and a caution says that its ports are open."""
    options = PipelineOptions(["--runner=PrismRunner", f"--prism_location={sys.executable}"])
    assert type(make_runner(options)).__name__ == "PrismRunner"
    tell_open_ports(options)
    assert "caution: Prism opens ports to the network" in capsys.readouterr().err


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
        ("calm_beam.inputs.examples.DataError: a.jsonl, line 2: bad", "a.jsonl, line 2: bad"),
        ("elsewhere.DataError: not ours", "DataError: not ours"),
        ("calm_beam.launch.evaluate.splits.command.SimulatedError: gone", "SimulatedError: gone"),
        ("calm_beam.inputs.examples.DataError: bad: really", "bad: really"),
        ("OSError: [Errno 28] No space left on device: '/x'", "OSError: [Errno 28] No space left on device: '/x'"),
        (_TRACE + "calm_beam.inputs.examples.DataError: bad [while running 'Read/Parse']", "bad"),
        (_TRACE + "calm_beam.metrics.registry.MetricError: m [while running 'A [B] C-ptransform-12']\n\n", "m"),
        (_TRACE + "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED", "XlaRuntimeError: RESOURCE_EXHAUSTED"),
        ("RuntimeError: " + _TRACE + "calm_beam.outputs.generate.DecodeError: example x: no", "example x: no"),
        ("plain words [while running 'X']", "plain words"),
    ],
)
def test_first_cause(trace: str, message: str) -> None:
    """The last error of a trace is printed: our own by its message alone, others with their type."""
    assert first_cause(trace) == message


def test_brackets_in_a_message_survive() -> None:
    """Only Beam's suffix is cut."""
    assert (
        first_cause("calm_beam.inputs.examples.DataError: got keys ['a'] [while running 'Parse']") == "got keys ['a']"
    )


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
    """Our own errors in a worker are raised with their message, without Beam's additions."""
    assert _cause(_fail) == "a.jsonl, line 3: bad"


def test_other_failures_keep_their_type() -> None:
    """An error whose message says little is printed with its type, as `first_cause` promises."""
    message = _cause(_fail_strangely)
    assert message.startswith("KeyError: ")
    assert "what" in message


def _interrupt(_: int) -> None:
    raise RuntimeError("KeyboardInterrupt")


def test_ctrl_c_stays_one() -> None:
    """An interrupt inside Beam is raised as one, so that the command ends as interrupted and not as failed."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([1]) | beam.Map(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(pipeline)


def test_success_is_silent() -> None:
    """A pipeline that succeeds raises nothing."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | beam.Create([1]) | beam.Map(str)
    run_pipeline(pipeline)


def test_progress_of_workers_that_may_be_here() -> None:
    """Workers of a portable runner or of Flink may share the launcher's disk; those of Dataflow never do."""
    names = ["DirectRunner", "PortableRunner", "FlinkRunner", "DataflowRunner"]
    here = [may_report_progress(PipelineOptions([f"--runner={name}"])) for name in names]
    assert here == [True, True, True, False]


def test_external_workers_stay_external() -> None:
    """With an external environment, several workers are those of the pool, not our processes."""
    flags = ["--environment_type=EXTERNAL", "--environment_config=localhost:50000", "--direct_num_workers=2"]
    options = PipelineOptions(flags)
    assert isinstance(make_runner(options), run._PoolRunner)
    assert options.view_as(DirectOptions).direct_running_mode == "in_memory"


@pytest.mark.parametrize("name", ["DaskRunner", "apache_beam.runners.dask.dask_runner.DaskRunner"])
def test_beams_dask_runner_is_refused(name: str) -> None:
    """Beam's Dask runner, which loses outputs, is refused with what to use instead."""
    with pytest.raises(UsageError) as caught:
        make_runner(PipelineOptions([f"--runner={name}"]))
    assert str(caught.value) == (
        f"--runner={name}: Beam's DaskRunner loses outputs and reports success. Take --runner=FlinkRunner "
        "(docs/flink.md), or --direct_num_workers for processes on this machine."
    )


def test_job_services_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing job service is reported before anything is submitted, with how to start one."""
    monkeypatch.setattr(run, "_ENDPOINT_SECONDS", 0.2)
    with pytest.raises(UsageError) as caught:
        make_runner(PipelineOptions(["--runner=PortableRunner", "--job_endpoint=localhost:1"]))
    assert str(caught.value) == (
        "--job_endpoint=localhost:1: no job service answers there. Start one: python -m "
        "calm_beam.launch.job_service --port=1"
    )


@pytest.mark.parametrize("name", ["Flink", "Spark"])
def test_job_servers_of_clusters_are_beams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cluster's job server is missing, Beam's own for that cluster is named, not calm-beam's job service."""
    monkeypatch.setattr(run, "_ENDPOINT_SECONDS", 0.2)
    with pytest.raises(UsageError) as caught:
        make_runner(PipelineOptions([f"--runner={name}Runner", "--job_endpoint=localhost:1"]))
    assert str(caught.value) == (
        f"--job_endpoint=localhost:1: no job service answers there. Start Beam's job server for {name}, with "
        f"--job-port=1 (docs/{name.lower()}.md)."
    )


@pytest.mark.timeout(60)
def test_jobs_may_take_longer_than_beam_waits() -> None:
    """A job may take longer than Beam's limit of 300 s; a calibration has months."""
    service, port = start_job_service()
    try:
        options = PipelineOptions(["--runner=PortableRunner", f"--job_endpoint=localhost:{port}"])
        assert options.view_as(PortableOptions).job_server_timeout == 300
        make_runner(options)
        assert options.view_as(PortableOptions).job_server_timeout > 30 * 86400
    finally:
        service.stop()


def test_runs_leave_no_temporary_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files that Beam makes for a portable job are removed when the run ends, successful or not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for function in (str, _fail):
        options = PipelineOptions(["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"])
        pipeline = beam.Pipeline(runner=make_runner(options), options=options)
        _ = pipeline | beam.Create([1]) | beam.Map(function)
        with contextlib.suppress(PipelineError):
            run_pipeline(pipeline)
        assert list(tmp_path.iterdir()) == []
    assert tempfile.tempdir == str(tmp_path)
