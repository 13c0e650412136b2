"""The flags of `train`: which there are, and which belong together."""

import argparse
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from calm_beam.arithmetic import DTYPES
from calm_beam.inputs.seqio_names import seqio_name
from calm_beam.launch.flags import (
    FlagParser,
    UsageError,
    add_chat_flags,
    add_data_flags,
    add_model_flags,
    parse_own_flags,
    paths,
    utf8_text,
    whole_number,
)
from calm_beam.launch.flags.metrics import BLEURT_CHECKPOINT_HELP, METRIC_NAMES, checked_metrics, metric_settings
from calm_beam.model import ModelConfig
from calm_beam.storage import is_cloud_path
from calm_beam.training.config import LAYER_WEIGHTS, AdafactorConfig, ClassifierConfig, MuonConfig, TrainingConfig
from calm_beam.training.exit_objective import OBJECTIVES
from calm_beam.training.new_model import NEW_MODELS

_Config = TypeVar("_Config")

_STEPS, _SAVE_EVERY, _BEST_BY_ROWS = 2000, 500, 200
# A batch shape takes as long to compile as a dozen steps to run. On short sentences, two instead of one let a step hold
# two thirds more tokens, six instead of two a third more.
_LEAST_SHAPES, _STEPS_PER_SHAPE = 2, 100
# Sizes of new models, and the architectures that have them; a checkpoint has its own.
_NEW_MODEL = tuple(dict.fromkeys(size for new in NEW_MODELS.values() for size in new.sizes))
_FIRST = next(iter(NEW_MODELS))
_OPTIMIZERS: dict[str, type[MuonConfig] | type[AdafactorConfig]] = {"muon": MuonConfig, "adafactor": AdafactorConfig}
_RATES = {
    "muon": ("muon_learning_rate", "adam_learning_rate", "warmup_steps"),
    "adafactor": ("learning_rate",),
}
_SETTINGS = (
    "dropout",
    "layer_dropout",
    "layer_weights",
    "sampled_layers",
    "rotating_layers",
    "label_smoothing",
    "z_loss",
    "validate_every",
)
_BEST_AND_STATES = ("best_by", "best_by_rows", "bleurt_checkpoint", "save_every", "resume")
# Flags of one stage, which the other refuses.
_NEW = ("architecture", *_NEW_MODEL)
_EXITS = ("exit_norm", "exit_heads")
_OF_MODEL = (*_NEW, *_EXITS, *_SETTINGS, "optimizer", *_RATES["muon"], *_RATES["adafactor"], *_BEST_AND_STATES)
_OF_CLASSIFIER = ("objective", "balance_classes", "classifier_logits")
_SHARED = ("batch_tokens", "max_input_length", "max_target_length", "seed", "dtype", "model_parallelism")
# What a setting is called on the command line, where that is not its own name.
_FLAG_NAMES = {"dropout_rate": "dropout", "num_logits": "classifier_logits"}
_ESSENTIALS = (
    "--stage",
    "--data",
    "--validation_data",
    "--output",
    "--overwrite",
    "--checkpoint",
    "--steps",
    "--batch_tokens",
    "--validate_every",
    "--best_by",
    "--resume",
)


def parse_train_flags(argv: Sequence[str], *, doc: str | None = None) -> argparse.Namespace:
    """Returns the flags; those that were not given are None, or False.

    Args:
      argv: Flags, without the program's name.
      doc: What the help shows.

    Raises:
      UsageError: If a flag is unknown or malformed, or does not go with the others.
    """
    flags = parse_own_flags(train_parser(doc), argv)
    if flags.data is None:
        raise UsageError("--data is missing: files with the rows to learn from, or --seqio_task.")
    _take_validation_split(flags)
    if flags.system is not None and flags.chat_template is None:
        raise UsageError("--system belongs to --chat_template, which is missing.")
    if is_cloud_path(flags.output):
        raise UsageError(
            f"--output={flags.output}: training writes its states and its model to a local folder. Copy the model "
            "afterwards, with calm-beam convert."
        )
    others = _OF_MODEL if flags.stage == "classifier" else _OF_CLASSIFIER
    _refuse(flags, others, why=f"not a flag of --stage={flags.stage}")
    if flags.stage == "classifier":
        for name, why in (("checkpoint", "the model to train it for"), ("validation_data", "rows to measure it on")):
            if getattr(flags, name) is None:
                raise UsageError(f"--{name} is missing: --stage=classifier needs {why}.")
        return flags
    flags.optimizer = flags.optimizer or "muon"
    for optimizer, names in _RATES.items():
        if optimizer != flags.optimizer:
            _refuse(flags, names, why=f"belongs to --optimizer={optimizer}, this run has {flags.optimizer}")
    if flags.checkpoint is not None:
        _refuse(flags, _NEW, why="a model from --checkpoint has its own sizes")
    else:
        flags.architecture = flags.architecture or _FIRST
        own = NEW_MODELS[flags.architecture]
        known = {name for new in NEW_MODELS.values() for name in (*new.sizes, *new.options)}
        _refuse(
            flags,
            sorted(known - {*own.sizes, *own.options}),
            why=f"--architecture={flags.architecture} has no such number",
        )
    _check_best_by(flags)
    return flags


def training_config(flags: argparse.Namespace) -> TrainingConfig:
    """Returns the settings of `--stage=model`.

    Raises:
      UsageError: If a value is out of range.
    """
    if flags.rotating_layers:
        _refuse(flags, ("sampled_layers",), why="belongs to runs without --rotating_layers")
    steps = _STEPS if flags.steps is None else flags.steps
    return _build(
        TrainingConfig,
        steps=steps,
        num_shapes=min(TrainingConfig.num_shapes, _LEAST_SHAPES + steps // _STEPS_PER_SHAPE),
        save_every=_SAVE_EVERY if flags.save_every is None else flags.save_every,
        optimizer=_build(_OPTIMIZERS[flags.optimizer], **_given(flags, _RATES[flags.optimizer])),
        **_given(flags, (*_SETTINGS, *_SHARED)),
    )


def classifier_config(flags: argparse.Namespace) -> ClassifierConfig:
    """Returns the settings of `--stage=classifier`.

    Raises:
      UsageError: If a value is out of range, or does not go with another.
    """
    return _build(
        ClassifierConfig, stored_dtype=flags.stored_dtype, **_given(flags, ("steps", *_OF_CLASSIFIER, *_SHARED))
    )


def new_model(flags: argparse.Namespace) -> ModelConfig:
    """Returns the sizes of a new model.

    Raises:
      UsageError: If a value is out of range.
    """
    new = NEW_MODELS[flags.architecture]
    given = _given(flags, (*new.sizes, *new.options))
    return _build(lambda **settings: new.config(settings), **given)


def checked_output(flags: argparse.Namespace) -> pathlib.Path:
    """Returns the folder to write to.

    Raises:
      UsageError: If it is a file, or holds files and `--overwrite` is not given.
    """
    output = pathlib.Path(flags.output).resolve()
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output={flags.output}: is a file, expected a folder or nothing.")
    if output.is_dir() and any(output.iterdir()) and not flags.overwrite:
        raise UsageError(f"--output={flags.output}: is not empty. Name another folder, or pass --overwrite.")
    return output


def train_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam train", doc=doc, essentials=_ESSENTIALS, heading="what to train, and on what")
    defaults, muon = TrainingConfig(steps=_STEPS), MuonConfig()
    parser.add_config_flag()
    add = parser.add_argument
    add("--stage", choices=("model", "classifier"), default="model", help="what to train")
    add_data_flags(parser, kind="rows to learn from", split="train")
    add("--validation_data", type=paths, help="files with the rows to measure on, in the same format")
    add("--seqio_validation_split", help="split of --seqio_task to measure on, instead of --validation_data")
    add("--output", required=True, help="folder to write the model to")
    add(
        "--overwrite", action="store_true", help="write even if --output holds files, or an interrupted run left states"
    )
    add("--checkpoint", help="model to start from, with its vocabulary; without it, a new one of the sizes below")
    add_model_flags(parser)
    add("--task_prefix", type=utf8_text, default="", help="text to put before every input")
    add_chat_flags(parser)
    add("--stored_dtype", choices=("float32", "float16"), default="float32", help="type of the weights as stored")
    steps = (
        f"optimiser steps (default {_STEPS}); for a classifier, batches to learn from, whose states are kept in memory"
    )
    add("--steps", type=int, help=f"{steps} (default {ClassifierConfig().steps})")
    for name, meaning in {
        "batch_tokens": "padded tokens of a batch, on its wider side",
        "seed": "decides initial weights, batches, sampled layers and dropout",
        "max_input_length": "most tokens of a prompt, eos included; longer inputs are cut",
        "max_target_length": "most tokens of a reference, eos included; longer ones are cut",
    }.items():
        add(f"--{name}", type=int, help=f"{meaning} (default {getattr(defaults, name)})")
    add(
        "--dtype",
        choices=DTYPES,
        help="type of products and activations; learned weights are float32 (default float32)",
    )
    add(
        "--model_parallelism",
        type=whole_number(1),
        metavar="N",
        help="devices that share the model, the first of this machine, for models larger than one device (default 1)",
    )

    add = parser.add_argument_group("--stage=model").add_argument
    architecture = "of a new model: an encoder-decoder (t5) or a decoder-only one (llama)"
    add("--architecture", choices=tuple(NEW_MODELS), help=f"{architecture} (default {_FIRST})")
    for name in _NEW_MODEL:
        add(f"--{name}", type=int, help=f"{name.replace('_', ' ')} of a new model ({_default_size(name)})")
    exits = "give every decoder layer below the last a norm of its own, which begins as the final one (EE-LLM)"
    add("--exit_norm", action="store_true", help=exits)
    heads = "the output head for all layers, or one of its own for each, which begins as that of --checkpoint (EE-LLM)"
    add("--exit_heads", choices=("shared", "separate"), help=f"{heads}; default: as --checkpoint has it, or shared")
    _add_loss_flags(add, defaults)
    add("--optimizer", choices=tuple(_OPTIMIZERS), help="muon with adam, or adafactor as in the paper (default muon)")
    adafactor = "constant and relative to each array's size, of adafactor"
    add("--learning_rate", type=float, help=f"{adafactor} (default {AdafactorConfig().learning_rate})")
    for name, kind in (("muon_learning_rate", float), ("adam_learning_rate", float), ("warmup_steps", int)):
        add(f"--{name}", type=kind, help=f"{name.replace('_', ' ')}, of muon (default {getattr(muon, name)})")
    add("--validate_every", type=int, help="steps between validations; 0 for one at the end (default 0)")
    best_by = f"what decides the best weights: loss (of the last layer; default), or a metric: {METRIC_NAMES}"
    add("--best_by", metavar="NAME", help=best_by)
    add("--bleurt_checkpoint", help=BLEURT_CHECKPOINT_HELP)
    parser.only_with("--bleurt_checkpoint", "--best_by=bleurt")
    rows = f"validation rows that the metric is measured on (default {_BEST_BY_ROWS})"
    add("--best_by_rows", type=whole_number(1), help=rows)
    add("--save_every", type=int, help=f"steps between states to resume from; 0 for none (default {_SAVE_EVERY})")
    add("--resume", action="store_true", help="go on with the interrupted run of the same flags and data")

    add = parser.add_argument_group("--stage=classifier").add_argument
    add(
        "--objective",
        choices=OBJECTIVES,
        help="every layer for itself, or up to the first that agrees (default independent)",
    )
    add("--balance_classes", action="store_true", help="same weight for both classes, as T5X does; for independent")
    logits = "2 as T5X stores a classifier, 1 for the d + 1 weights of the paper (default 2)"
    add("--classifier_logits", type=int, choices=(1, 2), help=logits)
    return parser


def _add_loss_flags(add: Callable[..., Any], defaults: TrainingConfig) -> None:
    """Adds the flags of what a step computes."""
    add("--layer_weights", choices=LAYER_WEIGHTS, help=f"layers' shares in the loss (default {defaults.layer_weights})")
    sampled = "lower layers whose loss a step computes beside the last; 0 for all of them"
    add("--sampled_layers", type=int, help=f"{sampled} (default {defaults.sampled_layers})")
    rotating = "losses of every R-th lower layer, in turn (LayerSkip), instead of a sample; 0 for a sample (default 0)"
    add("--rotating_layers", type=int, metavar="R", help=rotating)
    dropout = f"share of activations dropped (default {defaults.dropout_rate}; decoder-only models have no dropout)"
    add("--dropout", type=float, help=dropout)
    layer_dropout = "how often rows pass the last decoder layer by, and lower ones less often (LayerSkip; default 0)"
    add("--layer_dropout", type=float, metavar="P", help=layer_dropout)
    add("--label_smoothing", type=float, help="probability spread over all other tokens (default 0)")
    add("--z_loss", type=float, help="weight of the squared log-normalizer in the loss; T5X has 1e-4 (default 0)")


def _default_size(name: str) -> str:
    """Returns which size new models have, and which of them have it."""
    sizes = {architecture: new.sizes[name] for architecture, new in NEW_MODELS.items() if name in new.sizes}
    only = "" if len(sizes) == len(NEW_MODELS) else f"; {', '.join(sizes)} only"
    return f"default {next(iter(sizes.values()))}{only}"


def _take_validation_split(flags: argparse.Namespace) -> None:
    split = flags.seqio_validation_split
    if split is None:
        return
    if flags.seqio_task is None or flags.validation_data is not None:
        raise UsageError("--seqio_validation_split goes with --seqio_task, and instead of --validation_data.")
    flags.validation_data = (seqio_name(flags.seqio_task, split),)


def _check_best_by(flags: argparse.Namespace) -> None:
    """Fills in the flags about the best weights, and refuses what cannot be measured."""
    flags.best_by = flags.best_by or "loss"
    if flags.validation_data is None and (flags.validate_every or flags.best_by != "loss"):
        raise UsageError("--validation_data is missing: --validate_every and --best_by need rows to measure on.")
    if flags.best_by == "loss":
        _refuse(flags, ("best_by_rows",), why="belongs to a metric in --best_by")
        return
    try:
        (flags.best_by,) = checked_metrics([flags.best_by], metric_settings(flags))
    except ValueError as error:
        raise UsageError(f'--best_by is "loss" or a metric; {error}') from error
    flags.best_by_rows = flags.best_by_rows or _BEST_BY_ROWS
    if not flags.validate_every:
        raise UsageError(
            f"--best_by={flags.best_by} needs --validate_every: with one validation, at the end, there is nothing to "
            "choose from."
        )


def _refuse(flags: argparse.Namespace, names: Iterable[str], *, why: str) -> None:
    """Raises `UsageError` if any of the flags was given."""
    # By identity, since 0 is a value that was given.
    given = [f"--{name}" for name in names if getattr(flags, name) is not None and getattr(flags, name) is not False]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}. Leave {'it' if len(given) == 1 else 'them'} out.")


def _given(flags: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of the flags that were given, by the names of the settings."""
    settings = {flag: setting for setting, flag in _FLAG_NAMES.items()}
    return {settings.get(name, name): getattr(flags, name) for name in names if getattr(flags, name) is not None}


def _build(config: Callable[..., _Config], **settings: Any) -> _Config:
    """Returns the settings as a config, whose complaints are turned into those about flags."""
    try:
        return config(**settings)
    except ValueError as error:
        setting, _, rest = str(error).partition(" ")
        raise UsageError(f"--{_FLAG_NAMES.get(setting, setting)} {rest}") from error
