r"""Text of others, made fit for a terminal.

Ids, names, file names and outputs are written by others. On a terminal, control characters in them move the cursor,
change the title or hide what stands before; marks of direction turn around the words beside them. Here they are shown
as Python writes them, such as `\x1b` and `\u202e`. Files and JSON need none of this: what stands there is data.
"""

import re

# Controls (C0, DEL, C1) but for line breaks and tabs; separators of lines and paragraphs; marks that change the
# direction of text; halves of surrogate pairs, which file names that are no UTF-8 have, and which no stream can encode.
_NEVER = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[{_NEVER}]")
_UNPRINTABLE_IN_LINE = re.compile(rf"[{_NEVER}\t\n]")


def printable(text: str) -> str:
    r"""Returns a text in which line breaks and tabs are the only characters that do something to a terminal.

    >>> printable("id \x1b[31m\nof \u202eold")
    'id \\x1b[31m\nof \\u202eold'
    """
    return _UNPRINTABLE.sub(_escaped, text)


def printable_line(text: str) -> str:
    r"""Returns a text in which no character does anything to a terminal: one value, in one line.

    >>> printable_line("a\tb\nc")
    'a\\tb\\nc'
    """
    return _UNPRINTABLE_IN_LINE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]
