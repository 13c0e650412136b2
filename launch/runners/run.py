"""Which Beam runner executes a pipeline, and what its failures say."""

import contextlib
import importlib
import re
import tempfile
import traceback
from collections.abc import Iterator

import apache_beam as beam
import grpc
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, PortableOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner, create_runner
from apache_beam.transforms.environments import Environment

from calm_beam.errors import CalmBeamError
from calm_beam.launch.flags import UsageError
from calm_beam.launch.terminal import say

from .dataflow import job_address, template_location
from .flags import LOCAL_RUNNERS, check_runner_flags
from .metrics import RunMetrics, run_metrics
from .worker_processes import provision_info, watch_workers

# Beam starts job services for these, unless it is told of one.
_JOB_SERVICE_RUNNERS = ("flinkrunner", "sparkrunner", "prismrunner")
# Workers of these may be on this machine, and can then report their progress to a file.
_PERHAPS_HERE = ("portablerunner", *_JOB_SERVICE_RUNNERS)

_ENDPOINT_SECONDS = 10
# Beam lets a job service answer for 300 s, and takes a job that runs longer for a failed one.
_JOB_SECONDS = 10_000_000
# Otherwise Flink ends all workers after each step of a job, and starts others for the next. Not for long, since a retry
# within this time is given the workers that it had, also where these are dead.
_CACHE_MILLIS = 10_000


class PipelineError(CalmBeamError, RuntimeError):
    """A pipeline ended without a result; its message is the first cause in words.

    Attributes:
      cause: Class of the first cause, if it is one of our errors.
    """

    def __init__(self, message: str, *, cause: type[CalmBeamError] | None = None) -> None:
        super().__init__(message)
        self.cause = cause


def is_local(options: PipelineOptions) -> bool:
    """Returns whether the pipeline runs on this machine's disks, in this process or its children."""
    return (options.view_as(StandardOptions).runner or "").lower() in LOCAL_RUNNERS


def may_report_progress(options: PipelineOptions) -> bool:
    """Returns whether workers may be on this machine, where they find the file to report to."""
    return is_local(options) or options.view_as(StandardOptions).runner.lower() in _PERHAPS_HERE


def make_runner(options: PipelineOptions) -> PipelineRunner:
    """Returns the runner that options name; the in-process one by default.

    Several workers mean worker processes, unless `--direct_running_mode` says otherwise; with
    `--environment_type=EXTERNAL`, those of a worker pool.

    Raises:
      UsageError: If it cannot run here, or loses outputs, or flags contradict each other.
      ValueError: If Beam does not know it.
    """
    check_runner_flags(options)
    watch_workers()
    name = options.view_as(StandardOptions).runner or ""
    if not is_local(options):
        if not name.lower().endswith("dataflowrunner"):
            _prepare_job_service(options)
        return create_runner(name)
    direct, portable = options.view_as(DirectOptions), options.view_as(PortableOptions)
    if (portable.environment_type or "").upper() == "EXTERNAL":
        return _PoolRunner(provision_info=provision_info(options))
    if direct.direct_num_workers != 1 and direct.direct_running_mode == "in_memory":
        direct.direct_running_mode = "multi_processing"
    return FnApiRunner(provision_info=provision_info(options))


class _PoolRunner(FnApiRunner):
    """Runs on workers of the pool that options name."""

    def run_pipeline(self, pipeline: beam.Pipeline, options: PipelineOptions) -> PipelineResult:
        # Here, since Beam makes temporary files for it.
        self._default_environment = Environment.from_options(options.view_as(PortableOptions))
        return super().run_pipeline(pipeline, options)


def _prepare_job_service(options: PipelineOptions) -> None:
    """Lets jobs of a job service take their time and keep their workers; checks that one that runs already answers."""
    portable = options.view_as(PortableOptions)
    portable.job_server_timeout = _JOB_SECONDS
    portable.environment_cache_millis = portable.environment_cache_millis or _CACHE_MILLIS
    endpoint = portable.job_endpoint
    if endpoint is None or endpoint == "embed":
        return
    with grpc.insecure_channel(endpoint) as channel:
        try:
            grpc.channel_ready_future(channel).result(_ENDPOINT_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise UsageError(
                f"--job_endpoint={endpoint}: no job service answers there. Start one: python -m "
                f"calm_beam.launch.job_service --port={endpoint.rpartition(':')[2]}"
            ) from error


def _starts_job_service(options: PipelineOptions) -> bool:
    """Returns whether Beam starts a job service for a pipeline, which it stops when this process ends."""
    name = (options.view_as(StandardOptions).runner or "").lower().rpartition(".")[2]
    return name in _JOB_SERVICE_RUNNERS and not options.view_as(PortableOptions).job_endpoint


def tell_open_ports(options: PipelineOptions) -> None:
    """Says what Beam would open to the network on this machine."""
    if _starts_job_service(options) and str(options.view_as(StandardOptions).runner).lower().endswith("prismrunner"):
        say("caution: Prism opens ports to the network, and asks nobody for a password.")


def run_pipeline(pipeline: beam.Pipeline) -> RunMetrics | None:
    """Runs a pipeline to its end; tells where to watch it, if that is elsewhere.

    Returns:
      What its workers counted; None from runners that keep no metrics, and for a job that was only described.

    Raises:
      PipelineError: If it did not succeed.
    """
    try:
        # A job service that Beam starts removes files of its own when this process ends, and needs them until then.
        has_files = _starts_job_service(pipeline.options)
        with contextlib.nullcontext() if has_files else _temporary_files_removed():
            result = pipeline.run()
            if address := job_address(result, pipeline.options):
                say(f"job {address}")
            _wait(result, address)
    except Exception as error:
        # Runners wrap what a worker raised in types of their own, with its traceback as text.
        trace = "".join(traceback.format_exception_only(error))
        name, message = _last_error(trace)
        if message == "KeyboardInterrupt":
            raise KeyboardInterrupt from error
        own = _own_class(name)
        if own is None:
            # Nothing that the user did is known to cause this: what helps is where it happened.
            say("".join(traceback.format_exception(error)))
        raise PipelineError(first_cause(trace), cause=own) from error
    return None if template_location(pipeline.options) else run_metrics(result)


@contextlib.contextmanager
def _temporary_files_removed() -> Iterator[None]:
    """Removes what is left in the folder for temporary files when the block ends: Beam leaves some of its own there."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="calm-beam-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _wait(result: PipelineResult, address: str | None) -> None:
    try:
        result.wait_until_finish()
    except KeyboardInterrupt as error:
        if address is None:
            raise
        # Whoever ends this process ends the watching, not the job.
        raise KeyboardInterrupt(f"the job goes on: {address}") from error


_ERROR_LINE = re.compile(r"^([\w.]*(?:Error|Exception|Interrupt)): ", re.MULTILINE)
_STEP_SUFFIX = re.compile(r" \[while running .*$", re.DOTALL)


def first_cause(trace: str) -> str:
    """Returns what a runner's text says of the error it ends with: our own in its words alone, others with their type.

    >>> first_cause("calm_beam.inputs.examples.DataError: bad [while running 'Parse']")
    'bad'
    """
    name, message = _last_error(trace)
    return message if not name or _own_class(name) else f"{name.rpartition('.')[2]}: {message}"


def _own_class(name: str) -> type[CalmBeamError] | None:
    """Returns which of our errors a traceback's name of a class is, None if it is none of them."""
    module, _, class_name = name.rpartition(".")
    if not module.startswith("calm_beam."):
        return None
    try:
        named = getattr(importlib.import_module(module), class_name, None)
    except ImportError:
        return None
    return named if isinstance(named, type) and issubclass(named, CalmBeamError) else None


def _last_error(trace: str) -> tuple[str, str]:
    """Returns type and message of the last error, without Beam's additions; no type if there is no such line."""
    plain = _STEP_SUFFIX.sub("", trace.strip())
    # Lines of a traceback are indented; the last error that is not begins the message, which may have several lines.
    starts = list(_ERROR_LINE.finditer(plain))
    if not starts:
        return "", plain or "the pipeline failed without a message"
    return starts[-1].group(1), plain[starts[-1].end() :].strip()
