"""Telling what a run that failed has left, and how to go on with it."""

import contextlib
from collections.abc import Callable, Iterator

from calm_beam.errors import CalmBeamError

from .run import PipelineError


@contextlib.contextmanager
def what_is_left_told(left: Callable[[], str], *, but: type[CalmBeamError]) -> Iterator[None]:
    """Adds to whatever ends the block what is left, and how to go on.

    Args:
      left: Returns that in words; may clear away what is not worth keeping.
      but: Errors that say themselves why nothing goes on from there; nothing is added to them.

    Raises:
      PipelineError: For an error of ours, or of files.
      KeyboardInterrupt: If the block is interrupted. What goes on elsewhere has left nothing yet, and says so itself.
    """
    try:
        yield
    except (CalmBeamError, OSError) as error:
        words = left()
        if isinstance(error, but) or (isinstance(error, PipelineError) and error.cause is but):
            words = ""
        raise PipelineError(f"{error} {words}".rstrip()) from error
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            raise
        raise KeyboardInterrupt(left()) from interrupt
