"""A line for people who wait at a prompt of Python's, or in a notebook: a compiler says nothing for half a minute."""

import contextlib
import sys
import threading
from collections.abc import Iterator

_PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def named_while_waiting(phase: str) -> Iterator[None]:
    """Says on standard error what is waited for, if it takes long and somebody sits there; programs hear nothing."""
    if not hasattr(sys, "ps1"):
        yield
        return
    timer = threading.Timer(_PATIENCE_SECONDS, print, (phase,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
