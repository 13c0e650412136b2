"""`calm-beam train`: trains a model whose every decoder layer can predict, or fine-tunes one for that.

A new model and its vocabulary, from rows {"input": str, "references": [str, ...]}:

    calm-beam train --data='train-*.jsonl.gz' --validation_data=validation.jsonl --output=model --steps=2000

Fine-tuning a T5 1.1 checkpoint, with its own vocabulary:

    calm-beam train --checkpoint=t5_small/checkpoint_1000000 --data=train.jsonl --output=model --steps=500

Every reference of a training row gives a pair to learn from; of a validation row, the first one does.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from calm_beam.checkpoints import Checkpoint, CheckpointError, FloatArrays, load_checkpoint, write_native
from calm_beam.examples import DataError, Example, parse_examples
from calm_beam.model import T5Config
from calm_beam.training.batches import Pair
from calm_beam.training.optimizer import OptimizerConfig
from calm_beam.training.train import Progress, TrainingConfig, train
from calm_beam.training.vocabulary import train_vocabulary
from calm_beam.vocabulary import Vocabulary, VocabularyError

from .data_files import find_files
from .flags import FlagParser, UsageError, parse_own_flags, refuse_cloud_paths, texts

# Sizes of a new model, by flag; a checkpoint has its own.
_NEW_MODEL = {
    "vocab_size": 2048,
    "emb_dim": 128,
    "num_heads": 4,
    "head_dim": 32,
    "mlp_dim": 256,
    "num_encoder_layers": 3,
    "num_decoder_layers": 8,
}
_SECONDS_BETWEEN_LINES = 10.0


def main(argv: Sequence[str]) -> int:
    """Trains a model and writes it.

    Args:
      argv: Flags, without the program's name.

    Returns:
      Exit status: 0 done, 1 failure, 2 bad usage.
    """
    console = Console(stderr=True)
    try:
        _run(_parse(argv), console)
    except UsageError as error:
        console.print(f"calm-beam train: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except (OSError, FloatingPointError, ValueError) as error:
        console.print(f"calm-beam train: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    description = "Trains a model whose every decoder layer can predict, with the layer-weighted loss."
    parser = FlagParser(prog="calm-beam train", description=description)
    add = parser.add_argument
    add(
        "--data",
        type=texts,
        required=True,
        help="JSONL files (.gz read as is) of training rows; globs, comma-separated",
    )
    add(
        "--validation_data",
        type=texts,
        help="JSONL files of rows to measure the loss of every layer on; globs, comma-separated",
    )
    add("--output", required=True, help="folder to write the model to")
    add("--overwrite", action="store_true", help="write even if --output holds files already")
    add("--checkpoint", help="model to start from, with its vocabulary; without it, a new one of the sizes below")
    for name, default in _NEW_MODEL.items():
        add(f"--{name}", type=int, help=f"{name.replace('_', ' ')} of a new model (default {default})")
    defaults = TrainingConfig(steps=2000)
    for name, meaning in {
        "steps": "optimiser steps",
        "batch_tokens": "padded tokens of a batch, on its wider side",
        "dropout": "share of activations dropped",
        "seed": "decides initial weights, batches and dropout",
        "max_input_length": "most source tokens, eos included; longer inputs are cut",
        "max_target_length": "most target tokens, eos included; longer references are cut",
        "sampled_layers": "lower layers whose loss a step computes beside the last; 0 for all of them",
    }.items():
        default = getattr(defaults, "dropout_rate" if name == "dropout" else name)
        add(f"--{name}", type=type(default), default=default, help=f"{meaning} (default {default})")
    for name in ("muon_learning_rate", "adam_learning_rate", "warmup_steps"):
        default = getattr(OptimizerConfig(), name)
        add(f"--{name}", type=type(default), default=default, help=f"{name.replace('_', ' ')} (default {default})")
    add("--dtype", choices=("float32", "float16"), default="float32", help="precision of the weights as stored")
    add("--task_prefix", default="", help="text to put before every input")
    return parse_own_flags(parser, argv)


def _run(flags: argparse.Namespace, console: Console) -> None:
    """Checks everything, trains and writes."""
    refuse_cloud_paths([("--output", flags.output), ("--checkpoint", flags.checkpoint or "")])
    output = pathlib.Path(flags.output)
    _check_output(output, overwrite=flags.overwrite)
    config = _training_config(flags)
    checkpoint = _load(flags)
    new_model = None if checkpoint else _new_model(flags)
    rows = _read_examples("--data", flags.data)
    validation_rows = _read_examples("--validation_data", flags.validation_data) if flags.validation_data else []
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            model_config, vocabulary_path = checkpoint.config, checkpoint.vocabulary_path
        else:
            assert new_model is not None
            vocabulary_path = pathlib.Path(folder, "sentencepiece.model")
            model_config = new_model
            _train_vocabulary(rows, flags.task_prefix, vocabulary_path, vocab_size=new_model.vocab_size)
        assert vocabulary_path is not None
        vocabulary = _open_vocabulary(vocabulary_path, model_config)
        pairs = [pair for row in rows for pair in _pairs(vocabulary, flags.task_prefix, row, row.references)]
        validation_pairs = [
            pair for row in validation_rows for pair in _pairs(vocabulary, flags.task_prefix, row, row.references[:1])
        ]
        if model_config.exit_classifier:
            console.print("The exit classifier is kept as it is, and was trained for the weights before these.")
        _report_start(console, model_config, config, pairs, validation_pairs)
        reporter = _Reporter(console, config.steps)
        with reporter:
            arrays = train(
                config,
                model_config,
                pairs,
                validation_pairs,
                initial=None if checkpoint is None else checkpoint.arrays,
                on_progress=reporter.report,
            )
        _write(console, output, model_config, arrays, vocabulary_path, flags.dtype)
    if reporter.validation_losses is not None:
        console.print(_loss_table(reporter.validation_losses))
    console.print(f"Wrote {output}", markup=False, highlight=False, soft_wrap=True)


def _write(
    console: Console,
    output: pathlib.Path,
    config: T5Config,
    arrays: FloatArrays,
    vocabulary_path: pathlib.Path,
    dtype: str,
) -> None:
    """Writes the model; in float32 if float16 cannot hold it, rather than losing it."""
    try:
        write_native(output, config, arrays, vocabulary_path=vocabulary_path, dtype=dtype)
    except ValueError as error:
        console.print(f"{error} Writing float32 instead.", markup=False, highlight=False, soft_wrap=True)
        write_native(output, config, arrays, vocabulary_path=vocabulary_path)


def _pairs(vocabulary: Vocabulary, task_prefix: str, row: Example, targets: Sequence[str]) -> list[Pair]:
    """Returns source and target ids, without eos, of a row and each of the targets."""
    source = vocabulary.encode(f"{task_prefix}{row.input}")
    return [(source, vocabulary.encode(target)) for target in targets]


def _check_output(output: pathlib.Path, *, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output={output}: is a file, expected a folder or nothing.")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UsageError(f"--output={output}: is not empty. Name another folder, or pass --overwrite.")


def _training_config(flags: argparse.Namespace) -> TrainingConfig:
    try:
        return TrainingConfig(
            steps=flags.steps,
            batch_tokens=flags.batch_tokens,
            max_input_length=flags.max_input_length,
            max_target_length=flags.max_target_length,
            dropout_rate=flags.dropout,
            sampled_layers=flags.sampled_layers,
            seed=flags.seed,
            optimizer=OptimizerConfig(
                muon_learning_rate=flags.muon_learning_rate,
                adam_learning_rate=flags.adam_learning_rate,
                warmup_steps=flags.warmup_steps,
            ),
        )
    except ValueError as error:
        # Fields are named as the flags are, but for this one.
        raise UsageError("--" + str(error).replace("dropout_rate", "dropout", 1)) from error


def _load(flags: argparse.Namespace) -> Checkpoint | None:
    if flags.checkpoint is None:
        return None
    given = [f"--{name}" for name in _NEW_MODEL if getattr(flags, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: a model from --checkpoint has its own sizes. Leave them out.")
    try:
        checkpoint = load_checkpoint(flags.checkpoint)
    except CheckpointError as error:
        raise UsageError(f"--checkpoint: {error}") from error
    if checkpoint.vocabulary_path is None:
        raise UsageError(f"--checkpoint={flags.checkpoint}: has no vocabulary. Put its sentencepiece.model beside it.")
    return checkpoint


def _new_model(flags: argparse.Namespace) -> T5Config:
    sizes: dict[str, Any] = {
        name: default if getattr(flags, name) is None else getattr(flags, name) for name, default in _NEW_MODEL.items()
    }
    try:
        return T5Config(**sizes)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _train_vocabulary(rows: Sequence[Example], task_prefix: str, path: pathlib.Path, *, vocab_size: int) -> None:
    """Writes a vocabulary of the rows' texts."""
    texts = [text for row in rows for text in (f"{task_prefix}{row.input}", *row.references)]
    try:
        train_vocabulary(texts, path, vocab_size=vocab_size)
    except VocabularyError as error:
        raise UsageError(f"--vocab_size={vocab_size}: {error}") from error


def _open_vocabulary(path: pathlib.Path, model: T5Config) -> Vocabulary:
    try:
        vocabulary = Vocabulary(path)
    except VocabularyError as error:
        raise UsageError(str(error)) from error
    if vocabulary.size > model.vocab_size:
        raise UsageError(
            f"vocabulary {path}: has {vocabulary.size} ids, the model only {model.vocab_size}. "
            "They do not belong together."
        )
    return vocabulary


def _read_examples(flag: str, patterns: Sequence[str]) -> list[Example]:
    """Returns all examples of the files, each with text and at least one reference to learn from."""
    examples = []
    for path in find_files(flag, patterns):
        try:
            with open(path, "rb") as raw:
                for example in parse_examples(raw, path=path):
                    if example.input is None or not example.references:
                        raise DataError(f"{path}, line {example.line}: training needs input as text, and references.")
                    examples.append(example)
        except (DataError, OSError) as error:
            raise UsageError(str(error)) from error
    if not examples:
        raise UsageError(f"{flag} {','.join(patterns)}: there are no examples.")
    return examples


def _report_start(
    console: Console, model: T5Config, config: TrainingConfig, pairs: Sequence[Pair], validation: Sequence[Pair]
) -> None:
    console.print(
        f"Training {model.num_encoder_layers} + {model.num_decoder_layers} layers of width {model.emb_dim} on "
        f"{len(pairs)} pairs for {config.steps} steps; {len(validation)} pairs to validate on.",
        highlight=False,
        soft_wrap=True,
    )
    # The eos takes one place of each side.
    cut_inputs = sum(len(source) >= config.max_input_length for source, _ in pairs)
    cut_targets = sum(len(target) >= config.max_target_length for _, target in pairs)
    if cut_inputs or cut_targets:
        console.print(
            f"Cut {cut_inputs} inputs to --max_input_length={config.max_input_length} and {cut_targets} references to "
            f"--max_target_length={config.max_target_length}.",
            highlight=False,
            soft_wrap=True,
        )


class _Reporter:
    """Shows progress: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, console: Console, steps: int) -> None:
        self.validation_losses: tuple[float, ...] | None = None
        self._console = console
        self._steps = steps
        self._start = self._last_line = time.monotonic()
        self._bar = ProgressBar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def report(self, progress: Progress) -> None:
        """Takes one report of the training loop."""
        self.validation_losses = progress.validation_losses or self.validation_losses
        now = time.monotonic()
        elapsed = max(now - self._start, 1e-9)
        speed = f"loss {progress.loss:.3f}, {progress.target_tokens / elapsed:,.0f} target tokens/s"
        self._bar.update(self._task, completed=progress.step, description=speed)
        is_due = now - self._last_line >= _SECONDS_BETWEEN_LINES or progress.step == self._steps
        if not self._console.is_terminal and is_due:
            self._last_line = now
            remaining = elapsed / progress.step * (self._steps - progress.step)
            self._console.print(
                f"step {progress.step}/{self._steps}, {speed}, {remaining:.0f} s left", highlight=False, soft_wrap=True
            )


def _loss_table(losses: Sequence[float]) -> Table:
    table = Table(title="Validation loss (nats per target token)")
    table.add_column("decoder layer", justify="right")
    table.add_column("loss", justify="right")
    for layer, loss in enumerate(losses, start=1):
        table.add_row(str(layer), f"{loss:.3f}")
    return table
