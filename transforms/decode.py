"""Decoding shards of examples at every threshold, into one Parquet file a shard."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.decoding.prompts import Prompt, encode_prompt
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.examples import DataError, Example
from calm_beam.generations import Generation, write_generations
from calm_beam.storage import joined, make_folder
from calm_beam.vocabulary import Vocabulary

from .devices import require_accelerator
from .metrics import DecodeCounts, DecodeMetrics
from .model_copies import ModelCopies
from .progress import ProgressLog

if TYPE_CHECKING:
    from calm_beam.decoding.sweep import SweepDecoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What a worker needs to know to decode.

    Attributes:
      checkpoint: Path of the model.
      model_fingerprint: What the weights there must be; a worker that finds others refuses to decode.
      vocabulary: Path of the SentencePiece model; None if all prompts are token ids.
      extra_ids: Sentinels of the vocabulary.
      settings: What determines the outputs.
      batch_size: Prompts decoded together.
      on_long: `truncate` or `error`, for prompts longer than the settings allow.
      on_error: `fail` or `worst_case`, for prompts that cannot be decoded.
      directory: Where generations go; made when the first shard is done.
      num_shards: Number of shards, part of the files' names.
      model_copies: Most copies of the model in one process; threads beyond them wait.
    """

    checkpoint: str
    model_fingerprint: str
    vocabulary: str | None
    extra_ids: int
    settings: DecodeSettings
    batch_size: int
    on_long: str
    on_error: str
    directory: str
    num_shards: int
    model_copies: int = 1

    def shard_path(self, shard: int) -> str:
        """Returns the file of a shard."""
        return joined(self.directory, f"generations-{shard:05d}-of-{self.num_shards:05d}.parquet")


@dataclasses.dataclass
class DecodeExamples(beam.PTransform):
    """Turns (shard, examples) pairs into paths of Parquet files with their generations.

    A retried shard replaces its file by an equal one.

    Attributes:
      plan: What to decode with.
      progress: Where to report.
      accelerator_hint: Resource hint of the step that decodes, and of no other; None for none.
      needs_accelerator: Whether a worker on which JAX finds only a CPU refuses to decode.
    """

    plan: DecodePlan
    progress: ProgressLog
    accelerator_hint: str | None = None
    needs_accelerator: bool = False

    def expand(self, shards: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of str."""
        decode = beam.ParDo(_DecodeShard(self.plan, self.progress, needs_accelerator=self.needs_accelerator))
        if self.accelerator_hint is not None:
            decode = decode.with_resource_hints(accelerator=self.accelerator_hint)
        return (
            shards
            | "DecodeShards" >> decode
            # What follows runs elsewhere, and when it is retried, nothing is decoded again.
            | "KeepPaths" >> beam.Reshuffle()
        )


class _DecodeShard(beam.DoFn):
    """Decodes one shard; threads of a process share its copies of the model."""

    def __init__(self, plan: DecodePlan, progress: ProgressLog, *, needs_accelerator: bool) -> None:
        self._plan = plan
        self._progress = progress
        self._needs_accelerator = needs_accelerator
        self._shared = Shared()
        self._metrics = DecodeMetrics()
        self._models: ModelCopies[_Loaded] | None = None

    def setup(self) -> None:
        # Deferred to the worker: JAX must not be initialised in the process that forks or pickles.
        if self._needs_accelerator:
            require_accelerator()
        self._models = self._shared.acquire(
            lambda: ModelCopies(lambda: _load(self._plan), most=self._plan.model_copies), tag=repr(self._plan)
        )

    def teardown(self) -> None:
        self._models = None

    def process(self, element: tuple[int, Iterable[Example]]) -> Iterator[str]:
        assert self._models is not None
        # All of a shard, before what follows sees any of it: that must not keep others waiting for the model.
        with self._models.borrowed() as loaded:
            paths = list(self._decode(loaded, element))
        # Here, since Beam has nowhere to count in `setup`.
        self._metrics.count_loads(self._models.take_load_msecs())
        yield from paths

    def _decode(self, loaded: "_Loaded", element: tuple[int, Iterable[Example]]) -> Iterator[str]:
        from calm_beam.decoding.generate import generate

        shard, unordered = element
        plan = self._plan
        examples = with_unique_ids(unordered)
        encode = functools.partial(
            encode_prompt,
            vocabulary=loaded.vocabulary,
            settings=plan.settings,
            vocab_size=loaded.vocab_size,
            on_long=plan.on_long,
        )
        duplicates = _duplicate_prompts(examples)
        prompts: list[Prompt] = []
        generations: list[Generation] = []
        for example in examples:
            try:
                prompts.append(encode(example))
            except DataError as error:
                if plan.on_error == "fail":
                    raise
                is_duplicate = example.id in duplicates
                generations.append(
                    Generation(example=example, truncated=False, duplicate=is_duplicate, failure=str(error), outputs=())
                )
        start, undecodable = time.perf_counter(), len(generations)
        for generation in generate(
            loaded.decoder, prompts, loaded.vocabulary, on_error=plan.on_error, duplicates=duplicates
        ):
            generations.append(generation)
            self._progress.report("decoded", 1)
        seconds = time.perf_counter() - start
        self._metrics.count_call(DecodeCounts.of_generations(generations[undecodable:], seconds=seconds))
        self._metrics.count_failures(generations)
        make_folder(plan.directory)
        path = plan.shard_path(shard)
        write_generations(path, sorted(generations, key=lambda generation: generation.example.id))
        yield path


def with_unique_ids(examples: Iterable[Example]) -> list[Example]:
    """Returns the examples in an order of their own, with equal derived ids told apart by a number.

    Args:
      examples: Of one shard, or of a whole data set: equal derived ids always meet in one shard.
    """
    ordered = sorted(examples, key=lambda example: (example.id, example.file_index, example.line))
    seen: dict[str, int] = {}
    unique = []
    for example in ordered:
        # An id that stood in the data occurs once, or the run has ended before.
        count = seen[example.id] = seen.get(example.id, 0) + 1
        unique.append(dataclasses.replace(example, id=f"{example.id}-{count}") if count > 1 else example)
    return unique


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """What one thread needs to decode."""

    vocabulary: Vocabulary | None
    vocab_size: int
    decoder: "SweepDecoder"


def _load(plan: DecodePlan) -> _Loaded:
    from calm_beam.checkpoints import CheckpointError, load_checkpoint
    from calm_beam.decoding.sweep import SweepDecoder

    checkpoint = load_checkpoint(plan.checkpoint)
    found = checkpoint.fingerprint()
    if found != plan.model_fingerprint:
        raise CheckpointError(
            f"checkpoint {plan.checkpoint}: fingerprint is {found}, the run was started for {plan.model_fingerprint}. "
            "Do not change a checkpoint while it is calibrated."
        )
    vocabulary = Vocabulary(plan.vocabulary, extra_ids=plan.extra_ids) if plan.vocabulary else None
    settings = plan.settings
    decoder = SweepDecoder(
        checkpoint,
        settings.rule,
        thresholds=settings.thresholds,
        max_decode_length=settings.max_decode_length,
        max_input_length=settings.max_input_length,
        batch_size=plan.batch_size,
    )
    return _Loaded(vocabulary, checkpoint.config.vocab_size, decoder)


def _duplicate_prompts(examples: list[Example]) -> frozenset[str]:
    """Returns the ids of examples whose prompt an earlier one has; equal prompts are always in one shard."""
    seen: set[bytes] = set()
    duplicates = set()
    for example in examples:
        digest = example.input_digest()
        if digest in seen:
            duplicates.add(example.id)
        seen.add(digest)
    return frozenset(duplicates)
