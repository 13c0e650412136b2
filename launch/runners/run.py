"""Running a pipeline: which Beam runner executes it, what its failures say, and what its workers counted.

Beam's flags about runners and workers are checked first: flags that contradict each other, or that would only fail
after work has begun, are refused. After a failure the message says what the run left and how to go on with it.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping

import apache_beam as beam
import grpc
from apache_beam.metrics.metric import MetricResults, MetricsFilter
from apache_beam.options.pipeline_options import (
    DirectOptions,
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    SparkRunnerOptions,
    StandardOptions,
)
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner, create_runner
from apache_beam.transforms.environments import Environment
from apache_beam.version import __version__ as beam_version

from calm_beam.errors import CalmBeamError
from calm_beam.launch.flags import UsageError
from calm_beam.launch.terminal import say
from calm_beam.text import counted
from calm_beam.transforms.metrics import CLIPPED_SCORES, EMPTY_REFERENCES, NAMESPACE

from .dataflow import job_address, template_location
from .worker_processes import foreign_pool, is_loopback, provision_info, watch_workers

# Beam's own DirectRunner tries to download a binary at every start and behaves by what it finds; ours is explicit.
LOCAL_RUNNERS = ("", "directrunner", "fnapirunner", "bundlebaseddirectrunner")
_DOWNLOADING_RUNNER = "switchingdirectrunner"
# Each is a process with a model of its own; beyond that, a machine is busy with itself.
_WORKERS_PER_CORE = 4
_LEAST_MOST_WORKERS = 64
_PRISM_SOURCE = "github.com/apache/beam/sdks/v2/go/cmd/prism"
_ADDRESS = re.compile(r"(\S+):(\d{1,5})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cluster:
    """A cluster that Beam reaches by a job server in Java: its name, and the flag for the jar of that server."""

    name: str
    flags: type[PipelineOptions]
    jar_flag: str

    @property
    def page(self) -> str:
        return f"docs/{self.name.lower()}.md"

    def jar(self, options: PipelineOptions) -> str | None:
        given: str | None = getattr(options.view_as(self.flags), self.jar_flag)
        return given


# By the runner's name in lower case.
_CLUSTERS = {
    "flinkrunner": _Cluster(name="Flink", flags=FlinkRunnerOptions, jar_flag="flink_job_server_jar"),
    "sparkrunner": _Cluster(name="Spark", flags=SparkRunnerOptions, jar_flag="spark_job_server_jar"),
}


def _runner_class(options: PipelineOptions) -> str:
    """Returns the name of the runner's class in lower case, without its module; empty if none is given."""
    return (options.view_as(StandardOptions).runner or "").lower().rpartition(".")[2]


def check_runner_flags(options: PipelineOptions) -> None:
    """Refuses flags that contradict each other or have no meaning here; nothing has been started.

    Raises:
      UsageError: If there are some.
    """
    name = (options.view_as(StandardOptions).runner or "").lower()
    is_local, runner = name in LOCAL_RUNNERS, name.rpartition(".")[2]
    if runner == _DOWNLOADING_RUNNER:
        raise UsageError(
            f"--runner={_given(options)}: starts a program that it downloads, and whose ports are open to the network. "
            "Leave --runner out to run on this machine."
        )
    if runner == "daskrunner":
        raise UsageError(
            f"--runner={_given(options)}: Beam's DaskRunner loses outputs and reports success. Take "
            "--runner=FlinkRunner (docs/flink.md), or --direct_num_workers for processes on this machine."
        )
    known = {each.lower() for each in StandardOptions.KNOWN_RUNNER_NAMES}
    if name and "." not in name and not {name, f"{name}runner"} & known:
        raise UsageError(
            f"--runner={_given(options)}: not known. Leave it out to run on this machine, or pass DataflowRunner, "
            "FlinkRunner, SparkRunner, PrismRunner, PortableRunner, or the full name of a class."
        )
    _check_prism(options, runner)
    if options.view_as(StandardOptions).streaming:
        raise UsageError("--streaming: the data are files, which end. Leave it out.")
    _check_workers(options, is_local=is_local)
    _check_portable(options, runner, is_local=is_local)
    _check_cluster(options, runner)


def _check_prism(options: PipelineOptions, runner: str) -> None:
    """Refuses a location of Prism that is left out, or is no file of this machine: Beam would download it."""
    location = options.view_as(PrismRunnerOptions).prism_location
    if runner != "prismrunner":
        if location:
            raise UsageError(f"--prism_location={location} needs --runner=PrismRunner, which is missing.")
        return
    if options.view_as(PortableOptions).job_endpoint:
        return
    if not location:
        raise UsageError(
            "--runner=PrismRunner needs --prism_location, the program: without it, Beam downloads one. Build it: go "
            f"install {_PRISM_SOURCE}@v{beam_version}. Or leave --runner out to run on this machine."
        )
    if not os.path.isfile(location):
        raise UsageError(f"--prism_location={location}: no such file.")


def _check_cluster(options: PipelineOptions, runner: str) -> None:
    """Refuses Flink or Spark without a job server, neither one that runs nor a jar to start: Beam would download it."""
    cluster = _CLUSTERS.get(runner)
    if cluster is None or options.view_as(PortableOptions).job_endpoint:
        return
    if not (jar := cluster.jar(options)):
        raise UsageError(
            f"--runner={_given(options)} needs --job_endpoint, the address of Beam's job server for {cluster.name}: "
            f"without it, Beam downloads one. Start it as in {cluster.page} and pass --job_endpoint=localhost:8099, or "
            f"name its jar: --{cluster.jar_flag}."
        )
    if "://" not in jar and not os.path.isfile(jar):
        raise UsageError(f"--{cluster.jar_flag}={jar}: no such file.")


def _check_workers(options: PipelineOptions, *, is_local: bool) -> None:
    direct, portable = options.view_as(DirectOptions), options.view_as(PortableOptions)
    most = max(_LEAST_MOST_WORKERS, _WORKERS_PER_CORE * (os.cpu_count() or 1))
    workers = direct.direct_num_workers
    if not 0 <= workers <= most:
        raise UsageError(
            f"--direct_num_workers={workers}: expected a number of workers of this machine from 1 to {most}, or 0 for "
            "one on each core."
        )
    if not is_local and (workers != 1 or direct.direct_running_mode != "in_memory"):
        flag = "--direct_num_workers" if workers != 1 else "--direct_running_mode"
        raise UsageError(
            f"{flag} is about workers of this machine, and --runner={_given(options)} has others. Leave it out; on a "
            "job service pass --sdk_worker_parallelism, on Dataflow --num_workers."
        )
    parallel = str(portable.sdk_worker_parallelism)
    if not (parallel.isascii() and parallel.isdigit() and int(parallel) <= most):
        raise UsageError(
            f"--sdk_worker_parallelism={parallel}: expected a number of workers from 1 to {most}, or 0 for the runner "
            "to decide."
        )


def _check_portable(options: PipelineOptions, runner: str, *, is_local: bool) -> None:
    portable, direct = options.view_as(PortableOptions), options.view_as(DirectOptions)
    endpoint, environment = portable.job_endpoint, (portable.environment_type or "").upper()
    has_job_service = not is_local and runner != "dataflowrunner"
    if endpoint is not None and not has_job_service:
        raise UsageError(f"--job_endpoint={endpoint} needs --runner=PortableRunner, or another that has job services.")
    if runner == "portablerunner" and not endpoint:
        raise UsageError(
            "--runner=PortableRunner needs --job_endpoint, the address of a job service. Start one: python -m "
            "calm_beam.launch.job_service --port=8099, and pass --job_endpoint=localhost:8099."
        )
    if endpoint not in (None, "embed") and not _is_address(endpoint):
        raise UsageError(f"--job_endpoint={endpoint}: expected HOST:PORT, such as localhost:8099.")
    if not environment:
        if portable.environment_config and is_local:
            raise UsageError(
                f"--environment_config={portable.environment_config} needs --environment_type=EXTERNAL, which is "
                "missing."
            )
        return
    if is_local and environment != "EXTERNAL":
        raise UsageError(
            f"--environment_type={portable.environment_type} has no meaning for this runner, whose workers are "
            "processes of its own. Leave it out."
        )
    if environment == "EXTERNAL":
        pool = _pool_of(portable)
        if is_local and not is_loopback(pool):
            raise UsageError(f"--environment_config={portable.environment_config}: {foreign_pool(pool)}")
        if is_local and direct.direct_running_mode != "in_memory":
            raise UsageError(
                f"--direct_running_mode={direct.direct_running_mode} starts workers here, --environment_type=EXTERNAL "
                "takes those of a pool: leave one of them out."
            )


def _pool_of(portable: PortableOptions) -> str:
    """Returns the address of the worker pool that options name."""
    given = portable.environment_config or portable.lookup_environment_option("external_service_address")
    if not given:
        raise UsageError(
            "--environment_type=EXTERNAL needs --environment_config, the address of a worker pool. Start one: python "
            "-m calm_beam.launch.worker_pool --port=50000, and pass --environment_config=localhost:50000."
        )
    address = str(given)
    if address.lstrip().startswith("{"):
        try:
            address = str(json.loads(address).get("url"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--environment_config={given}: not JSON ({error}).") from error
    if not _is_address(address):
        raise UsageError(f"--environment_config={given}: expected HOST:PORT, such as localhost:50000.")
    return address


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and int(match.group(2)) <= 65535


def _given(options: PipelineOptions) -> str:
    return str(options.view_as(StandardOptions).runner)


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
    prompts, failed = (metrics.counters.get(name, 0) for name in ("decoded-prompts", "failed-prompts"))
    said = f"workers: {counted(prompts, 'prompt')} decoded ({prompts / seconds:.1f} a second)"
    if failed:
        said += f", {failed:,} failed"
    return f"{said}{stored_in_words(metrics)}."


def stored_in_words(metrics: RunMetrics) -> str:
    """Returns a clause on prompts that an earlier run had stored; empty if there were none."""
    stored = metrics.counters.get("taken-over-prompts", 0)
    return f", {stored:,} {'was' if stored == 1 else 'were'} stored already" if stored else ""


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

    A step that a runner repeats counts again, which is why the count is in no manifest.
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
    """A pipeline ended without a result; its message describes the first cause.

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
            port = endpoint.rpartition(":")[2]
            cluster = _CLUSTERS.get(_runner_class(options))
            start = (
                f"Start one: python -m calm_beam.launch.job_service --port={port}"
                if cluster is None
                else f"Start Beam's job server for {cluster.name}, with --job-port={port} ({cluster.page})."
            )
            raise UsageError(f"--job_endpoint={endpoint}: no job service answers there. {start}") from error


def _starts_job_service(options: PipelineOptions) -> bool:
    """Returns whether Beam starts a job service for a pipeline, which it stops when this process ends."""
    name = _runner_class(options)
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
        # Ending this process ends the watching, not the job.
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


@contextlib.contextmanager
def what_is_left_told(left: Callable[[], str], *, but: type[CalmBeamError]) -> Iterator[None]:
    """Adds what is left, and how to resume, to the error or interrupt that ends the block.

    Args:
      left: Returns that text; may remove files that are not worth keeping.
      but: Errors that say themselves why nothing goes on from there; nothing is added to them.

    Raises:
      PipelineError: For calm-beam's errors, and for errors of files.
      KeyboardInterrupt: If the block is interrupted. A job that continues elsewhere has left nothing yet, and its own
        message says so.
    """
    try:
        yield
    except (CalmBeamError, OSError) as error:
        words = left()
        if isinstance(error, but) or (isinstance(error, PipelineError) and error.cause is but):
            words = ""
        if not words:
            raise PipelineError(str(error)) from error
        # Not all messages, such as those of files, end as sentences do.
        raise PipelineError(f"{str(error).rstrip().removesuffix('.')}. {words}") from error
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            raise
        raise KeyboardInterrupt(left()) from interrupt
