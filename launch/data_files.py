"""Finding the files that data flags name."""

from collections.abc import Sequence

from calm_beam.storage import absolute, check_writable, exists, is_cloud_path, is_folder, list_files, parent

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
        if not is_cloud_path(path) and not is_folder(parent(path)):
            raise UsageError(f"--output {path}: the folder {parent(path)} does not exist.")
        if exists(path) and not overwrite:
            raise UsageError(f"--output {path}: exists already. Choose another file, or pass --overwrite.")
        check_writable(path)
    return path
