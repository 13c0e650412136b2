"""From flags to a sweep that has been checked."""

from collections.abc import Callable, Sequence
from typing import Any

from calm_beam.decoding.engine_choice import Machine, slow_arithmetic
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.inputs import Reading
from calm_beam.outputs.prepared import PreparedSweep, prepare_sweep
from calm_beam.outputs.request import SweepRequest

from .flags import as_usage
from .flags.data import find_files
from .flags.task import TaskRequest
from .terminal import say, say_detail


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
