"""Local files: atomic writes, optionally only where no file exists.

Lines are appended atomically, from several threads and processes, and a directory is filled atomically.
"""

import contextlib
import errno
import filecmp
import glob
import io
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from ._paths import AnyPath, StorageError, is_cloud_path

_KINDS = {
    stat.S_ISDIR: "directory",
    stat.S_ISFIFO: "pipe",
    stat.S_ISSOCK: "socket",
    stat.S_ISCHR: "device",
    stat.S_ISBLK: "device",
}


def list_files(pattern: str) -> tuple[str, ...]:
    """Returns the files that match a glob, sorted."""
    return tuple(sorted(path for path in glob.glob(pattern) if os.path.isfile(path)))


def obstacle(path: AnyPath) -> str | None:
    """Returns what a path is if it is not a file, as the rest of a sentence; None if it does not exist."""
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a link that leads back to itself. Name the file that it should lead to."
        if os.path.islink(name):
            return f"is a link to {os.readlink(name)}, which is not there. Fix the link, or name the file itself."
        if error.errno == errno.ENAMETOOLONG:
            return "is longer than names of files may be."
        if isinstance(error, PermissionError):
            return f"cannot be looked for: permission denied above {os.path.basename(name)}."
        return None
    for is_kind, kind in _KINDS.items():
        if is_kind(mode):
            how = "Name a file in it." if kind == "directory" else "Write what comes from it to a file."
            return f"is a {kind}, expected a file. {how}"
    return None


def open_input(path: AnyPath) -> BinaryIO:
    """Returns a file opened for reading bytes; refuses anything but a file or a folder before opening it."""
    if not os.path.isfile(path) and os.path.exists(path) and not os.path.isdir(path):
        raise StorageError(f"{os.fspath(path)}: {obstacle(path)}")
    return io.BufferedReader(_NamedFile(os.fspath(path)))


class _NamedFile(io.FileIO):
    """A file that adds its name to the system's errors, which only say what happened."""

    def readinto(self, buffer: Any, /) -> int | None:
        with self._naming():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._naming():
            return super().readall()

    def seek(self, place: int, whence: int = 0, /) -> int:
        with self._naming():
            return super().seek(place, whence)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            reason = os.strerror(error.errno).lower()
            raise StorageError(f"{self.name}: cannot be read ({reason}). Name a file on a disk that works.") from error


def version(path: AnyPath) -> str:
    """Returns a text that changes when `replacing` has replaced the file; empty if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ""
    return f"{found.st_dev}-{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"


def check_writable(path: AnyPath) -> None:
    """Raises OSError unless a file can be written into its folder, or the nearest one above, if need be over it.

    Only a file may exist at the path: writing would replace a device, a pipe or a link to one by a file.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise FileExistsError(f"{path}: exists and is not a file that can be overwritten. Choose another name.")
    folder = next(folder for folder in pathlib.Path(path).absolute().parents if folder.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path}: {folder} is a file, expected a folder.")
    if not os.access(folder, os.W_OK):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise OSError(f"{path}: {folder} is on a file system that can only be read. Choose another place.")
        raise PermissionError(f"{path}: permission denied: {folder} cannot be written.")


@contextlib.contextmanager
def replacing(path: AnyPath, *, expected: str | None) -> Iterator[pathlib.Path]:
    """Gives a temporary path in the same folder, and moves it to `path` in a single step at the end.

    Args:
      path: A file in a folder that exists.
      expected: The version that the file must have then; None for any.
    """
    target = pathlib.Path(path)
    # In the same folder, since a rename is atomic only within one file system. Not tempfile: only the owner can read
    # its files, and serving often runs as another user.
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if expected is None:
            os.replace(temporary, target)
        else:
            _publish(temporary, target, expected=expected)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path: AnyPath) -> None:
    """Removes unfinished files that killed processes have left while writing a file by `replacing`."""
    target = pathlib.Path(path)
    unfinished = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{16}\.tmp")
    for found in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        if unfinished.fullmatch(found.name):
            found.unlink(missing_ok=True)


def remove_file(path: AnyPath, *, expected: str | None) -> None:
    """Removes a file if it exists; `expected` is the version that it must have then, None for any."""
    target = pathlib.Path(path)
    if expected is None:
        target.unlink(missing_ok=True)
    elif target.exists():
        with _locked(target.parent):
            found = version(target)
            if found and found != expected:
                raise FileExistsError(f"{target}: was written by another process in the meantime.")
            target.unlink(missing_ok=True)


def remove_folder(path: AnyPath, *, inside: AnyPath) -> None:
    """Removes a folder below `inside` with its content if it exists; links in it are removed, not followed."""
    refuse_links(path, inside=inside)
    if os.path.isdir(path):
        # rmtree checks at every step that it follows no link.
        shutil.rmtree(path)


def refuse_links(path: AnyPath, *, inside: AnyPath) -> None:
    """Raises OSError if a folder below `inside`, or one between the two, is a symbolic link."""
    top = pathlib.Path(inside)
    place = top
    for part in pathlib.Path(path).relative_to(top).parts:
        place /= part
        if place.is_symlink():
            raise OSError(
                f"{place}: is a symbolic link, and what lies behind it is not removed. Put a folder there instead of "
                "the link, or choose another output directory, which may itself be a link."
            )


def _publish(temporary: pathlib.Path, target: pathlib.Path, *, expected: str) -> None:
    with _locked(target.parent):
        found = version(target)
        try:
            if found != expected:
                raise FileExistsError
            if found:
                os.replace(temporary, target)
            else:
                # A hard link is safe also against writers that do not use the lock.
                os.link(temporary, target)
        except FileExistsError:
            # A repeated step finds its own file.
            if not target.is_file() or not filecmp.cmp(temporary, target, shallow=False):
                raise FileExistsError(f"{target}: was written by another process in the meantime.") from None


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Makes other writers to the folder wait; the system releases the lock if the process dies."""
    # Imported here: Windows has no fcntl, and reads manifests without it.
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Longer than any line.
_TAIL = 2**16


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Adds a line to a local file, and creates the file if needed.

    Readers find complete lines only. A partial line of a killed process is removed.

    Args:
      path: The file.
      line: The line, without a line break.

    Raises:
      OSError: If the line cannot be written; the file is then unchanged.
    """
    # Imported here: Windows has no fcntl.
    import fcntl

    assert "\n" not in line
    content = f"{line}\n".encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        # Held until the file is closed; the system releases it if the process dies.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = _without_torn_line(descriptor)
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, "no room for a whole line", os.fspath(path))
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _without_torn_line(descriptor: int) -> int:
    """Removes the bytes after the last line break, and returns the remaining size."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL)
    tail = os.pread(descriptor, size - start, start)
    if start and b"\n" not in tail:
        raise OSError(errno.EINVAL, f"no line ends in the last {_TAIL} bytes: this is not a file of short lines")
    whole = start + tail.rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(descriptor, whole)
    return whole


@contextlib.contextmanager
def staged(path: str) -> Iterator[str]:
    """Gives an empty directory to write to; its entries replace those of `path` once the block has succeeded.

    Until then `path` is unchanged, also if the block raises.

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
                # Removes the link, not its target.
                target.unlink()
            elif target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
