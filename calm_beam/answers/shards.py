"""The answers of one shard, in a Parquet file that says all that became of its prompts.

Each prompt has a row, or stands among the failures; losses that were measured stand beside them. So a shard is stored
in one step, and nothing of it can be missing or be there twice. What is stored is never replaced: of two workers that
answer the same shard, the first one counts.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import Example
from calm_beam.storage import is_file
from calm_beam.storage.parquet_shards import (
    about_shard,
    check_content,
    check_row_count,
    opened_shard,
    shard_rows,
    write_shard,
)
from calm_beam.tally import Tally

if TYPE_CHECKING:
    import pyarrow

_ANSWER_AGAIN = "Remove it, and repeat the run that made it with --resume: the shard is then answered again."


class AnswersError(CalmBeamError, ValueError):
    """Stored answers that cannot be trusted, or are not those that were asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A prompt without an answer.

    Attributes:
      id: Of the prompt.
      reason: Why, in words.
    """

    id: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedLoss:
    """The loss of a prompt that the full model has answered as well.

    Attributes:
      id: Of the prompt.
      loss: The loss.
      failure: Why it is 1 without having been measured; None if it was measured.
      calibration: Place of the entry of the manifest whose promise this is about.
    """

    id: str
    loss: float
    failure: str | None
    calibration: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredShard:
    """What the file of a shard says about itself.

    Attributes:
      shard: Number of the shard, from 0.
      digest: Of its prompts, and of how they were answered.
      failures: Prompts without an answer, by id.
      losses: What was measured, by id.
      tallies: Counts by group; under None for prompts of no group.
    """

    shard: int
    digest: str
    failures: tuple[Failure, ...]
    losses: tuple[ProbedLoss, ...]
    tallies: Mapping[str | None, Tally]

    @property
    def prompts(self) -> int:
        """Number of its prompts, failed ones included."""
        return sum(tally.prompts for tally in self.tallies.values())

    @property
    def failed(self) -> int:
        """Number of its prompts without an answer."""
        return len(self.failures)

    def to_dict(self) -> dict[str, Any]:
        """Returns this as plain JSON values."""
        return {
            "shard": self.shard,
            "digest": self.digest,
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "losses": [dataclasses.asdict(loss) for loss in self.losses],
            "tallies": [{"group": name, **dataclasses.asdict(tally)} for name, tally in self.tallies.items()],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "AnsweredShard":
        """Returns what `to_dict` gave; whatever is missing or unknown is a KeyError or a TypeError."""
        return cls(
            shard=value["shard"],
            digest=value["digest"],
            failures=tuple(Failure(**failure) for failure in value["failures"]),
            losses=tuple(ProbedLoss(**loss) for loss in value["losses"]),
            tallies={
                tally["group"]: Tally(**{name: count for name, count in tally.items() if name != "group"})
                for tally in value["tallies"]
            },
        )


def shard_digest(job: str, shard: int, *, examples: Sequence[Example]) -> str:
    """Returns `sha256:` and 64 digits: equal for the same prompts of the same job.

    Args:
      job: Digest of the job.
      shard: Number of the shard.
      examples: Its prompts, in the order in which they are answered.
    """
    content = json.dumps([job, shard, [example.content_digest().hex() for example in examples]])
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def write_answers(path: str, rows: Sequence[Mapping[str, Any]], *, shard: AnsweredShard, has_groups: bool) -> bool:
    """Writes the file of a shard, whole or not at all, and returns whether that was done: not if there is one already.

    Args:
      path: Where to.
      rows: Of `answer_row`, by id.
      shard: What became of all its prompts.
      has_groups: Whether rows say for which group, and at which threshold, a prompt was answered.

    Raises:
      OSError: If it cannot be written.
    """
    ids = [row["id"] for row in rows] + [failure.id for failure in shard.failures]
    assert len(ids) == len(set(ids)) == shard.prompts, "every prompt is answered once, or has failed"
    try:
        write_shard(path, rows, schema=_schema(has_groups=has_groups), about=shard.to_dict(), overwrite=False)
    except FileExistsError:
        return False
    return True


def stored_answers(path: str) -> AnsweredShard:
    """Returns what the file of a shard says about itself, reading no answer.

    Raises:
      AnswersError: If it is no file of `write_answers`.
      OSError: If there is no such file.
    """
    with opened_shard(path, kind=AnswersError, again=_ANSWER_AGAIN) as file:
        try:
            shard = AnsweredShard.from_dict(about_shard(file))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AnswersError(
                f"{path}: is not a file of answers of this version of calm-beam ({type(error).__name__}: {error}). "
                f"{_ANSWER_AGAIN}"
            ) from error
        rows = file.metadata.num_rows
    check_row_count(path, rows, said=shard.prompts - shard.failed, kind=AnswersError)
    return shard


def whole_answers(path: str) -> AnsweredShard:
    """Returns what the file of a shard says about itself, having read all of it: what a mark of success may rest on.

    Raises:
      AnswersError: If it is no file of `write_answers`, or damaged anywhere.
      OSError: If there is no such file.
    """
    shard = stored_answers(path)
    check_content(path, kind=AnswersError, again=_ANSWER_AGAIN)
    return shard


def answer_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a shard's file, by id.

    Raises:
      AnswersError: If it is damaged; where its parts alone do not show that, after the last row.
    """
    with opened_shard(path, kind=AnswersError, again=_ANSWER_AGAIN) as file:
        yield from shard_rows(file)


def taken_over(path: str, digest: str) -> AnsweredShard | None:
    """Returns the shard that is stored already; None if none is.

    Args:
      path: Its file.
      digest: Of the prompts that the data give for it now.

    Raises:
      AnswersError: If it is of other prompts, or damaged anywhere.
    """
    if not is_file(path):
        return None
    stored = whole_answers(path)
    if stored.digest != digest:
        raise AnswersError(
            f"{path}: holds answers to other prompts than the data give now for this shard, so the data have changed "
            "since. Restore them, or answer anew with --overwrite."
        )
    return stored


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
