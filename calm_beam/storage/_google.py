"""Google Cloud Storage, through google-cloud-storage: the only module that imports a client of an object store.

Every request is retried up to a deadline while its failure may be temporary. Every error has a clear message.

Readers that need files on a disk get local copies. One copy serves all processes of a machine. Its name contains the
generations of its objects, so other content gets another copy, and its checksums are verified every time it is used.
"""

import base64
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from ._paths import AnyPath, StorageError, bucket_and_name, joined

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client


# The deadline is for one request with its retries, the timeout for one attempt to connect or to receive more.
_DEADLINE_SECONDS = 300.0
_TIMEOUT_SECONDS = 60.0
# Bytes per read: a request costs as much time as a megabyte, and often only a file's first lines are read.
_READ_BYTES = 2**20
_WILDCARD = re.compile(r"[*?[]")
_LOG_IN = (
    "Log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key of a "
    "service account."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloudFile:
    """One generation of an object.

    Attributes:
      path: Path of the object.
      generation: Its generation.
      size: Size in bytes.
      crc32c: Checksum of the content, in base64.
    """

    path: str
    generation: int
    size: int
    crc32c: str


def version(path: AnyPath) -> str:
    """Returns the generation of an object, or an empty text if there is no object."""
    blob = _find(path)
    return "" if blob is None else str(blob.generation)


def stat(path: AnyPath) -> CloudFile | None:
    """Returns an object's current generation, or None if there is no object."""
    blob = _find(path)
    return None if blob is None else _file_of(blob)


def is_folder(path: AnyPath) -> bool:
    """Returns whether any object is below a path; for a bucket, whether it exists."""
    bucket, name = bucket_and_name(path)
    with _in_words(path) as client:
        blobs = client.list_blobs(bucket, prefix=f"{name}/" if name else None, max_results=1, **_attempts())
        return any(True for _ in blobs) or not name


def list_below(path: AnyPath) -> tuple[CloudFile, ...]:
    """Returns all objects below a path, sorted, without the empty ones that represent folders."""
    bucket, name = bucket_and_name(path)
    with _in_words(path) as client:
        blobs = client.list_blobs(bucket, prefix=f"{name}/" if name else None, **_attempts())
        return tuple(_file_of(blob) for blob in blobs if not blob.name.endswith("/"))


def list_files(pattern: str) -> tuple[str, ...]:
    """Returns the objects that match a glob, sorted."""
    bucket, name = bucket_and_name(pattern)
    wildcard = _WILDCARD.search(name)
    if wildcard is None:
        return (joined(f"gs://{bucket}", name),) if _find(pattern) else ()
    # If only the last part has wildcards, folders below are not listed.
    delimiter = None if "/" in name[wildcard.start() :] else "/"
    with _in_words(pattern) as client:
        blobs = client.list_blobs(bucket, prefix=name[: wildcard.start()], delimiter=delimiter, **_attempts())
        names = sorted(blob.name for blob in blobs if _matches(name, blob.name) and not blob.name.endswith("/"))
    return tuple(joined(f"gs://{bucket}", found) for found in names)


def open_input(path: AnyPath) -> BinaryIO:
    """Returns an object opened for reading."""
    blob = _find(path)
    if blob is None:
        raise FileNotFoundError(f"{path}: no such object.")
    if blob.content_encoding:
        # The client decides whether to decompress it, and byte ranges of the compressed object are meaningless.
        raise StorageError(
            f"{path}: is stored with Content-Encoding {blob.content_encoding}. Store it as it is to be read: without "
            "the encoding, or as a file that ends in .gz."
        )
    return io.BufferedReader(_ObjectReader(_file_of(blob)), _READ_BYTES)


def upload(source: pathlib.Path, path: AnyPath, *, expected: str | None) -> None:
    """Stores a local file as an object.

    Args:
      source: The file.
      path: The object to write.
      expected: Generation that the object must have now, empty for none; None for any.

    Raises:
      FileExistsError: If it has another, unless its content is the same.
    """
    bucket, name = bucket_and_name(path)
    generation = None if expected is None else int(expected or 0)
    with _in_words(path) as client:
        from google.api_core import exceptions

        blob = client.bucket(bucket).blob(name)
        try:
            blob.upload_from_filename(str(source), checksum="crc32c", if_generation_match=generation, **_attempts())
        except exceptions.PreconditionFailed:
            # The object may already be stored: by an attempt whose answer was lost, or by an earlier run of the same
            # pipeline step.
            stored = client.bucket(bucket).get_blob(name, **_attempts())
            if stored is None or stored.md5_hash != _md5(source):
                raise FileExistsError(f"{path}: was written by another process in the meantime.") from None


def check_writable(path: AnyPath) -> None:
    """Begins an upload, which needs the same permission as a complete one, and does not finish it."""
    bucket, name = bucket_and_name(path)
    with _in_words(path) as client:
        client.bucket(bucket).blob(name).create_resumable_upload_session(**_attempts())


def download(file: CloudFile, target: pathlib.Path) -> None:
    """Writes one generation of an object to a local path; `is_intact` verifies its checksum.

    Raises:
      StorageError: If the object has been replaced since.
    """
    with _in_words(file.path, generation=file.generation) as client:
        _blob_of(file, client).download_to_filename(str(target), raw_download=True, checksum=None, **_attempts())


def is_intact(path: pathlib.Path, file: CloudFile) -> bool:
    """Returns whether a local file has the object's content."""
    import google_crc32c

    if not path.is_file() or path.stat().st_size != file.size:
        return False
    checksum = google_crc32c.Checksum()
    with open(path, "rb") as content:
        while chunk := content.read(_READ_BYTES):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode() == file.crc32c


def remove_file(path: AnyPath, *, expected: str | None = None) -> None:
    """Removes an object if it exists.

    Args:
      path: The object.
      expected: Generation that it must have, empty for none; None for any.

    Raises:
      FileExistsError: If it has another generation.
    """
    bucket, name = bucket_and_name(path)
    if expected == "":
        if version(path):
            raise FileExistsError(f"{path}: was written by another process in the meantime.")
        return
    generation = None if expected is None else int(expected)
    with _in_words(path) as client:
        from google.api_core import exceptions

        try:
            client.bucket(bucket).blob(name).delete(if_generation_match=generation, **_attempts())
        except exceptions.NotFound:
            pass
        except exceptions.PreconditionFailed:
            # The object may already be removed: by an attempt whose answer was lost.
            if client.bucket(bucket).get_blob(name, **_attempts()) is not None:
                raise FileExistsError(f"{path}: was written by another process in the meantime.") from None


def remove_folder(path: AnyPath) -> None:
    """Removes all objects below a path."""
    bucket, name = bucket_and_name(path)
    if not name:
        raise StorageError(f"{path}: is a whole bucket, and is not removed. Name a folder in it.")
    with _in_words(path) as client:
        names = [blob.name for blob in client.list_blobs(bucket, prefix=f"{name}/", **_attempts())]
    for found in names:
        remove_file(f"gs://{bucket}/{found}")


class _ObjectReader(io.RawIOBase):
    """One generation of an object, read in ranges."""

    def __init__(self, file: CloudFile) -> None:
        import google_crc32c

        self._file = file
        self._position = 0
        # Checksum of the first `_hashed` bytes, as long as they are read in order.
        self._checksum, self._hashed = google_crc32c.Checksum(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._file.size - self._position)
        if size <= 0:
            return 0
        file, first = self._file, self._position
        with _in_words(file.path, generation=file.generation) as client:
            content = _blob_of(file, client).download_as_bytes(
                start=first, end=first + size - 1, raw_download=True, checksum=None, **_attempts()
            )
        if len(content) != size:
            raise StorageError(f"{file.path}: {len(content)} bytes arrived of {size} at {first}.")
        buffer[:size] = content
        if first == self._hashed:
            self._checksum.update(content)
            self._hashed += size
        self._position += size
        if self._hashed == file.size and base64.b64encode(self._checksum.digest()).decode() != file.crc32c:
            raise StorageError(f"{file.path}: what arrived has another checksum than what was stored. Try again.")
        return size


def _find(path: AnyPath) -> "Blob | None":
    """Returns the object with its metadata, or None if the bucket has no such object."""
    bucket, name = bucket_and_name(path)
    if not name:
        return None
    with _in_words(path) as client:
        from google.api_core import exceptions

        blob = client.bucket(bucket).get_blob(name, **_attempts())
        if blob is None:
            # A missing or misspelled bucket gives the same answer here; only a listing tells the difference.
            with contextlib.suppress(exceptions.Forbidden):
                any(client.list_blobs(bucket, prefix=name, max_results=1, **_attempts()))
        return blob


def _file_of(blob: "Blob") -> CloudFile:
    path = joined(f"gs://{blob.bucket.name}", blob.name)
    return CloudFile(path=path, generation=blob.generation, size=blob.size, crc32c=blob.crc32c)


def _blob_of(file: CloudFile, client: "Client") -> "Blob":
    """Returns a handle that reads only the given generation of an object."""
    bucket, name = bucket_and_name(file.path)
    return client.bucket(bucket).blob(name, generation=file.generation)


def _matches(pattern: str, name: str) -> bool:
    """Returns whether a name matches a glob as a file's would: part by part, and wildcards match no leading dot."""
    parts, found = pattern.split("/"), name.split("/")
    return len(parts) == len(found) and all(
        fnmatch.fnmatchcase(name, part) and not (name.startswith(".") and _WILDCARD.match(part))
        for part, name in zip(parts, found, strict=True)
    )


def _md5(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
    return base64.b64encode(digest).decode()


def _attempts() -> dict[str, Any]:
    """Returns the arguments that make requests retry."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    return {"retry": DEFAULT_RETRY.with_timeout(_DEADLINE_SECONDS), "timeout": _TIMEOUT_SECONDS}


@contextlib.contextmanager
def _in_words(path: AnyPath, *, generation: int | None = None) -> "Iterator[Client]":
    """Gives the client; turns errors of its requests into file errors.

    NotFound means that the bucket is missing, or the generation that is read.
    """
    client = _client(path)
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    bucket, _ = bucket_and_name(path)
    try:
        yield client
    except (exceptions.NotFound, exceptions.PreconditionFailed):
        if generation is None:
            raise FileNotFoundError(f"{path}: there is no bucket gs://{bucket}.") from None
        raise StorageError(
            f"{path}: was replaced or removed while it was read (generation {generation}). Do not change files that a "
            "run reads."
        ) from None
    except exceptions.Forbidden as error:
        raise PermissionError(
            f"{path}: permission denied ({_message(error)}). Give this account the role Storage Object User on "
            f"gs://{bucket}, or log in as another."
        ) from None
    except (exceptions.Unauthorized, GoogleAuthError) as error:
        raise StorageError(f"{path}: the credentials do not work ({_message(error)}). {_LOG_IN}") from None
    except (exceptions.GoogleAPIError, RequestException, _corruption_error()) as error:
        raise StorageError(f"{path}: the request to Google Cloud Storage failed ({_message(error)}).") from None


def _corruption_error() -> type[Exception]:
    """Returns the exception for uploads that arrived with another checksum; version 3 moved it."""
    try:
        from google.cloud.storage.exceptions import DataCorruption
    except ImportError:
        from google.resumable_media import DataCorruption
    error: type[Exception] = DataCorruption
    return error


def _client(path: AnyPath) -> "Client":
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage  # noqa: F401 - whether it is there
    except ImportError as error:
        raise StorageError(
            f"{path}: Google Cloud Storage needs the extra gcp, which is not installed: pip install 'calm-beam[gcp]' "
            "(in a checkout: pip install '.[gcp]')."
        ) from error
    bucket_and_name(path)
    try:
        return _client_of_process(os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))
    except DefaultCredentialsError:
        raise StorageError(f"{path}: there are no credentials for Google Cloud Storage. {_LOG_IN}") from None


@functools.lru_cache(maxsize=4)
def _client_of_process(process: int, emulator: str | None) -> "Client":
    """Returns this process's client; its connections survive neither a fork nor a change of the emulator."""
    from google.cloud import storage

    # Objects in buckets need no project.
    return storage.Client(project=None)


def _message(error: Exception) -> str:
    """Returns the service's message of an error, or else the error's own text, on one line."""
    try:
        text = error.response.json()["error"]["message"]  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError):
        text = str(error)
    return " ".join(str(text).split())[:300]


_PARALLEL_DOWNLOADS = 8


def cache_folder() -> pathlib.Path:
    """Returns `$CALM_BEAM_CACHE`, else `calm-beam` in `$XDG_CACHE_HOME` or `~/.cache`; it need not exist."""
    named = os.environ.get("CALM_BEAM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(named or os.path.join(base, "calm-beam"))


def cached_folder(root: str, files: Sequence[CloudFile]) -> pathlib.Path:
    """Returns a local folder with copies of objects, after downloading those that are missing.

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
    with _locked_folder(cache / f"{key}.lock"):
        if all(is_intact(folder / name, file) for name, file in zip(names, files, strict=True)):
            return folder
        # Leftovers of killed processes.
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
    """Returns the folder of all copies; only this user can read it, since the objects may be private."""
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
    # Imported here because it is slow to import and manifest readers do not need it.
    import concurrent.futures

    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        pending = [pool.submit(download, file, folder / name) for name, file in zip(names, files, strict=True)]
        try:
            for each in pending:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for name, file in zip(names, files, strict=True):
        if not is_intact(folder / name, file):
            raise StorageError(f"{file.path}: what arrived has another checksum than what was stored. Try again.")


@contextlib.contextmanager
def _locked_folder(path: pathlib.Path) -> Iterator[None]:
    """Makes other processes that download the same objects wait; the system releases the lock if the process dies."""
    import fcntl

    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
