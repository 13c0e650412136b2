"""The jobs that commands submit to Dataflow: Beam's own runner against fake services."""

import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import apache_beam
import pytest
from apache_beam.internal import pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from calm_beam.launch.cli import main
from calm_beam.outputs.request import SweepAssignment
from tests.cloud.dataflow_service import DataflowService, serving_dataflow
from tests.cloud.service import CloudService, make_bucket, raw_client
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ROOT = pathlib.Path(__file__).parents[2]
_DECODE = "DecodeExamples/DecodeShards"
_IMAGE = "us-docker.pkg.dev/a-project/calm-beam/worker:1"
# A worker's exception as it looks in the messages of a job.
_TRACE = """Traceback (most recent call last):
  File "apache_beam/runners/common.py", line 1498, in apache_beam.runners.common.DoFnRunner.process
calm_beam.inputs.examples.DataError: gs://bucket/rows.jsonl, line 7: bad [while running 'ReadExamples/ParseExamples-31']
"""


@dataclasses.dataclass(frozen=True)
class _Place:
    """The fake services, and a bucket with a model and data.

    Attributes:
      bucket: Its address.
      storage: The storage service.
      dataflow: The job service.
      environment: Variables by which a process finds them.
      folder: An empty folder, far from the sources.
    """

    bucket: str
    storage: CloudService
    dataflow: DataflowService
    environment: dict[str, str]
    folder: pathlib.Path

    def read(self, path: str) -> bytes:
        """Returns the content of a file in the bucket."""
        bucket = raw_client(self.storage).bucket(self.bucket.removeprefix("gs://"))
        content: bytes = bucket.blob(path.removeprefix(f"{self.bucket}/")).download_as_bytes()
        return content


@dataclasses.dataclass(frozen=True)
class _Run:
    """Status, output and job of a run of the command.

    Attributes:
      status: Its exit status.
      output: What it printed.
      errors: What it printed to stderr.
      job: The job, as Dataflow got it or as the template has it.
      pipeline: The pipeline that was staged.
    """

    status: int
    output: str
    errors: str
    job: dict[str, Any]
    pipeline: beam_runner_api_pb2.Pipeline

    @property
    def options(self) -> dict[str, Any]:
        """Beam's flags as workers will see them."""
        options: dict[str, Any] = self.job["environment"]["sdkPipelineOptions"]["options"]
        return options

    @property
    def pool(self) -> dict[str, Any]:
        """The job's pool of workers."""
        (pool,) = self.job["environment"]["workerPools"]
        assert isinstance(pool, dict)
        return pool

    def assignment(self) -> SweepAssignment:
        """Returns the settings of the step that decodes."""
        (step,) = [step for step in self.pipeline.components.transforms.values() if step.unique_name == _DECODE]
        payload = beam_runner_api_pb2.ParDoPayload.FromString(step.spec.payload)
        assignment = pickler.loads(payload.do_fn.payload)[0]._assignments[0]
        assert isinstance(assignment, SweepAssignment)
        return assignment

    def steps(self) -> set[str]:
        """Returns the names of the steps."""
        return {step.unique_name for step in self.pipeline.components.transforms.values()}

    def hints(self) -> dict[str, dict[str, bytes]]:
        """Returns the resource hints of each step that has any."""
        components = self.pipeline.components
        return {
            step.unique_name: dict(components.environments[step.environment_id].resource_hints)
            for step in components.transforms.values()
            if step.environment_id and components.environments[step.environment_id].resource_hints
        }


@pytest.fixture(scope="module")
def place(_cloud_service: CloudService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Place]:
    """Running fake services, and a bucket with a tiny model and six prompts."""
    folder = tmp_path_factory.mktemp("dataflow")
    environment = {**_cloud_service.environment(), "CALM_BEAM_CACHE": str(folder / "cache")}
    with pytest.MonkeyPatch.context() as patch, serving_dataflow() as dataflow:
        for name, value in environment.items():
            patch.setenv(name, value)
        address = make_bucket(_cloud_service, "dataflow-job")
        bucket = raw_client(_cloud_service).bucket("dataflow-job")
        write_model(folder / "model")
        for path in sorted((folder / "model").iterdir()):
            bucket.blob(f"model/{path.name}").upload_from_filename(path)
        bucket.blob("rows.jsonl").upload_from_filename(write_rows(folder / "rows.jsonl", id_rows(6)))
        (folder / "elsewhere").mkdir()
        yield _Place(address, _cloud_service, dataflow, environment, folder / "elsewhere")


def _calibrate(place: _Place, name: str, *flags: str) -> tuple[int, str, str]:
    """Runs calibrate, and returns its exit status and what it printed."""
    return _run(place, "calibrate", name, "--metric=token_f1", *SHORT_FLAGS, *flags)


def _run(place: _Place, command: str, name: str, *flags: str) -> tuple[int, str, str]:
    """Runs a command without `--output` unless it has a name, and returns its exit status and output."""
    process = _started(place, command, name, *flags)
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def _started(place: _Place, command: str, name: str, *flags: str) -> "subprocess.Popen[str]":
    """Starts the command in a process of its own, since Beam keeps credentials and clients for good."""
    arguments = [
        command,
        "--runner=DataflowRunner",
        "--project=a-project",
        "--region=us-central1",
        f"--dataflow_endpoint={place.dataflow.endpoint}",
        f"--temp_location={place.bucket}/temp",
        f"--checkpoint={place.bucket}/model",
        *([] if any(flag.startswith("--generations=") for flag in flags) else [f"--data={place.bucket}/rows.jsonl"]),
        *([f"--output={place.bucket}/{name}"] if name else []),
        *flags,
    ]
    code = "from calm_beam.launch.cli import entry_point; entry_point()"
    environment = {**os.environ, **place.environment, "PYTHONPATH": str(_ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=place.folder,
    )


def _run_of(place: _Place, done: tuple[int, str, str], job: dict[str, Any]) -> _Run:
    staged = place.read(job["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"])
    return _Run(*done, job=job, pipeline=beam_runner_api_pb2.Pipeline.FromString(staged))


def _submitted(place: _Place, name: str, *flags: str) -> _Run:
    return _submitted_by(place, "calibrate", name, "--metric=token_f1", *SHORT_FLAGS, *flags)


def _submitted_by(place: _Place, command: str, name: str, *flags: str) -> _Run:
    before = len(place.dataflow.jobs)
    done = _run(place, command, name, *flags)
    assert len(place.dataflow.jobs) == before + 1, done
    return _run_of(place, done, place.dataflow.jobs[-1])


@pytest.fixture(scope="module")
def from_sources(place: _Place) -> _Run:
    """A job on plain machines whose workers install the sources, which fails for a bad line of the data."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_FAILED", [_TRACE]
    return _submitted(place, "from_sources", "--num_shards=12", "--worker_machine_type=n2-standard-8")


@pytest.fixture(scope="module")
def on_gpus(place: _Place) -> _Run:
    """A job that decodes on GPUs in an image, and ends well without a manifest, since nothing was run."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    flags = (f"--sdk_container_image={_IMAGE}", "--accelerator=nvidia-l4", "--num_shards=12", "--max_num_workers=3")
    return _submitted(place, "on_gpus", *flags)


@pytest.fixture(scope="module")
def template_on_tpus(place: _Place) -> _Run:
    """A job on TPUs that is written as a template, as the launcher of a Flex Template asks for."""
    before = len(place.dataflow.jobs)
    flags = (f"--sdk_container_image={_IMAGE}", "--accelerator=tpu-v6e-slice", "--worker_zone=us-central1-b")
    done = _calibrate(place, "on_tpus", *flags, f"--template_location={place.bucket}/templates/job.json")
    assert done[0] == 0, done
    assert len(place.dataflow.jobs) == before
    return _run_of(place, done, json.loads(place.read("templates/job.json")))


def test_steps(from_sources: _Run) -> None:
    """The staged pipeline reads, decodes, scores, sums and writes, and no step asks for a device."""
    assert {
        "ReadExamples/ParseExamples",
        "ReadExamples/GroupByShard",
        _DECODE,
        "CalibrateGenerations/ScoreExamples",
        "CalibrateGenerations/SumLosses",
        "CalibrateGenerations/TestThresholds",
        "WriteManifest/Publish",
    } <= from_sources.steps()
    assert from_sources.hints() == {}


def test_workers_read_cloud_storage(place: _Place, from_sources: _Run) -> None:
    """The step that decodes has paths on Cloud Storage, never those of a copy on the launching machine."""
    assignment = from_sources.assignment()
    assert assignment.job.model.uri == f"{place.bucket}/model"
    assert assignment.stored.directory.startswith(f"{place.bucket}/from_sources/")
    assert assignment.job.num_shards == 12


def test_plain_machines(from_sources: _Run) -> None:
    """A job without accelerators has the machines that were named, scales up to its shards, and fills their cores."""
    pool = from_sources.pool
    assert pool["machineType"] == "n2-standard-8"
    # 2 is scaling by throughput.
    assert pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": 12}
    experiments = from_sources.job["environment"]["experiments"]
    assert "use_multiple_sdk_containers" in experiments
    assert "no_use_multiple_sdk_containers" not in experiments
    assert "serviceOptions" not in from_sources.job["environment"]
    assert from_sources.options["save_main_session"] is False


def test_image_without_one(from_sources: _Run) -> None:
    """Without an image, workers run Beam's for this version of it and of Python."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert from_sources.pool["workerHarnessContainerImage"].endswith(f"/beam_{python}_sdk:{apache_beam.__version__}")


def test_the_staged_package_is_whole(place: _Place, from_sources: _Run) -> None:
    """The package that workers install has every module of the three floors, equal to the sources."""
    packages = {package["name"]: package["location"] for package in from_sources.pool["packages"]}
    bucket = f"storage.googleapis.com/{place.bucket[5:]}/"
    content = place.read(packages["workflow.tar.gz"].removeprefix(bucket))
    staged = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive.getmembers():
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(("calm_beam/", "transforms/", "launch/")):
                file = archive.extractfile(member)
                assert file is not None
                staged[name] = file.read()
    links = {_ROOT / "calm_beam" / "transforms", _ROOT / "calm_beam" / "launch"}
    modules = {
        path.relative_to(_ROOT).as_posix(): path.read_bytes()
        for floor in ("calm_beam", "transforms", "launch")
        for path in (_ROOT / floor).rglob("*.py")
        if not links & set(path.parents) and (path.parent / "__init__.py").exists()
    }
    assert len(modules) > 100
    assert {name: content for name, content in staged.items() if name.endswith(".py")} == modules
    assert "calm_beam/manifest/manifest.schema.json" in staged


def test_what_a_job_fails_with(from_sources: _Run) -> None:
    """A failing job's address is printed at once, then only our own error message, with status 1."""
    assert from_sources.status == 1
    assert "job https://console.cloud.google.com/dataflow/jobs/us-central1/job-" in from_sources.errors
    last = from_sources.errors.strip().splitlines()[-1]
    assert last == "calm-beam calibrate: gs://bucket/rows.jsonl, line 7: bad"


def test_ctrl_c_ends_the_watching_alone(place: _Place) -> None:
    """Interrupted while it waits, the command ends as interrupted, and says that the job goes on and where."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_RUNNING", []
    place.dataflow.was_asked.clear()
    process = _started(
        place, "calibrate", "interrupted", "--metric=token_f1", *SHORT_FLAGS, f"--sdk_container_image={_IMAGE}"
    )
    assert place.dataflow.was_asked.wait(200)
    # The command takes SIGTERM for Ctrl-C; SIGINT is ignored below a shell that started tests in the background.
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    assert (process.returncode, output) == (130, "")
    job = f"https://console.cloud.google.com/dataflow/jobs/us-central1/job-{len(place.dataflow.jobs)}?project=a-project"
    assert errors.splitlines()[-1] == f"calm-beam calibrate: interrupted; the job goes on: {job}"


def test_only_decoding_asks_for_gpus(on_gpus: _Run) -> None:
    """The one step that decodes has the accelerator's hint, with machine and driver."""
    hint = b"type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver"
    assert on_gpus.hints() == {_DECODE: {common_urns.resource_hints.ACCELERATOR.urn: hint}}
    # Dataflow takes hints only without the service option.
    assert "serviceOptions" not in on_gpus.job["environment"]


def test_machines_around_gpus(on_gpus: _Run) -> None:
    """Other steps run on small machines; every worker runs one process with one thread, in the image."""
    pool = on_gpus.pool
    assert (pool["machineType"], pool["diskSizeGb"], pool["numThreadsPerWorker"]) == ("e2-standard-2", 50, 1)
    assert pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": 3}
    experiments = on_gpus.job["environment"]["experiments"]
    assert "no_use_multiple_sdk_containers" in experiments
    assert "use_multiple_sdk_containers" not in experiments
    images = {image["environmentId"]: image["containerImage"] for image in pool["sdkHarnessContainerImages"]}
    assert list(images.values()) == [_IMAGE, _IMAGE]
    assert "workflow.tar.gz" not in {package["name"] for package in pool.get("packages", ())}


def test_a_job_without_a_manifest_has_failed(on_gpus: _Run) -> None:
    """A job that says it is done, and has left no manifest, is a failure."""
    assert on_gpus.status == 1
    assert "manifest.json" in on_gpus.errors.strip().splitlines()[-1]
    assert on_gpus.output == ""


def test_a_template_on_tpus(place: _Place, template_on_tpus: _Run) -> None:
    """A template is written and nothing submitted; its workers all have the TPU, by service option and machine."""
    assert template_on_tpus.output == f"Template: {place.bucket}/templates/job.json. It has not run.\n"
    environment = template_on_tpus.job["environment"]
    assert environment["serviceOptions"] == ["worker_accelerator=type:tpu-v6e-slice;topology:1x1"]
    assert environment["workerZone"] == "us-central1-b"
    assert "no_use_multiple_sdk_containers" in environment["experiments"]
    pool = template_on_tpus.pool
    assert (pool["machineType"], pool["numThreadsPerWorker"]) == ("ct6e-standard-1t", 1)
    assert pool["workerHarnessContainerImage"] == _IMAGE
    assert template_on_tpus.hints() == {}


_ON_GPUS = (f"--sdk_container_image={_IMAGE}", "--accelerator=nvidia-l4", "--num_shards=12")


@pytest.fixture(scope="module")
def calibrated(place: _Place) -> str:
    """A calibration in the bucket, made on this machine."""
    flags = (*SHORT_FLAGS, "--metric=token_f1", "--delta=0.9", "--epsilon=0.5")
    files = (f"--checkpoint={place.bucket}/model", f"--output={place.bucket}/calibrated")
    assert main(["calibrate", *files, f"--data={place.bucket}/rows.jsonl", *flags]) == 0
    bucket = raw_client(place.storage).bucket(place.bucket.removeprefix("gs://"))
    fresh = write_rows(place.folder.parent / "fresh.jsonl", id_rows(6, seed=1))
    bucket.blob("fresh.jsonl").upload_from_filename(fresh)
    return f"{place.bucket}/calibrated"


def _check_gpus(run: _Run) -> None:
    """Asserts that only the step that decodes has the hint, and that the other flags are those of a calibration."""
    hint = b"type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver"
    assert run.hints() == {_DECODE: {common_urns.resource_hints.ACCELERATOR.urn: hint}}
    pool = run.pool
    assert (pool["machineType"], pool["diskSizeGb"], pool["numThreadsPerWorker"]) == ("e2-standard-2", 50, 1)
    assert pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": 12}
    assert "no_use_multiple_sdk_containers" in run.job["environment"]["experiments"]


def _left(place: _Place, part: str) -> list[str]:
    """Returns the names in the bucket that hold a text."""
    return [blob.name for blob in raw_client(place.storage).list_blobs(place.bucket[5:]) if part in blob.name]


def test_decode(place: _Place) -> None:
    """Decode submits the sweep alone, into a folder next to its output, and reports missing rows."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    run = _submitted_by(place, "decode", "outputs.jsonl", *SHORT_FLAGS, *_ON_GPUS)
    _check_gpus(run)
    assert {"ReadExamples/ParseExamples", _DECODE, "DecodeExamples/MarkComplete"} <= run.steps()
    directory = run.assignment().stored.directory
    assert directory.startswith(f"{place.bucket}/.outputs.jsonl.")
    assert run.status == 1
    last = run.errors.strip().splitlines()[-1]
    assert last.startswith(f"calm-beam decode: {directory}: has no complete.json, though the job has ended well.")
    assert _left(place, "outputs.jsonl") == []


def test_verify(place: _Place, calibrated: str) -> None:
    """Verify submits the sweep alone, at the promised thresholds, into a folder below --temp_location."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    flags = (f"--manifest={calibrated}", f"--data={place.bucket}/fresh.jsonl", "--batch_size=4", *_ON_GPUS)
    run = _submitted_by(place, "verify", "", *flags)
    _check_gpus(run)
    assignment = run.assignment()
    assert assignment.stored.directory.startswith(f"{place.bucket}/temp/calm-beam-verify-")
    assert assignment.job.model.uri == f"{place.bucket}/model"
    assert len(assignment.job.settings.thresholds) == 1
    assert run.status == 1
    assert "has no complete.json, though the job has ended well." in run.errors.strip().splitlines()[-1]
    assert _left(place, "calm-beam-verify-") == []


def test_splits(place: _Place, calibrated: str) -> None:
    """Splits of stored generations are scored on plain machines, into the output directory."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    flags = (f"--generations={calibrated}", f"--sdk_container_image={_IMAGE}", "--metric=token_f1", "--trials=3")
    run = _submitted_by(place, "evaluate", "splits", *flags)
    assert run.hints() == {}
    assert {"SplitGenerations/ScoreExamples", "SplitGenerations/WriteResults"} <= run.steps()
    # Of three shards, two have examples.
    assert run.pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": 2}
    assert run.status == 1
    assert f"{place.bucket}/splits/splits_trials.parquet" in run.errors.strip().splitlines()[-1]


def test_sweeps_of_splits(place: _Place) -> None:
    """Evaluate first submits the sweep of each measure, with the accelerator, as calibrate does."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    flags = (*SHORT_FLAGS, *_ON_GPUS, "--metric=token_f1", "--trials=3", "--confidence=softmax")
    run = _submitted_by(place, "evaluate", "swept", *flags)
    _check_gpus(run)
    assert run.assignment().stored.directory.startswith(f"{place.bucket}/swept/sweeps/softmax/generations/")
    assert run.status == 1
    assert "sweep softmax: " in run.errors


def test_experiments(place: _Place) -> None:
    """A sample is submitted with its first sweep, whose outputs go below --temp_location; tables are written here."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_DONE", []
    sizes = ("--max_input_length=32", "--max_decode_length=6", f"--output={place.folder}/sampled")
    asked = ("--experiment=tradeoff", "--confidence=softmax", "--thresholds=0.5,0", "--metric=token_f1")
    run = _submitted_by(place, "evaluate", "", *asked, *sizes, *_ON_GPUS)
    _check_gpus(run)
    assert "DivideExamples/SpreadShards" in run.steps()
    assignment = run.assignment()
    assert assignment.stored.directory.startswith(f"{place.bucket}/temp/calm-beam-evaluate-")
    assert assignment.stored.thresholds == (0.5, 0.0)
    assert run.status == 1
    assert "has no complete.json, though the job has ended well." in run.errors.strip().splitlines()[-1]
    assert _left(place, "calm-beam-evaluate-") == []
    assert list(place.folder.iterdir()) == []


def test_ctrl_c_leaves_what_a_job_still_writes(place: _Place) -> None:
    """Interrupted, decode says where the job writes, and that its output will not be read."""
    place.dataflow.final_state, place.dataflow.errors = "JOB_STATE_RUNNING", []
    place.dataflow.was_asked.clear()
    process = _started(place, "decode", "rows.jsonl", *SHORT_FLAGS, f"--sdk_container_image={_IMAGE}", "--overwrite")
    assert place.dataflow.was_asked.wait(200)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    assert (process.returncode, output) == (130, "")
    last = errors.splitlines()[-1]
    assert last.startswith("calm-beam decode: interrupted; the job goes on: https://console.cloud.google.com/")
    assert f"; nobody will read what it decodes: cancel it, and remove {place.bucket}/.rows.jsonl." in last
