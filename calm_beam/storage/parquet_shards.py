"""Parquet files that say what they hold, and whose damage is noticed: how generations and answers are stored."""

import collections
import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import CalmBeamError
from calm_beam.storage import open_input, replacing, strict_json
from calm_beam.text.counted import counted

if TYPE_CHECKING:
    import pyarrow.parquet

AnyPath = str | os.PathLike[str]

_ABOUT_KEY = b"calm_beam"
_CONTENT_KEY = b"calm_beam_content"
_ROWS_AT_A_TIME = 1024
# Of what the Parquet library says.
_LONGEST_REASON = 200


def write_shard(
    path: AnyPath,
    rows: Sequence[Mapping[str, Any]],
    *,
    schema: "pyarrow.Schema",
    about: Mapping[str, Any],
    overwrite: bool = True,
) -> None:
    """Writes rows as one Parquet file, which appears whole or not at all.

    Args:
      path: Where to.
      rows: A value for each column.
      schema: The columns.
      about: What the file says about itself, as JSON has it.
      overwrite: Whether a file that is there is replaced. If not, one of several that write at the same time succeeds.

    Raises:
      FileExistsError: If there is a file, with other content, that may not be replaced.
      OSError: If it cannot be written.
    """
    # Here as below, since much that only names what is stored does without Arrow.
    import pyarrow.parquet

    described = json.dumps(about).encode()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    content = _ContentDigest(described)
    for batch in table.to_batches(_ROWS_AT_A_TIME):
        content.add(batch.to_pylist())
    table = table.replace_schema_metadata({_ABOUT_KEY: described, _CONTENT_KEY: content.hexdigest()})
    with replacing(path, overwrite=overwrite) as temporary:
        # Without checksums, a flipped bit could be another token.
        pyarrow.parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


@contextlib.contextmanager
def opened_shard(path: AnyPath, *, kind: type[CalmBeamError], again: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Opens a file; whatever is found to be damaged in it while the block reads is an error that names it.

    Read it with `use_threads=False`: a thread of Arrow's that lets go of Python's memory while the interpreter ends
    aborts the process.

    Args:
      path: A file of `write_shard`.
      kind: What is raised where the file is damaged.
      again: What then helps, in a sentence.

    Raises:
      CalmBeamError: Of that kind, if what is read is not what was written.
      OSError: If there is no such file, or it may not be read.
    """
    import pyarrow.parquet

    try:
        with (
            open_input(path) as raw,
            pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
        ):
            yield file
    except (CalmBeamError, FileNotFoundError, PermissionError):
        raise
    # Any of these, depending on the place of what is wrong.
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        raise kind(f"{os.fspath(path)}: is damaged ({reason}). {again}") from error


def about_shard(file: "pyarrow.parquet.ParquetFile") -> dict[str, Any]:
    """Returns what an opened file says about itself.

    Raises:
      KeyError: If it says nothing.
      ValueError: If that is not JSON.
      TypeError: If it is no object.
    """
    about = strict_json.loads((file.schema_arrow.metadata or {})[_ABOUT_KEY])
    if not isinstance(about, dict):
        raise TypeError(f"expected an object, got {type(about).__name__}")
    return about


def check_row_count(path: AnyPath, rows: int, *, said: int, kind: type[CalmBeamError]) -> None:
    """Refuses a file that holds another number of examples than it says."""
    if rows != said:
        raise kind(f"{os.fspath(path)}: holds {counted(rows, 'example')}, but says that it has {said}.")


def shard_rows(file: "pyarrow.parquet.ParquetFile", *, only: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows of an opened file, in the order in which they were written.

    Args:
      file: Of `opened_shard`, within its block.
      only: Values of the column `id` of rows that are wanted; None for all.

    Raises:
      ValueError: If the content is not what was written; where its parts alone do not show that, and all rows are
        wanted, after the last of them.
    """
    import pyarrow.compute

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


def check_content(path: AnyPath, *, kind: type[CalmBeamError], again: str) -> None:
    """Reads all of a file, and refuses one whose content is not what was written.

    What a file says about itself stands apart from its rows: it can be read although a row is damaged.

    Args:
      path: A file of `write_shard`.
      kind: What is raised where the file is damaged.
      again: What then helps, in a sentence.

    Raises:
      CalmBeamError: Of that kind, if what is read is not what was written.
      OSError: If there is no such file, or it may not be read.
    """
    with opened_shard(path, kind=kind, again=again) as file:
        # The digest is compared after the last row.
        collections.deque(shard_rows(file), maxlen=0)


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
