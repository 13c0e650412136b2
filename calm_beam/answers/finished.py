"""The end of a run: the list of failures, the losses, and the mark of success, in this order."""

import dataclasses
import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from calm_beam.failures import check_failures, failure_limit
from calm_beam.storage import joined, remove_file, replacing
from calm_beam.storage.sealed_json import read_sealed, write_sealed
from calm_beam.tally import Tally, merged
from calm_beam.text.counted import counted

from .assignment import AnswerAssignment
from .paths import COMPLETE, FAILURES, losses_path
from .shards import AnsweredShard, AnswersError, answer_rows

_SCHEMA = "calm-beam/answered/v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredAnswers:
    """What the mark of success says of a shard.

    Attributes:
      shard: Number of the shard.
      prompts: Number of its prompts, failed ones included.
      failed: Prompts among them that have no answer.
      digest: As in `AnsweredShard`.
    """

    shard: int
    prompts: int
    failed: int
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedAnswers:
    """The mark of success of a folder of answers.

    Attributes:
      job: Digest of the job.
      shards: Those that have prompts, ascending by number.
      tallies: Counts by group; under None for prompts of no group.
      losses: Losses measured, by place of the entry of the manifest that they are about.
    """

    job: str
    shards: tuple[StoredAnswers, ...]
    tallies: Mapping[str | None, Tally]
    losses: Mapping[int, int]

    @property
    def total(self) -> Tally:
        """The counts of all prompts."""
        return sum(self.tallies.values(), Tally())

    @classmethod
    def of(cls, shards: Sequence[AnsweredShard], *, job: str, prompts: int) -> Self:
        """Returns the mark of a finished run.

        Args:
          shards: What was stored, each once, ascending by number.
          job: Digest of the job.
          prompts: Number of prompts that were read.

        Raises:
          AnswersError: If the shards do not hold the prompts that were read, each once.
        """
        tallies: dict[str | None, Tally] = functools.reduce(merged, (shard.tallies for shard in shards), {})
        losses: dict[int, int] = {}
        for loss in (loss for shard in shards for loss in shard.losses):
            losses[loss.calibration] = losses.get(loss.calibration, 0) + 1
        finished = cls(
            job=job,
            shards=tuple(
                StoredAnswers(shard=shard.shard, prompts=shard.prompts, failed=shard.failed, digest=shard.digest)
                for shard in shards
            ),
            # In an order that no worker decides.
            tallies={name: tallies[name] for name in sorted(tallies, key=lambda name: (name is not None, name))},
            losses=dict(sorted(losses.items())),
        )
        if finished.total.prompts != prompts:
            raise AnswersError(
                f"{counted(prompts, 'prompt was', several='prompts were')} read, but {finished.total.prompts} answered "
                "or listed as failed. Did the data change meanwhile? Repeat the run with --resume."
            )
        return finished

    def write(self, folder: str) -> None:
        """Writes `complete.json`."""
        content = {
            "schema": _SCHEMA,
            "job": self.job,
            **dataclasses.asdict(self.total),
            "groups": [
                {"group": name, **dataclasses.asdict(tally)} for name, tally in self.tallies.items() if name is not None
            ],
            "losses": [{"calibration": index, "losses": count} for index, count in self.losses.items()],
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }
        write_sealed(joined(folder, COMPLETE), content)

    @classmethod
    def read(cls, folder: str, *, job: str) -> Self:
        """Returns the mark of a folder.

        Args:
          folder: The folder.
          job: Digest of its job.

        Raises:
          AnswersError: If there is none, or it is of another job or not as it was written.
        """
        path = joined(folder, COMPLETE)
        content = read_sealed(
            path, schema=_SCHEMA, kind=AnswersError, of="answers", again="Repeat the run with --resume first"
        )
        try:
            groups: dict[str | None, Tally] = {group.pop("group"): Tally(**group) for group in content["groups"]}
            total = Tally(**{field.name: content[field.name] for field in dataclasses.fields(Tally)})
            of_none = {
                name: value - sum(getattr(tally, name) for tally in groups.values())
                for name, value in dataclasses.asdict(total).items()
            }
            finished = cls(
                job=content["job"],
                shards=tuple(StoredAnswers(**shard) for shard in content["shards"]),
                tallies={**({None: Tally(**of_none)} if of_none["prompts"] else {}), **groups},
                losses={each["calibration"]: each["losses"] for each in content["losses"]},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AnswersError(f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error}).") from error
        if finished.job != job:
            raise AnswersError(f"{path}: is about answers of another job.")
        return finished


def finish(assignment: AnswerAssignment, shards: Sequence[AnsweredShard], *, prompts: int) -> FinishedAnswers:
    """Writes what was found besides the answers, and then the mark of success, which it returns.

    A step that is run again writes the same once more.

    Args:
      assignment: What was answered.
      shards: As they are stored; one that was answered twice may come twice.
      prompts: Number of prompts that were read.

    Raises:
      AnswersError: If the shards do not hold the prompts that were read, each once.
      DataError: If more prompts failed than may.
      OSError: If a file cannot be written.
    """
    ordered = _each_once(shards)
    job, folder = assignment.job, assignment.directory
    finished = FinishedAnswers.of(ordered, job=job.digest(), prompts=prompts)
    failures = [failure for shard in ordered for failure in shard.failures]
    check_failures(
        [(failure.id, failure.reason) for failure in failures],
        failed=len(failures),
        limit=failure_limit(assignment.max_failures, examples=prompts),
    )
    _write_lines(joined(folder, FAILURES), [dataclasses.asdict(failure) for failure in failures])
    for calibration in assignment.watched():
        rows = [
            # As `loss_row` has it.
            {
                "id": loss.id,
                "loss": loss.loss,
                "failure": loss.failure,
                "manifest": job.manifest,
                "calibration": calibration,
            }
            for shard in ordered
            for loss in shard.losses
            if loss.calibration == calibration
        ]
        _write_lines(losses_path(folder, calibration, job=job), rows)
    finished.write(folder)
    return finished


def publish_rows(source: str, path: str) -> None:
    """Writes the rows of a shard's Parquet file as JSON lines, packed by gzip: the same bytes for the same rows.

    Raises:
      AnswersError: If the shard is damaged; nothing is written then.
      OSError: If the file cannot be written.
    """
    with (
        replacing(path) as temporary,
        open(temporary, "wb") as raw,
        # Without name and time, which would be of this moment.
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for row in answer_rows(source):
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def _each_once(shards: Iterable[AnsweredShard]) -> list[AnsweredShard]:
    """Returns the shards by number."""
    by_number: dict[int, AnsweredShard] = {}
    for shard in shards:
        if by_number.setdefault(shard.shard, shard) != shard:
            raise AnswersError(
                f"shard {shard.shard} was answered twice, with different results. Did the data change meanwhile?"
            )
    return [shard for _, shard in sorted(by_number.items())]


def _write_lines(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines; of none there is no file."""
    if not rows:
        remove_file(path)
        return
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
