"""Pipelines that are built by a function of ours, in whatever process that is called."""

import contextlib
import os
from typing import Any

import apache_beam as beam
from apache_beam import pipeline as beam_pipeline


class OwnPipeline(beam.Pipeline):
    """A pipeline whose steps are not those of a notebook's cell, and that leaves no folder behind.

    In IPython, Beam puts the number of the cell before the names of the steps that are applied in it. It looks for the
    pipelines of all cells at every step of any pipeline, and imports for that what interactive pipelines need, pandas
    first: `calibrate` would fail in a notebook where that is not installed.

    Beam also makes a folder for temporary files of every pipeline, and removes it only once the pipeline has run. Only
    transforms of other languages use it, and nothing here has any.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Makes a pipeline; arguments are those of Beam."""
        super().__init__(*arguments, **settings)
        with contextlib.suppress(OSError):
            os.rmdir(self.local_tempdir)

    def apply(self, transform: Any, pvalueish: Any = None, label: str | None = None) -> Any:
        """Applies a step under its own name; arguments and what is returned are those of Beam."""
        named = beam_pipeline.alter_label_if_ipython
        beam_pipeline.alter_label_if_ipython = _keep_name
        try:
            return super().apply(transform, pvalueish, label)
        finally:
            beam_pipeline.alter_label_if_ipython = named


def _keep_name(transform: Any, pvalueish: Any) -> None:
    """Leaves the name of a step as it is."""
