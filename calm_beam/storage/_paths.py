"""Paths as text, local or `gs://bucket/name`, and an exception for store and disk errors without a built-in class."""

import os
import posixpath
import re

from calm_beam.errors import CalmBeamError


class StorageError(CalmBeamError, OSError):
    """An object store (no client, no credentials, a wrong address, no answer) or a disk that cannot be used.

    Missing, existing or forbidden objects raise `FileNotFoundError`, `FileExistsError` and `PermissionError`, as on a
    disk.
    """


_CLOUD_PREFIXES = ("gs:/", "s3:/", "hdfs:/")
# pathlib drops one of two slashes.
_GOOGLE = re.compile(r"gs:/{1,2}([^/]+)(?:/(.*))?", re.DOTALL)

AnyPath = str | os.PathLike[str]


def is_cloud_path(path: AnyPath) -> bool:
    """Returns whether a path names an object store, also after pathlib dropped a slash, and not a local file."""
    return os.fspath(path).startswith(_CLOUD_PREFIXES)


def bucket_and_name(path: AnyPath) -> tuple[str, str]:
    """Returns bucket and name of an object, or of a folder without its last slash; a bucket's own name is empty.

    Raises:
      StorageError: If the path is on another object store than Google's, or names no bucket.
    """
    match = _GOOGLE.fullmatch(os.fspath(path))
    if match is None:
        raise StorageError(
            f"{os.fspath(path)}: of object stores only Google Cloud Storage is supported, gs://bucket/name. Copy the "
            "file there, or to a local or mounted disk."
        )
    return match.group(1), (match.group(2) or "").rstrip("/")


def joined(base: AnyPath, *parts: str) -> str:
    """Returns the path of an entry of a folder.

    >>> joined("gs://bucket/run/", "generations", "a.parquet")
    'gs://bucket/run/generations/a.parquet'
    """
    if not is_cloud_path(base):
        return os.path.join(base, *parts)
    bucket, name = bucket_and_name(base)
    return "/".join([f"gs://{bucket}", *([name] if name else []), *parts])


def parent(path: AnyPath) -> str:
    """Returns the folder that contains a path; for a bucket, the bucket.

    >>> parent("gs://bucket/run/manifest.json"), parent("gs://bucket/run")
    ('gs://bucket/run', 'gs://bucket')
    """
    if not is_cloud_path(path):
        return os.path.dirname(os.fspath(path).rstrip("/")) or "."
    bucket, name = bucket_and_name(path)
    return joined(f"gs://{bucket}", *([posixpath.dirname(name)] if "/" in name else []))


def base_name(path: AnyPath) -> str:
    """Returns the last part of a path; empty for a bucket."""
    name = bucket_and_name(path)[1] if is_cloud_path(path) else os.fspath(path).rstrip("/")
    return posixpath.basename(name)


def absolute(path: AnyPath) -> str:
    """Returns the path for use by other processes: a local one is made absolute, with links resolved."""
    if is_cloud_path(path):
        bucket, name = bucket_and_name(path)
        return joined(f"gs://{bucket}", *([name] if name else []))
    return os.path.realpath(path)
