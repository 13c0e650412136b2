"""Running what was prepared: the steps of a model, or the exit classifier of one, and what either writes."""

import contextlib
import functools
from collections.abc import Iterator

from calm_beam.checkpoints import FloatArrays, write_native
from calm_beam.errors import CalmBeamError
from calm_beam.launch.terminal import PlainConsole
from calm_beam.training.log import TrainingLog
from calm_beam.training.saved_state import StateFolder, TrainedModel
from calm_beam.training.train import train
from calm_beam.training.train_classifier import TrainedClassifier, train_classifier

from .prepare import PreparedClassifier, PreparedTraining
from .progress import StepBar, TrainingReporter
from .report import say_classifier_start, say_start

LOG = "training_log.jsonl"
"""The log of the steps, in the folder of the model."""


class ResumableInterruptError(CalmBeamError):
    """Ctrl-C, in a run that can be resumed."""


def run_training(run: PreparedTraining, console: PlainConsole) -> TrainedModel:
    """Trains a model and writes it, with the log of its steps.

    Raises:
      ResumableInterruptError: If it is interrupted, and has a state to resume from; says which.
      ResumeError: If the state to go on from is of another run.
      FloatingPointError: If the loss is no longer finite.
      ValueError: If the data or the weights do not fit the model.
    """
    done, tokens = (run.saved.step, run.saved.target_tokens) if run.saved else (0, 0)
    log = TrainingLog(run.states.path / LOG, after_step=done)

    def begin() -> None:
        # Not before: a run that is refused leaves an earlier one as it was.
        if run.saved is None:
            run.states.delete()
        log.begin()
        say_start(console, run)
        bar.begin()

    with _kept_if_resumable(run.states, log), StepBar(console, done=done) as bar:
        model = train(
            run.config,
            run.model,
            pairs=run.learned.pairs,
            validation_pairs=run.measured.pairs,
            end_id=run.end_id,
            initial=run.initial,
            score=run.score,
            on_start=begin,
            on_progress=TrainingReporter(bar, log, steps=run.config.steps, target_tokens=tokens).report,
            on_save=run.states.save,
            resume_from=run.saved,
        )
    _write(run, model.arrays, console=console)
    log.move_to(run.output / LOG)
    run.states.delete()
    return model


def run_classifier(run: PreparedClassifier, console: PlainConsole) -> TrainedClassifier:
    """Trains an exit classifier, and writes the model with it."""
    say_classifier_start(console, run)
    with StepBar(console) as bar:
        bar.begin()
        trained = train_classifier(
            run.config,
            run.checkpoint.config,
            arrays=run.checkpoint.arrays,
            pairs=run.learned.pairs,
            validation_pairs=run.measured.pairs,
            end_id=run.end_id,
            on_progress=lambda step, steps: bar.show(step, steps, text="batches of states"),
        )
    write_native(
        run.output,
        trained.config,
        arrays=trained.arrays,
        vocabulary_path=run.vocabulary_path,
        extra_ids=run.vocabulary.extra_ids,
        dtype=run.request.stored_dtype,
    )
    return trained


@contextlib.contextmanager
def _kept_if_resumable(states: StateFolder, log: TrainingLog) -> Iterator[None]:
    """Deletes the log of a run that ends early, unless it can be resumed; says so of one that was interrupted."""
    try:
        yield
    except BaseException as error:
        if not log.has_begun:
            raise
        steps = states.steps()
        if not steps:
            log.delete()
        elif isinstance(error, KeyboardInterrupt):
            raise ResumableInterruptError(f"step {steps[-1]}") from error
        raise


def _write(run: PreparedTraining, arrays: FloatArrays, *, console: PlainConsole) -> None:
    """Writes the model; in float32 if float16 cannot hold it, rather than losing it."""
    write = functools.partial(
        write_native,
        run.output,
        run.model,
        arrays=arrays,
        vocabulary_path=run.vocabulary_path,
        extra_ids=run.vocabulary.extra_ids,
    )
    try:
        write(dtype=run.request.stored_dtype)
    except ValueError as error:
        console.say(f"{error} Writing float32 instead.")
        write()
