"""Numbers that people write, in files and flags: read as JSON, C and spreadsheets read them, and nothing else.

Python's own `float` and `int` also take underscores between digits and the digits of every script, so that a typing
mistake such as `1_0e-1_0` becomes a number that nobody meant.
"""

import re

# Blanks that may stand around a number; not those of Unicode.
_BLANKS = " \t\r\n\f\v"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# Read, so that what asks for a range can say that it is outside.
_NOT_FINITE = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)


def written_float(text: str) -> float:
    r"""Returns the number that a text holds, blanks around it aside.

    Args:
      text: A decimal number such as `0.05`, `-1`, `.5` or `1e-3`; or `inf` or `nan`, for callers that check a range.

    Raises:
      ValueError: If it is anything else.

    >>> written_float(" 5e-2\n")
    0.05
    >>> written_float("1_0e-1_0")
    Traceback (most recent call last):
    ValueError: not a number: '1_0e-1_0'
    """
    stripped = text.strip(_BLANKS)
    if _DECIMAL.fullmatch(stripped) or _NOT_FINITE.fullmatch(stripped):
        return float(stripped)
    raise ValueError(f"not a number: {text!r:.40}")


def written_int(text: str) -> int:
    """Returns the whole number that a text holds, blanks around it aside.

    Args:
      text: Digits of ASCII, with or without a sign.

    Raises:
      ValueError: If it is anything else, or longer than any number is.
    """
    stripped = text.strip(_BLANKS)
    if _WHOLE.fullmatch(stripped):
        return int(stripped)
    raise ValueError(f"not a whole number: {text!r:.40}")
