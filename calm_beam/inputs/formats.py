"""The formats of data, by name and by suffix, and `read_examples`, through which every example is read.

Three formats are here: JSONL, one JSON object per line; plain text, one prompt per line, without ids and references;
and Parquet, one row per example, read by row group. `tensorflow_formats` has those that need TensorFlow.
"""

import codecs
import collections
import importlib.util
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from calm_beam.extras import MissingExtraError
from calm_beam.storage import open_input, version

from .examples import (
    CHAT,
    DEFAULT_KEYS,
    DataError,
    Example,
    check_row_size,
    example_of_row,
    numbered_lines,
    parse_examples,
    prompt_size,
)
from .reading import AS_USUAL, FilePart, Reading, WholeFiles, is_seqio
from .tensorflow_formats import SeqIOTasks, TFRecord

if TYPE_CHECKING:
    import pyarrow


class Jsonl(WholeFiles):
    """JSONL, read as gzip if the name ends in `.gz`; a file is one part, since lines have no index."""

    row = "line"
    has_fields = True

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names a malformed line."""
        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        with open_input(part.path) as raw:
            yield from parse_examples(raw, path=part.path, file_index=part.file_index, keys=keys)


class PlainText(WholeFiles):
    """Plain text in UTF-8, read as gzip if the name ends in `.gz`; a prompt is a line without its line break."""

    row = "line"
    has_fields = False

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names a malformed line."""
        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        with open_input(part.path) as raw:
            for number, line in numbered_lines(raw, path=part.path):
                where = f"{part.path}, line {number}"
                if number == 1:
                    # A byte order mark is not part of the prompt, though it would decode as a character.
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    raise DataError(f"{where}: is blank. Every line must be one prompt.")
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: is not UTF-8 ({error}).") from error
                yield example_of_row(
                    {keys.inputs: text}, where=where, position=number, file_index=part.file_index, keys=keys
                )


# Rows read at a time: few, since one long stored text may occur in all of them.
_BATCH = 16


class Parquet:
    """Parquet with the columns of a JSONL row; a null is read as a missing key.

    A row group is a part, so that workers share a large file.
    """

    row = "row"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without pyarrow, which serving installs do not have."""
        if importlib.util.find_spec("pyarrow") is None:
            raise MissingExtraError("reading Parquet needs pyarrow: pip install pyarrow.")

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns the row groups that are not empty."""
        # Imported here: serving reads no Parquet and installs no pyarrow.
        import pyarrow.parquet

        found = version(path)
        try:
            with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw, pre_buffer=False) as file:
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # An error of the disk, and not of the file's content.
                raise
            raise DataError(f"{path}: cannot be read as Parquet ({' '.join(str(error).split())}).") from error
        firsts = [1 + sum(sizes[:group]) for group in range(len(sizes))]
        return tuple(
            FilePart(path=path, file_index=file_index, row_group=group, first=first, version=found)
            for group, (first, size) in enumerate(zip(firsts, sizes, strict=True))
            if size
        )

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples of a row group; `DataError` names a malformed row."""
        import pyarrow.parquet

        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        wanted = {keys.inputs, "input_ids", keys.targets, "reference_ids", "id", keys.cluster, keys.group}
        position = part.first
        try:
            with (
                open_input(part.path) as raw,
                # Many writers add page checksums.
                pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
            ):
                if version(part.path) != part.version:
                    raise DataError(f"{part.path}: was replaced while it was read. Start again.")
                names = file.schema_arrow.names
                twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
                if twice is not None:
                    # Otherwise it would be undefined which column a row takes.
                    raise DataError(f"{part.path}: has two columns named {twice!r}. Rename or drop one of them.")
                if keys.inputs not in names and "input_ids" not in names:
                    wanted.add(CHAT)
                columns = [name for name in names if name in wanted]
                if not columns:
                    raise DataError(
                        f"{part.path}: has none of the columns {keys.inputs} and input_ids, only "
                        f"{', '.join(names)}. Name the column of the prompts with --inputs_field."
                    )
                # An Arrow thread that releases Python memory during interpreter shutdown aborts the process.
                batches = file.iter_batches(_BATCH, row_groups=[part.row_group], columns=columns, use_threads=False)
                for batch in batches:
                    for row in _parquet_rows(batch, part.path, position=position):
                        where = f"{part.path}, row {position}"
                        yield example_of_row(row, where=where, position=position, file_index=part.file_index, keys=keys)
                        position += 1
        except (pyarrow.ArrowException, OSError) as error:
            # Arrow reports any damaged page as one of the two.
            raise DataError(f"{part.path}: damaged Parquet data after row {position - 1} ({error}).") from error


def _parquet_rows(batch: "pyarrow.RecordBatch", path: str, *, position: int) -> list[dict[str, Any]]:
    """Returns the rows of a batch, without nulls; `position` is that of its first row."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_parquet_row(batch, index, where=f"{path}, row {position + index}") for index in range(batch.num_rows)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _parquet_row(batch: "pyarrow.RecordBatch", index: int, *, where: str) -> dict[str, Any]:
    """Returns one row of a batch; names the row if a text is not UTF-8."""
    row: dict[str, Any]
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: holds text that is not UTF-8 ({error}).") from error
    return row


class Format(Protocol):
    """A format of data files.

    Attributes:
      row: The word for its rows in messages.
      has_fields: Whether its rows have named fields.
    """

    row: str
    has_fields: bool

    def check_installed(self) -> None:
        """Raises `MissingExtraError` if packages that the format needs are missing."""
        ...

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns the parts of a file that can be read independently; each row is in exactly one.

        Raises:
          DataError: If the file is not of this format.
        """
        ...

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples of a part, in their order, with their positions in the file.

        Raises:
          DataError: If the part is damaged or a row is not an example; names file and row.
        """
        ...


FORMATS: Mapping[str, Format] = types.MappingProxyType(
    {
        "jsonl": Jsonl(),
        "text": PlainText(),
        "parquet": Parquet(),
        "tfrecord": TFRecord(),
        "seqio": SeqIOTasks(),
    }
)

# TFDS and T5X put the number of a part after the suffix.
_SUFFIXES = {
    "jsonl": re.compile(r"\.jsonl(\.gz)?"),
    "text": re.compile(r"\.txt(\.gz)?"),
    "parquet": re.compile(r"\.parquet"),
    "tfrecord": re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?"),
}


def format_of(path: str, reading: Reading = AS_USUAL) -> Format:
    """Returns the format of a file.

    Raises:
      DataError: If none was named and the suffix is not one of a format.
    """
    if is_seqio(path):
        return FORMATS["seqio"]
    if reading.data_format is not None:
        return FORMATS[reading.data_format]
    for name, suffix in _SUFFIXES.items():
        if re.search(suffix.pattern + r"\Z", path):
            return FORMATS[name]
    raise DataError(
        f"{path}: its suffix tells no format (.jsonl, .txt, each also with .gz; .parquet; .tfrecord). Pass "
        "--data_format."
    )


def check_installed(paths: Iterable[str], reading: Reading = AS_USUAL) -> None:
    """Raises `MissingExtraError` if packages that files need are missing, and the `DataError` of `format_of`."""
    for format_ in {format_of(path, reading) for path in paths}:
        format_.check_installed()


def parts_of(path: str, reading: Reading = AS_USUAL, *, file_index: int = 0) -> Sequence[FilePart]:
    """Returns the parts of a file that can be read independently, at least one.

    Raises:
      DataError: If the file is not of its format, or is visibly empty.
    """
    parts = format_of(path, reading).parts(path, file_index=file_index)
    if not parts:
        raise DataError(no_examples(path))
    return parts


def read_examples(source: str | FilePart, reading: Reading = AS_USUAL, *, file_index: int = 0) -> Iterator[Example]:
    """Yields the examples of a file, local or on Cloud Storage, or of a part of one.

    Args:
      source: The file, or one of its parts.
      reading: How to read it.
      file_index: Recorded in the examples; a part has its own.

    Raises:
      DataError: If the file is damaged or empty, or a row is not an example; names file and row.
    """
    path = source.path if isinstance(source, FilePart) else source
    format_ = format_of(path, reading)
    for part in [source] if isinstance(source, FilePart) else format_.parts(path, file_index=file_index):
        for example in format_.examples(part, reading):
            size = prompt_size(example.prompt) + sum(map(len, example.references))
            check_row_size(size, place_of(path, example.line, reading=reading))
            yield example


def place_of(path: str, position: int, *, reading: Reading = AS_USUAL) -> str:
    """Returns the place of an example as text, such as `a.jsonl, line 3`."""
    return f"{path}, {format_of(path, reading).row} {position}"


def no_examples(path: str) -> str:
    """Returns the error message for an empty file."""
    return f"{path}: holds no examples. A part that was lost would bias the result."
