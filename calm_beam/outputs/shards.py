"""One shard of outputs: a Parquet file that describes its content, and whose damage is detected.

Each example of a shard has a row, or is among the failures of a shard of answers. So a shard is stored in one step, and
none of its examples can be missing or stored twice. Everything downstream (losses, tests, reports) reads these files,
never the decoder's memory: the tests use what is stored.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_CONTENT_KEY = b"calm_beam_columns"
# In files of earlier versions.
_CONTENT_OF_ROWS_KEY = b"calm_beam_content"
_ROWS_AT_A_TIME = 1024
# Most characters of the Parquet library's message.
_LONGEST_REASON = 200
_AGAIN = "Remove it, and repeat the run that made it with --resume: the shard is then decoded again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """The description in a shard's file.

    Attributes:
      shard: Number of the shard, from 0.
      examples: Number of its examples, failed ones included.
      failed: Examples among them that could not be decoded.
      digest: Digest of the examples, and of how they were decoded.
      engine: The engine as text, if the run could not know its workers' instructions; else None.
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
        """Number of rows in the file: one per example, failed or not."""
        return self.examples

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; the engine is omitted if it is None."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "engine" or value is not None
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A prompt without an answer.

    Attributes:
      id: Id of the prompt.
      reason: Text on why it has none.
    """

    id: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedLoss:
    """The loss of a prompt that the full model has answered as well.

    Attributes:
      id: Id of the prompt.
      loss: The loss.
      failure: Why the loss is 1 without a measurement; None if it was measured.
      calibration: Index of the manifest entry whose guarantee the loss is about.
    """

    id: str
    loss: float
    failure: str | None
    calibration: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredShard(StoredShard):
    """The description in a file of answers: it has the failures, losses and counts, which are not in rows.

    Attributes:
      failures: Prompts without an answer, by id.
      losses: The measured losses, by id.
      tallies: Counts by group; those of prompts without a group are under None.
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
        """Returns the shard with these values and the counts that follow from them."""
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
        """Number of rows in the file: one per answer."""
        return self.examples - self.failed

    def in_short(self) -> StoredShard:
        """Returns the part that a mark of success lists."""
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
        """Returns the shard from `to_dict`'s values; raises KeyError, TypeError or another built-in error otherwise."""
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
    """Writes rows as one Parquet file, atomically.

    Args:
      path: The file to write.
      rows: Rows with a value for each column.
      schema: The columns.
      about: The description to store in the file.
      overwrite: Whether an existing file is replaced. If not, one of several simultaneous writers succeeds.

    Raises:
      FileExistsError: If there is a file with other content and it may not be replaced.
      OSError: If it cannot be written.
    """
    # Imported in functions, since much code that only names stored outputs does without Arrow.
    import pyarrow.parquet

    described = json.dumps(about.to_dict()).encode()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    content = _ContentDigest(described)
    for batch in table.to_batches(_ROWS_AT_A_TIME):
        content.add(batch)
    table = table.replace_schema_metadata({_ABOUT_KEY: described, _CONTENT_KEY: content.hexdigest()})
    with replacing(path, overwrite=overwrite) as temporary:
        # Without checksums, a flipped bit could go unnoticed as another token.
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


@contextlib.contextmanager
def open_shard(path: AnyPath) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Opens a file; any damage that is found while the block reads raises an error that names the file.

    Read it with `use_threads=False`: an Arrow thread that releases Python memory during interpreter shutdown aborts the
    process.

    Args:
      path: A file of `write_shard`.

    Raises:
      OutputsError: If what is read is not what was written.
      OSError: If there is no such file, or no permission to read it.
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
    """Turns any error in the block that shows damage into one that names the file and says what to do."""
    import pyarrow

    try:
        yield
    except (CalmBeamError, FileNotFoundError, PermissionError):
        raise
    # Arrow raises any of these, depending on where the damage is.
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        raise OutputsError(f"{os.fspath(path)}: is damaged ({reason}). {_AGAIN}") from error


def stored_shard(path: str) -> StoredShard:
    """Returns the description in a shard's file without reading a row: an `AnsweredShard` if it holds answers.

    Raises:
      OutputsError: If it is not a shard's file.
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
    """Returns the description in a shard's file after reading all of the file, so that a mark of success may list it.

    The description is separate from the rows, and can be read even if a row is damaged.

    Raises:
      OutputsError: If it is not a shard's file, or is damaged anywhere.
      OSError: If there is no such file.
    """
    shard = stored_shard(path)
    # The digest is compared after the last row.
    collections.deque(shard_batches(path), maxlen=0)
    return shard


def shard_rows(path: AnyPath) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, in the order in which they were written; errors are those of `shard_batches`."""
    with damage_told(path):
        for batch in shard_batches(path):
            yield from batch.to_pylist()


def shard_batches(path: AnyPath, *, only: Collection[str] | None = None) -> "Iterator[pyarrow.RecordBatch]":
    """Yields the rows of a file in batches, in the order in which they were written.

    Args:
      path: A file of `write_shard`.
      only: Values of the column `id` of the wanted rows; None for all.

    Raises:
      OutputsError: If the file is damaged. Damage that only the digest of all rows shows is raised after the last row,
        and only if all rows are read.
      OSError: If there is no such file.
    """
    import pyarrow.compute

    with open_shard(path) as file:
        metadata = file.schema_arrow.metadata
        is_by_columns = _CONTENT_KEY in metadata
        key, digest = (_CONTENT_KEY, _ContentDigest) if is_by_columns else (_CONTENT_OF_ROWS_KEY, _RowsDigest)
        content = digest(metadata[_ABOUT_KEY])
        for batch in file.iter_batches(_ROWS_AT_A_TIME, use_threads=False):
            if only is None:
                content.add(batch)
                yield batch
            else:
                wanted = pyarrow.array(only, pyarrow.string())
                yield batch.filter(pyarrow.compute.is_in(batch["id"], value_set=wanted))
        if only is None and content.hexdigest() != metadata[key]:
            raise ValueError("its content is not what was written")


class _ContentDigest:
    """A digest of a shard's content: Parquet pages have checksums, but their index and schema have none.

    Each column, or field of a nested one, has a digest of its own, so that it does not matter how rows are batched.
    """

    def __init__(self, about: bytes) -> None:
        self._about = about
        self._columns: dict[str, Any] = collections.defaultdict(hashlib.sha256)

    def add(self, batch: "pyarrow.RecordBatch") -> None:
        """Adds rows to the digest, in their order."""
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            self._add(name, values)

    def _add(self, name: str, values: "pyarrow.Array") -> None:
        import pyarrow.compute

        kind = values.type
        # A nested type may be written and read under different names.
        digest = self._columns[name if pyarrow.types.is_nested(kind) else f"{name} {kind}"]
        digest.update(values.is_valid().to_numpy(zero_copy_only=False).tobytes())
        if pyarrow.types.is_struct(kind):
            for field, children in zip(kind, values.flatten(), strict=True):
                self._add(f"{name}.{field.name}", children)
        elif pyarrow.types.is_list(kind):
            digest.update(pyarrow.compute.list_value_length(values).fill_null(0).to_numpy().tobytes())
            self._add(f"{name}.items", values.flatten())
        elif pyarrow.types.is_string(kind):
            present = values.fill_null("")
            digest.update(pyarrow.compute.binary_length(present).to_numpy().tobytes())
            digest.update("".join(present.to_pylist()).encode())
        else:
            present = values.fill_null(pyarrow.scalar(0).cast(kind))
            digest.update(present.to_numpy(zero_copy_only=False).tobytes())

    def hexdigest(self) -> bytes:
        """Returns 64 hexadecimal digits."""
        columns = {name: digest.hexdigest() for name, digest in self._columns.items()}
        return hashlib.sha256(self._about + json.dumps(columns, sort_keys=True).encode()).hexdigest().encode()


class _RowsDigest:
    """The digest of a shard's content in files of earlier versions: of its rows as JSON."""

    def __init__(self, about: bytes) -> None:
        self._digest = hashlib.sha256(about)

    def add(self, batch: "pyarrow.RecordBatch") -> None:
        """Adds rows to the digest, in their order."""
        for row in batch.to_pylist():
            self._digest.update(json.dumps(row).encode())

    def hexdigest(self) -> bytes:
        """Returns 64 hexadecimal digits."""
        return self._digest.hexdigest().encode()
