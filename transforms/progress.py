"""Progress of a local run, as lines appended to a file that the launcher reads.

`Pipeline.run` blocks, and Beam's metrics arrive at the end; short appends to one file are atomic, whichever process
makes them.
"""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class ProgressLog:
    """Where to report progress; nowhere if the path is None, as on runners whose workers share no disk.

    Attributes:
      path: The file to append to.
    """

    path: str | None

    def report(self, event: str, count: int) -> None:
        """Appends one line, such as `decoded 32`."""
        if self.path is None:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, f"{event} {count}\n".encode())
        finally:
            os.close(descriptor)
