"""Preparation of Dataflow jobs before submission: checks with clear messages, and defaults for missing options.

Workers on other machines get calm_beam as a package that is built here. From sources on this machine, which workers
install, to a job on plain machines; docs/dataflow.md has one with GPUs:

    calm-beam calibrate --runner=DataflowRunner --project=P --region=us-central1 --temp_location=gs://B/temp \
        --checkpoint=gs://B/model --data='gs://B/data/*.jsonl.gz' --output=gs://B/calibration --num_shards=100
"""

import pathlib
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.runners.runner import PipelineResult

import calm_beam
from calm_beam.extras import how_to_install
from calm_beam.inputs.reading import is_seqio
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.shared_options import BUILT_IN_FAMILIES, Accelerator
from calm_beam.launch.terminal import say

_FLOORS = ("calm_beam", "transforms", "launch")


def choose_package(options: PipelineOptions, *, needs_image: bool) -> None:
    """Makes sure that workers will have calm_beam, and fills in `options` where it is not said how.

    They find it in their image, or install a package at their start: a wheel or sdist that is staged as it is, or an
    sdist that Beam builds. Without such a flag, if calm_beam runs from its sources, Beam builds those.

    Args:
      options: Beam's flags.
      needs_image: Whether only an image will do, since installing calm_beam does not install JAX for an accelerator.

    Raises:
      UsageError: If workers would not have calm_beam, or a file that is named is none or another's.
    """
    setup = options.view_as(SetupOptions)
    worker = options.view_as(WorkerOptions)
    has_image = bool(worker.sdk_container_image or worker.worker_harness_container_image)
    if needs_image and not has_image:
        raise UsageError(
            "--sdk_container_image is missing: Beam's own image has no JAX for accelerators, and the job would decode "
            "on the CPU of machines whose accelerators idle. Build launch/Dockerfile."
        )
    for package in setup.extra_packages or ():
        _check_readable(package)
    if setup.setup_file:
        folder = pathlib.Path(setup.setup_file).resolve().parent
        if not pathlib.Path(setup.setup_file).is_file():
            raise UsageError(f"--setup_file {setup.setup_file}: no such file. That of calm-beam is setup.py.")
        if not has_image and not all((folder / floor / "__init__.py").is_file() for floor in _FLOORS):
            raise UsageError(f"--setup_file {setup.setup_file}: is not that of calm-beam, which workers need.")
    elif not has_image and not any(_holds_calm_beam(package) for package in setup.extra_packages or ()):
        setup_file = pathlib.Path(calm_beam.__file__).resolve().parents[1] / "setup.py"
        if not setup_file.is_file():
            raise UsageError(
                "workers have no calm-beam: pass --sdk_container_image with an image of launch/Dockerfile, "
                "--extra_package with its wheel or sdist, or --setup_file with the setup.py of its sources."
            )
        say(
            f"no --sdk_container_image: every worker will install calm-beam from the sources next to {setup_file}, "
            "which takes minutes; an image of launch/Dockerfile starts faster"
        )
        setup.setup_file = str(setup_file)
    if setup.setup_file:
        # Beam changes to the folder of the file, and then looks for the file by the path it was given.
        setup.setup_file = str(pathlib.Path(setup.setup_file).resolve())


def _check_readable(package: str) -> None:
    if not package.startswith("gs://") and not pathlib.Path(package).is_file():
        raise UsageError(f"--extra_package {package}: no such file.")


def _holds_calm_beam(package: str) -> bool:
    """Returns whether a wheel or an sdist holds all three floors; one on Cloud Storage is assumed to."""
    if package.startswith("gs://"):
        return re.match(r"calm[-_]beam-", pathlib.PurePosixPath(package).name) is not None
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive:
            names = archive.namelist()
    elif tarfile.is_tarfile(package):
        with tarfile.open(package) as archive:
            names = archive.getnames()
    else:
        return False
    return all(any(f"/{name}".endswith(f"/{floor}/__init__.py") for name in names) for floor in _FLOORS)


# Images with CUDA do not leave room on the disk that Dataflow gives to batch workers.
_ACCELERATOR_DISK_GB = 50
# With one process on each worker, further cores of those that only read and score would idle.
_PLAIN_MACHINE = "e2-standard-2"


def is_dataflow(options: PipelineOptions) -> bool:
    """Returns whether the pipeline runs on Dataflow."""
    return (options.view_as(StandardOptions).runner or "").lower().rpartition(".")[2] == "dataflowrunner"


def prepare_job(
    options: PipelineOptions,
    *,
    accelerator: Accelerator | None,
    paths: Iterable[tuple[str, str | None]],
    num_shards: Callable[[], int],
) -> None:
    """Refuses a job that would fail or idle on Dataflow, and fills in `options`; does nothing for other runners.

    Args:
      options: Beam's flags.
      accelerator: Of the step that decodes.
      paths: Pairs of flag and path of what workers read or write; None where a flag was left out.
      num_shards: Returns the shards of the data, which bound the workers that have anything to decode. It may have to
        look at the data, so it is asked last.

    Raises:
      UsageError: If something is missing or wrong; nothing has been staged.
    """
    if not is_dataflow(options):
        if accelerator is not None:
            raise UsageError("--accelerator is for --runner=DataflowRunner; here, JAX takes the devices it finds.")
        return
    try:
        from apache_beam.runners.dataflow.internal import apiclient  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--runner=DataflowRunner needs Google's clients: {how_to_install('dataflow')}.") from error
    _check_place(options)
    _check_paths(paths)
    _check_accelerator(options, accelerator)
    choose_package(options, needs_image=_has_accelerator(options, accelerator))
    _set_defaults(options, accelerator, num_shards=num_shards())


def job_address(result: PipelineResult, options: PipelineOptions) -> str | None:
    """Returns where to watch a job that was submitted to Dataflow; None if it was not, as for a template."""
    if not is_dataflow(options) or not result.has_job:
        return None
    cloud = options.view_as(GoogleCloudOptions)
    return f"https://console.cloud.google.com/dataflow/jobs/{cloud.region}/{result.job_id()}?project={cloud.project}"


def template_location(options: PipelineOptions) -> str | None:
    """Returns where a job is written instead of being submitted, as the launcher of a Flex Template asks; or None."""
    location: str | None = options.view_as(GoogleCloudOptions).template_location
    return location if is_dataflow(options) else None


def _check_place(options: PipelineOptions) -> None:
    cloud = options.view_as(GoogleCloudOptions)
    if not cloud.project:
        raise UsageError("--project is missing: the id of the Google Cloud project that runs and pays the job.")
    if not cloud.region:
        raise UsageError("--region is missing: where the job runs, for example us-central1; best that of the bucket.")
    # Without either, Beam would make a bucket of its own.
    if not cloud.temp_location and not cloud.staging_location:
        raise UsageError("--temp_location is missing: a folder on Cloud Storage such as gs://BUCKET/temp.")
    for flag, path in (("--temp_location", cloud.temp_location), ("--staging_location", cloud.staging_location)):
        if path and not re.fullmatch(r"gs://[^/]+/.+", path):
            raise UsageError(f"{flag} {path}: expected a folder on Cloud Storage such as gs://BUCKET/temp.")


def _check_paths(paths: Iterable[tuple[str, str | None]]) -> None:
    for flag, path in paths:
        if path is not None and not path.startswith("gs://"):
            raise UsageError(
                f"{flag} {path}: Dataflow's workers do not see this disk. Copy it to Cloud Storage "
                "(gcloud storage cp) and name it as gs://BUCKET/..."
            )


def _check_accelerator(options: PipelineOptions, accelerator: Accelerator | None) -> None:
    if accelerator is None:
        return
    if _service_accelerators(options):
        raise UsageError(
            "--accelerator and --dataflow_service_options=worker_accelerator=... both ask for one: drop the second."
        )
    if options.view_as(GoogleCloudOptions).flexrs_goal:
        raise UsageError("--flexrs_goal: Dataflow has no accelerators for flexible scheduling. Leave one of them out.")
    machine = options.view_as(WorkerOptions).machine_type
    if machine and accelerator.is_tpu and machine != accelerator.machine_type:
        raise UsageError(
            f"--worker_machine_type={machine}: {accelerator.type} needs {accelerator.machine_type}. Leave it out, or "
            "name the machine with the accelerator: type:...;topology:...;machine_type:..."
        )
    if machine and not accelerator.is_tpu and machine.startswith(BUILT_IN_FAMILIES):
        raise UsageError(
            f"--worker_machine_type={machine}: is the machine of the steps that do not decode, and comes with a GPU. "
            f"Name it with the accelerator: 'type:{accelerator.type};count:{accelerator.amount};"
            f"machine_type:{machine};install-nvidia-driver'."
        )


def _has_accelerator(options: PipelineOptions, accelerator: Accelerator | None) -> bool:
    return accelerator is not None or bool(_service_accelerators(options))


def _service_accelerators(options: PipelineOptions) -> list[str]:
    given = options.view_as(GoogleCloudOptions).dataflow_service_options or []
    return [option for option in given if option.startswith("worker_accelerator=")]


def _set_defaults(options: PipelineOptions, accelerator: Accelerator | None, *, num_shards: int) -> None:
    worker = options.view_as(WorkerOptions)
    # The launcher's main module holds no calm_beam code; pickling it would only carry the environment along.
    setup = options.view_as(SetupOptions)
    if setup.save_main_session is None:
        setup.save_main_session = False
    if worker.autoscaling_algorithm is None:
        worker.autoscaling_algorithm = "THROUGHPUT_BASED"
    if worker.max_num_workers is None:
        worker.max_num_workers = max(num_shards, worker.num_workers or 1)
    elif worker.max_num_workers > num_shards:
        say(
            f"caution: --num_shards={num_shards} gives work to {num_shards} of the {worker.max_num_workers} workers of "
            "--max_num_workers. Results do not depend on it: take several shards per worker."
        )
    if _has_accelerator(options, accelerator):
        _set_accelerator_defaults(options)
    if accelerator is not None:
        _choose_machine(options, accelerator)


def _set_accelerator_defaults(options: PipelineOptions) -> None:
    worker = options.view_as(WorkerOptions)
    debug = options.view_as(DebugOptions)
    # Each process would load the model into the one accelerator, and each thread decode a batch of its own on it.
    if not any(experiment.endswith("use_multiple_sdk_containers") for experiment in debug.experiments or ()):
        debug.add_experiment("no_use_multiple_sdk_containers")
    if debug.number_of_worker_harness_threads is None:
        debug.number_of_worker_harness_threads = 1
    if worker.disk_size_gb is None:
        worker.disk_size_gb = _ACCELERATOR_DISK_GB


def _choose_machine(options: PipelineOptions, accelerator: Accelerator) -> None:
    worker = options.view_as(WorkerOptions)
    if accelerator.is_tpu:
        cloud = options.view_as(GoogleCloudOptions)
        cloud.dataflow_service_options = [*(cloud.dataflow_service_options or ()), accelerator.service_option()]
        worker.machine_type = accelerator.machine_type
    elif worker.machine_type is None and accelerator.machine_type is not None:
        worker.machine_type = _PLAIN_MACHINE


def paths_by_flag(given: Mapping[str, str | tuple[str, ...] | None]) -> list[tuple[str, str | None]]:
    """Returns what workers read or write, a path a pair, each with its flag; from one or several paths by option."""
    paths: list[tuple[str, str | None]] = []
    for name, value in given.items():
        several = value if isinstance(value, tuple) else (value,)
        # TensorFlow opens what SeqIO reads, by paths that the task knows.
        paths += [(f"--{name}", path) for path in several if path is None or not is_seqio(path)]
    return paths
