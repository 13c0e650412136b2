"""Reading losses, one a line: numbers, rows that a probe wrote, and the word `missing`."""

import math
from collections.abc import Iterator
from typing import IO

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.inputs.examples import bounded_lines, check_utf_8
from calm_beam.storage import strict_json
from calm_beam.text import written_float

from .prepare import Watched

_MISSING = "missing"


class MonitorError(CalmBeamError, ValueError):
    """Losses or a stored state that cannot be used."""


def read_losses(lines: IO[str], name: str, *, watched: Watched) -> Iterator[float | None]:
    """Yields the losses of a text, one a line; None for one that is missing."""
    low = -1 if watched.promise.is_signed else 0
    for number, line in bounded_lines(lines, name=name):
        check_utf_8(line, f"{name}, line {number}")
        try:
            loss = _loss(line, watched)
        except UsageError as error:
            raise MonitorError(f"{name}, line {number}: {error}") from error
        except strict_json.StrictJSONError as error:
            raise MonitorError(f"{name}, line {number}: expected a loss or a row of a probe, got {error}.") from error
        except ValueError:
            loss = math.nan
        if loss is None:
            yield None
            continue
        if not low <= loss <= 1:
            raise MonitorError(f"{name}, line {number}: expected a loss in [{low}, 1], got {line.strip()!r:.100}.")
        if watched.tail is not None and loss not in (0, 1):
            raise MonitorError(
                f"{name}, line {number}: the entry is about the share of outputs that lose more than "
                f"{watched.tail:g}: expected 1 where one does and else 0, got {line.strip()!r:.100}."
            )
        yield loss


def _loss(line: str, watched: Watched) -> float | None:
    """Returns the loss in a line: a number, or a row that a `LossProbe` wrote for the same promise; None if missing."""
    if line.strip() == _MISSING:
        return None
    if not line.lstrip().startswith("{"):
        return written_float(line)
    row = strict_json.loads(line)
    if any(row.get(key) != value for key, value in watched.belongs_to.items()):
        raise UsageError(
            "was measured for another manifest or entry. The losses of one promise say nothing about another: name "
            "the one that it was measured for."
        )
    failure = row.get("failure")
    if not (failure is None or isinstance(failure, str)):
        raise UsageError(f"failure must be a text, or null where the loss was measured, got {failure!r:.100}.")
    if failure is not None:
        return None
    loss = row.get("loss")
    return math.nan if isinstance(loss, bool) or not isinstance(loss, int | float) else loss
