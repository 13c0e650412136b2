"""Finding the files that data flags name, and how they are read."""

import os
from collections.abc import Sequence

from calm_beam.inputs import AS_USUAL, DataFiles, NoFilesError, Reading
from calm_beam.options.groups import DataSource
from calm_beam.storage import absolute, check_writable, exists, is_cloud_path, is_file, is_folder, parent

from . import UsageError, naming


def find_files(flag: str, patterns: Sequence[str], *, reading: Reading = AS_USUAL) -> DataFiles:
    """Returns the files that a flag names.

    Args:
      flag: The flag, for messages.
      patterns: Paths or globs, local or on Cloud Storage, or names of SeqIO data.
      reading: How they will be read.

    Raises:
      UsageError: If a pattern matches no file, and none is passed over silently; if Cloud Storage cannot be listed,
        a file has no format, or one without the fields that are named.
      ValueError: If packages that they need are missing, or a SeqIO task.
    """
    with naming(flag):
        try:
            return DataFiles.found(patterns, reading=reading)
        except NoFilesError as error:
            raise UsageError(f"{flag} {error}") from error


def find_data(source: DataSource) -> DataFiles:
    """Returns the files that a request names; raises as `find_files`."""
    return find_files("--data", source.patterns or (), reading=source.reading())


def find_folder(path: str | os.PathLike[str]) -> str:
    """Returns the directory of `--output`, absolute, since workers have folders of their own; it need not exist.

    Raises:
      UsageError: If it is a file, or Cloud Storage does not say.
    """
    with naming("--output"):
        output = absolute(os.fspath(path))
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
    return output


def check_parent(flag: str, path: str) -> None:
    """Refuses the path of a file whose folder is not there.

    Args:
      flag: What names it, for messages.
      path: Local or on Cloud Storage, where nothing needs a folder.

    Raises:
      UsageError: If it is not.
    """
    if not is_cloud_path(path) and not is_folder(parent(path)):
        raise UsageError(f"{flag} {path}: the folder {parent(path)} does not exist.")


def find_output(path: str | None, *, overwrite: bool) -> str:
    """Returns the path of `--output`, a JSONL file that can be written.

    Raises:
      UsageError: If there is none, it is there already and may not be replaced, or it cannot be written.
    """
    if path is None:
        raise UsageError("--output is missing: the JSONL file to write.")
    with naming("--output"):
        if is_folder(path):
            raise UsageError(f"--output {path}: is a directory, expected a file such as {path}/outputs.jsonl.")
        check_parent("--output", path)
        if exists(path) and not overwrite:
            raise UsageError(f"--output {path}: exists already. Choose another file, or pass --overwrite.")
        check_writable(path)
    return path
