"""Progress of a local run, as lines appended to a file that the launcher reads.

`Pipeline.run` blocks, and Beam's metrics arrive at the end; short appends to one file are atomic, whichever process
makes them.
"""

import contextlib
import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class ProgressLog:
    """Where to report progress; nowhere if the path is None, or leads to no file on the worker's machine.

    Attributes:
      path: The file to append to, which its reader has made.
    """

    path: str | None

    def report(self, event: str, count: int) -> None:
        """Appends one line, such as `decoded 32`."""
        if self.path is None:
            return
        try:
            # Not made if it is missing: then this is another machine, where nobody would read it.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return
        try:
            # A full disk ends no run that has room for its outputs: who watches sees less.
            with contextlib.suppress(OSError):
                os.write(descriptor, f"{event} {count}\n".encode())
        finally:
            os.close(descriptor)


NOWHERE = ProgressLog(None)
