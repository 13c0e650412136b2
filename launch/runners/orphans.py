"""Worker processes whose runner was killed: they end with one line, and with nothing of what their connections say.

Nothing tells them that it is gone. gRPC notices it in every thread, and each would leave its traceback on the terminal.
"""

import os
import sys
import threading
import time
from typing import Any, TextIO

SPEAKS = "CALM_BEAM_SPEAKS"
"""Set in the environment of the one worker that says what has happened."""

# Connections of a process that is killed close shortly before its children have another parent. Workers that are well
# hardly say anything, so that each line may wait.
_SECONDS_BETWEEN = 0.1
_SECONDS_BETWEEN_LOOKS = 2.0
_LAST_WORDS = (
    b"calm-beam: the command was killed, and its workers end. What is finished is kept: --resume goes on with it, "
    b"where the command has that.\n"
)


class _UntilOrphaned:
    """Standard error of a process that ends once its parent is gone, before it says anything."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parent = os.getppid()
        self._turn = threading.Lock()

    def write(self, text: str) -> int:
        self.look()
        return self._stream.write(text)

    def look(self) -> None:
        """Ends the process if its parent is gone."""
        with self._turn:
            time.sleep(_SECONDS_BETWEEN)
            if os.getppid() != self._parent:
                if os.environ.get(SPEAKS):
                    os.write(2, _LAST_WORDS)
                os._exit(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_with_the_runner() -> None:
    """Has this process end once its parent is gone; to be called early."""
    stream = _UntilOrphaned(sys.stderr)
    sys.stderr = stream

    def watch() -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            stream.look()

    threading.Thread(target=watch, name="calm-beam-orphan", daemon=True).start()
