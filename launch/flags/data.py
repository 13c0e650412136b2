"""Finding the files that data flags name, and how they are read."""

import argparse
import os
from collections.abc import Sequence

from calm_beam.inputs import AS_USUAL, Reading, check_installed, format_of, is_seqio, seqio_shards
from calm_beam.storage import (
    absolute,
    check_writable,
    exists,
    is_cloud_path,
    is_file,
    is_folder,
    list_files,
    parent,
    why_no_file,
)

from . import UsageError, naming


def reading_of(flags: argparse.Namespace, *, cluster_key: str | None = None, needs_references: bool = False) -> Reading:
    """Returns how the data are read that the flags of `add_data_flags` name."""
    return Reading(
        data_format=None if flags.data_format == "seqio" else flags.data_format,
        inputs_field=flags.inputs_field,
        targets_field=flags.targets_field,
        seqio_modules=flags.seqio_module or (),
        cluster_key=cluster_key,
        needs_references=needs_references,
    )


def find_files(flag: str, patterns: Sequence[str], reading: Reading = AS_USUAL) -> tuple[str, ...]:
    """Returns the files that match, as absolute paths, sorted, each once; of SeqIO tasks, their shards.

    Args:
      flag: The flag, for messages.
      patterns: Paths or globs, local or on Cloud Storage, or names of SeqIO data.
      reading: How they will be read.

    Raises:
      UsageError: If a pattern matches no file, and none is passed over silently; if Cloud Storage cannot be listed,
        a file has no format, or one without the fields that are named.
      ValueError: If packages that they need are missing, or a SeqIO task.
    """
    # By what links lead to: a file of two names is read once. Its name, not that of what a link leads to, tells the
    # format; caches keep files under digests.
    found: dict[str, str] = {}
    for pattern in patterns:
        if is_seqio(pattern):
            found |= {shard: shard for shard in seqio_shards(pattern, reading.seqio_modules)}
            continue
        with naming(flag):
            # A file that is called so is meant, even where the name is a pattern too.
            is_name = not is_cloud_path(pattern) and is_file(pattern)
            matches = [pattern] if is_name else sorted(list_files(pattern))
            is_directory = not matches and is_folder(pattern)
        if is_directory:
            raise UsageError(f"{flag} {pattern}: is a directory. Name its files, for example '{pattern}/*.jsonl'.")
        if not matches:
            raise UsageError(f"{flag} {pattern}: {why_no_file(pattern)}{_hint(pattern, patterns)}")
        for path in matches:
            found.setdefault(absolute(path), path if is_cloud_path(path) else os.path.abspath(path))
    files = sorted(found.values())
    check_installed(files, reading)
    for name in ("inputs_field", "targets_field"):
        if getattr(reading, name) is not None:
            without = next((path for path in files if not format_of(path, reading).has_fields), None)
            if without is not None:
                raise UsageError(f"--{name} names a field, and {without} is plain text, which has none. Leave it out.")
    return tuple(files)


def _hint(pattern: str, patterns: Sequence[str]) -> str:
    """Returns what to know about a pattern that matches nothing; empty where there is nothing."""
    if len(patterns) > 1:
        return " Commas separate names; of a single file, the name may have some."
    if any(mark in pattern for mark in "*?["):
        return " As in shells, * and ? stand for any characters, [...] for one of some, but in the name of one file."
    return ""


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
