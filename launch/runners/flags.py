"""Checking Beam's flags about runners and workers: what contradicts itself, or would only fail after work has begun."""

import json
import os
import re

from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    StandardOptions,
)
from apache_beam.version import __version__ as beam_version

from calm_beam.launch.flags import UsageError

from .worker_processes import foreign_pool, is_loopback

# Beam's own DirectRunner tries to download a binary at every start and behaves by what it finds; ours is explicit.
LOCAL_RUNNERS = ("", "directrunner", "fnapirunner", "bundlebaseddirectrunner")
_DOWNLOADING_RUNNER = "switchingdirectrunner"
# Each is a process with a model of its own; beyond that, a machine is busy with itself.
_WORKERS_PER_CORE = 4
_LEAST_MOST_WORKERS = 64
_PRISM_SOURCE = "github.com/apache/beam/sdks/v2/go/cmd/prism"
_ADDRESS = re.compile(r"(\S+):(\d{1,5})")


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
    _check_prism(options, runner)
    if options.view_as(StandardOptions).streaming:
        raise UsageError("--streaming: the data are files, which end. Leave it out.")
    _check_workers(options, is_local=is_local)
    _check_portable(options, runner, is_local=is_local)


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
