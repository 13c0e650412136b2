"""Running a sweep whose generations are read back by the command, wherever they are decoded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import apache_beam as beam

from calm_beam.outputs import COMPLETE, FinishedSweep
from calm_beam.outputs.assignment import SweepAssignment
from calm_beam.storage import is_file, joined
from calm_beam.transforms import DecodeExamples, ReadExamples
from calm_beam.transforms.progress import ProgressLog

from .runners import PipelineError, Workers, run_pipeline
from .runners.metrics import RunMetrics

if TYPE_CHECKING:
    # It loads JAX, and what is stored is calibrated without.
    from calm_beam.outputs.prepared import PreparedSweep


def reading(sweep: "PreparedSweep", progress: ProgressLog) -> ReadExamples:
    """Returns what reads the examples of a sweep, in the shards that it has."""
    request = sweep.request
    return ReadExamples(
        sweep.data, num_shards=sweep.num_shards, order=request.order, part=request.part, progress=progress
    )


def decoded(
    pipeline: beam.Pipeline,
    sweep: "PreparedSweep",
    assignments: Sequence[SweepAssignment],
    *,
    workers: Workers,
    progress: ProgressLog,
) -> beam.PCollection:
    """Adds to a pipeline what reads the examples of a sweep and decodes them; gives a `FinishedSweep` an assignment.

    Args:
      pipeline: Of `Workers.new_pipeline`.
      sweep: What is read.
      assignments: How it is decoded, and where to.
      workers: Who decodes.
      progress: Where they report.
    """
    return (
        pipeline
        | "ReadExamples" >> reading(sweep, progress)
        | "DecodeExamples" >> DecodeExamples(assignments, progress, devices=workers.devices)
    )


def run_sweep(
    pipeline: beam.Pipeline,
    sweep: "PreparedSweep",
    *,
    folder: str,
    workers: Workers,
    progress: ProgressLog,
    examples: tuple[beam.PCollection, beam.PCollection] | None = None,
) -> RunMetrics | None:
    """Decodes a sweep to its end, and returns what workers have counted; None where their runner counts nothing.

    Args:
      pipeline: Of `Workers.new_pipeline`.
      sweep: What is decoded, and how.
      folder: Where to, seen by the workers and by this machine; shards of the same sweep in it stay as they are.
      workers: Who decodes.
      progress: Where they report.
      examples: Some of its examples, as `ExamplesRead`; None reads all of them.

    Raises:
      PipelineError: If it did not succeed, or workers have written to a folder of another machine.
      OutputsError: If what is found is not what was decoded.
    """
    assignment = sweep.assignment(folder)
    if examples is None:
        _ = decoded(pipeline, sweep, [assignment], workers=workers, progress=progress)
    else:
        _ = examples | "DecodeExamples" >> DecodeExamples([assignment], progress, devices=workers.devices)
    metrics = run_pipeline(pipeline)
    if not is_file(joined(folder, COMPLETE)):
        raise PipelineError(
            f"{folder}: has no {COMPLETE}, though the job has ended well. If its workers run on other machines, name a "
            "folder that they and this one see (--output, --temp_location), on Cloud Storage or on a shared disk."
        )
    # Checks that all of it is there.
    FinishedSweep.read(folder, assignment.job)
    return metrics
