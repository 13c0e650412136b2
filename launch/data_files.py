"""Finding the files that a data flag names."""

import glob
import pathlib
from collections.abc import Sequence

from .flags import UsageError, refuse_cloud_paths


def find_files(flag: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the files that match, as absolute paths, sorted, each once.

    Args:
      flag: The flag, for messages.
      patterns: Paths or globs.

    Raises:
      UsageError: If a pattern matches no file; none is passed over silently.
    """
    refuse_cloud_paths((flag, pattern) for pattern in patterns)
    found: set[str] = set()
    for pattern in patterns:
        matches = {str(pathlib.Path(path).resolve()) for path in glob.glob(pattern) if pathlib.Path(path).is_file()}
        if not matches:
            if pathlib.Path(pattern).is_dir():
                raise UsageError(f"{flag} {pattern}: is a directory. Name its files, for example '{pattern}/*.jsonl'.")
            raise UsageError(f"{flag} {pattern}: no such file.")
        found |= matches
    return tuple(sorted(found))
