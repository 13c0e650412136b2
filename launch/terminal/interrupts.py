"""How a command that was interrupted or has failed ends: cleaned up, soon, and with the status it reports.

The standard streams are made to take any text, and to end quietly when nobody reads them any more.
"""

import _thread
import atexit
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

# Exit status that shells report for a process that a closed pipe ended.
_READER_GONE = 141


class StreamError(BaseException):
    """Standard output cannot be written any more.

    Not an `Exception`: what has gone wrong is no file of the command's, and nothing that it could make good.

    Attributes:
      status: The exit status that says so.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}.")
        self.is_reader_gone = isinstance(error, BrokenPipeError)
        self.status = _READER_GONE if self.is_reader_gone else 1


def prepare_streams() -> None:
    """Replaces the standard streams.

    Characters that an ASCII terminal cannot show are written with backslashes. Prompts in a pipe are UTF-8, whatever
    the terminal's encoding is; other bytes become surrogates, which code that needs text checks for. If the reader of
    standard output goes away or its disk is full, `StreamError` ends the command. If that happens to standard error,
    messages are lost, and the work goes on.
    """
    if sys.stdin is None:
        # The process was started without one.
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.stdout = _Stream.replacing(sys.stdout, is_needed=True)
    sys.stderr = _Stream.replacing(sys.stderr, is_needed=False)


class _Stream(io.TextIOWrapper):
    """A stream for text of any characters.

    Attributes:
      is_needed: Whether the command ends if it cannot be written.
    """

    is_needed = True
    _replaced: TextIO

    @classmethod
    def replacing(cls, stream: TextIO | None, *, is_needed: bool) -> TextIO:
        """Returns a stream to the file of another one, which is used no longer."""
        if stream is None:
            return open(os.devnull, "w", encoding="utf-8")
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        replaced = cls(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        replaced.is_needed = is_needed
        # It would close the file if nobody knew it any more.
        replaced._replaced = stream
        return replaced

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Sends what is left, and all that is still to come, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self.is_needed:
            raise StreamError(error) from error


# Exit status that shells report for a process that Ctrl-C ended.
INTERRUPTED = 130

# Worker processes are ended one after the other, each in a few seconds.
_SECONDS_TO_CLEAN_UP = 15.0
# Long enough for a callback to end, and unnoticeable to a waiting user.
_SECONDS_BEFORE_ANOTHER = 0.1


def run_interruptible(main: Callable[[], int]) -> int:
    """Returns the status of a process's command, which SIGTERM interrupts as Ctrl-C does.

    To be called once, early, and to be followed by `sys.exit` with the status.

    Args:
      main: Runs the command; turns `KeyboardInterrupt` into the status `INTERRUPTED`, having cleaned up.
    """
    interrupts = Interrupts()
    # Schedulers end a job by SIGTERM: then too, nothing half-written may stay behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupts.take)
    sys.unraisablehook = interrupts.take_dropped
    status = 0
    # What is registered first is called last: whatever libraries have to do at the end is done by then.
    atexit.register(lambda: _leave(status))
    status = main()
    if status == INTERRUPTED:
        # Cleanup is done: a second interrupt means that the user does not want to wait.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    return status


class Interrupts:
    """Raises `KeyboardInterrupt` once, so that a second Ctrl-C does not break off cleaning up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with nothing interrupted; `clock` tells seconds."""
        self._clock = clock
        self._since: float | None = None

    def take(self, *signal_and_frame: object) -> None:
        """Handles a signal.

        Raises:
          KeyboardInterrupt: Unless there was another shortly before.
        """
        now = self._clock()
        if self._since is not None and now - self._since < _SECONDS_TO_CLEAN_UP:
            # Past the buffer of stderr, in whose midst this may have come.
            os.write(2, b"calm-beam: interrupted already, cleaning up\n")
            return
        self._since = now
        raise KeyboardInterrupt

    def take_dropped(self, unraisable: Any) -> None:
        """Interrupts once more where an interrupt was dropped, as in a callback of C code; shows other exceptions.

        JAX has one that garbage collection calls. A run would go on as if nothing had been.
        """
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        self._since = None
        # In a thread, since here it would be dropped again.
        _thread.start_new_thread(_interrupt_soon, ())


def _interrupt_soon() -> None:
    time.sleep(_SECONDS_BEFORE_ANOTHER)
    _thread.interrupt_main()


def _leave(status: int) -> None:
    """Ends a process whose command did not succeed, without taking down what its threads may still use.

    XLA compiles in threads of its own, which cannot be stopped. An interpreter that goes on to its end waits for them,
    minutes with a large model, and then they find gone what they were started with: a segmentation fault.
    """
    if status:
        leave_at_once(status)


def leave_at_once(status: int) -> None:
    """Ends the process with a status, and with whatever its threads are at: what they do is not needed any more."""
    for stream in (sys.stdout, sys.stderr):
        # A reader that is gone takes nothing away from a failure.
        with contextlib.suppress(OSError, ValueError, StreamError):
            stream.flush()
    os._exit(status)
