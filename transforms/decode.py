"""Decoding shards of examples at every threshold, into one Parquet file a shard."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import apache_beam as beam
from apache_beam.utils.shared import Shared

from calm_beam.counted import counted
from calm_beam.decoding.prompts import Prompt, encode_prompt
from calm_beam.examples import DataError, Example
from calm_beam.failures import check_failures, failure_limit
from calm_beam.generations import (
    Generation,
    GenerationsError,
    StoredShard,
    read_generations,
    stored_examples,
    stored_failures,
    stored_shard,
    write_generations,
)
from calm_beam.generations.folder import Completion, check_files, shard_digest, shard_path
from calm_beam.storage import is_file
from calm_beam.sweeps import DecodePlan
from calm_beam.sweeps.shard import duplicate_prompts, with_unique_ids
from calm_beam.vocabulary import Vocabulary, VocabularyError

from .devices import require_accelerator
from .examples import ExamplesRead
from .metrics import DecodeMetrics
from .model_copies import ModelCopies
from .progress import ProgressLog

if TYPE_CHECKING:
    from calm_beam.decoding.sweep import SweepDecoder


@dataclasses.dataclass
class DecodeExamples(beam.PTransform):
    """Decodes shards of examples into a folder of generations, and marks it as complete at the end.

    A shard that the folder holds already is taken over if it is of the same job and the same examples; if it is not,
    the run fails before anything is decoded. So a retried bundle, or a later run, finds what an earlier one has done.

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

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `Completion`, given `ExamplesRead`."""
        read = ExamplesRead(*examples)
        count = beam.pvalue.AsSingleton(read.count)
        is_checked = (
            read.shards
            | "CheckStored" >> beam.ParDo(_CheckStored(self.plan))
            | "ListShards" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "CheckFolder" >> beam.Map(_check_folder, plan=self.plan)
        )
        decode = beam.ParDo(
            _DecodeShard(self.plan, self.progress, needs_accelerator=self.needs_accelerator),
            beam.pvalue.AsSingleton(is_checked),
            count,
        )
        if self.accelerator_hint is not None:
            decode = decode.with_resource_hints(accelerator=self.accelerator_hint)
        return (
            read.shards
            | "DecodeShards" >> decode
            | "ListDecoded" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
            | "MarkComplete" >> beam.Map(_mark_complete, count, plan=self.plan)
        )


class _CheckStored(beam.DoFn):
    """Yields the numbers of shards, and fails for one that is stored, or was above, of other examples than now."""

    def __init__(self, plan: DecodePlan) -> None:
        self._plan = plan

    def process(self, element: tuple[int, Iterable[Example]]) -> Iterator[int]:
        shard, unordered = element
        examples = with_unique_ids(unordered)
        _taken_over(self._plan, shard, examples)
        _path_above(self._plan, shard, examples)
        yield shard


def _check_folder(shards: list[int], *, plan: DecodePlan) -> bool:
    check_files(plan.directory, shards, num_shards=plan.num_shards)
    if plan.above is not None:
        check_files(plan.above.directory, shards, num_shards=plan.num_shards)
    return True


def _taken_over(plan: DecodePlan, shard: int, examples: list[Example]) -> StoredShard | None:
    """Returns the shard that is stored already, None if none is.

    Raises:
      GenerationsError: If it is of other examples.
      DataError: If it has failures, which are not allowed now.
    """
    path = plan.shard_path(shard)
    if not is_file(path):
        return None
    stored = stored_shard(path)
    _require_examples(stored, path, job=plan.job, examples=examples, num_shards=plan.num_shards)
    if stored.failed and plan.on_error == "fail":
        name, reason = stored_failures(path)[0]
        raise DataError(
            f"{path}: holds {counted(stored.failed, 'example')} that could not be decoded, {name} first: {reason}. "
            "Go on with "
            "--on_error=worst_case, or decode anew with --overwrite."
        )
    return stored


def _path_above(plan: DecodePlan, shard: int, examples: list[Example]) -> str | None:
    """Returns the file of a shard at the upper part of the grid, None if there is no such part.

    Raises:
      GenerationsError: If it is of other examples: outputs of different prompts must not meet in one generation.
    """
    if plan.above is None:
        return None
    assert plan.above_job is not None, "the part above has a job"
    path = shard_path(plan.above.directory, shard, num_shards=plan.num_shards)
    if not is_file(path):
        raise GenerationsError(
            f"{path}: is missing, although the data give {counted(len(examples), 'example')} for this shard: they "
            "have changed "
            "since the upper part of the grid was decoded. Restore them, or decode anew with --overwrite."
        )
    _require_examples(stored_shard(path), path, job=plan.above_job, examples=examples, num_shards=plan.num_shards)
    return path


def _require_examples(stored: StoredShard, path: str, *, job: str, examples: list[Example], num_shards: int) -> None:
    if stored.digest != shard_digest(job, stored.shard, examples):
        raise GenerationsError(
            f"{path}: was decoded from other examples than the data give now for shard {stored.shard} of {num_shards}, "
            f"so the data have changed since{_change(stored_examples(path), examples)}. Restore them, or decode anew "
            "with --overwrite."
        )


def _change(before: Sequence[Example], now: Sequence[Example]) -> str:
    """Returns in parentheses what happened to the first example that is not as it was; nothing if all are."""
    old, new = ({example.id: _as_given(example) for example in examples} for examples in (before, now))
    for name in sorted(old | new):
        if name not in new:
            return f" (example {name!r} is gone)"
        if name not in old:
            return f" (example {name!r} is new)"
        changed = [field for field in old[name] if old[name][field] != new[name][field]]
        if changed:
            return f" (example {name!r} has another {' and another '.join(changed)})"
    return ""


def _as_given(example: Example) -> dict[str, Any]:
    """Returns an example's fields, but for references that are made of token ids once prompts are encoded."""
    fields = dataclasses.asdict(example)
    if example.reference_ids is not None:
        del fields["references"]
    return fields


def _mark_complete(shards: list[StoredShard], count: int, *, plan: DecodePlan) -> Completion:
    completion = Completion.of(shards, job=plan.job, examples=count)
    limit = failure_limit(plan.max_failures, examples=count)
    if completion.failed > limit:
        failing = [plan.shard_path(shard.shard) for shard in completion.shards if shard.failed]
        failures = [failure for path in failing for failure in stored_failures(path)]
        check_failures(sorted(failures), failed=completion.failed, limit=limit)
    completion.write(plan.directory)
    return completion


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

    def process(self, element: tuple[int, Iterable[Example]], is_checked: bool, count: int) -> Iterator[StoredShard]:
        assert self._models is not None
        shard, unordered = element
        examples = with_unique_ids(unordered)
        stored = _taken_over(self._plan, shard, examples)
        if stored is not None:
            self._metrics.count_taken_over(stored.examples)
            self._progress.report("stored", stored.examples)
        else:
            # For all of a shard, before what follows sees any of it: that must not keep others waiting for the model.
            above = _generations_above(self._plan, shard, examples)
            self._progress.report("loading", 1)
            with self._models.borrowed() as loaded:
                # Beam counts nothing before the end, and until the first prompt is decoded, XLA compiles.
                self._progress.report("compiling", 1)
                generations = self._decode(
                    loaded, examples, above, limit=failure_limit(self._plan.max_failures, examples=count)
                )
            path = self._plan.shard_path(shard)
            write_generations(
                path,
                sorted(generations, key=lambda generation: generation.example.id),
                shard=shard,
                digest=shard_digest(self._plan.job, shard, examples),
            )
            # As it was stored, not as it is remembered.
            stored = stored_shard(path)
        # Here, since Beam has nowhere to count in `setup`.
        self._metrics.count_loads(self._models.take_load_msecs())
        yield stored

    def _decode(
        self, loaded: "_Loaded", examples: list[Example], above: Mapping[str, Generation] | None, *, limit: int
    ) -> list[Generation]:
        generations: list[Generation] = []
        failures: list[tuple[str, str]] = []
        start, before = time.perf_counter(), loaded.decoder.work
        for generation in self._generations(loaded, examples, above):
            generations.append(generation)
            self._progress.report("decoded", 1)
            if generation.failure is not None:
                failures.append((generation.example.id, generation.failure))
                # Now, and not after hours on a device that is broken.
                check_failures(failures, failed=len(failures), limit=limit)
        self._metrics.count_call(loaded.decoder.work - before, seconds=time.perf_counter() - start)
        self._metrics.count_failures(len(failures))
        return generations

    def _generations(
        self, loaded: "_Loaded", examples: list[Example], above: Mapping[str, Generation] | None
    ) -> Iterator[Generation]:
        """Yields the generation of every example; first of those whose prompt is already unfit, or failed above."""
        from calm_beam.decoding.generate import DecodeError, generate, reason_of

        plan = self._plan
        duplicates = duplicate_prompts(examples)
        prompts: list[Prompt] = []
        for example in examples:
            if above is not None and above[example.id].failure is not None:
                yield above[example.id]
                continue
            try:
                prompts.append(
                    encode_prompt(
                        example,
                        vocabulary=loaded.vocabulary,
                        settings=plan.settings,
                        vocab_size=loaded.vocab_size,
                        on_long=plan.on_long,
                    )
                )
            except Exception as error:
                is_data = isinstance(error, DataError)
                failure = str(error) if is_data else f"its prompt cannot be turned into token ids ({reason_of(error)})"
                if plan.on_error == "fail":
                    if is_data:
                        raise
                    raise DecodeError(f"{example.in_words()}: {failure}.") from error
                is_duplicate = example.id in duplicates
                yield Generation(example=example, truncated=False, duplicate=is_duplicate, failure=failure, outputs=())
        yield from generate(
            loaded.decoder,
            prompts,
            loaded.vocabulary,
            on_error=plan.on_error,
            duplicates=duplicates,
            above=[above[prompt.example.id] for prompt in prompts] if above is not None else None,
            goes_on=plan.goes_on,
        )


def _generations_above(plan: DecodePlan, shard: int, examples: list[Example]) -> dict[str, Generation] | None:
    """Returns the generations of a shard at the upper part of the grid, by id; None if there is no such part."""
    path = _path_above(plan, shard, examples)
    if path is None:
        return None
    return {generation.example.id: generation for generation in read_generations(path)}


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """What one thread needs to decode."""

    vocabulary: Vocabulary | None
    vocab_size: int
    decoder: "SweepDecoder"


def _load(plan: DecodePlan) -> _Loaded:
    from calm_beam.checkpoints import CheckpointError, Declared, load_checkpoint
    from calm_beam.decoding.compilation import use_compilation_cache
    from calm_beam.decoding.memory import keep_freed_memory
    from calm_beam.decoding.sweep import SweepDecoder

    keep_freed_memory()
    use_compilation_cache()
    checkpoint = load_checkpoint(
        plan.checkpoint,
        declared=Declared(activation=plan.activation, relative_max_distance=plan.relative_max_distance),
    )
    found = checkpoint.fingerprint()
    if found != plan.model_fingerprint:
        raise CheckpointError(
            f"checkpoint {plan.checkpoint}: fingerprint is {found}, the run was started for {plan.model_fingerprint}. "
            "Do not change a checkpoint while it is calibrated."
        )
    vocabulary = Vocabulary(plan.vocabulary, extra_ids=plan.extra_ids) if plan.vocabulary else None
    if vocabulary is not None and vocabulary.fingerprint != plan.vocabulary_fingerprint:
        raise VocabularyError(
            f"vocabulary {plan.vocabulary}: fingerprint is {vocabulary.fingerprint}, the run was started for "
            f"{plan.vocabulary_fingerprint}. Do not change a vocabulary while a model is calibrated."
        )
    settings = plan.settings
    decoder = SweepDecoder(
        checkpoint,
        settings.rule,
        thresholds=settings.thresholds[len(plan.above.thresholds) if plan.above else 0 :],
        with_full_model=plan.above is None,
        max_decode_length=settings.max_decode_length,
        max_input_length=settings.max_input_length,
        batch_size=plan.batch_size,
        token_budget=plan.token_budget,
    )
    return _Loaded(vocabulary, checkpoint.config.vocab_size, decoder)
