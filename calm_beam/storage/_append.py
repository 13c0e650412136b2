"""Appending lines to a file atomically, from several threads and processes."""

import errno
import os

# Longer than any line that is written.
_TAIL = 2**16


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Adds a line to a local file, and creates the file if needed.

    Readers find complete lines only. A partial line of a process that was killed is removed.

    Args:
      path: The file.
      line: Without a line break.

    Raises:
      OSError: If the line cannot be written; the file is then as it was.
    """
    # Here, since Windows has none.
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
