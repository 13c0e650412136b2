"""Numbers with what they count, as a reader expects them."""


def counted(number: int, one: str, *, several: str | None = None) -> str:
    """Returns a number with what it counts.

    Args:
      number: The number.
      one: What it counts, if that is one.
      several: The same for any other number; the word for one with an s if omitted.

    >>> counted(1, "example"), counted(1000, "example"), counted(0, "reply", several="replies")
    ('1 example', '1,000 examples', '0 replies')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def check_count(name: str, value: object) -> None:
    """Refuses what a file gives for a count and is none; `name` is its key.

    Raises:
      TypeError: If it is no integer.
      ValueError: If it is negative, or no 64-bit number holds it.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least 0 and below 2^63")
