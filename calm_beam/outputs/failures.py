"""How many examples may fail before a run does.

A failed example counts with loss 1, so failures never void the guarantee; but they eat up the tolerance, and many of
them point at a broken device or model rather than at prompts.
"""

from collections.abc import Sequence

from calm_beam.inputs.examples import DataError
from calm_beam.text import counted

_SHARE = 100
_FEWEST = 10
_NAMED = 5


def failure_limit(max_failures: int | None, *, examples: int) -> int:
    """Returns the most examples that may fail.

    Args:
      max_failures: As the user says; None takes 1 % of the examples, and no fewer than 10.
      examples: Size of the data set.

    >>> failure_limit(None, examples=5000), failure_limit(None, examples=30), failure_limit(3, examples=5000)
    (50, 10, 3)
    """
    return max(_FEWEST, examples // _SHARE) if max_failures is None else max_failures


def check_failures(failures: Sequence[tuple[str, str]], *, failed: int, limit: int) -> None:
    """Raises if more examples failed than may.

    Args:
      failures: Id and reason of failed examples, some of them at least.
      failed: How many failed.
      limit: How many may.

    Raises:
      DataError: If more did; names the first.
    """
    if failed > limit:
        named = "; ".join(f"{name} ({reason})" for name, reason in failures[:_NAMED])
        raise DataError(
            f"{counted(failed, 'example')} failed, more than the {limit} that may. The first: {named}. Find out "
            "why; if that is "
            f"how it is, pass --max_failures={failed} or more."
        )
