"""Reading a calibration set: files to checked examples, grouped into shards."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.metrics import Metrics

from calm_beam.examples import DataError, Example, parse_examples
from calm_beam.storage import open_input

from .progress import ProgressLog


class ExamplesRead(NamedTuple):
    """What was read.

    Attributes:
      shards: Pairs of int and Iterable[Example], one for every shard that has examples.
      count: One int: how many examples were read, counted where ids are compared and not where shards are made.
    """

    shards: beam.PCollection
    count: beam.PCollection


@dataclasses.dataclass
class ReadExamples(beam.PTransform):
    """Reads JSONL files into (shard, examples) pairs, and fails before decoding if two examples have one id.

    The shard of an example depends on its prompt alone, so equal prompts meet in one shard, and what is in a shard
    does not depend on files, workers or order.

    Attributes:
      paths: The files, `.gz` or not.
      num_shards: Number of shards.
      needs_references: Whether an example without references is an error.
      progress: Where to report.
      cluster_key: Key of the name of an example's cluster; None reads no clusters.
    """

    paths: Sequence[str]
    num_shards: int
    needs_references: bool
    progress: ProgressLog
    cluster_key: str | None = None

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, pipeline: beam.Pipeline) -> tuple[beam.PCollection, beam.PCollection]:
        """Returns `ExamplesRead`: shards of examples, and how many examples there are."""
        examples = (
            pipeline
            | "ListFiles" >> beam.Create(list(enumerate(self.paths)))
            # So that one worker does not read all files: Create is one bundle.
            | "SpreadFiles" >> beam.Reshuffle()
            | "ParseExamples" >> beam.ParDo(_ParseFile(self.needs_references, self.cluster_key, self.progress))
        )
        count = (
            examples
            | "KeyById" >> beam.Map(_id_and_place)
            | "GroupById" >> beam.GroupByKey()
            | "CheckUniqueIds" >> beam.ParDo(_CheckUniqueId(list(self.paths)))
            | "CountExamples" >> beam.CombineGlobally(sum)
        )
        shards = (
            examples
            | "KeyByShard" >> beam.Map(_shard_and_example, self.num_shards)
            | "GroupByShard" >> beam.GroupByKey()
            # Waiting for the side input keeps decoding from starting before ids are checked.
            | "AwaitUniqueIds" >> beam.Map(_first, _=beam.pvalue.AsSingleton(count))
        )
        return ExamplesRead(shards, count)


def _first(element: Any, _: int) -> Any:
    return element


def _id_and_place(example: Example) -> tuple[str, tuple[int, int, bool]]:
    return example.id, (example.file_index, example.line, example.has_own_id)


def _shard_and_example(example: Example, num_shards: int) -> tuple[int, Example]:
    return int.from_bytes(example.input_digest()[:8], "big") % num_shards, example


class _ParseFile(beam.DoFn):
    """Yields the examples of one file."""

    def __init__(self, needs_references: bool, cluster_key: str | None, progress: ProgressLog) -> None:
        self._needs_references = needs_references
        self._cluster_key = cluster_key
        self._progress = progress
        self._examples = Metrics.counter("calm_beam", "read-examples")

    def process(self, element: tuple[int, str]) -> Iterator[Example]:
        file_index, path = element
        count = 0
        for example in read_examples(
            path, file_index=file_index, needs_references=self._needs_references, cluster_key=self._cluster_key
        ):
            count += 1
            yield example
        if not count:
            raise DataError(f"{path}: holds no examples. A part that was lost would bias the result.")
        self._examples.inc(count)
        self._progress.report("read", count)


def read_examples(
    path: str, *, file_index: int = 0, needs_references: bool = False, cluster_key: str | None = None
) -> Iterator[Example]:
    """Yields the examples of one JSONL file, local or on Cloud Storage.

    Args:
      path: The file, read as gzip if it ends in `.gz`.
      file_index: Recorded in the examples.
      needs_references: Whether an example without references is an error.
      cluster_key: Key of the cluster's name; None reads no clusters.

    Raises:
      DataError: If the file is damaged or a line is not an example; names file and line.
    """
    with open_input(path) as raw:
        yield from parse_examples(
            raw, path=path, file_index=file_index, needs_references=needs_references, cluster_key=cluster_key
        )


class _CheckUniqueId(beam.DoFn):
    """Fails for an id that two examples have; yields how many have it.

    Ids derived from content are no claim of identity: equal examples without ids are counted as duplicates instead.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def process(self, element: tuple[str, Iterable[tuple[int, int, bool]]]) -> Iterator[int]:
        example_id, found = element
        all_places = list(found)
        places = sorted((file, line) for file, line, _ in all_places)
        if len(places) > 1 and any(is_own for _, _, is_own in all_places):
            named = " and ".join(f"{self._paths[file]}, line {line}" for file, line in places[:2])
            raise DataError(
                f"id {example_id!r} occurs {len(places)} times ({named}). Ids must be unique: an example that counts "
                "twice voids the guarantee."
            )
        yield len(all_places)
