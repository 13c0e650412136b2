"""Checking everything that can be checked before a worker starts."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

from calm_beam.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from calm_beam.decoding.memory import check_memory, checked_least_tokens
from calm_beam.decoding.settings import DecodeSettings, descending_grid, uniform_grid
from calm_beam.examples import DataError, mixed_prompts, no_vocabulary_for
from calm_beam.exits.measures import Need, is_own, source_digest
from calm_beam.exits.rule import ExitRule
from calm_beam.generations.folder import DecodeJob
from calm_beam.inputs import Reading, is_seqio, place_of, read_examples, seqio_name
from calm_beam.manifest import ModelRecord, VocabularyRecord
from calm_beam.seqio_names import SeqIOShard
from calm_beam.storage import absolute
from calm_beam.transforms.decode import DecodePlan
from calm_beam.vocabulary import Vocabulary, VocabularyError, open_vocabulary

from .flags import UsageError
from .flags.data import find_files, reading_of
from .flags.model import declared
from .terminal import say
from .versions import decoding_versions

# Looked at in every file before work starts, and in one shard of a SeqIO task; the rest is checked by the workers.
_PREVIEWED_EXAMPLES = 100

_WITHOUT_VOCABULARY = "but what was calibrated are token ids without a vocabulary. Take data that has"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose inputs have been found good.

    Attributes:
      paths: Data files, sorted.
      reading: How they are read.
      checkpoint: The model.
      vocabulary: Its vocabulary, which makes texts of outputs; None if the data are token ids and there is none.
      vocabulary_path: Where that was read.
      settings: What determines the outputs.
      model_fingerprint: Of the weights.
    """

    paths: tuple[str, ...]
    reading: Reading
    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    vocabulary_path: str | None
    settings: DecodeSettings
    model_fingerprint: str

    def job(self, flags: argparse.Namespace, *, cluster_key: str | None = None) -> DecodeJob:
        """Returns what decides the generations of the run."""
        vocabulary = self.vocabulary
        return DecodeJob(
            model=ModelRecord(
                uri=self.checkpoint.uri,
                fingerprint=self.model_fingerprint,
                layers=self.checkpoint.config.num_decoder_layers,
            ),
            vocabulary=VocabularyRecord(fingerprint=vocabulary.fingerprint, extra_ids=vocabulary.extra_ids)
            if vocabulary
            else None,
            settings=self.settings,
            on_long=flags.on_long,
            cluster_key=cluster_key,
            patterns=flags.data,
            files=self.paths,
            reading=self.reading.choices(),
            num_shards=flags.num_shards,
            software=decoding_versions(),
        )

    def without_weights(self) -> Self:
        """Returns the run without the weights of its model, which a launcher that waits for workers need not hold."""
        return dataclasses.replace(self, checkpoint=dataclasses.replace(self.checkpoint, arrays={}))

    def with_upper_part(self, thresholds: int) -> Self:
        """Returns the run with the first thresholds of its grid alone."""
        settings = dataclasses.replace(self.settings, thresholds=self.settings.thresholds[:thresholds])
        return dataclasses.replace(self, settings=settings)

    def plan(self, flags: argparse.Namespace, directory: str, *, job: DecodeJob | None = None) -> DecodePlan:
        """Returns what workers need to decode into `directory`; `job` is the run's own unless it reads clusters."""
        return DecodePlan(
            checkpoint=self.checkpoint.uri,
            model_fingerprint=self.model_fingerprint,
            vocabulary=self.vocabulary_path,
            vocabulary_fingerprint=self.vocabulary.fingerprint if self.vocabulary else None,
            extra_ids=self.vocabulary.extra_ids if self.vocabulary else 0,
            activation=self.checkpoint.config.activation,
            relative_max_distance=self.checkpoint.config.relative_max_distance,
            settings=self.settings,
            batch_size=flags.batch_size,
            token_budget=flags.token_budget,
            on_long=flags.on_long,
            on_error=flags.on_error,
            max_failures=flags.max_failures,
            job=(job or self.job(flags)).digest(),
            directory=directory,
            num_shards=flags.num_shards,
            model_copies=flags.model_copies,
        )


def prepare_run(
    flags: argparse.Namespace,
    *,
    needs_references: bool,
    cluster_key: str | None = None,
    settings: DecodeSettings | None = None,
    finds_vocabulary: bool = True,
    runs_here: bool = True,
) -> PreparedRun:
    """Returns a run whose flags, model, vocabulary and first examples have been checked.

    Args:
      flags: Of `add_decode_flags`, or of `add_task_flags` if settings are given.
      needs_references: Whether every example must have references.
      cluster_key: Key of the name of an example's cluster, which every example must then have.
      settings: What determines the outputs; as the flags say if omitted.
      runs_here: Whether it is this machine that decodes, so that its memory has to do.
      finds_vocabulary: Whether the one in or beside the checkpoint is taken where the flags name none. Not where the
        calibration had none.

    Raises:
      UsageError: If anything is wrong; nothing has been written.
    """
    if flags.checkpoint is None:
        raise UsageError("--checkpoint is missing: the folder of the model.")
    if flags.data is None:
        raise UsageError("--data is missing: files with the examples, or --seqio_task.")
    try:
        settings = settings or decode_settings(flags)
        _check_token_budget(flags.token_budget, settings)
        reading = reading_of(flags, cluster_key=cluster_key, needs_references=needs_references)
        paths = find_files("--data", flags.data, reading)
        preview = preview_data(paths, reading)
        checkpoint = load_checkpoint(flags.checkpoint, declared=declared(flags))
        for sentence in checkpoint.assumed:
            say(f"note: {sentence}")
        settings.rule.exit_layers(checkpoint.config.num_decoder_layers)
        if settings.rule.measure().needs is Need.CLASSIFIER and not checkpoint.config.exit_classifier:
            raise UsageError(
                f"--confidence={settings.rule.confidence} needs decoder/meta_cls in the checkpoint; {flags.checkpoint} "
                "has none."
            )
        vocabulary_path = flags.vocabulary or (checkpoint.vocabulary_uri if finds_vocabulary else None)
        if preview.text_prompt and vocabulary_path is None:
            if not finds_vocabulary:
                raise UsageError(f"{preview.text_prompt}: its prompt is text, {_WITHOUT_VOCABULARY} input_ids.")
            raise UsageError(
                f"no sentencepiece.model in or beside {checkpoint.uri}: pass --vocabulary, or data that has input_ids."
            )
        if preview.text_reference and vocabulary_path is None:
            if not finds_vocabulary:
                raise UsageError(
                    f"{preview.text_reference}: its references are texts, {_WITHOUT_VOCABULARY} reference_ids."
                )
            raise UsageError(no_vocabulary_for(f"{preview.text_reference}: its"))
        vocabulary = open_vocabulary(vocabulary_path, extra_ids=flags.extra_ids) if vocabulary_path else None
        if runs_here:
            check_memory(
                checkpoint.config,
                lanes=1 + len(settings.thresholds),
                steps=settings.max_decode_length,
                source=settings.max_input_length,
                token_budget=flags.token_budget,
                copies=getattr(flags, "model_copies", 1),
            )
    except (CheckpointError, VocabularyError, DataError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    head = checkpoint.config.vocab_size
    if vocabulary is not None and vocabulary.size > head:
        raise UsageError(
            f"vocabulary {vocabulary_path} has {vocabulary.size} ids, the model's output head {head}: they do not "
            "belong together."
        )
    return PreparedRun(
        paths=paths,
        # Workers look at the rows that are not previewed.
        reading=dataclasses.replace(reading, has_vocabulary=vocabulary is not None),
        checkpoint=checkpoint,
        vocabulary=vocabulary,
        vocabulary_path=absolute(vocabulary_path) if vocabulary_path else None,
        settings=settings,
        model_fingerprint=checkpoint.fingerprint(),
    )


def _check_token_budget(token_budget: int | None, settings: DecodeSettings) -> None:
    # Rules that run every layer hold a batch and no budget.
    if not settings.rule.needs_full_model():
        checked_least_tokens(
            token_budget,
            lanes=1 + len(settings.thresholds),
            steps=settings.max_decode_length,
            source=settings.max_input_length,
        )


def decode_settings(flags: argparse.Namespace) -> DecodeSettings:
    """Returns what determines the outputs.

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
            confidence=flags.confidence,
            schedule=flags.schedule,
            tau=flags.tau,
            state_propagation=flags.state_propagation,
            token_from=flags.token_from,
            min_exit_layer=flags.min_exit_layer,
            exit_interval=flags.exit_interval,
            patience=flags.patience,
            confidence_source=source_digest(flags.confidence) if is_own(flags.confidence) else None,
        ),
        thresholds=grid,
        max_input_length=flags.max_input_length,
        max_decode_length=flags.max_decode_length,
        task_prefix=flags.task_prefix,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataPreview:
    """What the first examples of every file hold.

    Attributes:
      text_prompt: Where the first prompt stands that is text; None if all are token ids.
      text_reference: Where the first references stand that are texts; None if there are none.
    """

    text_prompt: str | None
    text_reference: str | None


def preview_data(paths: Sequence[str], reading: Reading) -> DataPreview:
    """Returns what kinds of values the data hold, having checked the first examples of every file.

    Of a SeqIO task, one shard is looked at: a task makes all its examples alike, may have a thousand shards, and each
    takes a second to open. Preprocessors may leave nothing of a shard, so that the next one is tried then.

    Raises:
      DataError: If one of them is malformed, a file has none, or prompts are texts here and token ids there.
    """
    first: dict[str, str] = {}
    has_examples: dict[str, bool] = {}
    for path in paths:
        name = _task_name(path) if is_seqio(path) else path
        if has_examples.get(name):
            continue
        examples = list(itertools.islice(read_examples(path, reading), _PREVIEWED_EXAMPLES))
        has_examples[name] = bool(examples)
        if not examples and not is_seqio(path):
            break
        for example in examples:
            place = place_of(path, example.line, reading)
            first.setdefault("ids" if example.input is None else "text", place)
            if example.references:
                first.setdefault("reference", place)
    empty = next((name for name, found in has_examples.items() if not found), None)
    if empty is not None:
        raise DataError(f"--data {empty}: holds no examples.")
    if "text" in first and "ids" in first:
        raise DataError(mixed_prompts(first["text"], first["ids"]))
    return DataPreview(text_prompt=first.get("text"), text_reference=first.get("reference"))


def _task_name(shard: str) -> str:
    """Returns the name of the split that a shard is one of."""
    found = SeqIOShard.of(shard)
    return seqio_name(found.task, found.split)
