"""The job that `calm-beam generate` submits to Dataflow: Beam's own runner against fake services."""

import os
import pathlib
import subprocess
import sys

import pytest
from apache_beam.internal import pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from calm_beam.outputs.request import AnswerAssignment
from tests.answers import write_served_folder
from tests.cloud.dataflow_service import serving_dataflow
from tests.cloud.service import CloudService, make_bucket, raw_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ROOT = pathlib.Path(__file__).parents[2]
_ANSWER = "AnswerPrompts/DecodeShards"
_ENTRY = "from calm_beam.launch.cli import entry_point; entry_point()"


@pytest.fixture
def service(_cloud_service: CloudService) -> CloudService:
    """The storage service."""
    return _cloud_service


def test_a_job(service: CloudService, tmp_path: pathlib.Path) -> None:
    """One step asks for the GPU, workers get paths in the bucket, and missing answers are reported."""
    folder = write_served_folder(tmp_path / "served", prompts=6)
    environment = {**service.environment(), "CALM_BEAM_CACHE": str(tmp_path / "cache")}
    with pytest.MonkeyPatch.context() as patch, serving_dataflow() as dataflow:
        for name, value in environment.items():
            patch.setenv(name, value)
        dataflow.final_state, dataflow.errors = "JOB_STATE_DONE", []
        place = make_bucket(service, "dataflow-answers")
        bucket = raw_client(service).bucket("dataflow-answers")
        for path in (folder / "rows.jsonl", *(folder / "model").iterdir()):
            bucket.blob(path.relative_to(folder).as_posix()).upload_from_filename(path)
        arguments = [
            "generate",
            "--runner=DataflowRunner",
            "--project=a-project",
            "--region=us-central1",
            f"--dataflow_endpoint={dataflow.endpoint}",
            f"--temp_location={place}/temp",
            "--sdk_container_image=us-docker.pkg.dev/a-project/calm-beam/worker:1",
            "--accelerator=nvidia-l4",
            # Only the launcher reads these.
            f"--manifest={folder}",
            f"--checkpoint={place}/model",
            f"--input={place}/rows.jsonl",
            "--num_shards=12",
        ]
        command = [sys.executable, "-c", _ENTRY, *arguments]
        # In a process of its own, since Beam keeps credentials and clients for good.
        environment = {**os.environ, **environment, "PYTHONPATH": str(_ROOT)}
        refused = subprocess.run(
            [*command, f"--output={tmp_path}/answers/"], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert refused.returncode == 2
        assert "Dataflow's workers do not see this disk" in refused.stderr
        assert not dataflow.jobs
        done = subprocess.run(
            [*command, f"--output={place}/answers/"], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        (job,) = dataflow.jobs
        staged = job["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"].removeprefix(f"{place}/")
        pipeline = beam_runner_api_pb2.Pipeline.FromString(bucket.blob(staged).download_as_bytes())
        names = [blob.name for blob in raw_client(service).list_blobs("dataflow-answers")]
    assert done.returncode == 1
    assert (
        f"{place}/answers: has no complete.json, so decoding did not finish there"
        in done.stderr.strip().splitlines()[-1]
    )
    assert "answers/generate.json" in names
    components = pipeline.components
    hints = {
        step.unique_name: dict(components.environments[step.environment_id].resource_hints)
        for step in components.transforms.values()
        if step.environment_id and components.environments[step.environment_id].resource_hints
    }
    hint = b"type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver"
    assert hints == {_ANSWER: {common_urns.resource_hints.ACCELERATOR.urn: hint}}
    (pool,) = job["environment"]["workerPools"]
    assert pool["autoscalingSettings"] == {"algorithm": 2, "maxNumWorkers": 12}
    (step,) = [step for step in components.transforms.values() if step.unique_name == _ANSWER]
    payload = beam_runner_api_pb2.ParDoPayload.FromString(step.spec.payload)
    assignment = pickler.loads(payload.do_fn.payload)[0]._assignments[0]
    assert isinstance(assignment, AnswerAssignment)
    assert assignment.directory == f"{place}/answers"
    assert (assignment.job.model.uri, assignment.job.num_shards) == (f"{place}/model", 12)
