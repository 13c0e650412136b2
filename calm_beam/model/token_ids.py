"""Token ids in the config of a model."""

_LONGEST_SHOWN = 100


def check_ids(name: str, ids: object, *, below: int) -> None:
    """Refuses what is not a tuple of ascending whole numbers.

    Args:
      name: What they are called, for the message.
      ids: The numbers.
      below: All must be from 0 to below it.

    Raises:
      ValueError: If they are not.
    """
    is_of_numbers = isinstance(ids, tuple) and all(type(index) is int and 0 <= index < below for index in ids)
    if not is_of_numbers or list(ids) != sorted(set(ids)):  # type: ignore[call-overload]
        shown = repr(ids)
        shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
        raise ValueError(f"{name} must be different whole numbers from 0 to {below - 1}, ascending; got {shown}.")
