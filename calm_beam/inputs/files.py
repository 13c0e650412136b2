"""Finds the files of a data set, and identifies their content."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Self

from calm_beam.storage import absolute, is_cloud_path, is_file, is_folder, list_files, open_input, why_no_file
from calm_beam.storage import stat as cloud_stat

from .examples import DataError
from .formats import check_installed, format_of
from .reading import AS_USUAL, Reading, is_seqio
from .tensorflow_formats import seqio_shards

_CHUNK = 2**20


class NoFilesError(DataError):
    """A name that is neither a file nor a pattern that matches one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFiles:
    """Files that hold one data set.

    Attributes:
      patterns: The user's patterns.
      files: Absolute paths, sorted, each once; for SeqIO tasks, their shards.
      reading: How to read them.
    """

    patterns: tuple[str, ...]
    files: tuple[str, ...]
    reading: Reading = AS_USUAL

    @classmethod
    def found(cls, patterns: str | os.PathLike[str] | Sequence[str], *, reading: Reading = AS_USUAL) -> Self:
        """Returns the files that match the patterns.

        Args:
          patterns: Paths or globs, local or on Cloud Storage, or names of SeqIO data.
          reading: How to read them.

        Raises:
          NoFilesError: If a pattern matches no file: none is skipped silently.
          DataError: If a file's format is unknown, or has no fields although some are named.
          OSError: If Cloud Storage cannot be listed.
          ValueError: If a package that they need is missing, or a SeqIO task does not exist.
        """
        given = (os.fspath(patterns),) if isinstance(patterns, str | os.PathLike) else tuple(patterns)
        # Keyed by link targets, so that a file with two names is read once. Its name, not its target's, gives the
        # format: caches name files by digests.
        found: dict[str, str] = {}
        for pattern in given:
            if is_seqio(pattern):
                found |= {shard: shard for shard in seqio_shards(pattern, reading.seqio_modules)}
                continue
            found = {**matching_files(pattern, among=given), **found}
        files = tuple(sorted(found.values()))
        check_installed(files, reading)
        for name in ("inputs_field", "targets_field"):
            if getattr(reading, name) is not None:
                without = next((path for path in files if not format_of(path, reading).has_fields), None)
                if without is not None:
                    raise DataError(
                        f"--{name} names a field, and {without} is plain text, which has none. Leave it out."
                    )
        return cls(patterns=given, files=files, reading=reading)


def matching_files(pattern: str, *, among: Sequence[str] = ()) -> dict[str, str]:
    """Returns the files that match a path or glob, local or on Cloud Storage: their names by their link targets.

    Args:
      pattern: The path or glob.
      among: All patterns that were given with it, separated by commas.

    Raises:
      NoFilesError: If there is none.
      OSError: If Cloud Storage cannot be listed.
    """
    # An existing file of that name takes precedence over the name as a pattern.
    is_name = not is_cloud_path(pattern) and is_file(pattern)
    matches = [pattern] if is_name else sorted(list_files(pattern))
    if not matches and is_folder(pattern):
        raise NoFilesError(f"{pattern}: is a directory. Name its files, for example '{pattern}/*.jsonl'.")
    if not matches:
        raise NoFilesError(f"{pattern}: {why_no_file(pattern)}{_hint(pattern, among)}")
    found: dict[str, str] = {}
    for path in matches:
        found.setdefault(absolute(path), path if is_cloud_path(path) else os.path.abspath(path))
    return found


def digest_of_files(files: Sequence[str]) -> str:
    """Returns `sha256:` and 64 digits: equal for data files of equal content, whatever their names.

    SeqIO data are identified by their names only, and objects on Cloud Storage by size and checksum.

    Raises:
      OSError: If a file cannot be read.
    """
    found = json.dumps(sorted(_content_of(path) for path in files))
    return f"sha256:{hashlib.sha256(found.encode()).hexdigest()}"


def _content_of(path: str) -> str:
    if is_seqio(path):
        return path
    if is_cloud_path(path) and (found := cloud_stat(path)) is not None:
        return f"{found.size} {found.crc32c}"
    digest = hashlib.sha256()
    with open_input(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _hint(pattern: str, patterns: Sequence[str]) -> str:
    """Returns a hint for a pattern without matches; empty if there is none."""
    if len(patterns) > 1:
        return " Commas separate names; of a single file, the name may have some."
    if any(mark in pattern for mark in "*?["):
        return (
            " As in shells, * and ? stand for any characters, [...] for one of some, unless a file is called just that."
        )
    return ""
