r"""Numbers and texts as people write and read them: in data, in flags, on terminals and in spreadsheets.

Numbers are read as JSON, C and spreadsheets read them, and in no other way. Python's own `float` and `int` also take
underscores between digits and the digits of every script, so a typing mistake such as `1_0e-1_0` would become a number
that nobody meant.

Ids, names, file names and outputs are written by others. On a terminal, control characters in them move the cursor,
change the title or hide text; direction marks reverse the words around them. Here such characters are shown as Python
writes them, such as `\x1b` and `\u202e`. Files and JSON need none of this: their content is data.
"""

import re

# Blanks allowed around a number; not those of Unicode.
_BLANKS = " \t\r\n\f\v"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# These are read, so that a check of a range can say that they are outside.
_NOT_FINITE = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)

# Controls (C0, DEL, C1) but for line breaks and tabs; separators of lines and paragraphs; marks that change the
# direction of text; lone surrogates, from file names that are not UTF-8; no stream can encode them.
_NEVER = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_NEVER}]")
_UNPRINTABLE_IN_LINE = re.compile(rf"[{_NEVER}\t\n]")


def counted(number: int, one: str, *, several: str | None = None) -> str:
    """Returns a number with its noun, singular or plural.

    Args:
      number: The number.
      one: The noun for exactly one.
      several: The noun for any other number; `one` with an s if omitted.

    >>> counted(1, "example"), counted(1000, "example"), counted(0, "reply", several="replies")
    ('1 example', '1,000 examples', '0 replies')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def shortened(text: str, most: int) -> str:
    """Returns a text cut to at most `most` characters: the text itself, or its beginning and an ellipsis.

    >>> shortened("abc", 3), shortened("abcd", 3)
    ('abc', 'ab…')
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def check_count(name: str, value: object) -> None:
    """Refuses a value from a file that is not a count; `name` is its key.

    Raises:
      TypeError: If it is not an integer.
      ValueError: If it is negative, or does not fit in 64 bits.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least 0 and below 2^63")


def written_float(text: str) -> float:
    r"""Returns the number in a text, ignoring blanks around it.

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
    """Returns the whole number in a text, ignoring blanks around it.

    Args:
      text: ASCII digits, with or without a sign.

    Raises:
      ValueError: If it is anything else, or too long for any number.
    """
    stripped = text.strip(_BLANKS)
    if _WHOLE.fullmatch(stripped):
        return int(stripped)
    raise ValueError(f"not a whole number: {text!r:.40}")


def printable(text: str) -> str:
    r"""Returns a text in which line breaks and tabs are the only characters that affect a terminal.

    >>> printable("id \x1b[31m\nof \u202eold")
    'id \\x1b[31m\nof \\u202eold'
    """
    return _UNPRINTABLE.sub(_escaped, text)


def printable_line(text: str) -> str:
    r"""Returns a text in one line, in which no character affects a terminal.

    >>> printable_line("a\tb\nc")
    'a\\tb\\nc'
    """
    return _UNPRINTABLE_IN_LINE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]


def function_itself(value: object) -> str | None:
    """Returns, for a function given where its name is expected, the end of a message; None for any other value.

    >>> function_itself(counted)
    "the function itself. Name it: 'calm_beam.text:counted'"
    """
    if isinstance(value, str) or not callable(value):
        return None
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"the function itself. Name it: '{getattr(value, '__module__', 'module')}:{name}'"
