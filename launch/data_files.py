"""Finding the files that a data flag names."""

from collections.abc import Sequence

from calm_beam.storage import absolute, is_folder, list_files

from .flags import UsageError, naming


def find_files(flag: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the files that match, as absolute paths, sorted, each once.

    Args:
      flag: The flag, for messages.
      patterns: Paths or globs, local or on Cloud Storage.

    Raises:
      UsageError: If a pattern matches no file, and none is passed over silently; or if Cloud Storage cannot be listed.
    """
    found: set[str] = set()
    for pattern in patterns:
        with naming(flag):
            matches = {absolute(path) for path in list_files(pattern)}
            is_directory = not matches and is_folder(pattern)
        if is_directory:
            raise UsageError(f"{flag} {pattern}: is a directory. Name its files, for example '{pattern}/*.jsonl'.")
        if not matches:
            raise UsageError(f"{flag} {pattern}: no such file.")
        found |= matches
    return tuple(sorted(found))
