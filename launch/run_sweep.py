"""Sweeps of a command: checked from its flags, run on any runner, and their generations read back."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import apache_beam as beam

from calm_beam.decoding.engine_choice import Machine, slow_arithmetic
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.inputs import Reading
from calm_beam.outputs import COMPLETE, FinishedSweep
from calm_beam.outputs.prepared import PreparedSweep, prepare_sweep
from calm_beam.outputs.request import SweepAssignment, SweepRequest
from calm_beam.storage import is_file, joined
from calm_beam.transforms import DecodeExamples, ReadExamples
from calm_beam.transforms.metrics import ProgressLog

from .flags import as_usage
from .flags.shared_options import find_files
from .flags.task import TaskRequest
from .runners import PipelineError, Workers, run_pipeline
from .runners.run import RunMetrics
from .terminal import say, say_detail

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


def prepare_task(
    request: TaskRequest,
    settings: Callable[[], DecodeSettings],
    *,
    needs_references: bool = False,
    runs_here: bool = True,
    compares_texts: bool = True,
    **own: Any,
) -> PreparedSweep:
    """Returns the sweep of a request, checked as by `prepare_request`.

    Args:
      request: What is asked for.
      settings: Returns what determines the outputs; what it raises is about the request.
      needs_references: Whether every example must have references.
      runs_here: As in `prepare_sweep`.
      compares_texts: As in `prepare_sweep`.
      own: As in `SweepRequest.asked_by`.

    Raises:
      UsageError: As `prepare_request`.
    """
    with as_usage((ValueError, OSError)):
        asked = SweepRequest.asked_by(request, settings(), model=request.model_path, **own)
    return prepare_request(
        asked,
        request.patterns,
        reading=request.reading(needs_references=needs_references),
        runs_here=runs_here,
        compares_texts=compares_texts,
    )


def prepare_request(
    request: SweepRequest,
    patterns: Sequence[str] | None,
    *,
    reading: Reading,
    finds_vocabulary: bool = True,
    runs_here: bool = True,
    compares_texts: bool = True,
) -> PreparedSweep:
    """Returns a sweep whose model, vocabulary and first examples have been checked, and says what was assumed.

    Args:
      request: What is asked for.
      patterns: What names the data; None if nothing does.
      reading: How they are read.
      finds_vocabulary: As in `prepare_sweep`.
      runs_here: As in `prepare_sweep`.
      compares_texts: As in `prepare_sweep`.

    Raises:
      UsageError: If anything is wrong; nothing has been written.
    """
    if patterns is None:
        raise UsageError("--data is missing: files with the examples, or --seqio_task.")
    with as_usage((ValueError, OSError)):
        data = find_files("--data", patterns, reading=reading)
        prepared = prepare_sweep(
            request, data, finds_vocabulary=finds_vocabulary, runs_here=runs_here, compares_texts=compares_texts
        )
    for sentence in prepared.checkpoint.assumed:
        say(f"note: {sentence}")
    say_detail(prepared.memory)
    assert prepared.settings.engine is not None, "a prepared sweep has one"
    say(f"engine: {prepared.settings.engine.in_words()}")
    if runs_here and (caution := slow_arithmetic(prepared.settings.precision, Machine.here())):
        say(caution)
    return prepared
