"""Sweeps of commands: checking their flags, running them on any runner, and reading back their generations."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import apache_beam as beam

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.measures import is_own
from calm_beam.inputs import Reading
from calm_beam.outputs import COMPLETE, FinishedSweep
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
    # It loads JAX, which calibrating stored generations does not need.
    from calm_beam.outputs.prepared import PreparedSweep


def reading(sweep: "PreparedSweep", progress: ProgressLog) -> ReadExamples:
    """Returns the transform that reads the examples of a sweep, in the sweep's shards."""
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
    """Adds reading and decoding a sweep to a pipeline; gives one `FinishedSweep` per assignment.

    Args:
      pipeline: A pipeline from `Workers.new_pipeline`.
      sweep: The sweep whose examples are read.
      assignments: How they are decoded, and into which folders.
      workers: The workers that decode.
      progress: Log of the workers' progress.
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
    """Decodes a whole sweep, and returns the workers' counters; None if their runner counts nothing.

    Args:
      pipeline: A pipeline from `Workers.new_pipeline`.
      sweep: What is decoded, and how.
      folder: Output folder, visible to the workers and to this machine; it keeps shards of the same sweep.
      workers: The workers that decode.
      progress: Log of the workers' progress.
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
    # Checks that the sweep is complete.
    FinishedSweep.read(folder, assignment.job)
    return metrics


def prepare_task(
    request: TaskRequest,
    settings: Callable[[], DecodeSettings],
    *,
    needs_references: bool = False,
    runs_here: bool = True,
    compares_texts: bool = True,
    tells_assumed: bool = True,
    **own: Any,
) -> "PreparedSweep":
    """Returns the sweep of a request, checked by `prepare_request`.

    Args:
      request: What is asked for.
      settings: Returns the settings that determine the outputs; its errors are usage errors.
      needs_references: Whether every example must have references.
      runs_here: Whether this machine decodes, so that the sweep must fit its memory.
      compares_texts: Whether output texts are compared, so that the token that ends an output must not be in them.
      tells_assumed: Whether what was assumed of the model is printed; an earlier sweep of the same model has done so.
      own: Fields of `SweepRequest` that are not options, or have another name there.

    Raises:
      UsageError: If anything is wrong; nothing has been written.
    """
    with as_usage((ValueError, OSError)):
        asked = SweepRequest.asked_by(request, settings(), model=request.model_path, **own)
    return prepare_request(
        asked,
        request.patterns,
        reading=request.reading(needs_references=needs_references),
        runs_here=runs_here,
        compares_texts=compares_texts,
        tells_assumed=tells_assumed,
    )


def prepare_request(
    request: SweepRequest,
    patterns: Sequence[str] | None,
    *,
    reading: Reading,
    finds_vocabulary: bool = True,
    runs_here: bool = True,
    compares_texts: bool = True,
    tells_assumed: bool = True,
) -> "PreparedSweep":
    """Returns a sweep whose model, vocabulary and first examples have been checked, and prints what was assumed.

    Args:
      request: What is asked for.
      patterns: Patterns of the data files; None if no data are named.
      reading: How the data files are read.
      finds_vocabulary: Whether the vocabulary in or next to the checkpoint is used if the request names none.
      runs_here: Whether this machine decodes, so that the sweep must fit its memory.
      compares_texts: Whether output texts are compared, so that the token that ends an output must not be in them.
      tells_assumed: Whether what was assumed of the model is printed; an earlier sweep of the same model has done so.

    Raises:
      UsageError: If anything is wrong; nothing has been written.
    """
    # Here, since they load JAX, and stored generations are calibrated without it.
    from calm_beam.decoding.engine_choice import Machine, slow_precision
    from calm_beam.outputs.prepared import prepare_sweep

    if patterns is None:
        raise UsageError("--data is missing: files with the examples, or --seqio_task.")
    with as_usage((ValueError, OSError)):
        data = find_files("--data", patterns, reading=reading)
        prepared = prepare_sweep(
            request, data, finds_vocabulary=finds_vocabulary, runs_here=runs_here, compares_texts=compares_texts
        )
    for sentence in prepared.checkpoint.assumed if tells_assumed else ():
        say(f"note: {sentence}")
    say_detail(prepared.memory)
    engine, measure = prepared.settings.engine, prepared.settings.rule.confidence
    assert engine is not None, "a prepared sweep has one"
    say(f"engine: {engine.in_words()}")
    if is_own(measure) and engine.name == "native":
        say(f"note: {measure} is computed by JAX, outside native code, which takes longer")
    if runs_here and (caution := slow_precision(prepared.settings.precision, Machine.here())):
        say(caution)
    return prepared
