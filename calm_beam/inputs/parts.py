"""Parts of a data file that can be read independently of each other."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePart:
    """A data file, or a part of one.

    Attributes:
      path: The file.
      file_index: Which of the data files it is.
      row_group: Number of the Parquet row group; None for a whole file.
      first: Position of its first row in the file, from 1.
      version: What the file's version was when it was divided, to tell whether it was replaced; empty for a whole file.
    """

    path: str
    file_index: int
    row_group: int | None = None
    first: int = 1
    version: str = ""


class WholeFiles:
    """What formats have in common whose files have no index, so that a file is one part."""

    def check_installed(self) -> None:
        """Nothing is needed, unless a format says otherwise."""

    def parts(self, path: str, *, file_index: int) -> Sequence[FilePart]:
        """Returns the whole file."""
        return (FilePart(path=path, file_index=file_index),)
