"""What `calm-beam train` does once its flags are parsed: both stages."""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from calm_beam.arithmetic import Arithmetic
from calm_beam.checkpoints import FloatArrays, write_native
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.inputs.examples import Example
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.data import reading_of
from calm_beam.launch.flags.metrics import metric_settings
from calm_beam.launch.flags.model import declared
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.interrupts import INTERRUPTED
from calm_beam.metrics.registry import MetricError
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.storage import refuse_links
from calm_beam.text import counted
from calm_beam.training.batches import Pair
from calm_beam.training.config import TrainingConfig
from calm_beam.training.new_model import NEW_MODELS
from calm_beam.training.saved_state import ResumeError, SavedState, StateFolder, TrainedModel
from calm_beam.training.train import train
from calm_beam.training.validation import GenerationScore

from .classifier import run_classifier_stage
from .flags import checked_output, new_model, training_config
from .inputs import (
    EncodedPairs,
    encoded_pairs,
    end_of_targets,
    load_model,
    open_vocabulary,
    read_rows,
    say_end,
    with_exits,
    write_vocabulary,
)
from .progress import StepBar, TrainingLog, TrainingReporter, loss_table

_LOG = "training_log.jsonl"


def train_command(flags: argparse.Namespace) -> int:
    """Trains a model, or its exit classifier, as the flags say, and writes it.

    Returns:
      Exit status: 0 done, 1 failure, 2 bad usage, 130 interrupted with a state to resume from.

    Raises:
      KeyboardInterrupt: If interrupted without such a state.
    """
    console = PlainConsole(stderr=True)
    try:
        if flags.stage == "classifier":
            run_classifier_stage(flags, console)
        else:
            _train_model(flags, console)
    except (UsageError, ResumeError) as error:
        _say(console, f"calm-beam train: {error}")
        return 2
    except (OSError, FloatingPointError, MetricError, ValueError) as error:
        _say(console, f"calm-beam train: {error}")
        return 1
    except _ResumableInterruptError as interrupt:
        _say(console, f"calm-beam train: interrupted. With --resume, the same command goes on after {interrupt}.")
        return INTERRUPTED
    return 0


class _ResumableInterruptError(Exception):
    """Ctrl-C, in a run that can be resumed."""


def _train_model(flags: argparse.Namespace, console: PlainConsole) -> None:
    """Checks everything, trains and writes."""
    use_compilation_cache()
    output, config = checked_output(flags), training_config(flags)
    # Beside the output: on the same disk, and never mistaken for a part of the model.
    states = StateFolder(output.with_name(f"{output.name}.training"))
    saved, going_on = _saved_state(flags, states)
    checkpoint = None if flags.checkpoint is None else load_model(flags.checkpoint, declared(flags))
    model_config = new_model(flags) if checkpoint is None else checkpoint.config
    initial = None if checkpoint is None else checkpoint.arrays
    own = model_config.exit_norms, model_config.exit_heads
    model_config, initial = with_exits(flags, model_config, initial)
    if flags.dropout is None:
        config = dataclasses.replace(config, dropout_rate=architecture_of(model_config).usual_dropout)
    reading = reading_of(flags)
    rows = read_rows("--data", flags.data, reading=reading)
    validation_rows = (
        read_rows("--validation_data", flags.validation_data, reading=reading) if flags.validation_data else []
    )
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            vocabulary_path = pathlib.Path(folder, NEW_MODELS[flags.architecture].vocabulary)
            write_vocabulary(rows, flags.task_prefix, path=vocabulary_path, vocab_size=model_config.vocab_size)
        else:
            assert checkpoint.vocabulary_path is not None
            vocabulary_path = checkpoint.vocabulary_path
        vocabulary = open_vocabulary(
            vocabulary_path, model_config, chat_template=flags.chat_template, system=flags.system
        )
        learned, measured = encoded_pairs(
            flags,
            vocabulary,
            rows=rows,
            validation_rows=validation_rows,
            max_input_length=config.max_input_length,
            vocab_size=model_config.vocab_size,
        )
        end_id = end_of_targets(vocabulary, model_config)
        done, tokens = (saved.step, saved.target_tokens) if saved else (0, 0)
        log = TrainingLog(states.path / _LOG, after_step=done)

        def begin() -> None:
            # Not before: a run that is refused leaves an earlier one as it was.
            if saved is None:
                states.delete()
            log.begin()
            if model_config.exit_classifier:
                _say(console, "The exit classifier is kept as it is, and was trained for the weights before these.")
            if checkpoint is not None and own != (model_config.exit_norms, model_config.exit_heads):
                _say(console, "Exits begin with the final norm and the output head, and are trained apart from them.")
            _report_start(console, model_config, config=config, learned=learned, measured=measured)
            say_end(console, end_id, model=model_config)
            if saved is not None:
                _say(console, going_on)

        with _kept_if_resumable(states, log), StepBar(console, done=done) as bar:
            model = train(
                config,
                model_config,
                pairs=learned.pairs,
                validation_pairs=measured.pairs,
                end_id=end_id,
                initial=initial,
                score=_score(
                    flags, config, model=model_config, vocabulary=vocabulary, pairs=measured.pairs, rows=validation_rows
                ),
                on_start=begin,
                on_progress=TrainingReporter(bar, log, steps=config.steps, target_tokens=tokens).report,
                on_save=states.save,
                resume_from=saved,
            )
        _write(
            console,
            output,
            config=model_config,
            arrays=model.arrays,
            vocabulary_path=vocabulary_path,
            extra_ids=vocabulary.extra_ids,
            dtype=flags.stored_dtype,
        )
    log.move_to(output / _LOG)
    states.delete()
    _report_end(console, flags, model=model)


def _saved_state(flags: argparse.Namespace, states: StateFolder) -> tuple[SavedState | None, str]:
    """Returns the state to go on from, or None to start anew; and what to say once it has been found to fit."""
    refuse_links(states.path, inside=states.path.parent)
    steps = states.steps()
    if not flags.resume:
        if steps and not flags.overwrite:
            raise UsageError(
                f"--output={flags.output}: an interrupted run of it left states in {states.path}. Pass --resume to go "
                "on with it, or --overwrite to start again."
            )
        return None, ""
    if not steps:
        raise UsageError(f"--resume: there is no state of an interrupted run in {states.path}. Leave it out to start.")
    saved = states.load()
    unread = "" if saved.step == steps[-1] else f" (the newer state, of step {steps[-1]}, cannot be read)"
    return saved, f"Going on after step {saved.step}{unread}."


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
            raise _ResumableInterruptError(f"step {steps[-1]}") from error
        raise


def _score(
    flags: argparse.Namespace,
    config: TrainingConfig,
    *,
    model: ModelConfig,
    vocabulary: Vocabulary,
    pairs: Sequence[Pair],
    rows: Sequence[Example],
) -> GenerationScore | None:
    """Returns what decides the best weights, or None if the loss does."""
    if flags.best_by == "loss":
        return None
    return GenerationScore(
        flags.best_by,
        model,
        prompts=[prompt for prompt, _ in pairs[: flags.best_by_rows]],
        references=[row.references for row in rows[: flags.best_by_rows]],
        decode=vocabulary.decode,
        max_target_length=config.max_target_length,
        metric_settings=metric_settings(flags),
        arithmetic=Arithmetic(dtype=config.dtype),
        model_parallelism=config.model_parallelism,
    )


def _write(
    console: PlainConsole,
    output: pathlib.Path,
    *,
    config: ModelConfig,
    arrays: FloatArrays,
    vocabulary_path: pathlib.Path,
    extra_ids: int,
    dtype: str,
) -> None:
    """Writes the model; in float32 if float16 cannot hold it, rather than losing it."""
    write = functools.partial(
        write_native, output, config, arrays=arrays, vocabulary_path=vocabulary_path, extra_ids=extra_ids
    )
    try:
        write(dtype=dtype)
    except ValueError as error:
        _say(console, f"{error} Writing float32 instead.")
        write()


def _report_start(
    console: PlainConsole, model: ModelConfig, *, config: TrainingConfig, learned: EncodedPairs, measured: EncodedPairs
) -> None:
    _say(
        console,
        f"Training {architecture_of(model).layers_in_words(model)} of width {model.emb_dim} on "
        f"{counted(len(learned.pairs), 'pair')} for {counted(config.steps, 'step')}; "
        f"{counted(len(measured.pairs), 'pair')} to validate on.",
    )
    # The end takes one place.
    cut_targets = sum(len(target) >= config.max_target_length for _, target in learned.pairs)
    if learned.cut or cut_targets:
        _say(
            console,
            f"Cut {counted(learned.cut, 'input')} to --max_input_length={config.max_input_length} and "
            f"{counted(cut_targets, 'reference')} to "
            f"--max_target_length={config.max_target_length}.",
        )


def _report_end(console: PlainConsole, flags: argparse.Namespace, *, model: TrainedModel) -> None:
    chosen = "the last"
    if model.validation is not None:
        console.print(loss_table(model.validation.losses))
        value = model.validation.losses[-1] if model.validation.score is None else model.validation.score
        if flags.validate_every:
            chosen = f"the best of those validated by {flags.best_by} ({value:.4f})"
    _say(console, f"Wrote {flags.output}: the weights after step {model.step}, {chosen}.")


def _say(console: PlainConsole, line: str) -> None:
    console.say(line)
