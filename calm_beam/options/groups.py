"""Groups of options that several requests share: model, data, decoding, exits and the run.

Groups about a manifest name the manifest, its entry and its model, and decide how answers are made under it.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from calm_beam.errors import UsageError
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import TOKEN_SOURCES, ExitRule
from calm_beam.exits.schedules import SCHEDULES
from calm_beam.inputs import Reading
from calm_beam.inputs.reading import seqio_name
from calm_beam.manifest import ENGINES, Manifest
from calm_beam.model import ACTIVATIONS
from calm_beam.model.registry import USUAL_INPUT_LENGTH
from calm_beam.precision import DTYPES, MATMUL_PRECISIONS, Precision

from .kinds import (
    confidence,
    exit_head,
    integer,
    measures_in_words,
    number,
    numbers,
    paths,
    share,
    stop_strings,
    texts,
    utf8_text,
    whole_number,
)
from .option import Options, again, option, shared, switch

_OF_MODEL = ("checkpoint", "generations")
MODEL_AND_DATA = "model and data"
"""Heading of the options about model and data."""
DELTA = 0.1
"""The default risk tolerance."""
EPSILON = 0.05
"""The default allowed probability of error."""
GRID_STEP = 0.05
"""The default step of the grid of thresholds, except for `decode`, which requires one."""
_EXITS = "exits"
_RUN = "run (Beam's own flags, such as --runner, may be added)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource(Options):
    """The model and its vocabulary."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA
    # Transforms call it so.
    ELSEWHERE: ClassVar[Mapping[str, str]] = {"model": "Did you mean checkpoint?"}

    checkpoint: str | os.PathLike[str] | None = option(
        None,
        "model folder: native, Hugging Face, T5X or Orbax (checkpoint_<step>, or the folder of them); without model "
        "and data, calibrate and evaluate use the demo model and data",
    )
    vocabulary: str | None = option(
        None,
        "SentencePiece model or tokenizer.json; default: found in or next to the model folder",
        belongs_to=_OF_MODEL,
    )
    extra_ids: int | None = option(
        None,
        "sentinels <extra_id_0>... to add; default: as many as the tokenizer files next to the vocabulary list, or 0",
        kind=whole_number(0),
        belongs_to=_OF_MODEL,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(Options):
    """The chat template and system message of inputs."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    chat_template: str | None = option(
        None,
        "turn every input into a chat: model for the template next to its tokenizer.json, or a file with a Jinja "
        "template; none: inputs are prompts as they are. Required if the model has a template",
        metavar="model|none|FILE",
        belongs_to=_OF_MODEL,
    )
    system: str | None = option(
        None, "system message at the start of every chat, before the input; needs --chat_template", kind=utf8_text
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts(Options):
    """Properties of a model that its arrays do not show."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    activation: str | None = option(
        None,
        "activation of the feed-forward layers, for a T5X checkpoint without a config.gin; silu is also called "
        "swish; default: T5's",
        choices=ACTIVATIONS,
        belongs_to=_OF_MODEL,
    )
    relative_max_distance: int | None = option(
        None,
        "distance from which relative positions share a bucket, for a T5X checkpoint without a config.gin; default: "
        "T5's, 128",
        kind=integer,
        belongs_to=_OF_MODEL,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactsOfAny(ModelFacts):
    """`ModelFacts` for a model that is named in another way, or is new."""

    activation: str | None = again(ModelFacts, "activation", belongs_to=())
    relative_max_distance: int | None = again(ModelFacts, "relative_max_distance", belongs_to=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Options):
    """The data to read, and how to read them.

    Attributes:
      SPLIT: Default split of a SeqIO task.
    """

    SECTION: ClassVar[str | None] = MODEL_AND_DATA
    SPLIT: ClassVar[str] = "validation"

    data: str | Sequence[str] | None = option(None, "files with the data: globs, comma-separated", kind=paths)
    data_format: str | None = option(
        None,
        "format of the data; default: by suffix (.jsonl, .txt, .tfrecord, each also with .gz; .parquet)",
        choices=("jsonl", "text", "parquet", "tfrecord", "seqio"),
    )
    inputs_field: str | None = option(
        None, "field of a row with the prompt; default: input, in TFRecord and SeqIO inputs"
    )
    targets_field: str | None = option(
        None, "field of a row with the references; default: references, in TFRecord and SeqIO targets"
    )
    seqio_task: str | None = option(None, "SeqIO task to read instead of --data")
    seqio_split: str | None = option(None, f"split of the SeqIO task; default: {SPLIT}")
    seqio_module: str | Sequence[str] | None = option(
        None, "modules that register the task, comma-separated; importable on workers too", kind=texts
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seqio_task is None:
            for name in ("seqio_split", "seqio_module"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} belongs to --seqio_task, which is missing.")
            if self.data_format == "seqio":
                raise UsageError("--data_format=seqio needs --seqio_task, the name of the task.")
            for name in ("data_format", "inputs_field", "targets_field"):
                if self.data is None and getattr(self, name) is not None:
                    raise UsageError(f"--{name} belongs to --data, which is missing.")
            return
        if self.data is not None:
            raise UsageError(f"--seqio_task={self.seqio_task} and --data both name the data: leave one of them out.")
        if self.data_format not in (None, "seqio"):
            raise UsageError(f"--seqio_task is read as seqio, not --data_format={self.data_format}: leave that out.")

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The names of the data: paths and globs, or the name of a SeqIO task; None if no data were named."""
        if self.seqio_task is not None:
            return (seqio_name(self.seqio_task, self.seqio_split or self.SPLIT),)
        return None if self.data is None else tuple(self.data)

    def reading(
        self, *, cluster_key: str | None = None, group_key: str | None = None, needs_references: bool = False
    ) -> Reading:
        """Returns the settings for reading the data; arguments as in `Reading`."""
        return Reading(
            data_format=None if self.data_format == "seqio" else self.data_format,
            inputs_field=self.inputs_field,
            targets_field=self.targets_field,
            seqio_modules=tuple(self.seqio_module or ()),
            cluster_key=cluster_key,
            group_key=group_key,
            needs_references=needs_references,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths(Options):
    """The prefix of inputs, and the lengths of inputs and outputs."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    task_prefix: str = option("", "text put before every input", kind=utf8_text)
    max_input_length: int | None = option(
        None,
        f"longest input in tokens, eos included; default: {USUAL_INPUT_LENGTH}, or as many as fit with an output",
        kind=whole_number(1),
    )
    on_long: str = option("truncate", "whether longer inputs are cut or an error", choices=("truncate", "error"))
    max_decode_length: int = option(64, "longest output in tokens, eos included", kind=whole_number(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Options):
    """The precision in which the model computes."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    dtype: str = option(
        "float32",
        "type of weights, states, keys and values; sums, norms, logits and confidences are always float32",
        choices=DTYPES,
    )
    matmul_precision: str = option(
        "highest",
        "precision of float32 matrix products, on GPUs and TPUs: highest (float32), high or default (TF32, or passes "
        "in bfloat16)",
        choices=MATMUL_PRECISIONS,
    )

    @property
    def precision(self) -> Precision:
        """The precision in which the model computes; raises ValueError if the two options exclude each other."""
        return Precision(dtype=self.dtype, matmul_precision=self.matmul_precision)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings(Lengths, PrecisionOptions):
    """The options that determine outputs, apart from the exit rule and its thresholds."""

    stop_strings: Sequence[str] | None = option(
        None,
        'texts that end an output, which then stops before them, as a JSON list such as \'["###", "\\n\\n"]\'; [] for '
        "none; default: stop_strings in the model's generation_config.json",
        kind=stop_strings,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Options):
    """Batch and cache sizes, which change no output."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    batch_size: int | None = option(
        None, "most prompts decoded together; default: chosen from the free memory", kind=whole_number(1)
    )
    max_cache_tokens: int | None = option(
        None,
        "most tokens of prompts and outputs in the KV cache at a time; default: chosen from the free memory",
        kind=whole_number(1),
        old_name="token_budget",
    )
    model_parallelism: int = option(
        1,
        "devices over which one model is split, for models larger than one device; a worker's other devices hold "
        "copies (default: 1)",
        kind=whole_number(1),
        metavar="N",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(Options):
    """The engine, and the form of the output head that decides exits. They change outputs at near ties only."""

    SECTION: ClassVar[str | None] = MODEL_AND_DATA

    engine: str = option(
        "auto",
        "engine that decodes: native (compiled C, for CPUs), xla, or auto: native if this installation has it for the "
        "processor (only on this machine), else xla; the engine is recorded, and engines are never mixed (default: "
        "%(default)s)",
        choices=("auto", *ENGINES),
    )
    exit_head: str = option(
        "auto",
        "form of the output head that decides exits: exact; int8, certified by native code, with the exact one if that "
        "is undecided; auto takes int8 for large heads with native code, else exact (default: %(default)s)",
        kind=exit_head,
        choices=EXIT_HEADS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding(Memory, Engine):
    """Options of a decoder that do not define its outputs."""

    def asked_of_decoder(self) -> dict[str, Any]:
        """Returns only these options, by name, also from a larger request, as `Decoder` and `Generator` take them."""
        return shared(self, Decoding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitGrid(Options):
    """The grid of exit thresholds, and the parts of the exit rule that a calibration does not choose."""

    SECTION: ClassVar[str | None] = _EXITS

    patience: int | None = option(
        None, "with --confidence=patience: number of layers that must agree at threshold 1", kind=whole_number(1)
    )
    thresholds: float | Sequence[float] | None = option(
        None, "exit thresholds, comma-separated; instead of --grid_step", kind=numbers
    )
    grid_step: float | None = option(
        None, f"step of a grid of thresholds below 1, down to 0; {GRID_STEP:g} without --thresholds", kind=number
    )
    schedule: str = option(
        "constant",
        "threshold over output positions: "
        + "; ".join(f"{schedule.name} ({schedule.meaning})" for schedule in SCHEDULES.values()),
        choices=tuple(SCHEDULES),
    )
    state_propagation: str = option("from_exit", "what skipped layers attend to", choices=tuple(PROPAGATIONS))
    token_from: str = option(
        "exit_layer",
        "layer whose prediction is the token; last_layer shows the effect of exits on the cache alone",
        choices=TOKEN_SOURCES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thresholds is not None and self.grid_step is not None:
            raise UsageError(
                f"--thresholds and --grid_step={self.grid_step:g} both give a grid: leave one of them out."
            )

    @property
    def grid(self) -> tuple[float, ...] | None:
        """The requested thresholds, descending; None if none were.

        Raises:
          ValueError: If they are not a grid.
        """
        # Imported here: they need numpy, and help does not.
        from calm_beam.exits.thresholds import descending_grid, uniform_grid

        if isinstance(self.thresholds, tuple):
            return descending_grid(self.thresholds)
        return None if self.grid_step is None else uniform_grid(self.grid_step)

    def rule(self, *, confidence: str, tau: float | None, min_exit_layer: int, exit_interval: int) -> ExitRule:
        """Returns the exit rule with one choice of the parts that a calibration may choose.

        Raises:
          ValueError: If the rule is not allowed.
        """
        return ExitRule(
            confidence=confidence,
            schedule=self.schedule,
            tau=tau,
            state_propagation=self.state_propagation,
            token_from=self.token_from,
            min_exit_layer=min_exit_layer,
            exit_interval=exit_interval,
            patience=self.patience,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitLayers(ExitGrid):
    """The exit layers and schedule that a calibration may choose, one of each."""

    tau: float | None = option(None, "temperature of a decaying schedule", kind=number)
    min_exit_layer: int = option(1, "lowest layer that may exit", kind=whole_number(1))
    exit_interval: int = option(1, "distance between layers that may exit", kind=whole_number(1))

    def rule_by(self, confidence: str) -> ExitRule:
        """Returns the exit rule with a confidence measure.

        Raises:
          ValueError: If the rule is not allowed.
        """
        return self.rule(
            confidence=confidence,
            tau=self.tau,
            min_exit_layer=self.min_exit_layer,
            exit_interval=self.exit_interval,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRule(ExitLayers):
    """All parts of the exit rule that a calibration may choose, one of each."""

    confidence: str = option("softmax", f"confidence measure: {measures_in_words()}", kind=confidence)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances(Options):
    """The tolerated risk, and the allowed probability of exceeding it."""

    delta: float | Sequence[float] = option((DELTA,), f"risk tolerances in (0, 1); default: {DELTA:g}", kind=numbers)
    epsilon: float | Sequence[float] = option(
        (EPSILON,), f"allowed probabilities of error in (0, 1); default: {EPSILON:g}", kind=numbers
    )


def check_fractions(**values: Iterable[float]) -> None:
    """Refuses options that are not in (0, 1).

    Args:
      **values: The values of each option, by its name.

    Raises:
      UsageError: If one is not.
    """
    for name, given in values.items():
        for value in given:
            if not 0 < value < 1:
                raise UsageError(f"--{name} must be in (0, 1), got {value:g}. It is a fraction: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures(Options):
    """The treatment of examples that fail."""

    SECTION: ClassVar[str | None] = _RUN

    on_error: str = option(
        "fail",
        "for examples that fail twice, the second time alone: end the run, or count loss 1 at every threshold",
        choices=("fail", "worst_case"),
    )
    max_failures: int | None = option(
        None,
        "with --on_error=worst_case, end the run if more examples fail; default: 1 %% of them, at least 10",
        kind=whole_number(0),
        belongs_to=("on_error=worst_case",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copies(Options):
    """The number of model copies per worker, which changes no output."""

    SECTION: ClassVar[str | None] = _RUN

    model_copies: int = option(
        1, "most copies of the model in one worker process; its threads take turns", kind=whole_number(1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread(Copies):
    """How decoding is spread over workers, which changes no output."""

    SECTION: ClassVar[str | None] = _RUN

    num_shards: int | None = option(
        None,
        "parts of the data, decoded independently, several per worker; default: parts of about a thousand examples, "
        "at least 4; with --resume, as begun",
        kind=whole_number(1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacing(Options):
    """Whether an earlier result is replaced."""

    SECTION: ClassVar[str | None] = _RUN

    overwrite: bool = switch("replace an earlier result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telling(Options):
    """The amount of messages about a run; no output, and nothing that is written, depends on it."""

    SECTION: ClassVar[str | None] = _RUN

    verbose: bool = switch(
        "also report the plan's hash, its tests, how much memory and work the run took, and the mean loss at every "
        "threshold or setting"
    )


# As `calm_beam.outputs.job.FORMATS`.
_FORMATS = ("parquet", "jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedModel(FactsOfAny):
    """The model of a manifest, which records its folder."""

    SECTION: ClassVar[str | None] = ModelSource.SECTION
    ELSEWHERE: ClassVar[Mapping[str, str]] = ModelSource.ELSEWHERE

    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource, "checkpoint", sentence="model folder; default: the one recorded in the manifest"
    )
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())

    @property
    def named_model(self) -> str | None:
        """The folder of the model, if one was named."""
        return None if self.checkpoint is None else os.fspath(self.checkpoint)

    def model_of(self, manifest: Manifest) -> str:
        """Returns the folder of the model: the named one, else the one in the manifest."""
        return self.named_model or manifest.model.uri


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedManifest(Options):
    """The manifest to use."""

    manifest: str = option(dataclasses.MISSING, "a manifest, or the calibration directory that holds one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry(Options):
    """The choice of a manifest's entry; options have the names of the entry's fields."""

    SECTION: ClassVar[str | None] = "which entry of the manifest, if it has several"

    consistency: str | None = option(None, "textual or risk")
    metric: str | None = option(None, "name of the metric")
    loss: str | None = option(None, "loss computed from its scores, such as signed or dissimilarity>0.3")
    delta: float | None = option(None, "risk tolerance, as calibrated", kind=number)
    epsilon: float | None = option(None, "allowed probability of error, as calibrated", kind=number)
    group: str | None = option(None, "group that the entry is about; default: the entry about all prompts")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"delta": self.delta, "epsilon": self.epsilon}
        check_fractions(**{name: () if value is None else (value,) for name, value in given.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSettings(Options):
    """The choice of an entry about settings, in addition to `Entry`."""

    SECTION: ClassVar[str | None] = "and of a manifest of kind settings, next to --delta, --epsilon and --group"

    tail: float | None = option(
        None, "bound on the loss of an example; default: the entry about the mean loss", kind=number
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trusted(Options):
    """The code named in a manifest that a user trusts."""

    confidence: str | None = option(
        None,
        "confidence measure of the manifest; required if that is your own module:function, which is imported only if "
        "it is named here",
        kind=confidence,
    )


_SURE = "as in the manifest, whose thresholds hold for no other; given only as a check"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPrecision(Options):
    """The precision in which the model computes, which the manifest decides."""

    dtype: str | None = option(None, f"type of weights and states, {_SURE}", choices=DTYPES)
    matmul_precision: str | None = option(None, f"precision of products, {_SURE}", choices=MATMUL_PRECISIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactEngine(Options):
    """Whether an engine other than the calibrated one may serve."""

    exact_engine: bool = switch("refuse to serve with an engine other than the calibrated one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(Options):
    """How answers in shards are stored, failed prompts are treated, and prompts are sampled to measure losses."""

    SECTION: ClassVar[str | None] = (
        "with --output=FOLDER/, answers in shards (Beam's own flags, such as --runner, may be added)"
    )

    output_format: str = option(
        "parquet", "format of the files of answers: parquet, or gzipped jsonl", choices=_FORMATS
    )
    on_error: str = option(
        "fail",
        "for prompts that fail twice, the second time alone: end the run, or list them in failures.jsonl",
        choices=("fail", "list"),
    )
    max_failures: int | None = option(
        None,
        "with --on_error=list, end the run if more prompts fail; default: 1 %% of them, at least 10",
        kind=whole_number(0),
        belongs_to=("on_error=list",),
    )
    probe_share: float | None = option(
        None,
        "also answer this share of the prompts, such as 1%%, by the full model, and write their losses to "
        "losses.jsonl, for calm-beam monitor",
        kind=share,
        metavar="SHARE",
    )
    probe_salt: str | None = option(
        None,
        "decides which prompts those are, by a hash of their ids; keep it secret if others choose the ids; default: "
        "the manifest's digest",
        belongs_to=("probe_share",),
    )
