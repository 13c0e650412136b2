"""The formats of data, by name and by suffix, and the one door through which every example is read."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from calm_beam.inputs.examples import DataError, Example, check_row_size
from calm_beam.inputs.seqio_names import is_seqio

from .jsonl import Jsonl
from .parquet import Parquet
from .parts import FilePart
from .reading import AS_USUAL, Reading
from .seqio_tasks import SeqIOTasks
from .text import PlainText
from .tfrecord import TFRecord


class Format(Protocol):
    """A form that data come in.

    Attributes:
      row: What its rows are called in messages.
      has_fields: Whether its rows have named fields.
    """

    row: str
    has_fields: bool

    def check_installed(self) -> None:
        """Raises `MissingExtraError` if packages that it needs are missing."""
        ...

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns what of a file can be read independently: together all of it, and no row twice.

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

# TFDS and T5X put the number of a part behind the suffix.
_SUFFIXES = {
    "jsonl": re.compile(r"\.jsonl(\.gz)?"),
    "text": re.compile(r"\.txt(\.gz)?"),
    "parquet": re.compile(r"\.parquet"),
    "tfrecord": re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?"),
}


def format_of(path: str, reading: Reading = AS_USUAL) -> Format:
    """Returns the format that a file is read as.

    Raises:
      DataError: If none was named and the suffix tells none.
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
    """Raises `MissingExtraError` if packages are missing that files need; `DataError` as `format_of`."""
    for format_ in {format_of(path, reading) for path in paths}:
        format_.check_installed()


def parts_of(path: str, reading: Reading = AS_USUAL, *, file_index: int = 0) -> Sequence[FilePart]:
    """Returns what of a file can be read independently, at least one part.

    Raises:
      DataError: If the file is not of its format, or is seen to be empty.
    """
    parts = format_of(path, reading).parts(path, file_index=file_index)
    if not parts:
        raise DataError(no_examples(path))
    return parts


def read_examples(source: str | FilePart, reading: Reading = AS_USUAL, *, file_index: int = 0) -> Iterator[Example]:
    """Yields the examples of a file, local or on Cloud Storage, or of a part of one.

    Args:
      source: The file, or one of its `parts_of`.
      reading: How it is read.
      file_index: Recorded in the examples; a part knows its own.

    Raises:
      DataError: If the file is damaged or a row is not an example; names file and row. An empty file is none.
    """
    path = source.path if isinstance(source, FilePart) else source
    format_ = format_of(path, reading)
    for part in [source] if isinstance(source, FilePart) else format_.parts(path, file_index=file_index):
        for example in format_.examples(part, reading):
            size = sum(map(len, (example.input or example.input_ids or "", *example.references)))
            check_row_size(size, place_of(path, example.line, reading=reading))
            yield example


def place_of(path: str, position: int, *, reading: Reading = AS_USUAL) -> str:
    """Returns in words where an example stands, such as `a.jsonl, line 3`."""
    return f"{path}, {format_of(path, reading).row} {position}"


def no_examples(path: str) -> str:
    """Returns what is said of an empty file."""
    return f"{path}: holds no examples. A part that was lost would bias the result."
