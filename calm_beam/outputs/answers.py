"""Answers: what every prompt became by one branch, a row each of a shard's file, and of what users read."""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.inputs.examples import Example
from calm_beam.serving.tally import Tally
from calm_beam.storage import absolute, replacing

from .finished import FinishedAnswers
from .job import AnswerJob, OutputsError
from .shards import AnsweredShard, Failure, ProbedLoss, shard_rows, stored_shard, write_shard

if TYPE_CHECKING:
    import pyarrow

    from calm_beam.serving import Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answered:
    """What became of a prompt.

    Attributes:
      example: The prompt.
      answer: Its answer; None if it has none.
      failure: Why it has none, in words; None if it has one.
      is_refused: Whether it was unfit to be decoded. If it has no answer otherwise, it should have been answered, and
        counts as a loss of 1 where losses are measured.
    """

    example: Example
    answer: "Answer | None" = None
    failure: str | None = None
    is_refused: bool = False


def write_answers(path: str, rows: Sequence[Mapping[str, Any]], *, shard: AnsweredShard, has_groups: bool) -> None:
    """Writes the file of a shard, whole or not at all.

    Args:
      path: Where to.
      rows: Of `answer_row`, by id.
      shard: What became of all its prompts.
      has_groups: Whether rows say for which group, and at which threshold, a prompt was answered.

    Raises:
      FileExistsError: If there is one already, with other content.
      OSError: If it cannot be written.
    """
    ids = [row["id"] for row in rows] + [failure.id for failure in shard.failures]
    assert len(ids) == len(set(ids)) == shard.examples, "every prompt is answered once, or has failed"
    write_shard(path, rows, schema=_schema(has_groups=has_groups), about=shard, overwrite=False)


def write_outcomes(
    path: str,
    outcomes: Iterable[Answered],
    *,
    shard: int,
    digest: str,
    losses: Sequence[ProbedLoss],
    has_groups: bool,
) -> None:
    """Writes what became of the prompts of a shard, as `write_answers` does.

    Args:
      path: Where to.
      outcomes: By id.
      shard: Number of the shard.
      digest: Of its prompts, and of how they were answered.
      losses: What was measured, by id.
      has_groups: As in `write_answers`.
    """
    # Here, since it needs JAX, which reading answers does not.
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
    """Writes the rows of a shard's Parquet file as JSON lines, packed by gzip: the same bytes for the same rows.

    Raises:
      OutputsError: If the shard is damaged; nothing is written then.
      OSError: If the file cannot be written.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "wb") as raw,
        # Without name and time, which would be of this moment.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for row in shard_rows(source):
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def read_answers(directory: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of all answers of a run that has finished, by shard and id: the same as its files hold.

    Args:
      directory: Its output folder.

    Raises:
      OutputsError: If answering did not finish there, or a shard is missing, damaged or not the one that was finished.
      OSError: If a file cannot be read.
    """
    folder = absolute(directory)
    job = AnswerJob.read(folder)
    for finished in FinishedAnswers.read(folder, job).shards:
        path = job.shard_path(folder, finished.shard)
        if stored_shard(path).digest != finished.digest:
            raise OutputsError(f"{path}: is not the shard that was finished.")
        yield from shard_rows(path)


def _schema(*, has_groups: bool) -> "pyarrow.Schema":
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
            *([("group", pyarrow.string()), ("threshold", pyarrow.float64())] if has_groups else []),
        ]
    )
