"""Parquet: one row an example, read by row group."""

import collections
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.extras import MissingExtraError
from calm_beam.inputs.examples import DEFAULT_KEYS, DataError, Example, example_of_row
from calm_beam.storage import open_input, version

from .messages import KEY as MESSAGES
from .parts import FilePart
from .reading import Reading

if TYPE_CHECKING:
    import pyarrow

# Rows that are read at a time: few, since a long text that is stored once may be in all of them.
_BATCH = 16


class Parquet:
    """Parquet with the columns of a JSONL row; an entry that is null is as if the key were not there.

    A row group is a part, so that workers share a large file.
    """

    row = "row"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without pyarrow, which what serves is installed without."""
        if importlib.util.find_spec("pyarrow") is None:
            raise MissingExtraError("reading Parquet needs pyarrow: pip install pyarrow.")

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns the row groups that have rows."""
        # Here, since what serves reads no Parquet and is installed without it.
        import pyarrow.parquet

        found = version(path)
        try:
            with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # Of the disk, and not of what is on it.
                raise
            raise DataError(f"{path}: cannot be read as Parquet ({' '.join(str(error).split())}).") from error
        firsts = [1 + sum(sizes[:group]) for group in range(len(sizes))]
        return tuple(
            FilePart(path=path, file_index=file_index, row_group=group, first=first, version=found)
            for group, (first, size) in enumerate(zip(firsts, sizes, strict=True))
            if size
        )

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples of a row group; `DataError` names the row that is none."""
        import pyarrow.parquet

        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        wanted = {keys.inputs, "input_ids", keys.targets, "reference_ids", "id", keys.cluster, keys.group}
        position = part.first
        try:
            with (
                open_input(part.path) as raw,
                # Where pages have checksums, as those of many writers do.
                pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
            ):
                if version(part.path) != part.version:
                    raise DataError(f"{part.path}: was replaced while it was read. Start again.")
                names = file.schema_arrow.names
                twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
                if twice is not None:
                    # A row could take either.
                    raise DataError(f"{part.path}: has two columns named {twice!r}. Rename or drop one of them.")
                if keys.inputs not in names and "input_ids" not in names:
                    wanted.add(MESSAGES)
                columns = [name for name in names if name in wanted]
                if not columns:
                    raise DataError(
                        f"{part.path}: has none of the columns {keys.inputs} and input_ids, only "
                        f"{', '.join(names)}. Name the column of the prompts with --inputs_field."
                    )
                # A thread of Arrow's that lets go of Python's memory while the interpreter ends aborts the process.
                batches = file.iter_batches(_BATCH, row_groups=[part.row_group], columns=columns, use_threads=False)
                for batch in batches:
                    for row in _rows(batch, part.path, position=position):
                        where = f"{part.path}, row {position}"
                        yield example_of_row(row, where=where, position=position, file_index=part.file_index, keys=keys)
                        position += 1
        except (pyarrow.ArrowException, OSError) as error:
            # Whatever is wrong with a page comes as one of the two.
            raise DataError(f"{part.path}: damaged Parquet data after row {position - 1} ({error}).") from error


def _rows(batch: "pyarrow.RecordBatch", path: str, *, position: int) -> list[dict[str, Any]]:
    """Returns the rows of a batch that begins at a position, without what is null."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_row(batch, index, where=f"{path}, row {position + index}") for index in range(batch.num_rows)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _row(batch: "pyarrow.RecordBatch", index: int, *, where: str) -> dict[str, Any]:
    """Returns one row of a batch that holds text which is none."""
    row: dict[str, Any]
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: holds text that is not UTF-8 ({error}).") from error
    return row
