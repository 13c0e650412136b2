"""Rows of a shard's file, one for every prompt: generations and answers.

A generation has the outputs of a prompt at every threshold or setting; their texts can be written in the order of the
data. An answer is the output of a prompt by one branch; answers may also be published as JSON lines, which users read.
"""

import array
import dataclasses
import functools
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calm_beam.inputs.examples import Example
from calm_beam.serving.answer import Tally
from calm_beam.storage import absolute, replacing

from .finished import FinishedAnswers
from .job import AnswerJob, OutputsError
from .shards import (
    AnsweredShard,
    Failure,
    ProbedLoss,
    StoredShard,
    damage_told,
    open_shard,
    shard_batches,
    shard_rows,
    stored_shard,
    write_shard,
)

if TYPE_CHECKING:
    import pyarrow

    from calm_beam.serving import Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of one prompt.

    Attributes:
      text: The text that metrics see, without eos; without a vocabulary, the generated ids joined by spaces.
      tokens: Generated ids, with the final eos if it was generated; empty if a user's decoder gave none.
      exit_layers: Exit layer of each token, from 1; empty if a user's decoder gave none.
      confidences: Confidence at each token's exit layer; the middle of its interval if a certified head decided. Empty
        for a user's decoder.
      near_tie: Whether a decision for this output was within rounding (`calm_beam.decoding.engine_choice`); None if
        unknown, as in files of earlier versions.
      cost: The cost that a user's decoder gave; None if it gave none.
    """

    text: str
    tokens: tuple[int, ...]
    exit_layers: tuple[int, ...]
    confidences: tuple[float, ...]
    near_tie: bool | None = None
    cost: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """All outputs of one prompt.

    Attributes:
      example: The example.
      truncated: Whether its prompt was cut.
      duplicate: Whether an earlier example has the same prompt.
      failure: Why it could not be decoded; None if it was.
      outputs: The full model's output, then one per threshold in descending order, or one per setting in their order;
        empty after a failure.
      max_rejected_confidence: Of the last output, the values that a sweep needs to resume below its threshold
        (`PromptResult.max_rejected_confidence`); None if no sweep resumes.
    """

    example: Example
    truncated: bool
    duplicate: bool
    failure: str | None
    outputs: tuple[Output, ...]
    max_rejected_confidence: tuple[float, ...] | None = None

    def near_ties(self) -> tuple[bool, ...]:
        """Returns, for each threshold, whether its output or the full model's is known to depend on a near tie."""
        full, *others = self.outputs
        return tuple(bool(full.near_tie or output.near_tie) for output in others)


# The fields that are stored. `repeats_prompt` is not: the generation's `duplicate` records it.
_EXAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Example) if field.name != "repeats_prompt")
# The fields that a file may lack: it does if no example has a group, or none is a chat of several turns.
_GROUP, _EARLIER = "group", "earlier"
# The column of `max_rejected_confidence`, under its name in files of every version.
_REJECTED = "runner_ups"


def write_generations(
    path: str | os.PathLike[str],
    generations: Iterable[Generation],
    *,
    shard: int = 0,
    digest: str = "",
    engine: str | None = None,
    overwrite: bool = True,
) -> None:
    """Writes one shard as Parquet, atomically.

    Args:
      path: The file to write.
      generations: The shard's generations.
      shard: Number of the shard.
      digest: Digest of the examples and of how they were decoded: a later run takes the file over if it is equal.
      engine: The engine as text, if the run could not know its workers' instructions; else None.
      overwrite: Whether to replace an existing file; see `write_shard`, whose errors apply.
    """
    rows = []
    for generation in generations:
        # Not `dataclasses.asdict`, which copies every token: it took a fifth of a run's time.
        row = {**vars(generation), "outputs": [vars(output) for output in generation.outputs]}
        row[_REJECTED] = row.pop("max_rejected_confidence")
        rows.append({**vars(row.pop("example")), **row})
    has_groups, has_earlier = (any(row[name] is not None for row in rows) for name in (_GROUP, _EARLIER))
    outputs = [output for row in rows for output in row["outputs"]]
    has_near_ties, has_costs = (any(output[name] is not None for output in outputs) for name in ("near_tie", "cost"))
    failed = sum(row["failure"] is not None for row in rows)
    about = StoredShard(shard=shard, examples=len(rows), failed=failed, digest=digest, engine=engine)
    schema = _generations_schema(
        has_groups=has_groups, has_earlier=has_earlier, has_near_ties=has_near_ties, has_costs=has_costs
    )
    write_shard(path, rows, schema=schema, about=about, overwrite=overwrite)


@functools.cache
def _generations_schema(
    *, has_groups: bool, has_earlier: bool, has_near_ties: bool, has_costs: bool
) -> "pyarrow.Schema":
    """Returns the schema of a shard; without any of these it is the schema of earlier versions."""
    import pyarrow

    output = pyarrow.struct(
        [
            ("text", pyarrow.string()),
            ("tokens", pyarrow.list_(pyarrow.int32())),
            ("exit_layers", pyarrow.list_(pyarrow.int32())),
            ("confidences", pyarrow.list_(pyarrow.float32())),
            *([("near_tie", pyarrow.bool_())] if has_near_ties else []),
            *([("cost", pyarrow.float64())] if has_costs else []),
        ]
    )
    return pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("has_own_id", pyarrow.bool_()),
            ("input", pyarrow.string()),
            ("input_ids", pyarrow.list_(pyarrow.int32())),
            ("references", pyarrow.list_(pyarrow.string())),
            ("reference_ids", pyarrow.list_(pyarrow.list_(pyarrow.int32()))),
            ("cluster", pyarrow.string()),
            *([(_GROUP, pyarrow.string())] if has_groups else []),
            *([(_EARLIER, pyarrow.list_(pyarrow.string()))] if has_earlier else []),
            ("file_index", pyarrow.int32()),
            ("line", pyarrow.int64()),
            ("truncated", pyarrow.bool_()),
            ("duplicate", pyarrow.bool_()),
            ("failure", pyarrow.string()),
            ("outputs", pyarrow.list_(output)),
            (_REJECTED, pyarrow.list_(pyarrow.float32())),
        ]
    )


def read_generations(path: str | os.PathLike[str], *, only: Collection[str] | None = None) -> Iterator[Generation]:
    """Yields the generations of one shard, in the order in which they were written.

    Args:
      path: A file of `write_generations`.
      only: Ids of the wanted generations; None for all.

    Raises:
      OutputsError: If the file is damaged. Damage that only the digest of all rows shows is raised after the last
        generation, and only if all are read.
    """
    with damage_told(path):
        for batch in shard_batches(path, only=only):
            for row in _rows(batch):
                example = {name: row.pop(name) for name in _EXAMPLE_FIELDS if name in row}
                rejected = row.pop(_REJECTED)
                yield Generation(example=Example(**example), max_rejected_confidence=rejected, **row)


def stored_failures(path: str) -> list[tuple[str, str]]:
    """Returns id and reason of every example of a shard that could not be decoded.

    Args:
      path: A file of `write_generations`.
    """
    return [(row["id"], row["failure"]) for row in _columns(path, "id", "failure") if row["failure"] is not None]


StoredPrompt = tuple[str | None, tuple[int, ...] | None, tuple[str, ...] | None]
"""Text and token ids of a prompt, of which one is None, and the earlier turns of its chat."""


def stored_prompts(path: str | os.PathLike[str]) -> set[StoredPrompt]:
    """Returns the prompts of one shard.

    Args:
      path: A file of `write_generations`.
    """
    columns = _columns(path, "input", "input_ids", _EARLIER)
    return {(row["input"], row["input_ids"], row.get(_EARLIER)) for row in columns}


def stored_examples(path: str | os.PathLike[str]) -> list[Example]:
    """Returns the examples of one shard, without their outputs.

    Args:
      path: A file of `write_generations`.
    """
    return [Example(**row) for row in _columns(path, *_EXAMPLE_FIELDS)]


def stored_groups(path: str | os.PathLike[str]) -> list[str | None]:
    """Returns the group of every example of one shard.

    Args:
      path: A file of `write_generations`.
    """
    return [row.get(_GROUP) for row in _columns(path, "id", _GROUP)]


def _columns(path: str | os.PathLike[str], *names: str) -> list[dict[str, Any]]:
    """Returns some columns of a shard, by row; those that a file may lack are omitted if it has none."""
    with open_shard(path) as file:
        stored = [name for name in names if name not in (_GROUP, _EARLIER) or name in file.schema_arrow.names]
        table = file.read(columns=stored, use_threads=False)
        return [row for batch in table.to_batches() for row in _rows(batch)]


def _rows(batch: "pyarrow.RecordBatch") -> Iterator[dict[str, Any]]:
    """Yields rows with tuples for lists; column by column, this is several times as fast as `to_pylist`."""
    columns = [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: "pyarrow.Array") -> list[Any]:
    import pyarrow

    if pyarrow.types.is_list(column.type):
        items = _values(column.flatten())
        ends = np.cumsum(column.value_lengths().fill_null(0).to_numpy()).tolist()
        starts = (0, *ends)
        return [
            tuple(items[start:end]) if is_valid else None
            for start, end, is_valid in zip(starts, ends, column.is_valid().to_pylist(), strict=False)
        ]
    if pyarrow.types.is_struct(column.type):
        # The only structs are outputs.
        names = [field.name for field in column.type]
        fields = map(_values, column.flatten())
        return [Output(**dict(zip(names, values, strict=True))) for values in zip(*fields, strict=True)]
    is_plain = pyarrow.types.is_primitive(column.type) and not column.null_count
    values: list[Any] = column.to_numpy(zero_copy_only=False).tolist() if is_plain else column.to_pylist()
    return values


def write_in_data_order(
    file: BinaryIO, generations: Iterable[Generation], *, text_of: Callable[[Generation], str], folder: str
) -> None:
    """Writes a text for each generation, in the order of data files and of their lines.

    Generations are not kept in memory: their texts wait on disk, and 32 bytes for each locate its text.

    Args:
      file: The file to write to.
      generations: In any order.
      text_of: Returns the text of one generation.
      folder: A folder on a local disk, with room for all texts once more; nothing remains there.

    Raises:
      OSError: If the disk is full.
    """
    # For each generation: file, line, first byte, number of bytes.
    places = array.array("q")
    with tempfile.TemporaryFile(dir=folder) as unordered:
        end = 0
        for generation in generations:
            text = text_of(generation).encode()
            unordered.write(text)
            places.extend((generation.example.file_index, generation.example.line, end, len(text)))
            end += len(text)
        # [generations * 4] -> [generations, 4]
        table = np.array(places, np.int64).reshape(-1, 4)
        for row in np.lexsort((table[:, 1], table[:, 0])):
            unordered.seek(table[row, 2])
            file.write(unordered.read(table[row, 3]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """The outcome of a prompt.

    Attributes:
      example: The prompt.
      answer: Its answer; None if it has none.
      failure: Text on why it has no answer; None if it has one.
      is_refused: Whether the prompt was unfit to be decoded. Any other prompt without an answer should have been
        answered, and counts as a loss of 1 if losses are measured.
    """

    example: Example
    answer: "Answer | None" = None
    failure: str | None = None
    is_refused: bool = False


def write_answers(path: str, rows: Sequence[Mapping[str, Any]], *, shard: AnsweredShard, has_groups: bool) -> None:
    """Writes the file of a shard atomically.

    Args:
      path: The file to write.
      rows: Rows of `answer_row`, by id.
      shard: The outcome of all its prompts.
      has_groups: Whether rows have the group of each prompt and the threshold that answered it.

    Raises:
      FileExistsError: If there is a file with other content.
      OSError: If it cannot be written.
    """
    ids = [row["id"] for row in rows] + [failure.id for failure in shard.failures]
    assert len(ids) == len(set(ids)) == shard.examples, "every prompt is answered once, or has failed"
    write_shard(path, rows, schema=_answers_schema(has_groups=has_groups), about=shard, overwrite=False)


def write_outcomes(
    path: str,
    outcomes: Iterable[Answered],
    *,
    shard: int,
    digest: str,
    losses: Sequence[ProbedLoss],
    has_groups: bool,
) -> None:
    """Writes the outcomes of a shard's prompts, as `write_answers` does.

    Args:
      path: The file to write.
      outcomes: Outcomes by id.
      shard: Number of the shard.
      digest: Digest of its prompts, and of how they were answered.
      losses: The measured losses, by id.
      has_groups: Whether rows have the group of each prompt and the threshold that answered it.
    """
    # Imported here because it needs JAX; reading answers does not.
    from calm_beam.serving import answer_row

    tallies: dict[str | None, Tally] = {}
    rows, failures = [], []
    for each in outcomes:
        example, before = each.example, tallies.get(each.example.group, Tally())
        if each.answer is not None:
            tallies[example.group] = before.answered(each.answer)
            rows.append(answer_row(example.id, each.answer, has_groups=has_groups))
        else:
            assert each.failure is not None, "a prompt without an answer has a reason"
            tallies[example.group] = before.failing()
            failures.append(Failure(id=example.id, reason=each.failure))
    answered = AnsweredShard.of(shard, digest=digest, failures=failures, losses=losses, tallies=tallies)
    write_answers(path, rows, shard=answered, has_groups=has_groups)


def publish_rows(source: str, path: str) -> None:
    """Writes the rows of a shard's Parquet file as gzipped JSON lines: equal bytes for equal rows.

    Raises:
      OutputsError: If the shard is damaged; then nothing is written.
      OSError: If the file cannot be written.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "wb") as raw,
        # Name and time are omitted, so that equal rows give equal bytes.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for row in shard_rows(source):
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def read_answers(directory: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all answers of a finished run, by shard and id, as its files hold them.

    Args:
      directory: Its output folder.

    Raises:
      OutputsError: If answering did not finish there, or a shard is missing, damaged or not the finished one.
      OSError: If a file cannot be read.
    """
    folder = absolute(directory)
    job = AnswerJob.read(folder)
    for finished in FinishedAnswers.read(folder, job).shards:
        path = job.shard_path(folder, finished.shard)
        if stored_shard(path).digest != finished.digest:
            raise OutputsError(f"{path}: is not the shard that was finished.")
        yield from shard_rows(path)


def _answers_schema(*, has_groups: bool) -> "pyarrow.Schema":
    import pyarrow

    return pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("text", pyarrow.string()),
            ("tokens", pyarrow.list_(pyarrow.int32())),
            ("exit_layers", pyarrow.list_(pyarrow.int32())),
            ("confidences", pyarrow.list_(pyarrow.float32())),
            ("layers_used", pyarrow.int64()),
            ("layers_saved", pyarrow.int64()),
            ("truncated", pyarrow.bool_()),
            ("finish_reason", pyarrow.string()),
            *([("group", pyarrow.string()), ("threshold", pyarrow.float64())] if has_groups else []),
        ]
    )
