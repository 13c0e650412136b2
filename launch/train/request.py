"""What `calm-beam train` is asked for: a model, or the exit classifier of one, and what both are learned from."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from calm_beam.errors import UsageError
from calm_beam.inputs.reading import seqio_name
from calm_beam.launch.flags.shared_options import METRIC_NAMES, MetricFiles
from calm_beam.model import ModelConfig
from calm_beam.model.registry import USUAL_INPUT_LENGTH
from calm_beam.options import Options, again, option, options_of, switch
from calm_beam.options.groups import (
    MODEL_AND_DATA,
    Chat,
    DataSource,
    FactsOfAny,
    Lengths,
    Memory,
    ModelSource,
    PrecisionOptions,
)
from calm_beam.options.kinds import integer, number, paths, whole_number
from calm_beam.options.option import shared
from calm_beam.storage import is_cloud_path
from calm_beam.training.config import (
    LAYER_WEIGHTS,
    OBJECTIVES,
    AdafactorConfig,
    ClassifierConfig,
    MuonConfig,
    TrainingConfig,
)
from calm_beam.training.new_model import NEW_MODELS

_Config = TypeVar("_Config")

LOSS = "loss"
"""The name of the criterion of the best weights where it is no metric."""
_STEPS = 2000
# A batch shape takes as long to compile as a dozen steps to run. On short sentences, two instead of one let a step hold
# two thirds more tokens, six instead of two a third more.
_LEAST_SHAPES, _STEPS_PER_SHAPE = 2, 100
_OPTIMIZERS: dict[str, type[MuonConfig] | type[AdafactorConfig]] = {"muon": MuonConfig, "adafactor": AdafactorConfig}
_RATES = {
    "muon": ("muon_learning_rate", "adam_learning_rate", "warmup_steps"),
    "adafactor": ("learning_rate",),
}
# Option names of settings whose names differ.
_OPTION_NAMES = {"dropout_rate": "dropout", "num_logits": "classifier_logits"}
_MODEL = "--stage=model"


def _size(name: str) -> Any:
    """Returns the option of a size of new models, which only some architectures may have."""
    sizes = {architecture: new.sizes[name] for architecture, new in NEW_MODELS.items() if name in new.sizes}
    only = "" if len(sizes) == len(NEW_MODELS) else f"; {', '.join(sizes)} only"
    default = next(iter(sizes.values()))
    return option(None, f"{name.replace('_', ' ')} of a new model (default {default}{only})", kind=integer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning(Options):
    """The model to train, the duration, and the output."""

    stage: str = option("model", "what to train", choices=("model", "classifier"))
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "folder to write the model to")
    overwrite: bool = switch("write even if --output holds files, or an interrupted run left states")
    stored_dtype: str = option("float32", "type of the weights as stored", choices=("float32", "float16"))
    steps: int | None = option(
        None,
        f"optimiser steps (default {_STEPS}); for a classifier, batches to learn from, whose states are kept in memory "
        f"(default {ClassifierConfig.steps})",
        kind=integer,
    )
    batch_tokens: int = option(TrainingConfig.batch_tokens, "padded tokens of a batch, on its wider side", kind=integer)
    seed: int = option(0, "decides initial weights, batches, sampled layers and dropout (default: 0)", kind=integer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(DataSource):
    """Which model is trained on which rows, and how they become prompts and targets."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA
    SPLIT: ClassVar[str] = "train"

    data: str | Sequence[str] | None = again(
        DataSource, "data", sentence="files with the rows to learn from: globs, comma-separated"
    )
    validation_data: str | Sequence[str] | None = option(
        None, "files with the rows to measure on, in the same format", kind=paths
    )
    seqio_split: str | None = again(DataSource, "seqio_split", sentence=f"its split; default: {SPLIT}")
    seqio_validation_split: str | None = option(
        None, "split of --seqio_task to measure on, instead of --validation_data"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patterns is None:
            raise UsageError("--data is missing: files with the rows to learn from, or --seqio_task.")
        if self.seqio_validation_split is not None and (self.seqio_task is None or self.validation_data is not None):
            raise UsageError("--seqio_validation_split goes with --seqio_task, and instead of --validation_data.")

    @property
    def validation_patterns(self) -> tuple[str, ...] | None:
        """Patterns of the rows to measure on; None if none are named."""
        if self.seqio_task is not None and self.seqio_validation_split is not None:
            return (seqio_name(self.seqio_task, self.seqio_validation_split),)
        return None if self.validation_data is None else tuple(self.validation_data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(FactsOfAny, Chat):
    """The model that training begins with, and how rows become its prompts and targets."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource,
        "checkpoint",
        sentence="model to start from, with its vocabulary; without it, a new one of the sizes below",
    )
    chat_template: str | None = again(Chat, "chat_template", belongs_to=())
    system: str | None = again(Chat, "system", belongs_to=("chat_template",))
    task_prefix: str = again(Lengths, "task_prefix")
    max_input_length: int | None = again(
        Lengths,
        "max_input_length",
        sentence=f"in tokens, eos included; longer inputs are cut; default: {USUAL_INPUT_LENGTH}",
    )
    max_target_length: int = option(
        TrainingConfig.max_target_length,
        "most tokens of a reference, eos included; longer ones are cut",
        kind=integer,
    )
    dtype: str = again(
        PrecisionOptions, "dtype", sentence="type of products and activations; learned weights are float32"
    )
    model_parallelism: int = again(
        Memory,
        "model_parallelism",
        sentence="devices that share the model, the first of this machine, for models larger than one device",
    )

    @property
    def named_model(self) -> str | None:
        """Folder of the model to start from, where one was named."""
        return None if self.checkpoint is None else os.fspath(self.checkpoint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewSizes(Options):
    """Sizes of a new model; a checkpoint has its own sizes."""

    SECTION: ClassVar[str | None] = _MODEL

    architecture: str = option(
        next(iter(NEW_MODELS)),
        "of a new model: an encoder-decoder (t5) or a decoder-only one (llama)",
        choices=tuple(NEW_MODELS),
    )
    vocab_size: int | None = _size("vocab_size")
    emb_dim: int | None = _size("emb_dim")
    num_heads: int | None = _size("num_heads")
    head_dim: int | None = _size("head_dim")
    mlp_dim: int | None = _size("mlp_dim")
    num_decoder_layers: int | None = _size("num_decoder_layers")
    num_encoder_layers: int | None = _size("num_encoder_layers")
    num_kv_heads: int | None = _size("num_kv_heads")
    max_positions: int | None = _size("max_positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exits(Options):
    """Options of exits."""

    SECTION: ClassVar[str | None] = _MODEL

    exit_norm: bool = switch(
        "give every decoder layer below the last a norm of its own, which begins as the final one (EE-LLM)"
    )
    exit_heads: str | None = option(
        None,
        "the output head for all layers, or one of its own for each, which begins as that of --checkpoint (EE-LLM); "
        "default: as --checkpoint has it, or shared",
        choices=("shared", "separate"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Options):
    """Options of a training step."""

    SECTION: ClassVar[str | None] = _MODEL

    layer_weights: str = option(TrainingConfig.layer_weights, "layers' shares in the loss", choices=LAYER_WEIGHTS)
    sampled_layers: int = option(
        TrainingConfig.sampled_layers,
        "lower layers whose loss a step computes next to that of the last; 0 for all of them",
        kind=integer,
    )
    rotating_layers: int = option(
        0,
        "losses of every R-th lower layer, in turn (LayerSkip), instead of a sample; 0 for a sample (default: 0)",
        kind=integer,
        metavar="R",
    )
    dropout: float | None = option(
        None,
        f"share of activations dropped (default {TrainingConfig.dropout_rate}; decoder-only models have no dropout)",
        kind=number,
    )
    layer_dropout: float = option(
        0.0,
        "how often rows pass the last decoder layer by, and lower ones less often (LayerSkip) (default: 0)",
        kind=number,
        metavar="P",
    )
    label_smoothing: float = option(0.0, "probability spread over all other tokens (default: 0)", kind=number)
    z_loss: float = option(
        0.0, "weight of the squared log-normalizer in the loss; T5X has 1e-4 (default: 0)", kind=number
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Options):
    """How weights follow from the loss."""

    SECTION: ClassVar[str | None] = _MODEL

    optimizer: str = option("muon", "muon with adam, or adafactor as in the paper", choices=tuple(_OPTIMIZERS))
    learning_rate: float = option(
        AdafactorConfig.learning_rate, "constant and relative to each array's size, of adafactor", kind=number
    )
    muon_learning_rate: float = option(MuonConfig.muon_learning_rate, "muon learning rate, of muon", kind=number)
    adam_learning_rate: float = option(MuonConfig.adam_learning_rate, "adam learning rate, of muon", kind=number)
    warmup_steps: int = option(MuonConfig.warmup_steps, "warmup steps, of muon", kind=integer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation(Options):
    """Which weights are kept, and when states are saved."""

    SECTION: ClassVar[str | None] = _MODEL

    validate_every: int = option(0, "steps between validations; 0 for one at the end (default: 0)", kind=integer)
    best_by: str = option(
        LOSS,
        f"what decides the best weights: loss (of the last layer; default), or a metric: {METRIC_NAMES}",
        metavar="NAME",
    )
    bleurt_checkpoint: str | None = again(MetricFiles, "bleurt_checkpoint", belongs_to=("best_by=bleurt",))
    best_by_rows: int = option(200, "validation rows that the metric is measured on", kind=whole_number(1))
    save_every: int = option(500, "steps between states to resume from; 0 for none", kind=integer)
    resume: bool = switch("go on with the interrupted run of the same flags and data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier(Options):
    """How an exit classifier is trained."""

    SECTION: ClassVar[str | None] = "--stage=classifier"

    objective: str = option(
        ClassifierConfig.objective, "every layer for itself, or up to the first that agrees", choices=OBJECTIVES
    )
    balance_classes: bool = switch("same weight for both classes, as T5X does; for independent")
    classifier_logits: int = option(
        ClassifierConfig.num_logits,
        "2 as T5X stores a classifier, 1 for the d + 1 weights of the paper",
        kind=integer,
        choices=(1, 2),
    )


_OF_STAGE: dict[str, tuple[type[Options], ...]] = {
    "model": (NewSizes, Exits, Loss, Optimizer, Validation),
    "classifier": (Classifier,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest(Learning, Start, Rows, NewSizes, Exits, Loss, Optimizer, Validation, MetricFiles, Classifier):
    """A model, or the exit classifier of one, as a user asks for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_cloud_path(self.output):
            raise UsageError(
                f"--output={self.output}: training writes its states and its model to a local folder. Copy the model "
                "afterwards, with calm-beam convert."
            )
        if self.stage == "classifier":
            for name, value, why in (
                ("checkpoint", self.checkpoint, "the model to train it for"),
                ("validation_data", self.validation_patterns, "rows to measure it on"),
            ):
                if value is None:
                    raise UsageError(f"--{name} is missing: --stage=classifier needs {why}.")
            return
        if self.validation_patterns is None and (self.validate_every or self.best_by != LOSS):
            raise UsageError("--validation_data is missing: --validate_every and --best_by need rows to measure on.")
        if self.best_by != LOSS and not self.validate_every:
            raise UsageError(
                f"--best_by={self.best_by} needs --validate_every: with one validation, at the end, there is nothing "
                "to choose from."
            )

    def check_given(self, names: Collection[str]) -> None:
        """Refuses what means nothing to the stage, the optimizer, the model or the loss that are asked for.

        Args:
          names: Options that were given, with whatever value.
        """
        for stage, groups in _OF_STAGE.items():
            if stage != self.stage:
                own = [name for group in groups for name, _ in options_of(group)]
                _refuse(own, names, why=f"not a flag of --stage={self.stage}")
        for optimizer, rates in _RATES.items():
            if optimizer != self.optimizer:
                _refuse(rates, names, why=f"belongs to --optimizer={optimizer}, this run has {self.optimizer}")
        if self.checkpoint is not None:
            sizes = [name for name, _ in options_of(NewSizes)]
            _refuse(sizes, names, why="a model from --checkpoint has its own sizes")
        else:
            own_of_new = {name: (*new.sizes, *new.options) for name, new in NEW_MODELS.items()}
            known = {name for every in own_of_new.values() for name in every}
            others = sorted(known - {*own_of_new[self.architecture]})
            _refuse(others, names, why=f"--architecture={self.architecture} has no such number")
        if self.best_by == LOSS:
            _refuse(["best_by_rows"], names, why="belongs to a metric in --best_by")
        if self.rotating_layers:
            _refuse(["sampled_layers"], names, why="belongs to runs without --rotating_layers")

    def training_config(self) -> TrainingConfig:
        """Returns the settings of `--stage=model`; dropout is as T5 has it where nobody says.

        Raises:
          UsageError: If a value is out of range.
        """
        steps = _STEPS if self.steps is None else self.steps
        rates = {name: getattr(self, name) for name in _RATES[self.optimizer]}
        own = {
            "steps": steps,
            "num_shapes": min(TrainingConfig.num_shapes, _LEAST_SHAPES + steps // _STEPS_PER_SHAPE),
            "max_input_length": self._input_length,
            "dropout_rate": TrainingConfig.dropout_rate if self.dropout is None else self.dropout,
            "optimizer": _build(_OPTIMIZERS[self.optimizer], **rates),
        }
        return _build(TrainingConfig, **{**shared(self, TrainingConfig), **own})

    def classifier_config(self) -> ClassifierConfig:
        """Returns the settings of `--stage=classifier`.

        Raises:
          UsageError: If a value is out of range, or does not go with another.
        """
        own = {
            "steps": ClassifierConfig.steps if self.steps is None else self.steps,
            "max_input_length": self._input_length,
            "num_logits": self.classifier_logits,
        }
        return _build(ClassifierConfig, **{**shared(self, ClassifierConfig), **own})

    def new_model(self) -> ModelConfig:
        """Returns the sizes of a new model.

        Raises:
          UsageError: If a value is out of range.
        """
        new = NEW_MODELS[self.architecture]
        given = {name: getattr(self, name) for name in (*new.sizes, *new.options) if getattr(self, name) is not None}
        return _build(lambda **settings: new.config(settings), **given)

    @property
    def _input_length(self) -> int:
        return USUAL_INPUT_LENGTH if self.max_input_length is None else self.max_input_length


def _refuse(names: Iterable[str], given: Collection[str], *, why: str) -> None:
    """Raises `UsageError` if any of the options was given."""
    refused = [f"--{name}" for name in names if name in given]
    if refused:
        raise UsageError(f"{', '.join(refused)}: {why}. Leave {'it' if len(refused) == 1 else 'them'} out.")


def _build(config: Callable[..., _Config], **settings: Any) -> _Config:
    """Returns the settings as a config, whose complaints are turned into those about options."""
    try:
        return config(**settings)
    except ValueError as error:
        setting, _, rest = str(error).partition(" ")
        raise UsageError(f"--{_OPTION_NAMES.get(setting, setting)} {rest}") from error
