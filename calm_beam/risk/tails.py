"""Losses that say whether another one exceeds a number, and what they are called.

Their expectation is a share of outputs: that of `dissimilarity>0.3` at most delta means that at most a share delta of
outputs is less similar than 0.7.
"""

import math

# A signed loss exceeds a number exactly where its positive part does.
TAILED = ("dissimilarity", "relu")


def tail_name(loss: str, above: float) -> str:
    """Returns the name of the loss that is 1 where a loss exceeds a number, and else 0.

    >>> tail_name("relu", 0.3)
    'relu>0.3'

    Args:
      loss: One of `TAILED`.
      above: In [0, 1).

    Raises:
      ValueError: If either is something else.
    """
    if loss not in TAILED:
        raise ValueError(f"a tail must be of the loss {' or '.join(TAILED)}, got {loss!r}.")
    if not 0 <= above < 1:
        raise ValueError(f"tail must be in [0, 1), got {above}: an output loses at most 1.")
    # -0.0 is 0.0.
    return f"{loss}>{float(above) + 0.0!r}"


def split_tail(name: str) -> tuple[str, float | None]:
    """Returns a loss and what it has to exceed; None for a loss that is counted as it is.

    >>> split_tail("dissimilarity>0.3"), split_tail("signed")
    (('dissimilarity', 0.3), ('signed', None))

    Raises:
      ValueError: If it is not a name of `tail_name`'s, though it has its sign.
    """
    loss, sign, number = name.partition(">")
    if not sign:
        return name, None
    try:
        above = float(number)
    except ValueError:
        above = math.nan
    # One name for one loss, since losses are compared by their names.
    if math.isnan(above) or name != tail_name(loss, above):
        raise ValueError(f"a tail must be written as {tail_name('relu', 0.3)!r} is, got {name!r}.")
    return loss, above


def tail_in_words(name: str) -> str:
    """Returns what a loss has to exceed to count, to be put behind the kind of loss; nothing where the mean is meant.

    >>> tail_in_words("relu>0.3"), tail_in_words("relu")
    (' > 0.3', '')
    """
    _, above = split_tail(name)
    return "" if above is None else f" > {above:g}"
