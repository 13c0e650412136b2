"""The result of a command for other programs: `--json` prints it, and what is said to people goes to standard error."""

import contextlib
import contextvars
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass
class Outcome:
    """What came of a command.

    Attributes:
      result: What it found; None if it ended without a result.
      is_proved: Whether anything was proved; None where nothing was to be.
      files: What people look at of what was written; some may not be there.
      status: Exit status, once the command has ended.
      on_step: Takes the numbers of training steps, where somebody does.
    """

    result: Any = None
    is_proved: bool | None = None
    files: Sequence[str] = ()
    status: int = 0
    on_step: Callable[[int, Mapping[str, float]], None] | None = None


_outcome: contextvars.ContextVar[Outcome | None] = contextvars.ContextVar("_outcome", default=None)


@contextlib.contextmanager
def outcome_of_command(*, as_json: bool) -> Iterator[Outcome]:
    """Within it, `give` takes the result of a command.

    Args:
      as_json: Whether the result is printed at the end, and nothing else to standard output.
    """
    outcome = Outcome()
    token = _outcome.set(outcome)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield outcome
    finally:
        _outcome.reset(token)
    if as_json:
        print(json.dumps(_plain(outcome.result), ensure_ascii=False, indent=1))


def give(result: Any, *, is_proved: bool | None = None, files: Sequence[str] = ()) -> None:
    """Gives the result of a command to whoever asked for it; functions of Python return theirs.

    Args:
      result: Mappings, lists, dataclasses and numbers.
      is_proved: As in `Outcome`.
      files: As in `Outcome`.
    """
    outcome = _outcome.get()
    if outcome is not None:
        outcome.result, outcome.is_proved, outcome.files = result, is_proved, files


def give_step(step: int, values: Mapping[str, float]) -> None:
    """Gives the numbers of a training step to whoever draws curves of them."""
    outcome = _outcome.get()
    if outcome is not None and outcome.on_step is not None:
        outcome.on_step(step, values)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it: numbers that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        # A number of numpy's.
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
