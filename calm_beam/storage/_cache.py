"""Local copies of what lies on Cloud Storage, for readers that need files on a disk.

One copy serves all processes of a machine. It is named by the generations of its objects, so another content is another
copy, and it is compared with their checksums every time it is used.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from . import _google
from ._error import StorageError
from ._google import CloudFile

_PARALLEL_DOWNLOADS = 8


def cache_folder() -> pathlib.Path:
    """Returns `$CALM_BEAM_CACHE`, else `calm-beam` in `$XDG_CACHE_HOME` or `~/.cache`; it need not exist."""
    named = os.environ.get("CALM_BEAM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(named or os.path.join(base, "calm-beam"))


def cached_folder(root: str, files: Sequence[CloudFile]) -> pathlib.Path:
    """Returns a local folder with copies of objects, downloading what is not there yet.

    Args:
      root: The `gs://` folder that becomes the local one.
      files: Objects below it.

    Raises:
      OSError: If an object cannot be read, was replaced, or arrived damaged, or if the cache cannot be written.
    """
    names = [_relative(root, file) for file in files]
    content = [[name, file.generation, file.size, file.crc32c] for name, file in zip(names, files, strict=True)]
    key = hashlib.sha256(json.dumps([root, sorted(content)]).encode()).hexdigest()[:32]
    cache = _cache_directory()
    folder = cache / key
    with _locked(cache / f"{key}.lock"):
        if all(_google.is_intact(folder / name, file) for name, file in zip(names, files, strict=True)):
            return folder
        # Of processes that were killed.
        for leftover in (folder, *cache.glob(f".{key}.*.partial")):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = cache / f".{key}.{os.urandom(6).hex()}.partial"
        try:
            _download(partial, names, files=files)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _cache_directory() -> pathlib.Path:
    """Returns where copies are kept; readable by this user alone, as the objects may be."""
    directory = cache_folder()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(
            f"{directory}: files of Google Cloud Storage cannot be kept here ({error}). Set CALM_BEAM_CACHE to a "
            "folder that can be written."
        ) from error
    return directory.resolve()


def _relative(root: str, file: CloudFile) -> str:
    name = file.path.removeprefix(f"{root}/")
    if {"", ".", ".."} & set(name.split("/")) or "\\" in name:
        raise StorageError(f"{file.path}: has no name on a local disk. Rename it.")
    return name


def _download(folder: pathlib.Path, names: Sequence[str], *, files: Sequence[CloudFile]) -> None:
    # Here, since it takes long to import, and readers of manifests need none.
    import concurrent.futures

    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        pending = [pool.submit(_google.download, file, folder / name) for name, file in zip(names, files, strict=True)]
        try:
            for download in pending:
                download.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for name, file in zip(names, files, strict=True):
        if not _google.is_intact(folder / name, file):
            raise StorageError(f"{file.path}: what arrived has another checksum than what was stored. Try again.")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Keeps other processes waiting that fetch the same; the system lets go of it if the process dies."""
    import fcntl

    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
