"""One shard of outputs: a Parquet file that says what it holds, and whose damage is noticed.

Each example of a shard has a row, or stands among the failures of an answered one. So a shard is stored in one step,
and nothing of it can be missing or be there twice. Everything downstream (losses, tests, reports) reads these files,
never the decoder's memory: what is tested is what is stored.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import CalmBeamError
from calm_beam.serving.answer import Tally
from calm_beam.storage import open_input, replacing, strict_json
from calm_beam.text import check_count, counted

from .job import OutputsError

if TYPE_CHECKING:
    import pyarrow.parquet

AnyPath = str | os.PathLike[str]

_ABOUT_KEY = b"calm_beam"
_CONTENT_KEY = b"calm_beam_content"
_ROWS_AT_A_TIME = 1024
# Of what the Parquet library says.
_LONGEST_REASON = 200
_AGAIN = "Remove it, and repeat the run that made it with --resume: the shard is then decoded again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """What a shard's file says about itself.

    Attributes:
      shard: Number of the shard, from 0.
      examples: Number of its examples, failed ones included.
      failed: Examples among them that could not be decoded.
      digest: Of the examples, and of how they were decoded.
      engine: What decoded it, in words, where the run could not know its workers' instructions; else None.
    """

    shard: int
    examples: int
    failed: int
    digest: str
    engine: str | None = None

    def __post_init__(self) -> None:
        for name in ("shard", "examples", "failed"):
            check_count(name, getattr(self, name))
        if not isinstance(self.digest, str):
            raise TypeError(f"digest must be a text, got {type(self.digest).__name__}")

    @property
    def rows(self) -> int:
        """Number of the file's rows: one for every example, failed or not."""
        return self.examples

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without an engine where there is none."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "engine" or value is not None
        }


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
class AnsweredShard(StoredShard):
    """What the file of a shard of answers says about itself: failures, losses and counts stand there, and not in rows.

    Attributes:
      failures: Prompts without an answer, by id.
      losses: What was measured, by id.
      tallies: Counts by group; under None for prompts of no group.
    """

    failures: tuple[Failure, ...]
    losses: tuple[ProbedLoss, ...]
    tallies: Mapping[str | None, Tally]

    @classmethod
    def of(
        cls,
        shard: int,
        *,
        digest: str,
        failures: Sequence[Failure],
        losses: Sequence[ProbedLoss],
        tallies: Mapping[str | None, Tally],
    ) -> "AnsweredShard":
        """Returns the shard of which this is known."""
        return cls(
            shard=shard,
            examples=sum(tally.prompts for tally in tallies.values()),
            failed=len(failures),
            digest=digest,
            failures=tuple(failures),
            losses=tuple(losses),
            tallies=tallies,
        )

    @property
    def rows(self) -> int:
        """Number of the file's rows: one for every answer."""
        return self.examples - self.failed

    def in_short(self) -> StoredShard:
        """Returns what a mark of success says of it."""
        return StoredShard(shard=self.shard, examples=self.examples, failed=self.failed, digest=self.digest)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "shard": self.shard,
            "digest": self.digest,
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "losses": [dataclasses.asdict(loss) for loss in self.losses],
            "tallies": [{"group": name, **dataclasses.asdict(tally)} for name, tally in self.tallies.items()],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "AnsweredShard":
        """Returns what `to_dict` gave; raises KeyError, TypeError or another of Python's if it is something else."""
        return cls.of(
            value["shard"],
            digest=value["digest"],
            failures=[Failure(**failure) for failure in value["failures"]],
            losses=[ProbedLoss(**loss) for loss in value["losses"]],
            tallies={
                tally["group"]: Tally(**{name: count for name, count in tally.items() if name != "group"})
                for tally in value["tallies"]
            },
        )


def write_shard(
    path: AnyPath,
    rows: Sequence[Mapping[str, Any]],
    *,
    schema: "pyarrow.Schema",
    about: StoredShard,
    overwrite: bool = True,
) -> None:
    """Writes rows as one Parquet file, which appears whole or not at all.

    Args:
      path: Where to.
      rows: A value for each column.
      schema: The columns.
      about: What the file says about itself.
      overwrite: Whether a file that is there is replaced. If not, one of several that write at the same time succeeds.

    Raises:
      FileExistsError: If there is a file, with other content, that may not be replaced.
      OSError: If it cannot be written.
    """
    # Here as below, since much that only names what is stored does without Arrow.
    import pyarrow.parquet

    described = json.dumps(about.to_dict()).encode()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    content = _ContentDigest(described)
    for batch in table.to_batches(_ROWS_AT_A_TIME):
        content.add(batch.to_pylist())
    table = table.replace_schema_metadata({_ABOUT_KEY: described, _CONTENT_KEY: content.hexdigest()})
    with replacing(path, overwrite=overwrite) as temporary:
        # Without checksums, a flipped bit could be another token.
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


@contextlib.contextmanager
def open_shard(path: AnyPath) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Opens a file; whatever is found to be damaged in it while the block reads is an error that names it.

    Read it with `use_threads=False`: a thread of Arrow's that lets go of Python's memory while the interpreter ends
    aborts the process.

    Args:
      path: A file of `write_shard`.

    Raises:
      OutputsError: If what is read is not what was written.
      OSError: If there is no such file, or it may not be read.
    """
    import pyarrow.parquet

    with (
        damage_told(path),
        open_input(path) as raw,
        pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
    ):
        yield file


@contextlib.contextmanager
def damage_told(path: AnyPath) -> Iterator[None]:
    """Makes an error that names the file, and says what to do, of whatever shows in the block that it is damaged."""
    import pyarrow

    try:
        yield
    except (CalmBeamError, FileNotFoundError, PermissionError):
        raise
    # Any of these, depending on the place of what is wrong.
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        raise OutputsError(f"{os.fspath(path)}: is damaged ({reason}). {_AGAIN}") from error


def stored_shard(path: str) -> StoredShard:
    """Returns what a shard's file says about itself, reading no row: an `AnsweredShard` if it holds answers.

    Raises:
      OutputsError: If it is no file of a shard.
      OSError: If there is no such file.
    """
    with open_shard(path) as file:
        try:
            about = strict_json.loads((file.schema_arrow.metadata or {})[_ABOUT_KEY])
            shard = AnsweredShard.from_dict(about) if "tallies" in about else StoredShard(**about)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OutputsError(
                f"{path}: is not a shard of this version of calm-beam ({type(error).__name__}: {error}). {_AGAIN}"
            ) from error
        rows = file.metadata.num_rows
    if rows != shard.rows:
        raise OutputsError(f"{path}: holds {counted(rows, 'example')}, but says that it has {shard.rows}.")
    return shard


def whole_shard(path: str) -> StoredShard:
    """Returns what a shard's file says about itself, having read all of it: what a mark of success may rest on.

    What a file says about itself stands apart from its rows: it can be read although a row is damaged.

    Raises:
      OutputsError: If it is no file of a shard, or damaged anywhere.
      OSError: If there is no such file.
    """
    shard = stored_shard(path)
    # The digest is compared after the last row.
    collections.deque(shard_rows(path), maxlen=0)
    return shard


def shard_rows(path: AnyPath, *, only: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, in the order in which they were written.

    Args:
      path: A file of `write_shard`.
      only: Values of the column `id` of rows that are wanted; None for all.

    Raises:
      OutputsError: If it is damaged; where its parts alone do not show that, and all rows are wanted, after the last of
        them.
      OSError: If there is no such file.
    """
    import pyarrow.compute

    with open_shard(path) as file:
        metadata = file.schema_arrow.metadata
        content = _ContentDigest(metadata[_ABOUT_KEY])
        for batch in file.iter_batches(_ROWS_AT_A_TIME, use_threads=False):
            if only is not None:
                wanted = pyarrow.array(only, pyarrow.string())
                batch = batch.filter(pyarrow.compute.is_in(batch["id"], value_set=wanted))
            rows = batch.to_pylist()
            content.add(rows)
            yield from rows
        if only is None and content.hexdigest() != metadata[_CONTENT_KEY]:
            raise ValueError("its content is not what was written")


class _ContentDigest:
    """A digest of what a shard holds: pages have checksums, but what says where they are and how to read them none."""

    def __init__(self, about: bytes) -> None:
        self._digest = hashlib.sha256(about)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Takes in some rows, in their order."""
        for row in rows:
            self._digest.update(json.dumps(row).encode())

    def hexdigest(self) -> bytes:
        """Returns 64 hexadecimal digits."""
        return self._digest.hexdigest().encode()
