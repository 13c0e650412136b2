"""The base class of the errors that calm-beam raises in words of its own, and words for the system's."""

import os


class CalmBeamError(Exception):
    """What was wrong, what was expected and how to fix it, in one or two sentences.

    Every error class of ours derives from it, next to the built-in that fits (`ValueError`, `OSError`). A caller who
    sees one needs its message and no traceback; any other exception out of calm-beam is a defect.
    """


class UsageError(CalmBeamError, ValueError):
    """What was asked for is wrong; nothing has been done. Messages call arguments by the flags of the command line."""


def os_error_in_words(error: OSError) -> str:
    """Returns what an error says, the system's without its number."""
    # Only the system's have both; errors of our own are whole sentences.
    if error.filename is None or not error.strerror:
        return str(error)
    return f"{os.fspath(error.filename)}: {error.strerror[0].lower()}{error.strerror[1:]}."
