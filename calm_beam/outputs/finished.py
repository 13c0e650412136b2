"""Completeness of outputs: the mark of success of a folder, and how many examples may fail before a run does.

The mark lists every shard once, with the counts over all of them.

A failed example counts with loss 1, so failures never void the guarantee. They use up the tolerance, though, and many
failures point at a broken device or model rather than at prompts.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from calm_beam.inputs.examples import DataError
from calm_beam.serving.answer import Tally, merged
from calm_beam.storage import is_file, joined
from calm_beam.storage.strict_json import content_digest, read_sealed, write_sealed
from calm_beam.text import counted

from .job import AnswerJob, DecodeJob, Job, OutputsError, SettingJob, Words
from .shards import AnsweredShard, StoredShard

COMPLETE = "complete.json"
STOPPED = "stopped.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The content of a mark of success, for any kind of outputs.

    Attributes:
      job: Digest of the job.
      shards: The shards that have examples, ascending by number.
    """

    JOB: ClassVar[type[Job]]
    """Class of the job that is finished."""
    SCHEMA: ClassVar[str]
    """Schema of the file."""
    LOST: ClassVar[str]
    """End of the error message where other examples were decoded than read; it follows their number."""

    job: str
    shards: tuple[StoredShard, ...]

    @property
    def examples(self) -> int:
        """Number of examples, failed ones included."""
        return sum(shard.examples for shard in self.shards)

    @property
    def failed(self) -> int:
        """Number of examples that could not be decoded."""
        return sum(shard.failed for shard in self.shards)

    @classmethod
    def of(cls, shards: Iterable[StoredShard], *, job: str, examples: int) -> Self:
        """Returns the mark of a finished run.

        Args:
          shards: The shards that were decoded; a shard that was decoded twice may come twice.
          job: Digest of the job.
          examples: Number of examples that were read.

        Raises:
          OutputsError: If the shards do not hold each example that was read once, or if two engines decoded them.
        """
        words, once = cls.JOB.WORDS, each_once(shards, words=cls.JOB.WORDS)
        finished = cls._joined(once, job=job)
        engines = sorted({shard.engine for shard in finished.shards if shard.engine is not None})
        if len(engines) > 1:
            raise OutputsError(mixed_engines(*engines[:2]))
        if finished.examples != examples:
            read = counted(examples, f"{words.example} was", several=f"{words.example}s were")
            raise OutputsError(f"{read} read, but {finished.examples} {cls.LOST}")
        return finished

    def write(self, folder: str, name: str = COMPLETE) -> None:
        """Writes the mark: `complete.json`, or under another name the mark of some of the shards."""
        shards = [self._shard_content(shard) for shard in self.shards]
        write_sealed(joined(folder, name), {"schema": self.SCHEMA, "job": self.job, **self._counts(), "shards": shards})

    @classmethod
    def read(cls, folder: str, job: Job, *, or_stopped: bool = False) -> Self:
        """Returns the mark of a folder, after checking that exactly the files that it names are there.

        Args:
          folder: The folder.
          job: Its job.
          or_stopped: Whether to accept the shards that a stopped sequential calibration has counted, for inspection.
            Other files may be there then.

        Raises:
          OutputsError: If decoding did not finish there, or if files are missing or left over.
        """
        path, stopped = joined(folder, COMPLETE), joined(folder, STOPPED)
        is_stopped = not is_file(path) and is_file(stopped)
        if is_stopped and not or_stopped:
            raise OutputsError(
                f"{folder}: a sequential calibration stopped there when it had proved enough, so its losses have "
                "decided which examples are there. Other tests of them would prove nothing. Go on with that "
                "calibration with --resume, without a rule to stop, or decode again."
            )
        if is_stopped:
            path = stopped
        elif not is_file(path):
            raise OutputsError(
                f"{folder}: has no {COMPLETE}, so decoding did not finish there. Repeat that run with --resume first."
            )
        words = cls.JOB.WORDS
        again = words.redo.capitalize()
        content = read_sealed(path, schema=cls.SCHEMA, kind=OutputsError, of=words.outputs, again=again)
        try:
            finished = cls._of(content)
            numbers = [shard.shard for shard in finished.shards]
            is_sound = len(set(numbers)) == len(numbers) and finished._counts().items() <= content.items()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OutputsError(f"{path}: is not as calm-beam writes it ({type(error).__name__}: {error}).") from error
        if not is_sound or finished.job != job.digest():
            raise OutputsError(f"{path}: does not match {job.FILE} next to it, or itself.")
        if not is_stopped:
            job.check_files(folder, numbers)
        found = set(job.shard_files(folder))
        missing = [number for number in numbers if job.shard_path(folder, number) not in found]
        if missing:
            raise OutputsError(
                f"{folder}: {counted(len(missing), 'shard has no file', several='shards have no files')}, shard "
                f"{missing[0]} first."
            )
        return finished

    @classmethod
    def _joined(cls, shards: Sequence[StoredShard], *, job: str) -> Self:
        """Returns the mark of shards that come once each, by number."""
        raise NotImplementedError

    def _counts(self) -> dict[str, Any]:
        """Returns the counts over all shards, as JSON values."""
        raise NotImplementedError

    @staticmethod
    def _shard_content(shard: StoredShard) -> dict[str, Any]:
        """Returns the mark's entry for a shard."""
        return shard.to_dict()

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        """Returns the mark with a file's content; raises a built-in error if the content is something else."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedSweep(Finished):
    """The mark of a folder of generations."""

    JOB: ClassVar[type[Job]] = DecodeJob
    SCHEMA = DecodeJob.SCHEMA
    LOST = "decoded. Counting others than were drawn would void the guarantee."

    @classmethod
    def _joined(cls, shards: Sequence[StoredShard], *, job: str) -> Self:
        return cls(job=job, shards=tuple(shards))

    def digest(self) -> str:
        """Returns `sha256:` and 64 digits, over the job and every shard's content."""
        return content_digest({"job": self.job, "shards": [dataclasses.asdict(shard) for shard in self.shards]})

    def _counts(self) -> dict[str, Any]:
        return {"examples": self.examples}

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        return cls(job=content["job"], shards=tuple(StoredShard(**shard) for shard in content["shards"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedSettings(FinishedSweep):
    """The mark of a folder of generations by a user's decoder."""

    JOB = SettingJob
    SCHEMA = SettingJob.SCHEMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedAnswers(Finished):
    """The mark of a folder of answers.

    Attributes:
      tallies: Counts by group; those of prompts without a group are under None.
      losses: Number of measured losses, by index of the manifest entry that they are about.
    """

    JOB = AnswerJob
    SCHEMA = "calm-beam/answered/v1"
    LOST = "answered or listed as failed. Did the data change meanwhile? Repeat the run with --resume."

    tallies: Mapping[str | None, Tally]
    losses: Mapping[int, int]

    @property
    def total(self) -> Tally:
        """The counts of all prompts."""
        return sum(self.tallies.values(), Tally())

    @classmethod
    def _joined(cls, shards: Sequence[StoredShard], *, job: str) -> Self:
        answered = [shard for shard in shards if isinstance(shard, AnsweredShard)]
        tallies: dict[str | None, Tally] = functools.reduce(merged, (shard.tallies for shard in answered), {})
        losses = collections.Counter(loss.calibration for shard in answered for loss in shard.losses)
        return cls(
            job=job,
            shards=tuple(shard.in_short() for shard in answered),
            # Sorted, so that the order does not depend on workers.
            tallies={name: tallies[name] for name in sorted(tallies, key=lambda name: (name is not None, name))},
            losses=dict(sorted(losses.items())),
        )

    def _counts(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.total),
            "groups": [
                {"group": name, **dataclasses.asdict(tally)} for name, tally in self.tallies.items() if name is not None
            ],
            "losses": [{"calibration": index, "losses": count} for index, count in self.losses.items()],
        }

    @staticmethod
    def _shard_content(shard: StoredShard) -> dict[str, Any]:
        return {"shard": shard.shard, "prompts": shard.examples, "failed": shard.failed, "digest": shard.digest}

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        groups: dict[str | None, Tally] = {
            group["group"]: Tally(**{name: count for name, count in group.items() if name != "group"})
            for group in content["groups"]
        }
        total = Tally(**{field.name: content[field.name] for field in dataclasses.fields(Tally)})
        of_none = {
            name: value - sum(getattr(tally, name) for tally in groups.values())
            for name, value in dataclasses.asdict(total).items()
        }
        return cls(
            job=content["job"],
            shards=tuple(
                StoredShard(**{"examples" if name == "prompts" else name: value for name, value in shard.items()})
                for shard in content["shards"]
            ),
            tallies={**({None: Tally(**of_none)} if of_none["prompts"] else {}), **groups},
            losses={each["calibration"]: each["losses"] for each in content["losses"]},
        )


def finished_of(job: type[Job]) -> type[Finished]:
    """Returns the class of the mark for a kind of job."""
    return next(kind for kind in (FinishedSweep, FinishedSettings, FinishedAnswers) if kind.JOB is job)


S = TypeVar("S", bound=StoredShard)


def each_once(shards: Iterable[S], *, words: Words) -> list[S]:
    """Returns shards by number, each once, although some may come twice.

    Raises:
      OutputsError: If two shards with the same number differ.
    """
    by_number: dict[int, S] = {}
    for shard in shards:
        if by_number.setdefault(shard.shard, shard) != shard:
            raise OutputsError(
                f"shard {shard.shard} was {words.made} twice, with different results. Did the data change meanwhile?"
            )
    return [shard for _, shard in sorted(by_number.items())]


def mixed_engines(one: str, other: str) -> str:
    """Returns the message that two engines have decoded the shards, with the remedy."""
    return (
        f"some of the workers decode by {one}, others by {other}: outputs of two engines are never mixed. Take workers "
        "with one kind of processor (on Dataflow, --machine_type of one generation or --min_cpu_platform), and decode "
        "again."
    )


_SHARE = 100
_FEWEST = 10
_NAMED = 5


def failure_limit(max_failures: int | None, *, examples: int) -> int:
    """Returns the most examples that may fail.

    Args:
      max_failures: The user's limit; None takes 1 % of the examples, and at least 10.
      examples: Size of the data set.

    >>> failure_limit(None, examples=5000), failure_limit(None, examples=30), failure_limit(3, examples=5000)
    (50, 10, 3)
    """
    return max(_FEWEST, examples // _SHARE) if max_failures is None else max_failures


def check_failures(failures: Sequence[tuple[str, str]], *, failed: int, limit: int) -> None:
    """Raises if more examples failed than may.

    Args:
      failures: Id and reason of failed examples, or of some of them.
      failed: How many failed.
      limit: How many may fail.

    Raises:
      DataError: If more than `limit` failed; names the first.
    """
    if failed > limit:
        named = "; ".join(f"{name} ({reason})" for name, reason in failures[:_NAMED])
        raise DataError(
            f"{counted(failed, 'example')} failed, more than the {limit} that may. The first: {named}. Find out "
            "why; if that is "
            f"how it is, pass --max_failures={failed} or more."
        )
