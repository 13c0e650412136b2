"""A directory that is filled atomically."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from ._paths import is_cloud_path


@contextlib.contextmanager
def staged(path: str) -> Iterator[str]:
    """Gives an empty directory to write to, whose entries replace those of `path` once the block has succeeded.

    Until then `path` stays as it was, also if the block raises.

    Args:
      path: The directory to fill; need not exist.

    Yields:
      A directory on the same disk. On Cloud Storage, where nothing can be moved in one step, `path` itself.
    """
    if is_cloud_path(path):
        yield path
        return
    output = pathlib.Path(path)
    existing = next(folder for folder in output.parents if folder.is_dir())
    staging = existing / f".{output.name}.{os.urandom(6).hex()}.partial"
    staging.mkdir()
    try:
        yield str(staging)
        output.mkdir(parents=True, exist_ok=True)
        for entry in staging.iterdir():
            target = output / entry.name
            if target.is_symlink():
                # The link, not what lies behind it.
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
