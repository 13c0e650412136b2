"""Names and values in a message: the first few names and how many there are, and as much of a value as helps."""

import itertools
from collections.abc import Collection

from calm_beam.text import counted, shortened

_MOST = 5
_LONGEST = 80


def value_in_words(value: object) -> str:
    """Returns a value of a file as Python shows it, cut if it is long.

    >>> value_in_words("a" * 100)[-3:], value_in_words(0.5)
    ('aa…', '0.5')
    """
    return shortened(repr(value), _LONGEST)


def named(names: Collection[str], kind: str) -> str:
    """Returns how many names there are, and the first few.

    Args:
      names: At least one.
      kind: What one of them names.

    >>> named(["a", "b"], "id"), named(list("abcdefg"), "id")
    ("2 ids ('a', 'b')", "7 ids ('a', 'b', 'c', 'd', 'e', ...)")
    """
    first = ", ".join(repr(name) for name in itertools.islice(names, _MOST))
    return f"{counted(len(names), kind)} ({first}{', ...' if len(names) > _MOST else ''})"
