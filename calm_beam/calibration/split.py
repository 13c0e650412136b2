"""What is checked wherever a set is split in two, one part of which chooses what the other one tests."""

from collections.abc import Sequence


def check_split(*, keys: Sequence[str], share: tuple[str, float], fault: str) -> None:
    """Refuses to split units that cannot be told apart, or by no share.

    Args:
      keys: One per unit.
      share: Name and value of the chance of a unit to be in one of the parts, in (0, 1).
      fault: What a unit in both parts would do.

    Raises:
      ValueError: If keys repeat, or the share is out of range.
    """
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be distinct: a unit in both parts would {fault}.")
    name, value = share
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value}. For 30 % pass 0.3.")


def check_parts(choosing: int, testing: int, *, verb: str) -> None:
    """Refuses parts of a set one of which is empty.

    Args:
      choosing: Units that choose.
      testing: Units of the other part.
      verb: What these do with what was chosen.

    Raises:
      ValueError: If a part is empty.
    """
    if not (choosing and testing):
        raise ValueError(
            f"of {choosing + testing} units, {choosing} were drawn to choose what the other {testing} {verb}. "
            "Both parts need some: take more examples."
        )
