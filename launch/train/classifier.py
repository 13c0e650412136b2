"""`calm-beam train --stage=classifier`: trains the exit classifier of a model that stays as it is."""

import argparse
import math

import numpy as np
from rich.table import Table

from calm_beam.checkpoints import Arrays, pieces, write_native
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.data import reading_of
from calm_beam.launch.flags.model import declared
from calm_beam.launch.terminal import PlainConsole
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.text import counted
from calm_beam.training.train_classifier import TrainedClassifier, train_classifier

from .flags import checked_output, classifier_config
from .inputs import encoded_pairs, end_of_targets, load_model, open_vocabulary, read_rows, say_end
from .progress import StepBar


def run_classifier_stage(flags: argparse.Namespace, console: PlainConsole) -> None:
    """Checks everything, trains the classifier, writes the model with it, and says how good it is.

    Args:
      flags: Of `parse_train_flags`.
      console: Where to show progress and results.

    Raises:
      UsageError: If a flag, the model or the data are not as they should be; nothing has been written.
    """
    config, output = classifier_config(flags), checked_output(flags)
    checkpoint = load_model(flags.checkpoint, declared(flags))
    assert checkpoint.vocabulary_path is not None
    _check_dtype(checkpoint.arrays, flags.stored_dtype)
    vocabulary = open_vocabulary(
        checkpoint.vocabulary_path, checkpoint.config, chat_template=flags.chat_template, system=flags.system
    )
    reading = reading_of(flags)
    learned, measured = encoded_pairs(
        flags,
        vocabulary,
        rows=read_rows("--data", flags.data, reading=reading),
        validation_rows=read_rows("--validation_data", flags.validation_data, reading=reading),
        max_input_length=config.max_input_length,
        vocab_size=checkpoint.config.vocab_size,
    )
    end_id = end_of_targets(vocabulary, checkpoint.config)

    say_end(console, end_id, model=checkpoint.config)
    if checkpoint.config.exit_classifier:
        console.say(f"Replacing the exit classifier of {flags.checkpoint}.")
    with StepBar(console) as bar:
        trained = train_classifier(
            config,
            checkpoint.config,
            arrays=checkpoint.arrays,
            pairs=learned.pairs,
            validation_pairs=measured.pairs,
            end_id=end_id,
            on_progress=lambda step, steps: bar.show(step, steps, text="batches of states"),
        )
    write_native(
        output,
        trained.config,
        arrays=trained.arrays,
        vocabulary_path=checkpoint.vocabulary_path,
        extra_ids=vocabulary.extra_ids,
        dtype=flags.stored_dtype,
    )
    console.print(quality_table(trained))
    console.say(
        f"Learned from {counted(trained.tokens, 'token')} in {counted(trained.newton_steps, 'Newton step')}. Loss "
        "per token: "
        f"{trained.training_loss:.4f} on them, {trained.validation_loss:.4f} on the validation data."
    )
    console.say(f"Wrote {flags.output}: the same model with an exit classifier; its other weights are unchanged.")


def quality_table(trained: TrainedClassifier) -> Table:
    """Returns the classifier's quality on the validation data as a table, one line per layer but the last."""
    title = "Exit classifier, on validation data"
    table = PlainTable(title)
    table.add_numbers("decoder\nlayer", "tokens that agree\nwith the last layer", "F1 of\ndon't exit", "AUC")
    for layer, quality in enumerate(trained.quality, start=1):
        values = (quality.agreeing, quality.f1, quality.auc)
        table.add_row(str(layer), *("-" if math.isnan(value) else f"{value:.3f}" for value in values))
    return table


def _check_dtype(arrays: Arrays, dtype: str) -> None:
    """Refuses a type of storage that would change the model."""
    for name, array in arrays.items():
        for values in pieces(array):
            with np.errstate(over="ignore"):
                stored = values.astype(dtype)
            if not name.startswith("decoder/meta_cls/") and not np.array_equal(values, stored):
                raise UsageError(
                    f"--stored_dtype={dtype}: would change {name}, and an exit classifier leaves the model as it is. "
                    "Use float32."
                )
