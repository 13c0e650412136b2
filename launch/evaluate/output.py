"""The output directory of an experiment: where it may be, tables in it, and that it is replaced whole or not at all."""

import contextlib
import csv
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

from calm_beam.errors import UsageError
from calm_beam.launch.flags import naming
from calm_beam.manifest import MANIFEST
from calm_beam.storage import absolute, check_writable, exists, is_cloud_path, is_file, joined, replacing

from .request import Result

Cell = str | int | float | None


def checked_output(request: Result, files: Sequence[str]) -> str:
    """Returns the directory to write to, which holds no calibration, and none of the files unless they may go.

    Raises:
      UsageError: If it cannot be written to, or holds what must stay.
    """
    with naming("--output"):
        output = absolute(os.fspath(request.output))
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        if exists(joined(output, MANIFEST)):
            raise UsageError(f"--output {output}: holds a calibration. Choose another directory.")
        found = [file for file in files if exists(joined(output, file))]
        check_writable(joined(output, files[0]))
    if found and not request.overwrite:
        raise UsageError(f"--output {output}: holds {found[0]} already. Choose another directory, or pass --overwrite.")
    return output


@contextlib.contextmanager
def staged(path: str) -> Iterator[str]:
    """Gives an empty directory to write to, whose entries replace those of `output` once the block has succeeded.

    Until then `output` stays as it is, and it stays so if the block raises.

    Args:
      path: The directory to fill; need not exist.

    Yields:
      A directory on the same disk. On Cloud Storage, where nothing can be moved in one step, `path` itself.
    """
    if is_cloud_path(path):
        yield path
        return
    output = pathlib.Path(path)
    existing = next(folder for folder in output.parents if folder.is_dir())
    staging = existing / f".{output.name}.{os.urandom(6).hex()}.partial"
    staging.mkdir()
    try:
        yield str(staging)
        output.mkdir(parents=True, exist_ok=True)
        for entry in staging.iterdir():
            target = output / entry.name
            if target.is_symlink():
                # The link, not what lies behind it.
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_rows(path: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Writes a table as CSV, its columns those of the first row; the file appears whole or not at all."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
