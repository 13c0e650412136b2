"""The standard streams of a process, made to take any text, and to end quietly when nobody reads them any more."""

import io
import os
import sys
from typing import TextIO

# What shells report for a process that a closed pipe ended.
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

    What a terminal cannot show, since it is ASCII only, is written with backslashes. Prompts in a pipe are UTF-8,
    whatever the terminal's encoding is; bytes that are not come as surrogates, and whoever needs text finds them. If
    the reader of standard output goes away or its disk is full, `StreamError` ends the command. If that happens to
    standard error, what was to be said is lost, and the work goes on.
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
