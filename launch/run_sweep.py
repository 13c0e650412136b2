"""Running a sweep whose generations are read back by the command, wherever they are decoded."""

import apache_beam as beam

from calm_beam.outputs import COMPLETE, FinishedSweep
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import is_file, joined
from calm_beam.transforms import DecodeExamples
from calm_beam.transforms.progress import ProgressLog

from .runners import PipelineError, Workers, run_pipeline
from .runners.metrics import RunMetrics


def run_sweep(
    pipeline: beam.Pipeline,
    examples: tuple[beam.PCollection, beam.PCollection],
    *,
    sweep: PreparedSweep,
    folder: str,
    workers: Workers,
    progress: ProgressLog,
) -> RunMetrics | None:
    """Decodes a sweep to its end, and returns what workers have counted; None where their runner counts nothing.

    Args:
      pipeline: Of `Workers.new_pipeline`.
      examples: What it reads, as `ExamplesRead`.
      sweep: How they are decoded.
      folder: Where to, seen by the workers and by this machine; shards of the same sweep in it stay as they are.
      workers: Who decodes.
      progress: Where they report.

    Raises:
      PipelineError: If it did not succeed, or workers have written to a folder of another machine.
      OutputsError: If what is found is not what was decoded.
    """
    assignment = sweep.assignment(folder)
    _ = examples | "DecodeExamples" >> DecodeExamples(
        [assignment],
        progress,
        accelerator_hint=workers.accelerator_hint,
        needs_accelerator=workers.needs_accelerator,
    )
    metrics = run_pipeline(pipeline)
    if not is_file(joined(folder, COMPLETE)):
        raise PipelineError(
            f"{folder}: has no {COMPLETE}, though the job has ended well. If its workers run on other machines, name a "
            "folder that they and this one see (--output, --temp_location), on Cloud Storage or on a shared disk."
        )
    # Checks that all of it is there.
    FinishedSweep.read(folder, assignment.job)
    return metrics
