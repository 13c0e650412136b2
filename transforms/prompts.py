"""Prompts to be answered, of files or of a pipeline: checked examples, grouped into shards by their ids."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import apache_beam as beam

from calm_beam.inputs import DataFiles, Reading
from calm_beam.inputs.examples import DEFAULT_KEYS, DataError, Example, RowKeys, example_of_row
from calm_beam.outputs.shard_count import prompt_shards

from .examples import ExamplesRead, ReadsFiles, awaited, counted_examples, parsed_examples


@dataclasses.dataclass
class ReadPrompts(ReadsFiles):
    """Reads prompts to be answered into shards, and fails before anything is decoded if two of them have one id.

        pipeline | ReadPrompts("prompts/*.jsonl.gz") | Generate(manifest="calibration", model="model", output="answers")

    Files are those of calibration sets; references may be there and are not needed. The shard of a prompt depends on
    its id alone, so that a prompt which comes very often makes no shard larger than the others.

    Attributes:
      data: Paths or globs, names of SeqIO data, or files that were found already.
      num_shards: Number of shards; None goes by the size of the data.
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
        count = counted_examples(examples, self.files())
        return ExamplesRead(_shards(examples, count, num_shards=self.shard_count()), count)


@dataclasses.dataclass
class ShardPrompts(beam.PTransform):
    """Divides prompts that a pipeline of one's own has made into shards, as `ReadPrompts` does with those of files.

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
    """Returns how many prompts have an id, and fails for several; equal ones without ids are told apart later."""
    name, origins = element[0], list(element[1])
    if len(origins) > 1 and any(origins):
        raise DataError(f"id {name!r} occurs {len(origins)} times. Ids must be unique: they name the answers.")
    return len(origins)


def _shard_by_id(example: Example, num_shards: int) -> tuple[int, Example]:
    digest = hashlib.sha256(example.id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % num_shards, example
