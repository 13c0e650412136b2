"""Names in a message: the first few, and how many there are."""

import itertools
from collections.abc import Collection

from calm_beam.counted import counted

_MOST = 5


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
