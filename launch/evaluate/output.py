"""The output directory of an experiment: where it may be, tables in it, and that it is replaced whole or not at all."""

import csv
from collections.abc import Mapping, Sequence

from calm_beam.errors import UsageError
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.data import find_folder
from calm_beam.manifest import MANIFEST
from calm_beam.storage import check_writable, exists, joined, replacing

from .request import Result

Cell = str | int | float | None


def checked_output(request: Result, files: Sequence[str]) -> str:
    """Returns the directory to write to, which holds no calibration, and none of the files unless they may go.

    Raises:
      UsageError: If it cannot be written to, or holds what must stay.
    """
    output = find_folder(request.output)
    with naming("--output"):
        if exists(joined(output, MANIFEST)):
            raise UsageError(f"--output {output}: holds a calibration. Choose another directory.")
        found = [file for file in files if exists(joined(output, file))]
        check_writable(joined(output, files[0]))
    if found and not request.overwrite:
        raise UsageError(f"--output {output}: holds {found[0]} already. Choose another directory, or pass --overwrite.")
    return output


def write_rows(path: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Writes a table as CSV, its columns those of the first row; the file appears whole or not at all."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
