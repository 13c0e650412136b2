"""Kinds of values of options: each reads a text of the command line, and checks a value from Python."""

import argparse
import dataclasses
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.exits.head_forms import GONE
from calm_beam.exits.measures import MEASURES, is_measure_name
from calm_beam.text import function_itself, written_float, written_int

_LARGEST = 2**31 - 1
_NOT_IN_PER_CENT = ". For 5 % pass 0.05"


class ValueRefusedError(CalmBeamError, argparse.ArgumentTypeError, ValueError):
    """A value that an option does not accept; the message says what was expected, and what was given."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of values that an option takes. Calling it with a text reads the text, so it is a `type` of argparse.

    Attributes:
      read: Returns the value of a text from the command line; raises `ValueError`, to which argparse adds the flag.
      take: Returns the stored form of a value from Python or from a file; raises `ValueRefusedError`. A text is read.
      placeholder: Placeholder of the value in help; None leaves that to the name of the flag.
      names_files: Whether shells complete names of files.
      name: Name of the kind, in argparse's message about a wrong text.
      is_list: Whether it takes several values.
      is_mapping: Whether these are `NAME=VALUE`, which may be a mapping in Python and files.
      is_json: Whether a list is written as JSON on the command line, and not separated by commas.
    """

    read: Callable[[str], Any]
    take: Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    placeholder: str | None = None
    names_files: bool = False
    name: str = ""
    is_list: bool = False
    is_mapping: bool = False
    is_json: bool = False

    def __call__(self, text: str) -> Any:
        """Returns the value of a text."""
        return self.read(text)

    @property
    def __name__(self) -> str:
        """The name of the kind, as argparse asks for it."""
        return self.name

    def written(self, values: Sequence[Any]) -> str:
        """Returns a list of values as the command line has it."""
        return json.dumps(values, ensure_ascii=False) if self.is_json else ",".join(map(str, values))

    def taken(self, value: Any) -> Any:
        """Returns the stored form of a value.

        Raises:
          ValueRefusedError: If it is not of this kind.
        """
        try:
            return self.take(value)
        except ValueRefusedError:
            raise
        except (TypeError, ValueError) as error:
            got = function_itself(value) or f"{value!r:.80}"
            raise ValueRefusedError(f"expected {self.name or 'another value'}, got {got}") from error


def _read_texts(value: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in value.split(","))
    if not all(parts):
        raise ValueRefusedError(f"expected values separated by commas, got {value!r}")
    return parts


def _read_stop_strings(value: str) -> tuple[str, ...]:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ValueRefusedError(f'expected a JSON list of texts, such as ["###"], got {value!r:.80}')
    return _checked_stop_strings(found)


def _checked_stop_strings(values: Iterable[Any]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(map(_take_text, values)))
    if not all(found):
        raise ValueRefusedError("expected texts that are not empty: every output would end before its first token")
    return found


def _read_paths(value: str) -> tuple[str, ...]:
    return (value,) if os.path.exists(value) else _read_texts(value)


def read_number(value: str) -> float:
    """Returns the number in a text.

    Raises:
      ValueRefusedError: If it is no number; in per cent, the message says what to pass.
    """
    if value.rstrip().endswith("%"):
        raise ValueRefusedError(f"expected a number, got {value!r:.40}{_NOT_IN_PER_CENT}")
    try:
        return written_float(value)
    except ValueError as error:
        raise ValueRefusedError(f"expected a number, got {value!r:.40}") from error


def _read_numbers(value: str) -> tuple[float, ...]:
    parts = _read_texts(value)
    try:
        return tuple(map(written_float, parts))
    except ValueError as error:
        hint = _NOT_IN_PER_CENT if "%" in value else ""
        raise ValueRefusedError(f"expected numbers separated by commas, got {value!r}{hint}") from error


def _read_share(value: str) -> float:
    number, percent = value.removesuffix("%"), value.endswith("%")
    try:
        found = written_float(number) / (100 if percent else 1)
    except ValueError:
        found = math.nan
    return _checked_share(found, value)


def _checked_share(found: float, given: object) -> float:
    if not 0 < found < 1:
        raise ValueRefusedError(f"expected a share above 0 and below 1, such as 2% or 0.02, got {given!r:.40}")
    return found


def _read_utf8(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueRefusedError(f"expected text that UTF-8 can hold, got {value!a:.80}") from error
    return value


def _read_pattern(value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueRefusedError(f"expected a regular expression, got {value!r}: {error}") from error


def _read_confidence(text: str) -> str:
    if not is_measure_name(text):
        raise ValueRefusedError(
            f"invalid choice: {text!r} (choose from {', '.join(map(repr, MEASURES))}, or module:function of your own)"
        )
    return text


def _take_text(value: Any) -> str:
    found = os.fspath(value)
    if not isinstance(found, str):
        raise TypeError("bytes are no text")
    return _read_utf8(found)


def _take_number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("no number")
    return written_float(value) if isinstance(value, str) else float(value)


def _take_integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("no number")
    return written_int(value) if isinstance(value, str) else operator.index(value)


def _take_share(value: Any) -> float:
    return _read_share(value) if isinstance(value, str) else _checked_share(_take_number(value), value)


def _take_truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueRefusedError(f"expected True or False, got {value!r:.40}")
    return value


def _take_each(read: Callable[[str], Any], one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a `take` for a list, a single value of it, or a text that `read` understands."""

    def take(value: Any) -> Any:
        if isinstance(value, str):
            return read(value)
        if isinstance(value, os.PathLike) or not isinstance(value, Iterable):
            return (one(value),)
        return tuple(one(each) for each in value)

    return take


def whole_number(low: int, high: int = _LARGEST) -> Kind:
    """Returns the kind of integers from `low` to `high`."""

    def checked(number: int, given: object) -> int:
        if number < low:
            raise ValueRefusedError(f"expected a whole number of at least {low}, got {given!r:.40}")
        if number > high:
            raise ValueRefusedError(f"expected a whole number of at most {high}, got {given:.40}")
        return number

    def read(value: str) -> int:
        try:
            number = written_int(value)
        except ValueError:
            number = low - 1
        return checked(number, value)

    def take(value: Any) -> int:
        if isinstance(value, str):
            return read(value)
        number = low - 1 if isinstance(value, bool | float) else operator.index(value)
        return checked(number, str(value) if number > high else value)

    return Kind(read, take, placeholder="N", name="a whole number")


def whole_numbers(low: int) -> Kind:
    """Returns the kind of lists of integers of at least `low`, comma-separated on the command line."""
    one = whole_number(low)

    def read(value: str) -> tuple[int, ...]:
        return tuple(map(one.read, _read_texts(value)))

    return Kind(read, _take_each(read, one.take), placeholder="N,...", name="whole numbers", is_list=True)


truth = Kind(lambda text: text, _take_truth)
"""A truth value; on the command line a flag without a value."""
text = Kind(lambda text: text, _take_text, names_files=True, name="text")
"""A text or a path."""
utf8_text = Kind(_read_utf8, _take_text, name="text")
"""A text that is written to files, which cannot hold shell arguments that are not UTF-8."""
texts = Kind(_read_texts, _take_each(_read_texts, _take_text), placeholder="NAME,...", name="texts", is_list=True)
"""Texts, separated by commas on the command line; an empty one is refused."""
stop_strings = Kind(
    _read_stop_strings,
    lambda value: _read_stop_strings(value) if isinstance(value, str) else _checked_stop_strings(value),
    placeholder="JSON",
    name="a list of texts",
    is_list=True,
    is_json=True,
)
"""Texts, as a JSON list on the command line, since they may hold commas and line breaks; possibly none."""
paths = Kind(
    _read_paths,
    _take_each(lambda value: (_read_utf8(value),), _take_text),
    placeholder="PATH,...",
    names_files=True,
    name="paths",
    is_list=True,
)
"""Paths, separated by commas on the command line; an existing path with commas in its name is one path."""
number = Kind(read_number, _take_number, placeholder="X", name="float")
"""A number."""
integer = Kind(written_int, _take_integer, placeholder="N", name="int")
"""A whole number, whose range is checked later."""
numbers = Kind(
    _read_numbers, _take_each(_read_numbers, _take_number), placeholder="X,...", name="numbers", is_list=True
)
"""Numbers, separated by commas on the command line."""
share = Kind(_read_share, _take_share, placeholder="SHARE", name="a share")
"""A share between 0 and 1, as a fraction or in per cent."""
pattern = Kind(_read_pattern, _read_pattern, placeholder="REGEX", name="a regular expression")
"""A regular expression."""
confidence = Kind(_read_confidence, lambda value: _read_confidence(_take_text(value)), name="a confidence measure")
"""The name of a confidence measure."""


def _read_confidences(value: str) -> tuple[str, ...]:
    return tuple(map(_read_confidence, _read_texts(value)))


confidences = Kind(
    _read_confidences, _take_each(_read_confidences, confidence.take), name="confidence measures", is_list=True
)
"""Names of confidence measures, comma-separated on the command line."""


def _read_exit_head(value: str) -> str:
    if value in GONE:
        raise ValueRefusedError(GONE[value])
    return value


exit_head = Kind(_read_exit_head, lambda value: _read_exit_head(_take_text(value)), name="text")
"""A form of the output head; forms of earlier versions are refused with their own message."""


def measures_in_words() -> str:
    """Returns the description of every measure for help."""
    ours = "; ".join(f"{measure.name} ({measure.meaning})" for measure in MEASURES.values())
    return f"{ours}; or module:function of your own, of (logits) or of (state, below)"
