"""The workers of a command, as flags name them."""

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, WorkerOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.shared_options import parse_accelerator
from calm_beam.launch.runners import Workers
from calm_beam.transforms.decode import ANY_DEVICES

_JOB = (
    "--runner=DataflowRunner",
    "--project=a-project",
    "--region=us-central1",
    "--temp_location=gs://bucket/temp",
    "--sdk_container_image=us-docker.pkg.dev/a-project/calm-beam/worker:1",
)


def _prepared(*flags: str, accelerator: str | None = None) -> Workers:
    return Workers.prepared(
        PipelineOptions(list(flags)),
        accelerator=None if accelerator is None else parse_accelerator(accelerator),
        paths=[("--data", "gs://bucket/rows.jsonl")],
        num_shards=lambda: 7,
    )


def test_workers_of_this_machine() -> None:
    """Without flags workers are local, have the devices that JAX finds, and make a pipeline."""
    workers = _prepared()
    assert workers.are_here
    assert (workers.devices, workers.template) == (ANY_DEVICES, None)
    assert isinstance(workers.new_pipeline().runner, FnApiRunner)
    workers.refuse_template(command="decode")


@pytest.mark.parametrize(("accelerator", "has_hint"), [("nvidia-l4", True), ("tpu-v6e-slice", False)])
def test_workers_with_accelerators(accelerator: str, has_hint: bool) -> None:
    """A job's workers need their accelerator, by a hint or for all, and are as many as there are shards."""
    workers = _prepared(*_JOB, accelerator=accelerator)
    assert not workers.are_here
    assert workers.devices.are_accelerators
    assert (workers.devices.hint is not None) == has_hint
    assert workers.options.view_as(WorkerOptions).max_num_workers == 7


def test_templates_are_refused_where_somebody_waits() -> None:
    """Commands that read results refuse a template, which gives none, and name the command."""
    workers = _prepared(*_JOB, "--template_location=gs://bucket/template")
    assert workers.template == "gs://bucket/template"
    with pytest.raises(UsageError) as caught:
        workers.refuse_template(command="verify")
    assert str(caught.value) == (
        "--template_location: verify reads back what its workers have done, which a template cannot. Leave it out."
    )


def test_local_paths_are_refused_elsewhere() -> None:
    """Paths that workers on Dataflow cannot see are named before anything is staged."""
    with pytest.raises(UsageError, match=r"^--data rows\.jsonl: Dataflow's workers do not see this disk"):
        Workers.prepared(
            PipelineOptions(list(_JOB)), accelerator=None, paths=[("--data", "rows.jsonl")], num_shards=lambda: 7
        )
