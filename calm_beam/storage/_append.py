"""A file that lines are added to, each whole or not at all, by several threads and processes."""

import errno
import os

# Longer than any line that is written.
_TAIL = 2**16


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Adds a line to a local file, which is made if there is none.

    Who reads the file finds whole lines only. What a process left that was ended in the middle of one is taken away.

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
        # Until the file is closed; the system lets go of it if the process dies.
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
    """Takes away what stands after the last line break, and returns the size that is left."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL)
    tail = os.pread(descriptor, size - start, start)
    if start and b"\n" not in tail:
        raise OSError(errno.EINVAL, f"no line ends in the last {_TAIL} bytes: this is not a file of short lines")
    whole = start + tail.rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(descriptor, whole)
    return whole
