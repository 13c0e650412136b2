"""Files that appear whole or not at all. Standard library only: the manifest reader shares this floor."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

_CLOUD_PREFIXES = ("gs:/", "s3:/", "hdfs:/")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a temporary path to write to, and moves it to `path` in a single step once the block has succeeded.

    Whoever reads `path` at any moment, or after a crash, finds the old file or the new one, never a part. If the block
    raises, `path` stays as it was.

    Args:
      path: A local file in a folder that exists.

    Yields:
      A path in the same folder, since a rename is atomic only within one file system.
    """
    target = pathlib.Path(path)
    # Not tempfile: its files are readable by their owner alone, and serving often runs as somebody else.
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_cloud_path(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names an object store rather than a local file (also after pathlib took one slash)."""
    return os.fspath(path).startswith(_CLOUD_PREFIXES)
