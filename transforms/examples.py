"""Reading a calibration set, or prompts to be answered: files to checked examples, grouped into shards.

Prompts come from files or from a pipeline, and are grouped by their ids.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.metrics import Metrics

from calm_beam.inputs import DataFiles, FilePart, Reading, no_examples, parts_of, place_of, read_examples
from calm_beam.inputs.examples import DEFAULT_KEYS, DataError, Example, RowKeys, example_of_row, mixed_prompts
from calm_beam.inputs.set_parts import CONFIRMING, Split
from calm_beam.outputs.sharding import default_shards, prompt_shards, shard_in_order, with_unique_ids

from .metrics import EMPTY_REFERENCES, NAMESPACE, NOWHERE, ProgressLog


class ExamplesRead(NamedTuple):
    """The examples that were read.

    Attributes:
      shards: Pairs of int and Iterable[Example], one for every shard that has examples.
      count: One int: how many examples were read, counted where ids are compared and not where shards are made.
    """

    shards: beam.PCollection
    count: beam.PCollection


@dataclasses.dataclass
class ReadsFiles(beam.PTransform):
    """Base of the transforms that read data files into shards.

    Attributes:
      data: Paths or globs, names of SeqIO data, or files that were found already.
      num_shards: Number of shards; None chooses by the size of the data.
      group_key: Key of the name of a group; None reads no groups. Found files say so themselves.
      progress: Where to report.
    """

    data: str | os.PathLike[str] | Sequence[str] | DataFiles
    _: dataclasses.KW_ONLY
    num_shards: int | None = None
    group_key: str | None = None
    progress: ProgressLog = NOWHERE

    def __post_init__(self) -> None:
        # Files are looked for now, so that a wrong name is told before a pipeline runs.
        if not isinstance(self.data, DataFiles):
            self.data = DataFiles.found(self.data, reading=self._reading())

    def shard_count(self) -> int:
        """Returns into how many shards the examples are divided."""
        if self.num_shards is None:
            self.num_shards = self._usual_shards()
        return self.num_shards

    def files(self) -> DataFiles:
        """Returns the files, and how they are read."""
        assert isinstance(self.data, DataFiles), "they were found when this was made"
        return self.data

    def _reading(self) -> Reading:
        """Returns how files are read that are yet to be found."""
        return Reading(group_key=self.group_key)

    def _usual_shards(self) -> int:
        """Returns the number of shards for the size of the data."""
        return default_shards(self.files())


@dataclasses.dataclass
class ReadExamples(ReadsFiles):
    """Reads a calibration set into shards, and fails before anything is decoded if its files are not one data set.

        pipeline | ReadExamples("data/*.jsonl.gz") | Sweep(model="model", thresholds=grid(0.05), output="out")

    That is if two examples have one id, or if prompts are texts here and token ids there. The shard of an example
    depends on its prompt alone, so equal prompts meet in one shard, and what is in a shard does not depend on files,
    workers or order. For a calibration that looks at some shards before others, it depends on the id or cluster alone:
    then shards are independent draws, however often a prompt is there.

    Attributes:
      data: Paths or globs, names of SeqIO data, or files that were found already.
      num_shards: Number of shards; None chooses by the size of the data.
      group_key: Key of the name of an example's group; None reads no groups. Found files say so themselves.
      progress: Where to report.
      needs_references: Whether an example without references is an error; those of found files say so themselves.
      cluster_key: Key of the name of an example's cluster, likewise; None reads no clusters.
      order: Salt of the hash of ids, or of clusters' names, that divides examples into shards; None divides by prompts.
      part: The part of the set that is kept; None for all of it. The rest is read and checked, but goes no further.
    """

    _: dataclasses.KW_ONLY
    needs_references: bool = False
    cluster_key: str | None = None
    order: str | None = None
    part: Split | None = None

    def _reading(self) -> Reading:
        return Reading(needs_references=self.needs_references, cluster_key=self.cluster_key, group_key=self.group_key)

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, pipeline: beam.Pipeline) -> tuple[beam.PCollection, beam.PCollection]:
        """Returns `ExamplesRead`: shards of examples, and how many examples there are."""
        data = self.files()
        examples = parsed_examples(pipeline, data, progress=self.progress if self.part is None else NOWHERE)
        count = counted_examples(examples, data)
        is_one_kind = (
            examples
            | "KeyByKind" >> beam.Map(_kind_and_place)
            | "FirstOfKind" >> beam.CombinePerKey(min)
            | "ListKinds" >> beam.combiners.ToList()
            | "CheckOneKind" >> beam.Map(_check_one_kind, paths=list(data.files), reading=data.reading)
        )
        is_checked = (beam.pvalue.AsSingleton(count), beam.pvalue.AsSingleton(is_one_kind))
        kept = self._named_apart(examples)
        if self.part is not None:
            kept = (
                kept
                | "KeyWholeByPrompt" >> beam.Map(_prompt_and_example)
                | "MeetWholeByPrompt" >> beam.GroupByKey()
                | "TakePart" >> beam.FlatMap(_taken, part=self.part, progress=self.progress)
            )
            # Of the part; the ids of all have been compared.
            count = kept | "CountPart" >> beam.combiners.Count.Globally()
        shards = (
            self._divided(kept)
            | "GroupByShard" >> beam.GroupByKey()
            # Waiting for the side inputs keeps decoding from starting before all examples are checked.
            | "AwaitChecks" >> beam.Map(awaited, *is_checked)
        )
        return ExamplesRead(shards, count)

    def _named_apart(self, examples: beam.PCollection) -> beam.PCollection:
        """Returns examples whose ids no two share, where these decide more than names."""
        if self.order is None and self.part is None:
            return examples
        return (
            examples
            | "KeyWholeById" >> beam.Map(_id_and_example)
            | "MeetById" >> beam.GroupByKey()
            | "NameApart" >> beam.FlatMap(_named_apart)
        )

    def _divided(self, examples: beam.PCollection) -> beam.PCollection:
        """Returns examples with the numbers of their shards."""
        if self.order is None:
            return examples | "KeyByShard" >> beam.Map(_shard_and_example, self.shard_count())
        return (
            examples
            | "KeyByPrompt" >> beam.Map(_prompt_and_example)
            | "MeetByPrompt" >> beam.GroupByKey()
            | "PutInOrder" >> beam.FlatMap(_in_order, salt=self.order, num_shards=self.shard_count())
        )


@dataclasses.dataclass
class DivideExamples(beam.PTransform):
    """Divides examples that the launching machine has read, and found to be one data set, as `ReadExamples` does.

    Attributes:
      examples: At least one; all of them become part of the pipeline.
      num_shards: Number of shards.
    """

    examples: Sequence[Example]
    _: dataclasses.KW_ONLY
    num_shards: int

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, pipeline: beam.Pipeline) -> tuple[beam.PCollection, beam.PCollection]:
        """Returns `ExamplesRead`."""
        keyed = [_shard_and_example(example, self.num_shards) for example in self.examples]
        numbers = sorted({number for number, _ in keyed})
        shards = (
            pipeline
            | "ListShards"
            >> beam.Create([(number, [example for at, example in keyed if at == number]) for number in numbers])
            # So that one worker does not decode all of them: Create is one bundle.
            | "SpreadShards" >> beam.Reshuffle()
        )
        return ExamplesRead(shards, pipeline | "CountExamples" >> beam.Create([len(keyed)]))


def _id_and_example(example: Example) -> tuple[str, Example]:
    return example.id, example


def _named_apart(element: tuple[str, Iterable[Example]]) -> list[Example]:
    return with_unique_ids(element[1])


def _taken(element: tuple[bytes, Iterable[Example]], *, part: Split, progress: ProgressLog) -> Iterator[Example]:
    """Yields the examples of one prompt that are of the part, and reports them as read.

    Where the part that chooses has the prompt too, those that confirm are marked: they repeat it.
    """
    examples = list(element[1])
    kept = [example for example in examples if part.takes(example)]
    repeats = part.name == CONFIRMING and len(kept) < len(examples)
    for example in kept:
        progress.report("read", 1)
        yield dataclasses.replace(example, repeats_prompt=True) if repeats else example


def _prompt_and_example(example: Example) -> tuple[bytes, Example]:
    return example.input_digest(), example


def _in_order(element: tuple[bytes, Iterable[Example]], *, salt: str, num_shards: int) -> Iterator[tuple[int, Example]]:
    """Yields the examples of one prompt with their shards, all but the first of them marked."""
    keyed = ((shard_in_order(example, salt=salt, num_shards=num_shards), example) for example in element[1])
    for place, (shard, example) in enumerate(sorted(keyed, key=lambda each: (each[0], each[1].id))):
        yield shard, dataclasses.replace(example, repeats_prompt=place > 0)


def awaited(element: Any, *_: object) -> Any:
    """Returns an element, once all that follows is there."""
    return element


def _kind_and_place(example: Example) -> tuple[str, tuple[int, int]]:
    return "token ids" if example.input is None else "text", (example.file_index, example.line)


def _check_one_kind(found: list[tuple[str, tuple[int, int]]], *, paths: list[str], reading: Reading) -> bool:
    """Fails if prompts are of both kinds; `found` has the first place of each."""
    places = {kind: place_of(paths[file], row, reading=reading) for kind, (file, row) in found}
    if len(places) > 1:
        raise DataError(mixed_prompts(places["text"], places["token ids"]))
    return True


def parsed_examples(pipeline: beam.Pipeline, data: DataFiles, *, progress: ProgressLog) -> beam.PCollection:
    """Returns the examples of all files."""
    return (
        pipeline
        | "ListFiles" >> beam.Create(list(enumerate(data.files)))
        # So that one worker does not read all files: Create is one bundle.
        | "SpreadFiles" >> beam.Reshuffle()
        | "DivideFiles" >> beam.FlatMap(_parts_of_file, data.reading)
        # Nor all of a file that can be read in parts.
        | "SpreadParts" >> beam.Reshuffle()
        | "ParseExamples" >> beam.ParDo(_ParsePart(data.reading, progress))
    )


# Why ids must be unique.
_VOIDS = "an example that counts twice voids the guarantee"
_NAME_ANSWERS = "they name the answers"


def counted_examples(examples: beam.PCollection, data: DataFiles, *, reason: str = _VOIDS) -> beam.PCollection:
    """Returns the number of examples, once no two of them are found to have one id.

    Args:
      examples: The examples.
      data: Where they are from.
      reason: Why ids must be unique, for the error.
    """
    return (
        examples
        | "KeyById" >> beam.Map(_id_and_place)
        | "GroupById" >> beam.GroupByKey()
        | "CheckUniqueIds" >> beam.ParDo(_CheckUniqueId(list(data.files), data.reading, reason))
        | "CountExamples" >> beam.CombineGlobally(sum)
    )


def _id_and_place(example: Example) -> tuple[str, tuple[int, int, bool]]:
    return example.id, (example.file_index, example.line, example.has_own_id)


def _shard_and_example(example: Example, num_shards: int) -> tuple[int, Example]:
    return int.from_bytes(example.input_digest()[:8], "big") % num_shards, example


def _parts_of_file(element: tuple[int, str], reading: Reading) -> Sequence[FilePart]:
    file_index, path = element
    return parts_of(path, reading, file_index=file_index)


class _ParsePart(beam.DoFn):
    """Yields the examples of one file, or of a part of it."""

    def __init__(self, reading: Reading, progress: ProgressLog) -> None:
        self._reading = reading
        self._progress = progress
        self._examples = Metrics.counter(NAMESPACE, "read-examples")
        self._empty_references = Metrics.counter(NAMESPACE, EMPTY_REFERENCES)

    def process(self, part: FilePart) -> Iterator[Example]:
        count = empty = 0
        for example in read_examples(part, self._reading):
            count += 1
            empty += example.has_empty_reference
            yield example
        if not count:
            raise DataError(no_examples(part.path))
        self._examples.inc(count)
        self._empty_references.inc(empty)
        self._progress.report("read", count)


class _CheckUniqueId(beam.DoFn):
    """Fails for an id that two examples have; yields how many have it.

    Ids derived from content are no claim of identity: equal examples without ids are counted as duplicates instead.
    """

    def __init__(self, paths: list[str], reading: Reading, reason: str) -> None:
        self._paths = paths
        self._reading = reading
        self._reason = reason

    def process(self, element: tuple[str, Iterable[tuple[int, int, bool]]]) -> Iterator[int]:
        example_id, found = element
        all_places = list(found)
        places = sorted((file, row) for file, row, _ in all_places)
        if len(places) > 1 and any(is_own for _, _, is_own in all_places):
            named = " and ".join(place_of(self._paths[file], row, reading=self._reading) for file, row in places[:2])
            raise DataError(
                f"id {example_id!r} occurs {len(places)} times ({named}). Ids must be unique: {self._reason}."
            )
        yield len(all_places)


@dataclasses.dataclass
class ReadPrompts(ReadsFiles):
    """Reads prompts to be answered into shards, and fails before anything is decoded if two of them have one id.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Files are those of calibration sets; references may be there and are not needed. The shard of a prompt depends on
    its id alone, so that a prompt which comes very often makes no shard larger than the others.

    Attributes:
      data: Paths or globs, names of SeqIO data, or files that were found already.
      num_shards: Number of shards; None chooses by the size of the data.
      group_key: Key of the name of a prompt's group; None reads no groups. Found files say so themselves.
      progress: Where to report.
    """

    def _usual_shards(self) -> int:
        return prompt_shards(self.files())

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, pipeline: beam.Pipeline) -> tuple[beam.PCollection, beam.PCollection]:
        """Returns `ExamplesRead`: shards of prompts, and how many prompts there are."""
        examples = parsed_examples(pipeline, self.files(), progress=self.progress)
        count = counted_examples(examples, self.files(), reason=_NAME_ANSWERS)
        return ExamplesRead(_shards(examples, count, num_shards=self.shard_count()), count)


@dataclasses.dataclass
class ShardPrompts(beam.PTransform):
    """Divides the prompts of your own pipeline into shards, as `ReadPrompts` does with those of files.

        rows | ShardPrompts(num_shards=100) | Generate(manifest="calibration", model="model", output="answers")

    Attributes:
      num_shards: Number of shards. One holds some thousand prompts well: fewer leave a decoder half empty.
      group_key: Key of the name of a prompt's group; None reads no groups.
    """

    _: dataclasses.KW_ONLY
    num_shards: int
    group_key: str | None = None

    def shard_count(self) -> int:
        """Returns into how many shards the prompts are divided."""
        return self.num_shards

    def files(self) -> DataFiles:
        """Returns no files, and how rows are read."""
        return DataFiles(patterns=(), files=(), reading=Reading(group_key=self.group_key))

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, rows: beam.PCollection) -> tuple[beam.PCollection, beam.PCollection]:
        """Returns `ExamplesRead`, given texts, or rows as files of JSON lines have them: `id`, `input` and so on."""
        keys = dataclasses.replace(DEFAULT_KEYS, group=self.group_key)
        examples = rows | "TakePrompts" >> beam.Map(_example_of, keys=keys)
        count = (
            examples
            | "KeyById" >> beam.Map(_id_and_origin)
            | "GroupById" >> beam.GroupByKey()
            | "CheckUniqueIds" >> beam.Map(_checked_count)
            | "CountExamples" >> beam.CombineGlobally(sum)
        )
        return ExamplesRead(_shards(examples, count, num_shards=self.num_shards), count)


def _shards(examples: beam.PCollection, count: beam.PCollection, *, num_shards: int) -> beam.PCollection:
    """Returns shards of prompts, none of them before all ids are checked."""
    return (
        examples
        | "KeyByShard" >> beam.Map(_shard_by_id, num_shards)
        | "GroupByShard" >> beam.GroupByKey()
        | "AwaitChecks" >> beam.Map(awaited, beam.pvalue.AsSingleton(count))
    )


def _example_of(row: str | Mapping[str, Any], *, keys: RowKeys) -> Example:
    fields = {keys.inputs: row} if isinstance(row, str) else row
    return example_of_row(fields, where=f"prompt {row!r:.60}", position=1, keys=keys)


def _id_and_origin(example: Example) -> tuple[str, bool]:
    return example.id, example.has_own_id


def _checked_count(element: tuple[str, Iterable[bool]]) -> int:
    """Returns how many prompts have an id, and fails for several; equal ones without ids are distinguished later."""
    name, origins = element[0], list(element[1])
    if len(origins) > 1 and any(origins):
        raise DataError(f"id {name!r} occurs {len(origins)} times. Ids must be unique: {_NAME_ANSWERS}.")
    return len(origins)


def _shard_by_id(example: Example, num_shards: int) -> tuple[int, Example]:
    digest = hashlib.sha256(example.id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards, example
