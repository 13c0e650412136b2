"""From flags to a sweep that has been checked."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from calm_beam.decoding.engine_choice import Machine, slow_arithmetic
from calm_beam.decoding.settings import DecodeSettings, descending_grid, uniform_grid
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import Reading
from calm_beam.inputs.demo import embedded
from calm_beam.model.input_length import USUAL_INPUT_LENGTH
from calm_beam.outputs.prepared import PreparedSweep, prepare_sweep
from calm_beam.outputs.request import SweepRequest

from .flags import arithmetic_of, as_usage
from .flags.data import find_files, reading_of
from .flags.task import TaskRequest
from .terminal import say


def prepare_run(
    flags: argparse.Namespace,
    *,
    needs_references: bool,
    settings: DecodeSettings,
    runs_here: bool = True,
) -> PreparedSweep:
    """Returns a sweep whose flags, model, vocabulary and first examples have been checked.

    Args:
      flags: Of `add_task_flags`.
      needs_references: Whether every example must have references.
      settings: What determines the outputs.
      runs_here: As in `prepare_sweep`.

    Raises:
      UsageError: If anything is wrong; nothing has been written.
    """
    if flags.checkpoint is None:
        raise UsageError("--checkpoint is missing: the folder of the model.")
    with as_usage((ValueError, OSError)):
        request = sweep_request(flags, settings)
    reading = reading_of(flags, needs_references=needs_references)
    return prepare_request(request, flags.data, reading=reading, runs_here=runs_here)


def prepare_task(
    request: TaskRequest,
    settings: Callable[[], DecodeSettings],
    *,
    runs_here: bool = True,
    compares_texts: bool = True,
) -> PreparedSweep:
    """Returns the sweep of a request, checked as by `prepare_request`.

    Args:
      request: What is asked for.
      settings: Returns what determines the outputs; what it raises is about the request.
      runs_here: As in `prepare_sweep`.
      compares_texts: As in `prepare_sweep`.

    Raises:
      UsageError: As `prepare_request`.
    """
    with as_usage((ValueError, OSError)):
        asked = request.sweep_asked(settings())
    return prepare_request(
        asked, request.patterns, reading=request.reading(), runs_here=runs_here, compares_texts=compares_texts
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
    say(prepared.memory)
    assert prepared.settings.engine is not None, "a prepared sweep has one"
    say(f"engine: {prepared.settings.engine.in_words()}")
    if runs_here and (caution := slow_arithmetic(prepared.settings.arithmetic, Machine.here())):
        say(caution)
    return prepared


def fill_in_embedded(flags: argparse.Namespace) -> bool:
    """Names the embedded model and data where the user named neither, says so, and returns whether it did."""
    if flags.checkpoint is not None or flags.data is not None:
        return False
    say("no --checkpoint and no --data: the embedded model on the embedded data")
    flags.checkpoint, flags.data = str(embedded.MODEL), (str(embedded.CALIBRATION_SET),)
    return True


def sweep_request(flags: argparse.Namespace, settings: DecodeSettings) -> SweepRequest:
    """Returns what flags ask for: each field but the model and the settings has the name of its flag."""
    names = {field.name for field in dataclasses.fields(SweepRequest)} - {"model", "settings", "shortens_prompts"}
    return SweepRequest(
        model=flags.checkpoint,
        settings=settings,
        shortens_prompts=getattr(flags, "max_input_length", USUAL_INPUT_LENGTH) is None,
        **{name: getattr(flags, name) for name in names if name in flags},
    )


def decode_settings(flags: argparse.Namespace, *, confidence: str | None = None) -> DecodeSettings:
    """Returns what determines the outputs.

    Args:
      flags: Of `add_decode_flags`.
      confidence: The measure; that of the flags if omitted.

    Raises:
      ValueError: If a value or a combination is wrong.
    """
    if flags.thresholds is not None and flags.grid_step is not None:
        raise UsageError(f"--thresholds and --grid_step={flags.grid_step:g} both give a grid: leave one of them out.")
    step = flags.grid_step if flags.grid_step is not None else flags.default_grid_step
    if flags.thresholds is not None:
        grid = descending_grid(flags.thresholds)
    elif step is not None:
        grid = uniform_grid(step)
    else:
        raise UsageError("--thresholds is missing: exit thresholds, comma-separated (or --grid_step).")
    return DecodeSettings(
        rule=ExitRule(
            confidence=confidence or flags.confidence,
            schedule=flags.schedule,
            tau=flags.tau,
            state_propagation=flags.state_propagation,
            token_from=flags.token_from,
            min_exit_layer=flags.min_exit_layer,
            exit_interval=flags.exit_interval,
            patience=flags.patience,
        ).with_source(),
        thresholds=grid,
        max_input_length=flags.max_input_length or USUAL_INPUT_LENGTH,
        max_decode_length=flags.max_decode_length,
        task_prefix=flags.task_prefix,
        arithmetic=arithmetic_of(flags),
    )


def full_model_settings(flags: argparse.Namespace) -> DecodeSettings:
    """Returns what determines the outputs of the full model: nothing exits."""
    return DecodeSettings(
        rule=ExitRule(),
        thresholds=(1.0,),
        max_input_length=flags.max_input_length or USUAL_INPUT_LENGTH,
        max_decode_length=flags.max_decode_length,
        task_prefix=flags.task_prefix,
        arithmetic=arithmetic_of(flags),
    )
