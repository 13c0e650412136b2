"""Steps that can share workers: reading, decoding and scoring are separate, and only decoding asks for a device."""

import apache_beam as beam
import pytest
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.utils import proto_utils

from calm_beam.inputs import DataFiles
from calm_beam.transforms import DecodeExamples, ReadExamples
from calm_beam.transforms.decode import Devices
from calm_beam.transforms.metrics import ProgressLog
from tests.pipelines import build_assignment

_HINT = "type:nvidia-l4;count:1;install-nvidia-driver"
_DECODE = "DecodeExamples/DecodeShards"
_FILES = DataFiles(patterns=("gs://bucket/*.jsonl",), files=("gs://bucket/a.jsonl",))
_ASSIGNMENT = build_assignment("gs://bucket/out", model="gs://bucket/model", num_shards=8)


def _pipeline(hint: str | None) -> beam_runner_api_pb2.Pipeline:
    """Returns a pipeline that reads, decodes, and reads the decoded outputs."""
    log = ProgressLog(None)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = (
        pipeline
        | "ReadExamples" >> ReadExamples(_FILES, num_shards=8, progress=log)
        | "DecodeExamples" >> DecodeExamples([_ASSIGNMENT], log, devices=Devices(hint=hint))
        | "Score" >> beam.Map(str)
    )
    return pipeline.to_runner_api()


def _fused(pipeline: beam_runner_api_pb2.Pipeline, start: str) -> set[str]:
    """Returns the names of steps that data reach from `start`, in either direction, without being grouped.

    A side input is complete before its step begins, so it cannot be fused with the step that makes it.
    """
    steps = [step for step in pipeline.components.transforms.values() if not step.subtransforms]
    kept = [step for step in steps if step.spec.urn != common_urns.primitives.GROUP_BY_KEY.urn]
    reached, found = {start}, 0
    while len(reached) > found:
        found = len(reached)
        touched = {collection for step in kept if step.unique_name in reached for collection in _main_collections(step)}
        reached |= {step.unique_name for step in kept if touched & set(_main_collections(step))}
    return reached


def _main_collections(step: beam_runner_api_pb2.PTransform) -> list[str]:
    side_inputs: set[str] = set()
    if step.spec.urn == common_urns.primitives.PAR_DO.urn:
        side_inputs = set(proto_utils.parse_Bytes(step.spec.payload, beam_runner_api_pb2.ParDoPayload).side_inputs)
    return [*(made for name, made in step.inputs.items() if name not in side_inputs), *step.outputs.values()]


def test_only_decoding_has_the_hint() -> None:
    """The hint is in the environment of the step that decodes, and of no other."""
    components = _pipeline(_HINT).components
    hinted = [
        step.unique_name
        for step in components.transforms.values()
        if step.environment_id and components.environments[step.environment_id].resource_hints
    ]
    assert hinted == [_DECODE]
    (step,) = [step for step in components.transforms.values() if step.unique_name == _DECODE]
    hints = dict(components.environments[step.environment_id].resource_hints)
    assert hints == {common_urns.resource_hints.ACCELERATOR.urn: _HINT.encode()}


def test_without_an_accelerator_there_are_no_hints() -> None:
    """Without an accelerator, all steps may run anywhere."""
    environments = _pipeline(None).components.environments.values()
    assert [dict(environment.resource_hints) for environment in environments if environment.resource_hints] == []


@pytest.mark.parametrize("hint", [_HINT, None])
def test_decoding_is_not_fused(hint: str | None) -> None:
    """Data are grouped between reading, decoding and scoring, so a runner cannot fuse them, with or without hints."""
    pipeline = _pipeline(hint)
    reading, decoding = _fused(pipeline, "ReadExamples/ParseExamples"), _fused(pipeline, _DECODE)
    assert {"ReadExamples/KeyByShard", "ReadExamples/KeyById"} <= reading
    # These wait, read stored files, or make lists of a few bytes per shard.
    lists = ("DecodeExamples/CheckFolders/ListShards/", "DecodeExamples/ListDecoded/")
    assert {name for name in decoding if not name.startswith(lists)} == {
        "ReadExamples/AwaitChecks",
        "DecodeExamples/CheckFolders/CheckStored",
        _DECODE,
    }
    assert not reading & decoding
    assert "Score" in _fused(pipeline, "DecodeExamples/MarkComplete")
    assert not {"Score", "DecodeExamples/MarkComplete"} & decoding
