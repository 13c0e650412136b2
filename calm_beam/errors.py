"""The base class of the errors that calm-beam raises with messages of its own, and messages for other errors.

Code that the user wrote runs within `UserCode`: otherwise a metric that calls `sys.exit(0)` would end a run as if it
had succeeded, with nothing written.
"""

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterator

_LONGEST_TEXT = 500


class CalmBeamError(Exception):
    """An error whose message says what was wrong, what was expected and how to fix it, in one or two sentences.

    All our error classes derive from it, next to the built-in that fits (`ValueError`, `OSError`). A caller who
    sees one needs its message and no traceback; any other exception out of calm-beam is a defect.
    """


class UsageError(CalmBeamError, ValueError):
    """A wrong request; nothing has been done.

    Messages call options by the flags of the command line; Python functions that take the same options call them as
    arguments.
    """


class ManifestError(CalmBeamError, ValueError):
    """A manifest that cannot be trusted or lacks what was asked of it, or a bad record that is part of a manifest."""


def os_error_in_words(error: OSError) -> str:
    """Returns the message of an OSError; for errors of the system, without their number."""
    # Only errors of the system have both; our own messages are whole sentences.
    if error.filename is None or not error.strerror:
        return str(error)
    return f"{os.fspath(error.filename)}: {error.strerror[0].lower()}{error.strerror[1:]}."


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Turns errors with a file, while the value of a flag is checked, into a `UsageError` that names the flag."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {os_error_in_words(error)}") from error


@contextlib.contextmanager
def as_usage(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Turns errors raised while flags and what they name are checked into a `UsageError`.

    Args:
      kinds: Exceptions to turn. A manifest that cannot be trusted is never turned: that is a failure.
    """
    try:
        yield
    except (UsageError, ManifestError):
        raise
    except kinds as error:
        # A CalmBeamError has the same message. Its own cause may be the user's code.
        raise UsageError(str(error)) from (error.__cause__ if isinstance(error, CalmBeamError) else error)


class UserCode:
    """A context for the user's code: an exception that leaves it is raised again as one of our errors.

    That includes `SystemExit` and anything else that is not an `Exception`. Ctrl-C stays what it is: Python raises it
    in the main thread, so a `KeyboardInterrupt` in another thread is the user's own. Do not yield within this context.

    >>> with UserCode(lambda said: CalmBeamError(f"my_metric raised {said}")):
    ...     raise SystemExit(0)
    Traceback (most recent call last):
    calm_beam.errors.CalmBeamError: my_metric raised SystemExit: 0, which would have ended the process
    """

    def __init__(self, error: Callable[[str], CalmBeamError], *, passing: type[CalmBeamError] | tuple[()] = ()) -> None:
        """Takes a function from the exception's text to our error, and the classes of errors that pass unchanged."""
        self._error = error
        self._passing = passing

    def __enter__(self) -> None:
        """Enters the context."""

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Raises the error if an exception left the context; the exception is its cause."""
        if raised is None or isinstance(raised, self._passing) or _is_ctrl_c(raised):
            return
        ends = ", which would have ended the process" if isinstance(raised, SystemExit) else ""
        raise self._error(f"{type(raised).__name__}: {text_of(raised)}{ends}") from raised


def text_of(raised: BaseException) -> str:
    """Returns the text of an exception, in one line and cut where it is long."""
    return _in_one_line(lambda: str(raised))


def shown(value: object) -> str:
    """Returns the `repr` of a value, in one line and cut where it is long."""
    return _in_one_line(lambda: repr(value))


def _in_one_line(text_of_it: Callable[[], str]) -> str:
    try:
        text = text_of_it()
    # The text comes from the user's code as well.
    except BaseException as error:
        if _is_ctrl_c(error):
            raise
        return "(its text is not available)"
    # In a traceback, readers take any line that looks like an error for the error.
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: _LONGEST_TEXT + 1])
    return line if len(text) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}…"


def _is_ctrl_c(raised: BaseException) -> bool:
    return isinstance(raised, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
