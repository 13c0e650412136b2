"""Checks and defaults before a job is submitted to Dataflow."""

import re
import sys
from collections.abc import Sequence

import pytest
from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    WorkerOptions,
)

from calm_beam.launch.cli import main
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.shared_options import parse_accelerator
from calm_beam.launch.runners.dataflow import is_dataflow, prepare_job

_PLACE = ("--runner=DataflowRunner", "--project=a-project", "--region=us-central1", "--temp_location=gs://bucket/temp")
_IMAGE = "--sdk_container_image=us-docker.pkg.dev/a-project/calm-beam/worker:1"
_CLOUD_PATHS = (("--checkpoint", "gs://bucket/model"), ("--vocabulary", None), ("--output", "gs://bucket/out"))


def _prepare(
    *flags: str,
    accelerator: str | None = None,
    paths: Sequence[tuple[str, str | None]] = _CLOUD_PATHS,
    num_shards: int = 10,
) -> PipelineOptions:
    options = PipelineOptions(list(flags))
    parsed = None if accelerator is None else parse_accelerator(accelerator)
    prepare_job(options, accelerator=parsed, paths=paths, num_shards=lambda: num_shards)
    return options


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--runner=DataflowRunner"], True),
        (["--runner=dataflowrunner"], True),
        (["--runner=apache_beam.runners.DataflowRunner"], True),
        (["--runner=DirectRunner"], False),
        (["--runner=PortableRunner"], False),
        ([], False),
    ],
)
def test_dataflow_is_recognised(flags: list[str], expected: bool) -> None:
    """Every name that Beam takes for Dataflow is recognised, and no other runner's."""
    assert is_dataflow(PipelineOptions(flags)) == expected


@pytest.mark.parametrize("runner", ["--runner=DirectRunner", "--runner=PortableRunner"])
def test_other_runners_are_left_alone(runner: str) -> None:
    """On another runner local paths are fine and no option changes; an accelerator is refused."""
    before = PipelineOptions([runner]).get_all_options()
    assert _prepare(runner, paths=[("--output", "out")]).get_all_options() == before
    with pytest.raises(UsageError, match="--accelerator is for --runner=DataflowRunner"):
        _prepare(runner, accelerator="nvidia-l4")


@pytest.mark.parametrize("missing", ["--project", "--region", "--temp_location"])
def test_the_place_is_needed(missing: str) -> None:
    """Without project, region or a folder for temporary files, the job is refused with the flag."""
    with pytest.raises(UsageError, match=f"^{missing} is missing: "):
        _prepare(*(flag for flag in _PLACE if not flag.startswith(missing)), _IMAGE)


def test_one_place_for_files_is_enough() -> None:
    """`--staging_location` alone is enough: Beam takes it for temporary files too."""
    _prepare(*_PLACE[:3], "--staging_location=gs://bucket/staging", _IMAGE)


@pytest.mark.parametrize("path", ["/tmp/x", "bucket/temp", "s3://bucket/temp", "gs://bucket", "gs:///temp"])
@pytest.mark.parametrize("flag", ["--temp_location", "--staging_location"])
def test_files_are_staged_on_cloud_storage(flag: str, path: str) -> None:
    """Places for files are folders on Cloud Storage; anything else is refused with its value."""
    with pytest.raises(UsageError, match=re.escape(f"{flag} {path}: expected a folder on Cloud Storage")):
        _prepare(*_PLACE, f"{flag}={path}", _IMAGE)


@pytest.mark.parametrize("flag", ["--checkpoint", "--vocabulary", "--data", "--output"])
def test_workers_read_no_local_disk(flag: str) -> None:
    """A path that only this machine knows is refused before anything is staged."""
    paths = [("--data", "gs://bucket/a.jsonl"), (flag, "here/it/is")]
    with pytest.raises(UsageError, match=f"^{flag} here/it/is: Dataflow's workers do not see this disk"):
        _prepare(*_PLACE, _IMAGE, paths=paths)


def test_google_clients_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Google's clients the error names the extra, not a failed import."""
    monkeypatch.setitem(sys.modules, "apache_beam.runners.dataflow.internal", None)
    monkeypatch.delitem(sys.modules, "apache_beam.runners.dataflow.internal.apiclient", raising=False)
    with pytest.raises(UsageError, match=re.escape("pip install 'calm-beam[dataflow]'")):
        _prepare(*_PLACE, _IMAGE)


def test_plain_workers_scale_up_to_the_shards() -> None:
    """Left open, a job scales with its work up to one worker per shard, and keeps a process per core."""
    options = _prepare(*_PLACE, _IMAGE, num_shards=30)
    worker = options.view_as(WorkerOptions)
    assert (worker.autoscaling_algorithm, worker.max_num_workers) == ("THROUGHPUT_BASED", 30)
    assert (worker.machine_type, worker.disk_size_gb) == (None, None)
    assert options.view_as(SetupOptions).save_main_session is False
    assert options.view_as(DebugOptions).experiments is None
    assert options.view_as(DebugOptions).number_of_worker_harness_threads is None
    assert options.view_as(GoogleCloudOptions).dataflow_service_options is None


def test_an_accelerator_is_used_by_one_process_and_thread() -> None:
    """With an accelerator a worker runs one process with one thread, and machines of other steps are small."""
    options = _prepare(*_PLACE, _IMAGE, accelerator="nvidia-l4")
    debug = options.view_as(DebugOptions)
    assert debug.experiments == ["no_use_multiple_sdk_containers"]
    assert debug.number_of_worker_harness_threads == 1
    worker = options.view_as(WorkerOptions)
    assert (worker.machine_type, worker.disk_size_gb) == ("e2-standard-2", 50)
    # Right fitting by hints and a service option for all workers exclude each other.
    assert options.view_as(GoogleCloudOptions).dataflow_service_options is None


def test_a_tpu_is_given_to_all_workers() -> None:
    """A TPU is added to the user's service options, with the machine type that carries it."""
    flags = (*_PLACE, _IMAGE, "--dataflow_service_options=enable_google_cloud_profiler")
    options = _prepare(*flags, accelerator="tpu-v5-lite-podslice")
    assert options.view_as(GoogleCloudOptions).dataflow_service_options == [
        "enable_google_cloud_profiler",
        "worker_accelerator=type:tpu-v5-lite-podslice;topology:1x1",
    ]
    assert options.view_as(WorkerOptions).machine_type == "ct5lp-hightpu-1t"
    assert options.view_as(DebugOptions).experiments == ["no_use_multiple_sdk_containers"]


def test_a_pool_of_accelerators_gets_the_same_defaults() -> None:
    """Accelerators for all workers by Beam's own flag also get one process per worker."""
    option = "worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver"
    options = _prepare(*_PLACE, _IMAGE, f"--dataflow_service_options={option}", "--worker_machine_type=g2-standard-4")
    assert options.view_as(DebugOptions).experiments == ["no_use_multiple_sdk_containers"]
    assert options.view_as(GoogleCloudOptions).dataflow_service_options == [option]
    assert options.view_as(WorkerOptions).machine_type == "g2-standard-4"


def test_what_the_user_says_stays() -> None:
    """No default replaces a value that was given."""
    options = _prepare(
        *_PLACE,
        _IMAGE,
        "--autoscaling_algorithm=NONE",
        "--num_workers=3",
        "--max_num_workers=4",
        "--worker_machine_type=n2-highmem-8",
        "--disk_size_gb=200",
        "--experiments=use_multiple_sdk_containers,another",
        "--number_of_worker_harness_threads=2",
        accelerator="nvidia-tesla-t4",
    )
    worker = options.view_as(WorkerOptions)
    assert (worker.autoscaling_algorithm, worker.num_workers, worker.max_num_workers) == ("NONE", 3, 4)
    assert (worker.machine_type, worker.disk_size_gb) == ("n2-highmem-8", 200)
    assert options.view_as(DebugOptions).experiments == ["use_multiple_sdk_containers", "another"]
    assert options.view_as(DebugOptions).number_of_worker_harness_threads == 2


def test_more_first_workers_than_shards() -> None:
    """The largest number of workers is never filled in below the first one: Dataflow would refuse the pair."""
    assert _prepare(*_PLACE, _IMAGE, "--num_workers=12").view_as(WorkerOptions).max_num_workers == 12


def test_idle_workers_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    """A message says that more workers than shards have nothing to decode; fewer workers get none."""
    _prepare(*_PLACE, _IMAGE, "--max_num_workers=10")
    assert capsys.readouterr().err == ""
    _prepare(*_PLACE, _IMAGE, "--max_num_workers=11")
    assert "--num_shards=10 gives work to 10 of the 11 workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "accelerator", "message"),
    [
        (
            ["--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1"],
            "nvidia-l4",
            "--accelerator and --dataflow_service_options=worker_accelerator=... both ask for one",
        ),
        (["--flexrs_goal=COST_OPTIMIZED"], "nvidia-l4", "Dataflow has no accelerators for flexible scheduling"),
        (
            ["--worker_machine_type=g2-standard-8"],
            "nvidia-l4",
            "Name it with the accelerator: 'type:nvidia-l4;count:1;machine_type:g2-standard-8;install-nvidia-driver'",
        ),
        (
            ["--worker_machine_type=n1-standard-4"],
            "tpu-v6e-slice",
            "--worker_machine_type=n1-standard-4: tpu-v6e-slice needs ct6e-standard-1t",
        ),
    ],
)
def test_contradictions_are_refused(flags: list[str], accelerator: str, message: str) -> None:
    """Flags that ask for two things, or for a GPU in every step, are refused with what to write instead."""
    with pytest.raises(UsageError, match=re.escape(message)):
        _prepare(*_PLACE, _IMAGE, *flags, accelerator=accelerator)


@pytest.mark.parametrize("accelerator", ["nvidia-l4", "tpu-v6e-slice"])
def test_an_accelerator_needs_an_image(accelerator: str) -> None:
    """Without an image that has JAX for it, an accelerator would be paid for and idle."""
    with pytest.raises(UsageError, match="--sdk_container_image is missing: Beam's own image has no JAX for accelera"):
        _prepare(*_PLACE, accelerator=accelerator)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--project is missing"),
        (["--accelerator=l4"], "argument --accelerator: expected a type such as nvidia-l4"),
        ([*_PLACE[1:], _IMAGE], "demo/model: Dataflow's workers do not see this disk"),
        ([*_PLACE[1:], _IMAGE, "--checkpoint=model", "--data=gs://bucket/a"], "--checkpoint model: Dataflow's workers"),
        ([*_PLACE[1:], _IMAGE, "--checkpoint=gs://b/m", "--data=gs://b/a,b.jsonl"], "--data b.jsonl: Dataflow's work"),
        ([*_PLACE[1:], _IMAGE, "--checkpoint=gs://b/m", "--data=gs://b/a"], "--output calibration: Dataflow's workers"),
    ],
)
def test_calibrate_checks_its_job(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`calibrate` refuses what Dataflow cannot do as bad usage, before it reads model or data."""
    assert main(["calibrate", "--runner=DataflowRunner", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
