"""Each operation on files, for either kind of path."""

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from . import _google, _local
from ._paths import AnyPath, StorageError, base_name, is_cloud_path

_MAKE_ROOM = "Make room there, or choose a folder on another disk."
_DISK_ERRORS = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "Raise the limit (ulimit -f), or choose a folder on another disk.",
    errno.EIO: "The disk fails: choose a folder on another one.",
    errno.EROFS: "Choose a folder on another disk.",
}


def is_file(path: AnyPath) -> bool:
    """Returns whether the path is a file."""
    return _google.version(path) != "" if is_cloud_path(path) else os.path.isfile(path)


def obstacle(path: AnyPath) -> str | None:
    """Returns what exists at the path if it is not a file, as the rest of a sentence; None if nothing does."""
    return None if is_cloud_path(path) else _local.obstacle(path)


def why_no_file(path: AnyPath) -> str:
    """Returns why `is_file` is false, as the rest of a sentence about the path."""
    return obstacle(path) or "no such file."


def is_folder(path: AnyPath) -> bool:
    """Returns whether the path is a folder; on Cloud Storage, whether any object is below it."""
    return _google.is_folder(path) if is_cloud_path(path) else os.path.isdir(path)


def exists(path: AnyPath) -> bool:
    """Returns whether the path is a file or a folder."""
    return is_file(path) or is_folder(path)


def list_files(pattern: str) -> tuple[str, ...]:
    """Returns the files that match a glob, sorted.

    Args:
      pattern: A path in which `*`, `?` and `[...]` match characters other than `/`. As in shells, they do not match a
        leading dot.
    """
    return _google.list_files(pattern) if is_cloud_path(pattern) else _local.list_files(pattern)


def open_input(path: AnyPath) -> BinaryIO:
    """Returns a file opened for reading bytes, which can seek.

    On Cloud Storage, this reads the generation that existed when the file was opened; if the object is replaced
    meanwhile, reading fails. Reading it from beginning to end verifies its checksum.

    Raises:
      StorageError: If the path is a pipe, a socket or a device, which may have no end; also while it is read, if the
        disk fails.
      OSError: If it cannot be opened.
    """
    return _google.open_input(path) if is_cloud_path(path) else _local.open_input(path)


def version(path: AnyPath) -> str:
    """Returns a text that changes whenever `replacing` has replaced the file; empty if there is none.

    On Cloud Storage it is the generation.
    """
    return _google.version(path) if is_cloud_path(path) else _local.version(path)


def size(path: AnyPath) -> int:
    """Returns the size of a file in bytes.

    Raises:
      OSError: If there is no such file.
    """
    if not is_cloud_path(path):
        return os.path.getsize(path)
    found = _google.stat(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    return found.size


@contextlib.contextmanager
def replacing(path: AnyPath, *, overwrite: bool = True, replaces: str | None = None) -> Iterator[pathlib.Path]:
    """Gives a local temporary path to write to; its content appears at `path` once the block has succeeded.

    A reader of `path` finds the old file or the new one at any moment, also after a crash, and never a part. If the
    block raises, `path` stays as it was.

    Args:
      path: A local file in a folder that exists, or an object in a bucket that exists.
      overwrite: Whether an existing file may be replaced. If not, one of several concurrent writers succeeds (hard
        link, or generation precondition).
      replaces: The `version` that the file must still have when it is replaced, empty for none. Of several writers that
        replace the same file, one succeeds. Writing the same content as the existing file also succeeds: an earlier
        attempt of this writer may have stored it and lost the answer.

    Yields:
      A path that does not exist yet; for a local file, in the same folder.

    Raises:
      FileExistsError: If a file already exists, or is not the one to replace.
      OSError: If the file cannot be written.
    """
    expected = replaces if overwrite else ""
    if not is_cloud_path(path):
        with writing(path), _local.replacing(path, expected=expected) as temporary:
            yield temporary
        return
    if not base_name(path):
        raise StorageError(f"{path}: is a bucket, expected the name of a file in it.")
    with writing(tempfile.gettempdir()), tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
        temporary = pathlib.Path(folder, base_name(path))
        yield temporary
        _google.upload(temporary, path, expected=expected)


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Adds the file's name to disk errors in the block: the system's own error has none.

    Args:
      path: The file that the block writes on a local disk.

    Raises:
      StorageError: If the disk is full or fails, or the file exceeds a size limit.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or error.errno not in _DISK_ERRORS:
            raise
        reason = os.strerror(error.errno)
        raise StorageError(f"{os.fspath(path)}: cannot be written: {reason}. {_DISK_ERRORS[error.errno]}") from error


def check_writable(path: AnyPath) -> None:
    """Raises if a file may not be written; leaves nothing behind.

    Raises:
      OSError: If it may not be written; says why.
    """
    if is_cloud_path(path):
        _google.check_writable(path)
    else:
        _local.check_writable(path)


def make_folder(path: AnyPath) -> None:
    """Makes a folder and its parents; does nothing on Cloud Storage, where folders need not be made."""
    if not is_cloud_path(path):
        os.makedirs(path, exist_ok=True)


def remove_unfinished(path: AnyPath) -> None:
    """Removes temporary files of `replacing` for a path that killed processes have left next to it.

    No other process may be writing the file. On Cloud Storage there are none.
    """
    if not is_cloud_path(path):
        _local.remove_unfinished(path)


def remove_file(path: AnyPath, *, removes: str | None = None) -> None:
    """Removes a file if it exists.

    Args:
      path: The file.
      removes: The `version` that it must have, empty for none; None for any.

    Raises:
      FileExistsError: If it has another version.
    """
    if is_cloud_path(path):
        _google.remove_file(path, expected=removes)
    else:
        _local.remove_file(path, expected=removes)


def remove_folder(path: AnyPath, *, inside: AnyPath) -> None:
    """Removes a folder and its content if it exists, without following symbolic links.

    Args:
      path: The folder.
      inside: A folder above it, which may itself be reached by links.

    Raises:
      OSError: If the folder, or one between the two, is a link; then nothing is removed.
    """
    if is_cloud_path(path):
        _google.remove_folder(path)
    else:
        _local.remove_folder(path, inside=inside)


def refuse_links(path: AnyPath, *, inside: AnyPath) -> None:
    """Raises if `remove_folder` would refuse a folder, which need not exist yet.

    Raises:
      OSError: If it would.
    """
    if not is_cloud_path(path):
        _local.refuse_links(path, inside=inside)
