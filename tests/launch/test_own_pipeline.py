"""Our pipelines in a notebook's kernel."""

import pathlib
import sys
import tempfile
import types

import apache_beam as beam
import pytest
from apache_beam import pipeline as beam_pipeline
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from calm_beam.launch.runners import Workers, run_pipeline


@pytest.fixture
def _notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looks like IPython's, without the packages of Beam's interactive pipelines."""
    kernel = types.SimpleNamespace(execution_count=7, config={"IPKernelApp": {}})
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "apache_beam.runners.interactive.interactive_environment", None)


@pytest.mark.usefixtures("_notebook")
def test_a_notebook_without_pandas() -> None:
    """Our steps are applied and run under their own names; Beam's pipeline misses a package there."""
    options = PipelineOptions([])
    with pytest.raises(ImportError, match="interactive_environment"):
        beam.Pipeline(options=options) | beam.Create([1])
    pipeline = Workers(options=options).new_pipeline()
    found = pipeline | "Make" >> beam.Create([1, 2]) | "Double" >> beam.Map(lambda number: 2 * number)
    assert_that(found, equal_to([2, 4]))
    assert found.producer.full_label == "Double"
    run_pipeline(pipeline)


@pytest.mark.usefixtures("_notebook")
def test_pipelines_of_cells_are_left_as_they_are() -> None:
    """After one of our steps is applied or fails, Beam names the steps of others as before."""
    named = beam_pipeline.alter_label_if_ipython
    pipeline = Workers(options=PipelineOptions([])).new_pipeline()
    _ = pipeline | "Make" >> beam.Create([1])
    with pytest.raises(RuntimeError, match="Make"):
        _ = pipeline | "Make" >> beam.Create([1])
    assert beam_pipeline.alter_label_if_ipython is named


def test_a_pipeline_leaves_no_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam's folder for temporary files is removed at once, whether our pipeline runs or not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = PipelineOptions([])
    pipeline = Workers(options=options).new_pipeline()
    assert list(tmp_path.iterdir()) == []
    _ = pipeline | beam.Create([1])
    run_pipeline(pipeline)
    assert list(tmp_path.iterdir()) == []
    beam.Pipeline(options=options)
    assert [path.name[:18] for path in tmp_path.iterdir()] == ["beam-pipeline-temp"]
