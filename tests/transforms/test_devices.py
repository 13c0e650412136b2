"""The devices on which a worker decodes."""

import pathlib

import apache_beam as beam
import jax
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.transforms import DecodeExamples
from calm_beam.transforms.decode import Devices, require_accelerator
from calm_beam.transforms.metrics import ProgressLog
from tests.pipelines import build_assignment


def test_a_cpu_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on which JAX falls back to the CPU stops with a message; one with a device continues."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match="JAX finds only its CPU"):
        require_accelerator()
    for backend in ("gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        require_accelerator()


def test_decoding_waits_for_its_device(tmp_path: pathlib.Path) -> None:
    """A step that needs an accelerator checks for it before it loads the model; other steps load the model at once."""
    assignment = build_assignment(str(tmp_path), model="/nowhere/model")
    for needs_accelerator, message in ((True, "JAX finds only its CPU"), (False, "/nowhere")):
        pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
        decode = DecodeExamples([assignment], ProgressLog(None), devices=Devices(are_accelerators=needs_accelerator))
        _ = (pipeline | "Shards" >> beam.Create([(0, ())]), pipeline | "Count" >> beam.Create([0])) | decode
        with pytest.raises(Exception, match=message):
            pipeline.run().wait_until_finish()
