"""Pipelines that are built by a function of ours, in whatever process that is called."""

from typing import Any

import apache_beam as beam
from apache_beam import pipeline as beam_pipeline


class OwnPipeline(beam.Pipeline):
    """A pipeline whose steps are not those of a notebook's cell.

    In IPython, Beam puts the number of the cell before the names of the steps that are applied in it. It looks for the
    pipelines of all cells at every step of any pipeline, and imports for that what interactive pipelines need, pandas
    first: `calibrate` would fail in a notebook where that is not installed.
    """

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
