"""Files that appear whole or not at all. Standard library only: the manifest reader shares this floor."""

import contextlib
import glob
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import BinaryIO

_CLOUD_PREFIXES = ("gs:/", "s3:/", "hdfs:/")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool = True) -> Iterator[pathlib.Path]:
    """Gives a temporary path to write to, and moves it to `path` in a single step once the block has succeeded.

    Whoever reads `path` at any moment, or after a crash, finds the old file or the new one, never a part. If the block
    raises, `path` stays as it was. A process that is killed may leave the temporary file, whose name begins with a dot.

    Args:
      path: A local file in a folder that exists.
      overwrite: Whether an existing file is replaced.

    Yields:
      A path in the same folder, since a rename is atomic only within one file system.

    Raises:
      FileExistsError: If there is a file and `overwrite` is False; of several writers, one alone succeeds.
    """
    target = pathlib.Path(path)
    # Not tempfile: its files are readable by their owner alone, and serving often runs as somebody else.
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_cloud_path(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names an object store rather than a local file (also after pathlib took one slash)."""
    return os.fspath(path).startswith(_CLOUD_PREFIXES)


def joined(base: str, *parts: str) -> str:
    """Returns the path of something below `base`."""
    return os.path.join(base, *parts)


def exists(path: str) -> bool:
    """Returns whether there is a file."""
    return os.path.exists(path)


def list_files(pattern: str) -> tuple[str, ...]:
    """Returns the files that match a glob, sorted; none whose name begins with a dot, unless the pattern does."""
    return tuple(sorted(path for path in glob.glob(pattern) if os.path.isfile(path)))


def open_input(path: str) -> BinaryIO:
    """Returns a file opened for reading bytes, seekable."""
    return open(path, "rb")


def remove_file(path: str) -> None:
    """Removes a file, if there is one."""
    pathlib.Path(path).unlink(missing_ok=True)


def remove_folder(path: str) -> None:
    """Removes a folder and all that is in it, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
